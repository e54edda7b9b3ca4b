"""Where each span stands, against a walk over its parents one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from traces import AnyRun, TraceBuilder, any_runs

from memdiag.trace import NONE, Kind, Phase, Trace
from memdiag.trace.model import RECOMPUTE
from memdiag.trace.nesting import nesting, span_rows

WORK = (Kind.OPERATOR, Kind.NODE)


def walked(trace: Trace, row: int) -> dict[str, int | bool]:
    """The same facts of one span, found the slow way."""
    spans = trace["spans"]
    around = list(trace.ancestors(int(spans["id"][row])))
    kinds = [Kind(spans["kind"][up]) for up in around]

    def nearest(kind: Kind) -> int:
        return next((up for up, own in zip(around, kinds, strict=True) if own is kind), NONE)

    def outermost(kind: Kind) -> int:
        return next((up for up, own in zip(around[::-1], kinds[::-1], strict=True) if own is kind), NONE)

    unit = NONE
    for up, kind in zip(around, kinds, strict=True):
        if kind not in WORK:
            break
        unit = up
    return {
        "step": nearest(Kind.STEP), "phase": nearest(Kind.PHASE), "module": nearest(Kind.MODULE),
        "outer_module": outermost(Kind.MODULE), "operator": nearest(Kind.OPERATOR), "node": outermost(Kind.NODE),
        "unit": unit,
        "recompute": any(kind is Kind.MODULE and spans["flags"][up] & RECOMPUTE
                         for up, kind in zip(around, kinds, strict=True)),
    }


@given(any_runs(), st.data())
def test_every_column_agrees_with_the_walk(any_run: AnyRun, data: st.DataObject) -> None:
    # GIVEN any run, some of whose spans were never written (the process was killed)
    trace = any_run.trace
    written = np.array(data.draw(st.lists(st.booleans(), min_size=trace.rows("spans"), max_size=trace.rows("spans"))),
                       dtype=bool)
    trace.tables["spans"] = {name: column[written] for name, column in trace["spans"].items()}
    # WHEN all spans are placed at once
    found = nesting(trace)
    # THEN each stands where its parents say
    for row in range(trace.rows("spans")):
        assert {name: getattr(found, name)[row] for name in walked(trace, row)} == walked(trace, row)


def test_by_hand() -> None:
    run = TraceBuilder()
    with (run.step() as step, run.phase(Phase.FORWARD), run.module("net"), run.module("net.fc"),
          run.operator("aten::linear") as linear, run.operator("aten::addmm") as addmm):
        pass
    trace = run.build()
    found = nesting(trace)
    row = trace.span_row(addmm)
    spans = trace["spans"]
    assert spans["id"][found.unit[row]] == linear
    assert spans["id"][found.operator[row]] == addmm
    assert spans["id"][found.step[row]] == 0
    assert step == 0
    assert trace.text[spans["name"][found.module[row]]] == "net.fc"
    assert trace.text[spans["name"][found.outer_module[row]]] == "net"
    assert found.node[row] == NONE


def test_lookup_of_spans_that_are_not_there() -> None:
    run = TraceBuilder()
    with run.module("a"), run.module("b"):
        pass
    trace = run.build()
    assert span_rows(trace, np.array([0, 1, NONE, 99])).tolist() == [0, 1, NONE, NONE]
    assert span_rows(TraceBuilder().build(), np.array([0, NONE])).tolist() == [NONE, NONE]


def test_spans_that_enclose_each_other_are_an_error_and_no_endless_loop() -> None:
    run = TraceBuilder()
    with run.module("a"), run.module("b"):
        pass
    trace = run.build()
    trace["spans"]["parent"][:] = [1, 0]
    with pytest.raises(ValueError, match="enclose each other"):
        nesting(trace)


def test_a_deep_nest_is_placed() -> None:
    run = TraceBuilder()

    def nest(depth: int) -> None:
        with run.module(f"m{depth}"):
            if depth:
                nest(depth - 1)

    nest(200)
    found = nesting(run.build())
    assert found.outer_module.tolist() == [0] * 201
    assert found.module.tolist() == list(range(201))
