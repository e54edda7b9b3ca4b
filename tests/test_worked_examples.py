"""The examples of ``docs/worked-examples.md``: steps written event by event, replayed and planned by the real code."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from traces import TraceBuilder

from memdiag.plan.regions import candidates
from memdiag.plan.replay import Region, peak_under
from memdiag.plan.search import Search
from memdiag.plan.step import Step, planned_step
from memdiag.trace import NONE, Kind, Phase, Role
from memdiag.trace.model import GRAD_ON
from memdiag.trace.view import View

MIB = 2**20
TENTH = 2**30 // 10  # of a GiB; the examples are in tenths, and bytes are whole


class Chain(TraceBuilder):
    """A step of blocks of layers, each of which makes one tensor from the one before it and saves it for backward.

    What was there before is alive all the time.
    """

    def __init__(self, blocks: Sequence[int], size: int, before: Sequence[tuple[Role, int]], *, holds: bool = False,
                 spike: int = 0, spike_at: int = NONE, saves_input: Sequence[int] = ()) -> None:
        """
        Args:
            blocks: how many layers each has.
            size: of each tensor.
            before: what was there before, and its size.
            holds: whether the script holds what the model returns, the last layer's tensor, until the step is over.
            spike: workspace of one layer's backward, that of the layer ``spike_at``.
            saves_input: layers that save what they are given as well.
        """
        super().__init__()
        for role, bytes_before in before:
            self.claim(self.existing(bytes_before), role)
        count = sum(blocks)
        tensors: list[int] = []
        saves: list[list[int]] = []
        operators: list[int] = []
        with self.step():
            with self.phase(Phase.FORWARD), self.module("Model", flags=GRAD_ON):
                for block, layers in enumerate(blocks):
                    with self.module(f"blocks.{block}", flags=GRAD_ON) as call:
                        if tensors:
                            self._rows["arguments"].append({"span": call, "allocation": tensors[-1]})
                        for _ in range(layers):
                            with self.operator("aten::tanh") as operator:
                                out = self.allocate(size)
                                mine = [self.save(tensors[-1])] if len(tensors) in saves_input else []
                                saves.append([*mine, self.save(out)])
                            tensors.append(out)
                            operators.append(operator)
            for number in range(count):  # run once more without a graph, each goes when the next one is there
                died = number + 2 if number + 1 < count else NONE
                self._rows["second_forwards"].append(
                    {"step": 0, "forward": 0, "device": 0, "bytes": size, "died": died})
            calls = [row for row in self._rows["spans"] if row["kind"] == Kind.MODULE]
            for call in sorted(calls, key=lambda row: row["id"]):  # it takes as long
                self._rows["second_calls"].append({
                    "step": 0, "forward": 0, "module": call["name"], "start_ns": call["start_ns"],
                    "end_ns": call["end_ns"]})
            with self.phase(Phase.BACKWARD):
                uses = [2 if number + 1 in saves_input else 1 for number in range(count)]
                uses[-1] += holds
                for number in reversed(range(count)):
                    with self.node("TanhBackward0", forward=operators[number]):
                        asked = self.events
                        if number == spike_at:
                            self.free(self.allocate(spike))
                        self.release(*saves[number])
                        for end in self._rows["save_ends"][-len(saves[number]):]:
                            end["unpacked_event"] = asked  # before the node does anything
                        for tensor in (number, *([number - 1] if number in saves_input else [])):
                            uses[tensor] -= 1
                            if not uses[tensor]:
                                self.free(tensors[tensor])
            if holds:
                self.free(tensors[-1])


def planned(run: Chain) -> Step:
    return planned_step(View(run.build()))


def regions(step: Step, *paths: str) -> list[Region]:
    return [Region((call,)) for call in step.calls if call.path in paths]


class TestBudget:
    """Half of the activations is a tenth of the peak."""

    BEFORE = ((Role.PARAMETERS, 300 * MIB), (Role.OPTIMIZER_STATE, 900 * MIB), (Role.BUFFERS, 200 * MIB))

    def test_the_peak_of_four_blocks_of_four(self) -> None:
        # GIVEN 16 tensors of 24 MiB in four blocks, beside 1,400 MiB
        step = planned(Chain([4] * 4, 24 * MIB, self.BEFORE, holds=True))
        bare = peak_under(step, []).bytes
        assert bare == (1_400 + 16 * 24) * MIB == 1_784 * MIB
        # WHEN each block is a checkpoint
        blocks = regions(step, *(f"blocks.{number}" for number in range(4)))
        found = peak_under(step, blocks)
        # THEN four boundaries and one block made anew are there at once, 192 of 384 MiB
        assert found.bytes == (1_400 + 4 * 24 + 4 * 24) * MIB == 1_592 * MIB
        assert found.region is blocks[-1]
        assert f"{(bare - found.bytes) / (384 * MIB):.0%} {(bare - found.bytes) / bare:.2%}" == "50% 10.76%"

    def test_the_planner_comes_to_it_by_its_budget_and_not_below(self) -> None:
        step = planned(Chain([4] * 4, 24 * MIB, self.BEFORE, holds=True))
        search = Search(step, candidates(step))
        within = search.within(1_592 * MIB)
        assert within is not None
        assert within.peak.bytes <= 1_592 * MIB
        # AND as small as it gets, which is no half of the peak: 1,400 MiB are no activations
        assert 1_400 * MIB < search.smallest().peak.bytes <= within.peak.bytes
        assert search.within(1_400 * MIB) is None


class TestLongerSequence:
    """Eight GiB, and where the spike comes."""

    BUDGET = 80 * TENTH
    BEFORE = ((Role.PARAMETERS, 15 * TENTH), (Role.OPTIMIZER_STATE, 35 * TENTH))

    def step(self, spike_at: int) -> Step:
        """Two blocks of four layers, with 0.3 GiB each; the first layer of the second one saves what it is given."""
        return planned(Chain([4, 4], 3 * TENTH, self.BEFORE, spike=11 * TENTH, spike_at=spike_at, saves_input=[4]))

    @pytest.mark.parametrize(("spike_at", "bare", "with_plan"), [
        (7, 85, 76),  # in the last layer's backward, where all activations are: 5.0 + 2.4 + 1.1, and 5.0 + 1.5 + 1.1
        (3, 74, 73),  # in the first block's: 5.0 + 2.4 as forward ends; then 5.0 + 4 x 0.3 + 1.1, as it runs again
        (0, 74, 65),  # in the very last: 5.0 + 2.4; then 5.0 + 1.5 as forward ends
    ])
    def test_what_the_plan_does_depends_on_where_the_spike_comes(
        self, spike_at: int, bare: int, with_plan: int
    ) -> None:
        step = self.step(spike_at)
        assert peak_under(step, []).bytes == bare * TENTH
        assert peak_under(step, regions(step, "blocks.0")).bytes == with_plan * TENTH

    def test_the_planner_fits_it(self) -> None:
        step = self.step(spike_at=7)
        plan = Search(step, candidates(step)).within(self.BUDGET)
        assert plan is not None
        assert [one.modules for one in plan.chosen] == [("blocks.0",)]
        assert self.BUDGET - plan.peak.bytes == 4 * TENTH
        # AND where the spike comes later, nothing is to be done
        step = self.step(spike_at=0)
        plan = Search(step, candidates(step)).within(self.BUDGET)
        assert plan is not None
        assert plan.chosen == ()
