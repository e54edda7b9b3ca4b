"""The summary for machines: the contract of ``docs/json.md``, no more and no less."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from memdiag.diagnose import Finding, Oom
from memdiag.report.summary import Summary

SCHEMA_VERSION = 1


def as_dict(summary: Summary) -> dict[str, Any]:
    """The summary as JSON-able values, in the order of the contract."""
    diagnosis, verdict = summary.diagnosis, summary.diagnosis.verdict
    # What no part of memdiag finds out yet is null: nothing was looked for, which is not the same as nothing found.
    return {
        "schema_version": SCHEMA_VERSION,
        "about": summary.about,
        "peak": asdict(summary.peak),
        "runner_up": None if diagnosis.runner_up is None else asdict(diagnosis.runner_up),
        "roles_at_peak": {row.role: row.bytes for row in summary.roles_at_peak},
        "outside_allocator": asdict(summary.outside_allocator),
        "phases": [vars(row) for row in summary.phases],
        "steps": [vars(row) for row in summary.steps],
        "saved": [vars(row) for row in summary.saved],
        "saved_earlier_bytes": summary.saved_earlier_bytes,
        "growth": {
            "bytes_per_step": _whole(diagnosis.growth.bytes_per_step),
            "host_bytes_per_step": _whole(diagnosis.growth.host_bytes_per_step),
            "sites": [{**vars(site), "bytes_per_step": _whole(site.bytes_per_step)} for site in diagnosis.growth.sites],
        },
        "scaling": [
            {"role": row.role, "by": row.by, "bytes_per_unit": row.bytes_per_unit, "fixed_bytes": row.fixed_bytes,
             "from": row.source} for row in diagnosis.scaling],
        "reachable_by_checkpointing_bytes": diagnosis.reachable_bytes,
        "verdict": {
            "class": verdict.cls.value,
            "classes": [{"class": row.cls.value, "bytes": row.bytes, "share": row.share} for row in verdict.classes],
            "phase": verdict.phase,
            "moment": verdict.moment,
            "sentence": verdict.sentence,
        },
        "findings": [_finding(finding) for finding in diagnosis.findings],
        "oom": None if diagnosis.oom is None else _oom(diagnosis.oom),
        "not_seen": summary.not_seen,
        "segments": None if summary.segments is None else asdict(summary.segments),
    }


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "class": None if finding.cls is None else finding.cls.value,
        "kind": finding.kind,
        "title": finding.title,
        "severity": finding.severity.value,
        "bytes": finding.bytes,
        "share": finding.share,
        "evidence": finding.evidence,
        "advice": [vars(advice) for advice in finding.advice],
        "birth": None if finding.birth is None else {"line": finding.birth},
        "holder": None if finding.holder is None else vars(finding.holder),
    }


def _oom(oom: Oom) -> dict[str, Any]:
    return {
        **vars(oom),
        "remedies": [vars(remedy) for remedy in oom.remedies],
        "places": None if oom.places is None else [
            {**vars(place), "bytes": size} for place, size in oom.places.items()],
        "earlier": None if oom.earlier is None else vars(oom.earlier),
    }


def _whole(number: float | None) -> int | None:
    return None if number is None else round(number)


def to_json(summary: Summary) -> str:
    """The summary as JSON text, with a newline at its end."""
    return json.dumps(as_dict(summary), indent=2) + "\n"
