"""A part of a trace: what was there when it began, and what happened until it ended. Roles stay as the whole tells."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from memdiag.trace import NONE, Trace
from memdiag.trace.timeline import lives

Rows = NDArray[np.bool_]


def part_of(trace: Trace, first: int, last: int) -> Trace:
    """The memory events ``first`` to ``last``, the last not included, numbered from 0.

    Steps and requests that failed are kept where they lie in it, steps as a whole.
    """
    tables = {name: dict(table) for name, table in trace.tables.items()}
    life = lives(trace)
    kept = (life.born < last) & (life.died >= first)
    new = np.cumsum(kept) - 1
    _keep(tables["allocations"], kept)
    born = tables["allocations"]["event"]
    before = born < first
    tables["allocations"]["event"] = np.where(before, NONE, born - first)
    tables["allocations"]["span"] = np.where(before, NONE, tables["allocations"]["span"])
    frees = tables["frees"]
    _keep(frees, kept[frees["allocation"]] & (frees["event"] >= first) & (frees["event"] < last))
    frees["event"] = frees["event"] - first
    frees["allocation"] = new[frees["allocation"]]
    claims = tables["claims"]
    _keep(claims, kept[claims["allocation"]])
    claims["allocation"] = new[claims["allocation"]]
    later = claims["event"] != NONE
    # From before the first event on is from event 0 on, before which nothing else can be seen of it.
    claims["event"] = np.where(later, np.maximum(claims["event"] - first, 0), NONE)
    spans = tables["spans"]
    _keep(spans, (spans["start_event"] < last) & (spans["end_event"] > first))
    steps = tables["steps"]
    _keep(steps, (steps["start_event"] >= first) & (steps["end_event"] <= last))
    for table in (spans, steps):
        for column in ("start_event", "end_event"):
            table[column] = np.clip(table[column] - first, 0, last - first)
    failures = tables["out_of_memory"]
    inside = (failures["event"] >= first) & (failures["event"] <= last)
    about: dict[str, Any] = dict(trace.about)
    if len(inside):
        about["failed_requests"] = [one for one, there in zip(about["failed_requests"], inside, strict=True) if there]
        about["ended_out_of_memory"] = about["ended_out_of_memory"] and bool(inside[-1])
    _keep(failures, inside)
    failures["event"] = failures["event"] - first
    return Trace(about, trace.text, tables)


def _keep(table: dict[str, Any], rows: Rows) -> None:
    for column in table:
        table[column] = table[column][rows]
