"""The JSON report keeps to its contract."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from traces import AnyRun, TraceBuilder, any_runs, training_run

from memdiag.report import summarize, to_json
from memdiag.trace import Phase, Role, Trace

DOCUMENT = (Path(__file__).parents[1] / "docs" / "json.md").read_text()

NUMBER, TEXT, TRUTH = (int,), (str,), (bool,)
MAYBE_NUMBER, MAYBE_TEXT, NOTHING = (int, type(None)), (str, type(None)), (type(None),)

# The contract: for each field the types that its value may have.
PEAK = {"allocated_bytes": NUMBER, "reserved_bytes": MAYBE_NUMBER, "step": MAYBE_NUMBER, "phase": MAYBE_TEXT,
        "module": MAYBE_TEXT, "operator": MAYBE_TEXT, "line": MAYBE_TEXT}
OUTSIDE = dict.fromkeys(["mapped", "numpy", "host_rss", "outside_pytorch"], MAYBE_NUMBER)
PHASE = {"step": MAYBE_NUMBER, "phase": TEXT, "peak_bytes": NUMBER, "warm_up": TRUTH}
STEP = {"step": NUMBER, "warm_up": TRUTH, "recorded": TEXT, "end_bytes": NUMBER, "host_rss_bytes": MAYBE_NUMBER,
        "input_shapes": MAYBE_TEXT}
SAVED = {"module": MAYBE_TEXT, "folded": TRUTH, "operator": MAYBE_TEXT, "line": MAYBE_TEXT, "dtype": MAYBE_TEXT,
         "shape": (list, type(None)), "count": NUMBER, "bytes": NUMBER, "role": TEXT, "savers": (list,)}
RUNNER_UP = {"allocated_bytes": NUMBER, "step": MAYBE_NUMBER, "phase": MAYBE_TEXT, "module": MAYBE_TEXT,
             "operator": MAYBE_TEXT, "line": MAYBE_TEXT, "without": TEXT}
GROWTH = {"bytes_per_step": MAYBE_NUMBER, "host_bytes_per_step": MAYBE_NUMBER, "sites": (list,)}
SITE = {"operator": MAYBE_TEXT, "module": MAYBE_TEXT, "line": MAYBE_TEXT, "bytes_per_step": NUMBER}
SCALING = {"role": TEXT, "by": TEXT, "bytes_per_unit": NUMBER, "fixed_bytes": NUMBER, "from": TEXT}
VERDICT = {"class": TEXT, "classes": (list,), "phase": MAYBE_TEXT, "moment": TEXT, "sentence": TEXT}
CLASS_SHARE = {"class": TEXT, "bytes": NUMBER, "share": (float,)}
FINDING = {"class": MAYBE_TEXT, "kind": TEXT, "title": TEXT, "severity": TEXT, "bytes": NUMBER, "share": (float,),
           "evidence": (list,), "advice": (list,), "birth": (dict, type(None)), "holder": (dict, type(None))}
ADVICE = {"text": TEXT, "bytes": MAYBE_NUMBER, "at_most": TRUTH}
ROLES = {role.label: NUMBER for role in Role}
FIELDS = {
    "schema_version": NUMBER, "about": (dict,), "peak": (dict,), "runner_up": (dict, type(None)),
    "roles_at_peak": (dict,), "outside_allocator": (dict,), "phases": (list,), "steps": (list,), "saved": (list,),
    "saved_earlier_bytes": MAYBE_NUMBER, "growth": (dict,), "scaling": (list,),
    "reachable_by_checkpointing_bytes": MAYBE_NUMBER, "verdict": (dict,), "findings": (list,),
    "oom": (dict, type(None)), "not_seen": (list,), "segments": NOTHING,
}
OOM = {
    "device": MAYBE_TEXT, "requested_bytes": MAYBE_NUMBER, "step": MAYBE_NUMBER, "phase": MAYBE_TEXT,
    "module": MAYBE_TEXT, "operator": MAYBE_TEXT, "line": MAYBE_TEXT, "forward_line": MAYBE_TEXT,
    "allocated_bytes": MAYBE_NUMBER, "reserved_bytes": MAYBE_NUMBER, "free_bytes": MAYBE_NUMBER,
    "outside_pytorch_bytes": MAYBE_NUMBER, "largest_hole_bytes": NOTHING, "remedies": (list,),
    "roles": (dict, type(None)), "places": (list, type(None)), "earlier": (dict, type(None)), "failures": NUMBER,
    "ended_run": TRUTH,
}
EARLIER = {"step": NUMBER, "warm_up": TRUTH, "operators": NUMBER, "of": NUMBER, "allocated_bytes": MAYBE_NUMBER}
PLACE = {"module": MAYBE_TEXT, "operator": MAYBE_TEXT, "line": MAYBE_TEXT, "bytes": NUMBER}


def check(value: dict[str, Any], fields: dict[str, tuple[type, ...]]) -> None:
    assert list(value) == list(fields)
    for name, types in fields.items():
        assert type(value[name]) in types, name


def report_of(trace: Trace) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(to_json(summarize(trace)))
    return report


@given(any_runs())
def test_every_report_has_the_fields_and_types_of_the_contract(any_run: AnyRun) -> None:
    report = report_of(any_run.trace)
    check(report, FIELDS)
    check(report["peak"], PEAK)
    check(report["roles_at_peak"], ROLES)
    check(report["outside_allocator"], OUTSIDE)
    for name, fields in (("phases", PHASE), ("steps", STEP), ("saved", SAVED)):
        for row in report[name]:
            check(row, fields)
    if report["runner_up"] is not None:
        check(report["runner_up"], RUNNER_UP)
    check(report["growth"], GROWTH)
    check(report["verdict"], VERDICT)
    for row in report["growth"]["sites"]:
        check(row, SITE)
    for row in report["scaling"]:
        check(row, SCALING)
    for row in report["verdict"]["classes"]:
        check(row, CLASS_SHARE)
    for row in report["findings"]:
        check(row, FINDING)
        for advice in row["advice"]:
            check(advice, ADVICE)
    assert report["schema_version"] == 1
    assert sum(report["roles_at_peak"].values()) == report["peak"]["allocated_bytes"]
    assert {row["phase"] for row in report["phases"]} <= {phase.label for phase in Phase}


def test_a_request_that_failed_has_the_fields_of_the_contract() -> None:
    # GIVEN a whole step and one that fails
    run = TraceBuilder()
    for number in range(2):
        with run.unfinished_step() if number else run.step(), run.phase(Phase.FORWARD), run.operator("aten::mul"):
            run.allocate(4 << 20)
            if number:
                run.out_of_memory(1 << 30)
    oom = report_of(run.build())["oom"]
    check(oom, OOM)
    check(oom["earlier"], EARLIER)
    for row in oom["places"]:
        check(row, PLACE)
    for row in oom["remedies"]:
        check(row, ADVICE)
    assert sum(row["bytes"] for row in oom["places"]) == sum(oom["roles"].values()) == oom["allocated_bytes"]


@pytest.mark.parametrize("trace", [
    TraceBuilder().build(),
    Trace({}, []),
    training_run().build(),
], ids=["empty", "nothing at all", "training"])
def test_it_is_json_that_ends_with_a_newline(trace: Trace) -> None:
    text = to_json(summarize(trace))
    assert text.endswith("}\n")
    assert json.loads(text)["roles_at_peak"].keys() == ROLES.keys()


def test_a_training_run_says_the_same_as_its_summary() -> None:
    summary = summarize(training_run(2, seed=7).build())
    report = json.loads(to_json(summary))
    assert report["about"]["seed"] == 7
    assert report["peak"]["allocated_bytes"] == summary.peak.allocated_bytes
    assert report["peak"]["line"] == "model.py:12"
    assert report["saved"][0]["module"] == "blocks.0-1.fc"
    assert report["saved"][0]["shape"] == [8, 2048]
    assert report["saved"][0]["savers"] == ["blocks.0-1.fc › aten::linear"]
    assert [row["recorded"] for row in report["steps"]] == ["full", "full"]


def test_nothing_of_the_trace_is_lost_between_light_and_full() -> None:
    run = training_run(1)
    run.light_step({Phase.FORWARD: 5}, end_bytes=3)
    assert [row["recorded"] for row in report_of(run.build())["steps"]] == ["full", "light"]


@pytest.mark.parametrize("name", sorted({
    *FIELDS, *PEAK, *ROLES, *OUTSIDE, *PHASE, *STEP, *SAVED, *OOM, *EARLIER, *PLACE}))
def test_every_field_is_documented(name: str) -> None:
    assert re.search(rf"`(peak\.)?{name}`", DOCUMENT)
