"""What was alive at a moment, by the place in the code where it was born."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from memdiag.diagnose.model import Ints
from memdiag.trace import NONE
from memdiag.trace.places import Place, module_names, operator_names, relative
from memdiag.trace.view import View


def by_place(view: View, event: int) -> dict[Place, int]:
    """Bytes by the module, operator and line of birth, largest first; they sum to what is alive."""
    trace, alive = view.trace, view.alive_after(event)
    key = _with_lines(view, alive)
    if view.run is not view:  # what was born in full steps is known there
        rows = view.rows_in_run[alive]
        key[rows != NONE] = _with_lines(view.run, rows[rows != NONE])
    keys, group = np.unique(key, axis=0, return_inverse=True)
    total = np.zeros(len(keys), dtype=np.int64)
    np.add.at(total, group.reshape(-1), trace["allocations"]["bytes"][alive])
    found: dict[Place, int] = defaultdict(int)
    for numbers, size in zip(keys.tolist(), total.tolist(), strict=True):
        module, name, line = (trace.string(number) for number in numbers)
        found[Place(module, name, relative(trace, line))] += size
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def births(view: View, allocations: Ints) -> Ints:
    """Module, operator and line of each birth, as numbers of their texts, in three columns."""
    table, rows = view.trace["allocations"], view.born_in[allocations]
    operator = operator_names(view.trace, view.nest, rows)
    return np.stack([
        module_names(view.trace, view.nest, rows),
        np.where(operator != NONE, operator, table["kernel"][allocations]), table["line"][allocations]], axis=1)


def _with_lines(view: View, allocations: Ints) -> Ints:
    found = births(view, allocations)
    found[:, 2] = _lines(view, allocations)
    return found


def _lines(view: View, allocations: Ints) -> Ints:
    """The line of each allocation; where it has none of its own, that of the nearest span around its birth."""
    spans = view.trace["spans"]
    line = view.trace["allocations"]["line"][allocations].astype(np.int64)
    missing = line == NONE
    around = {
        row: next((int(spans["line"][up]) for up in view.trace.ancestors(int(spans["id"][row]))
                   if spans["line"][up] != NONE), NONE)
        for row in np.unique(view.born_in[allocations[missing]]).tolist() if row != NONE}
    line[missing] = [around.get(row, NONE) for row in view.born_in[allocations[missing]].tolist()]
    return line
