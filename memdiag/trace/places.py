"""Where in the user's code things happen: the module, operator and line around a span or a birth."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memdiag.trace.model import NONE, Kind, Trace
from memdiag.trace.nesting import Nesting, span_rows

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Place:
    """Names for a person; None where not known.

    Attributes:
        module: path of the innermost module; in backward, of the one whose forward is undone.
        operator: the outermost ATen operator, or in backward the node of the graph.
        line: "file.py:12", relative to the script's folder where it lies below it.
    """

    module: str | None
    operator: str | None
    line: str | None


def birth(trace: Trace, nest: Nesting, allocation: int) -> Place:
    """Where an allocation was born."""
    allocations, spans = trace["allocations"], trace["spans"]
    span = int(allocations["span"][allocation])
    row = np.array([trace.span_row(span)])
    lines = [allocations["line"][allocation], *(spans["line"][up] for up in trace.ancestors(span))]
    return Place(
        module=trace.string(int(module_names(trace, nest, row)[0])),
        operator=trace.string(int(operator_names(trace, nest, row)[0]))
        or trace.string(int(allocations["kernel"][allocation])),
        line=relative(trace, trace.string(next((int(text) for text in lines if text != NONE), NONE))),
    )


def module_names(trace: Trace, nest: Nesting, rows: Rows) -> Rows:
    """Text of the innermost module around span rows; in backward, of the forward that is undone."""
    spans = trace["spans"]
    forward = span_rows(trace, at(spans["forward"], nest.of(nest.node, rows)))
    module = nest.of(nest.module, rows)
    return at(spans["name"], np.where(module != NONE, module, nest.of(nest.module, forward)))


def operator_names(trace: Trace, nest: Nesting, rows: Rows) -> Rows:
    """Text of the outermost operator, node or custom Function around span rows."""
    spans = trace["spans"]
    unit = nest.of(nest.unit, rows)
    inner = nest.of(nest.operator, rows)
    function = np.where(at(spans["kind"], rows) == Kind.FUNCTION, rows, NONE)
    return at(spans["name"], np.where(unit != NONE, unit, np.where(function != NONE, function, inner)))


def at(column: NDArray[Any], rows: Rows) -> Rows:
    """A column at rows, NONE where there is no row."""
    found = np.full(len(rows), NONE, dtype=np.int64)
    found[rows != NONE] = column[rows[rows != NONE]]
    return found


def relative(trace: Trace, line: str | None) -> str | None:
    """A line relative to the script's folder where it lies below it."""
    folder = os.path.join(os.path.dirname(trace.about.get("script") or ""), "")
    if line is not None and folder and line.startswith(folder):
        return line[len(folder):]
    return line
