"""Diagnosis of traces told by hand: what grows, what the peak is made of, and what it would be without it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from traces import AnyRun, TraceBuilder, any_runs, training_run, write

from memdiag.diagnose import Class, Diagnosis, diagnose
from memdiag.diagnose.evidence import Evidence
from memdiag.trace import NONE, Phase, Role, Trace
from memdiag.trace.model import SCHEMA
from memdiag.trace.timeline import timeline
from memdiag.trace.view import View

MIB = 1 << 20


def diagnosis(trace: Trace) -> Diagnosis:
    return diagnose(View(trace))


def loop(keep: list[int], steps: int, *, drop_after: int | None = None, activation: int = 8 * MIB) -> Trace:
    """A loop with one activation a step, that keeps an allocation of so many bytes at the end of some steps.

    Args:
        keep: what is kept at the end of each step; 0 for nothing.
        drop_after: how many are kept at once: the oldest goes for a new one.
    """
    run = TraceBuilder()
    run.claim(run.existing(4 * MIB), Role.PARAMETERS, "weight")
    kept: list[int] = []
    for number in range(steps):
        with run.step(warm_up=number == 0):
            with run.phase(Phase.FORWARD), run.module("Net"), run.operator("aten::linear", line="/project/train.py:5"):
                out = run.allocate(activation)
                save = run.save(out, shape=(8, 8))
            with run.phase(Phase.BACKWARD):
                run.release(save)
                run.free(out)
            with run.phase(Phase.OTHER), run.operator("aten::clone", line="/project/train.py:9"):
                if keep[number]:
                    if drop_after is not None and len(kept) == drop_after:
                        run.free(kept.pop(0))
                    kept.append(run.allocate(keep[number], line="/project/train.py:9"))
    return run.build()


class TestGrowth:
    def test_one_more_with_every_step(self) -> None:
        # GIVEN a loop that keeps a MiB with every step
        found = diagnosis(loop([MIB] * 8, 8))
        # THEN that is its growth, from that line, and a leak
        assert found.growth.bytes_per_step == MIB
        assert [(site.line, site.operator, site.bytes_per_step) for site in found.growth.sites] == [
            ("train.py:9", "aten::clone", MIB)]
        assert found.verdict.cls is Class.LEAK

    @pytest.mark.parametrize("period", [2, 3, 4])
    @pytest.mark.parametrize("first", [0, 1])
    def test_one_more_every_few_steps(self, period: int, first: int) -> None:
        # GIVEN one that keeps something at the end of every epoch of a few steps
        steps = 6 * period
        found = diagnosis(loop([MIB if step % period == first else 0 for step in range(steps)], steps))
        # THEN the growth is that of the epoch over its steps, wherever the first one lies
        assert found.growth.bytes_per_step == pytest.approx(MIB / period)
        assert found.verdict.cls is Class.LEAK

    def test_what_warm_up_leaves_does_not_grow(self) -> None:
        found = diagnosis(loop([4 * MIB, *[0] * 9], 10))
        assert found.growth.bytes_per_step == 0
        assert found.verdict.cls is not Class.LEAK

    @pytest.mark.parametrize("held", [1, 2, 3])
    def test_what_is_held_for_a_few_steps_does_not_grow(self, held: int) -> None:
        # GIVEN the last few results, and no more
        found = diagnosis(loop([MIB] * 12, 12, drop_after=held))
        assert found.growth.bytes_per_step == 0
        assert found.verdict.cls is not Class.LEAK

    def test_results_of_other_sizes_held_for_one_step_do_not_grow(self) -> None:
        sizes = [MIB, 3 * MIB, MIB, 2 * MIB, 4 * MIB, MIB, 5 * MIB, 2 * MIB, 6 * MIB, MIB]
        assert diagnosis(loop(sizes, 10, drop_after=1)).growth.bytes_per_step == 0

    def test_a_cache_that_fills_and_stops_does_not_grow(self) -> None:
        found = diagnosis(loop([MIB] * 6 + [0] * 6, 12))
        assert found.growth.bytes_per_step == 0
        assert found.verdict.cls is not Class.LEAK

    def test_a_tensor_that_is_made_anew_and_larger_grows(self) -> None:
        # GIVEN a bank that is concatenated onto itself: one tensor at a time
        found = diagnosis(loop([(number + 1) * MIB for number in range(10)], 10, drop_after=1))
        assert found.growth.bytes_per_step == MIB
        assert found.verdict.cls is Class.LEAK

    def test_a_loss_of_four_bytes_is_growth_and_no_leak(self) -> None:
        found = diagnosis(loop([4] * 12, 12))
        assert found.growth.bytes_per_step == 4
        assert found.verdict.cls is Class.ACTIVATION

    def test_what_has_become_much_of_the_peak_is_a_leak_however_slow(self) -> None:
        # GIVEN a run of three thousand steps that has kept 4 KiB of each, so that as many more would not double it
        found = diagnosis(loop([4096] * 3000, 3000, activation=MIB))
        assert 3000 * 4096 + MIB > 1000 * 4096
        assert found.verdict.cls is Class.LEAK
        assert found.findings[0].advice[0].bytes == 2999 * 4096

    def test_an_optimizers_history_is_growth_and_no_leak(self) -> None:
        # GIVEN an optimizer that keeps a MiB more of its own with every step
        run = TraceBuilder()
        run.claim(run.existing(MIB), Role.PARAMETERS, "weight")
        for number in range(8):
            with run.step(warm_up=number == 0), run.phase(Phase.OPTIMIZER):
                state = run.allocate(MIB, line="/project/train.py:9")
                run.claim(state, Role.OPTIMIZER_STATE, "old_dirs")
        found = diagnosis(run.build())
        assert found.growth.bytes_per_step == MIB
        assert found.verdict.cls is Class.OPTIMIZER_STATE

    @pytest.mark.parametrize(("ends", "rate"), [
        (range(2, 9), MIB), ([2, 2, 3, 3, 4, 4, 5], None), ([2] * 7, None)])
    def test_of_light_steps_what_rises_with_every_one_is_told(self, ends: Sequence[int], rate: int | None) -> None:
        # GIVEN two steps in full, and light ones of which nothing is known but what was alive at their ends
        run = TraceBuilder()
        run.existing(MIB)
        for _ in range(2):
            with run.step():
                run.free(run.allocate(MIB))
        for end in ends:
            run.light_step({Phase.FORWARD: 9 * MIB}, end_bytes=end * MIB)
        # THEN growth is told where each ends with more than the one before, without a place
        found = diagnosis(run.build())
        assert (found.growth.bytes_per_step or None) == rate
        assert not found.growth.sites

    def test_too_few_steps_tell_nothing(self) -> None:
        assert diagnosis(loop([MIB] * 3, 3)).growth.bytes_per_step is None


class TestVerdict:
    def test_a_small_run_is_short_of_nothing(self) -> None:
        found = diagnosis(training_run(4).build())
        assert (found.verdict.cls, found.findings) == (Class.NONE, [])

    def test_activations(self) -> None:
        found = diagnosis(training_run(4, width=8 * MIB, layers=6).build())
        assert found.verdict.cls is Class.ACTIVATION
        assert found.verdict.phase == "backward"

    def test_nothing_at_all(self) -> None:
        assert diagnosis(TraceBuilder().build()).verdict.cls is Class.NONE

    def test_what_a_variable_of_the_script_holds_is_undetermined_and_the_variable_named(self) -> None:
        # GIVEN a run most of whose memory a variable of the script leads to
        run = TraceBuilder()
        run.claim(run.existing(64 * MIB), Role.HELD, "table")
        run.claim(run.existing(4 * MIB), Role.PARAMETERS, "weight")
        with run.step(), run.phase(Phase.FORWARD), run.operator("aten::add"):
            run.free(run.allocate(MIB))
        # THEN its class is not known, and who holds it is told
        found = diagnosis(run.build())
        assert found.verdict.cls is Class.UNDETERMINED
        assert "held by the script, the largest part by `table`" in found.verdict.sentence

    def test_memory_without_an_owner_is_undetermined(self) -> None:
        run = TraceBuilder()
        run.allocate(64 * MIB)
        assert diagnosis(run.build()).verdict.cls is Class.UNDETERMINED

    @given(any_runs())
    def test_the_classes_sum_to_the_peak(self, any_run: AnyRun) -> None:
        found = diagnosis(any_run.trace)
        peak = View(any_run.trace).worst.bytes
        if found.verdict.classes:
            assert sum(row.bytes for row in found.verdict.classes) == peak
            assert sum(row.share for row in found.verdict.classes) == pytest.approx(1)
            assert found.verdict.classes[0].cls is found.verdict.cls or found.verdict.cls in (
                Class.NONE, Class.UNDETERMINED, Class.HOST_MEMORY, Class.LEAK)


def stripped(trace: Trace, gone: np.ndarray) -> Trace:
    """The trace as if some allocations had never been made: their rows and events are taken out."""
    tables = {name: dict(table) for name, table in trace.tables.items()}
    number = np.cumsum(~gone) - 1
    tables["allocations"] = {name: column[~gone] for name, column in trace["allocations"].items()}
    stays = ~gone[trace["frees"]["allocation"]]
    tables["frees"] = {name: column[stays] for name, column in trace["frees"].items()}
    tables["frees"]["allocation"] = number[tables["frees"]["allocation"]]
    for name in SCHEMA:
        if name not in ("allocations", "frees"):
            tables[name] = {column: values[:0] for column, values in trace[name].items()}
    return Trace(trace.about, trace.text, tables)


def halved(any_run: AnyRun) -> tuple[View, Evidence, np.ndarray]:
    """A run that was recorded in full, what its peak is made of, and every second of its allocations."""
    view = View(any_run.trace)
    assume(view.of_peak is view and not len(view.trace["phase_peaks"]["bytes"]))
    found = Evidence(view, view)
    return view, found, np.arange(len(found.size)) % 2 == 0


class TestWithout:
    @given(any_runs())
    def test_the_peak_without_something_is_that_of_a_trace_without_it(self, any_run: AnyRun) -> None:
        # GIVEN any run recorded in full, and any half of its allocations
        view, found, chosen = halved(any_run)
        # WHEN they are taken out of the trace THEN its peak is what was said
        assert found.without(chosen)[0] == timeline(stripped(view.trace, chosen), view.device).peak_bytes

    @given(any_runs())
    def test_the_peak_of_smaller_allocations_is_that_of_a_trace_in_which_they_are(self, any_run: AnyRun) -> None:
        # GIVEN any run recorded in full, and a part of each allocation of it, of every second one all
        view, found, chosen = halved(any_run)
        trace = view.trace
        part = np.where(view.life.born != NONE, found.size // 3, 0)
        # WHEN the others are smaller by it in the trace THEN its peak is what was said
        smaller = {**trace["allocations"], "bytes": trace["allocations"]["bytes"] - np.where(chosen, 0, part)}
        shrunk = Trace(trace.about, trace.text, {**trace.tables, "allocations": smaller})
        assert found.without(chosen, part=part)[0] == timeline(stripped(shrunk, chosen), view.device).peak_bytes

    @given(any_runs(), st.integers(0, 4096))
    def test_what_is_kept_of_it_is_there_at_any_time(self, any_run: AnyRun, keeping: int) -> None:
        # GIVEN any run recorded in full, every second of its allocations, and bytes of them that stay
        view, found, chosen = halved(any_run)
        # WHEN the bytes alive are summed at each event, one by one, before the first too
        highest = 0
        for event in range(NONE, len(view.line.live)):
            alive = (view.life.born <= event) & (view.life.died > event)
            mine, others = (int(found.size[alive & which].sum()) for which in (chosen, ~chosen))
            highest = max(highest, others + min(mine, keeping))
        # THEN their highest is what was said
        assert found.without(chosen, keeping=keeping)[0] == highest

    def test_what_a_finding_says_is_what_the_trace_without_it_shows(self) -> None:
        for trace in (training_run(4, width=8 * MIB, layers=6).build(), training_run(4, width=8 * MIB).build()):
            view = View(trace)
            for finding in diagnose(view).findings:
                assert finding.allocations is not None
                left = Evidence(view, view).without(finding.allocations, finding.since)[0]
                assert left == timeline(stripped(trace, finding.allocations), "cpu").peak_bytes


class TestCommand:
    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "memdiag", "diagnose", *arguments], capture_output=True, text=True, check=False)

    @pytest.fixture
    def leaking(self, tmp_path: Path) -> str:
        path = tmp_path / "run.mdiag"
        write(loop([MIB] * 8, 8), path)
        return str(path)

    def test_it_says_the_verdict(self, leaking: str) -> None:
        done = self.run(leaking)
        assert done.returncode == 0
        assert done.stdout.startswith("Verdict: leak\n")
        assert max(map(len, done.stdout.splitlines())) <= 80

    @pytest.mark.parametrize(("condition", "said"), [
        ("leak", "leak: Memory grows"), ("growth", "growth: Memory grows"), ("over=1MiB", "over=1MiB: the peak is"),
        ("workspace, leak", "leak: Memory grows"),
    ])
    def test_it_fails_on_what_it_is_told_to(self, leaking: str, condition: str, said: str) -> None:
        done = self.run("--fail-on", condition, leaking)
        assert done.returncode == 3
        assert f"memdiag: failed: {said}" in done.stderr

    @pytest.mark.parametrize("condition", ["workspace", "over=1GiB", ""])
    def test_it_does_not_fail_on_what_is_not_there(self, leaking: str, condition: str) -> None:
        assert self.run("--fail-on", condition, leaking).returncode == 0

    @pytest.mark.parametrize(("condition", "said"), [("leaks", "no class or kind"), ("over=much", "is not a size")])
    def test_a_condition_that_means_nothing_is_refused(self, leaking: str, condition: str, said: str) -> None:
        done = self.run("--fail-on", condition, leaking)
        assert done.returncode == 2
        assert said in done.stderr
