"""The summary for machines: the contract of ``docs/json.md``, no more and no less."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from memdiag.report.summary import Summary

SCHEMA_VERSION = 1


def as_dict(summary: Summary) -> dict[str, Any]:
    """The summary as JSON-able values, in the order of the contract."""
    # What no part of memdiag finds out yet is null: nothing was looked for, which is not the same as nothing found.
    return {
        "schema_version": SCHEMA_VERSION,
        "about": summary.about,
        "peak": asdict(summary.peak),
        "runner_up": None,
        "roles_at_peak": {row.role: row.bytes for row in summary.roles_at_peak},
        "outside_allocator": asdict(summary.outside_allocator),
        "phases": [vars(row) for row in summary.phases],
        "steps": [vars(row) for row in summary.steps],
        "saved": [vars(row) for row in summary.saved],
        "saved_earlier_bytes": summary.saved_earlier_bytes,
        "growth": None,
        "scaling": None,
        "reachable_by_checkpointing_bytes": None,
        "verdict": None,
        "findings": None,
        "oom": None,
        "not_seen": summary.not_seen,
    }


def to_json(summary: Summary) -> str:
    """The summary as JSON text, with a newline at its end."""
    return json.dumps(as_dict(summary), indent=2) + "\n"
