"""Where each span stands: the step, phase, module and operator around it, as columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memdiag.trace.model import NONE, RECOMPUTE, Kind, Trace

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Nesting:
    """For each row of the span table, the row of the enclosing span of a kind (itself included), or NONE.

    Attributes:
        step, phase: the enclosing step and phase.
        module: the innermost module call; ``outer_module``: the outermost one.
        operator: the innermost operator.
        unit: the outermost operator or autograd node that has no module call in between, nor an operator that runs
            again for a checkpoint: what counts as one piece of work when asking whether memory was only its
            workspace.
        node: the outermost autograd node.
        recompute: whether a module call, or an operator, that recomputes for a checkpoint encloses it.
    """

    step: Rows
    phase: Rows
    module: Rows
    outer_module: Rows
    operator: Rows
    unit: Rows
    node: Rows
    recompute: NDArray[np.bool_]

    def of(self, column: Rows, span_rows: Rows) -> Rows:
        """``column`` looked up at span rows, NONE where there is no span."""
        found = np.full(len(span_rows), NONE, dtype=np.int64)
        known = span_rows != NONE
        found[known] = column[span_rows[known]]
        return found


def span_rows(trace: Trace, ids: NDArray[np.int64]) -> Rows:
    """Rows of spans by id; NONE for NONE and for spans that were never closed (the process was killed)."""
    known = trace["spans"]["id"]
    if not len(known):
        return np.full(len(ids), NONE, dtype=np.int64)
    at = np.searchsorted(known, ids)
    at[at == len(known)] = 0
    return np.where(known[at] == ids, at, NONE).astype(np.int64)


def nesting(trace: Trace) -> Nesting:
    """Computed from the outside in, one nesting level at a time; linear in the number of spans."""
    spans = trace["spans"]
    count = len(spans["id"])
    parent = span_rows(trace, spans["parent"])
    kind = spans["kind"]
    result = Nesting(
        **{
            name: np.full(count, NONE, dtype=np.int64)
            for name in ("step", "phase", "module", "outer_module", "operator", "unit", "node")
        },
        recompute=np.zeros(count, dtype=bool),
    )
    for rows in _levels(parent):
        up = parent[rows]
        inside = up != NONE
        for column in (result.step, result.phase, result.module, result.outer_module, result.operator, result.node):
            column[rows[inside]] = column[up[inside]]
        result.recompute[rows[inside]] = result.recompute[up[inside]]
        kinds = kind[rows]
        for column, wanted in ((result.step, Kind.STEP), (result.phase, Kind.PHASE), (result.module, Kind.MODULE),
                               (result.operator, Kind.OPERATOR)):
            own = rows[kinds == wanted]
            column[own] = own
        for column, wanted in ((result.outer_module, Kind.MODULE), (result.node, Kind.NODE)):
            own = rows[(kinds == wanted) & (column[rows] == NONE)]
            column[own] = own
        again = spans["flags"][rows] & RECOMPUTE != 0
        result.recompute[rows] |= again
        work = np.isin(kinds, (Kind.OPERATOR, Kind.NODE))
        outer_unit = np.full(len(rows), NONE, dtype=np.int64)
        outer_unit[inside] = result.unit[up[inside]]
        result.unit[rows] = np.where(work, np.where((outer_unit == NONE) | again, rows, outer_unit), NONE)
    return result


def _levels(parent: Rows) -> list[Rows]:
    depth = np.where(parent == NONE, 0, -1)
    levels = [np.flatnonzero(depth == 0)]
    waiting = np.flatnonzero(depth < 0)
    while len(waiting):
        ready = depth[parent[waiting]] >= 0
        level = waiting[ready]
        if not len(level):  # a cycle cannot come from the recorder; a damaged file must not hang the reader
            raise ValueError("spans enclose each other")
        depth[level] = len(levels)
        levels.append(level)
        waiting = waiting[~ready]
    return levels
