"""Plans that are looked for: they fit, and cost no more than the best of all plans, which are tried one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planned import PLANNED_STEP, overlap, train
from recording import record
from test_plan_replay import applied_peak, as_file, recorded, recorded_with_choice

from memdiag.plan.chain import Chain
from memdiag.plan.regions import Candidate, candidates
from memdiag.plan.replay import Replay, peak_under
from memdiag.plan.search import Search
from memdiag.plan.step import planned_step
from memdiag.trace.view import View

PARTS = {  # of each model, what may be a checkpoint in these tests: few enough for all plans to be tried
    "gpt": [f"blocks.{number}{part}" for number in (0, 2, 5) for part in ("", ".attention", ".mlp")],
    "unet": ["down.0", "down.1", "down.2", "middle", "up.0", "up.1", "up.2", "up.0.conv2"],
    "lstm": ["embed", "layers.0", "layers.1", "layers.2", "head"],
    "shared": ["embed", "block", "block.attention", "block.mlp", "head"],
    "mixture": [f"experts.{layer}.{expert}" for layer in range(2) for expert in range(3)],
}


def among(name: str) -> list[Candidate]:
    step, _ = recorded(name, False)
    return [one for one in candidates(step) if not one.keep and len(one.modules) == 1 and one.modules[0] in PARTS[name]]


def wide(name: str) -> list[Candidate]:
    """Runs of modules, and modules that keep operators, beside some of the plain ones."""
    _, _, choice = recorded_with_choice(name, False)
    if name == "resnet":
        return [one for one in choice if one.modules[0].startswith("blocks.") and one.modules[0].count(".") == 1]
    paths = "blocks.1", "blocks.4.mlp"
    return [one for one in choice if one.modules[0].startswith(paths) and (
        one.keep or len(one.modules) > 1 or one.modules[0] in paths)]


def all_plans(choice: Sequence[Candidate]) -> Iterator[tuple[int, ...]]:
    """Numbers of candidates of which none is inside another."""
    plans: list[tuple[int, ...]] = [()]
    for number, one in enumerate(choice):
        plans += [(*plan, number) for plan in plans if not any(overlap(one, choice[other]) for other in plan)]
    return iter(plans)


@cache
def all_peaks(find: Callable[[str], list[Candidate]], name: str) -> list[tuple[int, tuple[int, ...]]]:
    step, _ = recorded(name, False)
    choice, replay = find(name), Replay(step)
    return [(replay.under([region for number in plan for region in choice[number].regions]).peak.bytes, plan)
            for plan in all_plans(choice)]


def spent(plan: Sequence[Candidate]) -> int:
    return sum(one.again_ns for one in plan)


class TestWithin:
    @pytest.mark.parametrize(("find", "name"), [
        *((among, name) for name in PARTS), *((wide, name) for name in ("resnet", "gpt"))])
    @given(data=st.data())
    @settings(max_examples=8, deadline=None)
    def test_it_fits_and_no_plan_is_cheaper(
            self, find: Callable[[str], list[Candidate]], name: str, data: st.DataObject) -> None:
        # GIVEN a recorded step, any times for its parts, and any budget
        step, _ = recorded(name, False)
        choice = [replace(one, again_ns=data.draw(st.integers(1, 1000), label=one.modules[0])) for one in find(name)]
        plans = [(peak, spent([choice[number] for number in plan])) for peak, plan in all_peaks(find, name)]
        lowest, highest = min(peak for peak, _ in plans), max(peak for peak, _ in plans)
        budget = data.draw(st.integers(lowest - 1, highest), label="budget")
        fitting = [cost for peak, cost in plans if peak <= budget]
        # WHEN a plan is looked for
        found = Search(step, choice).within(budget)
        # THEN there is one where any fits, it fits, and costs as little as any
        assert (found is not None) == bool(fitting)
        if found is not None:
            assert found.peak.bytes <= budget
            assert found.again_ns == spent(found.chosen) <= 1.01 * min(fitting)

    @pytest.mark.parametrize("name", PARTS)
    def test_the_peak_is_that_of_the_plan_really_applied(self, name: str) -> None:
        step, before, choice = recorded_with_choice(name, False)
        search = Search(step, choice)
        bare = search.plan([]).peak.bytes
        found = search.within(bare - (bare - before) // 5)
        assert found is not None
        assert applied_peak(name, as_file(found.chosen), False) == found.peak.bytes - before

    def test_nothing_is_needed_where_the_step_fits(self) -> None:
        step, _ = recorded("gpt", False)
        search = Search(step, among("gpt"))
        found = search.within(search.plan([]).peak.bytes)
        assert found is not None
        assert found.chosen == ()

    def test_less_than_what_is_there_all_the_time_fits_nothing(self) -> None:
        step, _ = recorded("gpt", False)
        assert Search(step, candidates(step)).within(step.before - 1) is None


class TestMicroBatches:
    @pytest.mark.parametrize("summed", [False, True])
    def test_plans_of_several_forwards_in_a_step(self, summed: bool) -> None:
        # GIVEN a step of three micro-batches, each with its own backward, or one backward for their sum
        seen = record(lambda: train("gpt", batches=3, summed=summed), plan_step=PLANNED_STEP)
        step = planned_step(View(seen.trace))
        choice = [one for one in candidates(step) if not one.keep and one.modules[0] in PARTS["gpt"]
                  and len(one.modules) == 1]
        replay, search = Replay(step), Search(step, choice)
        plans = [(replay.under([region for number in plan for region in choice[number].regions]).peak.bytes,
                  spent([choice[number] for number in plan])) for plan in all_plans(choice)]
        lowest, highest = min(peak for peak, _ in plans), max(peak for peak, _ in plans)
        # WHEN plans are looked for / THEN they fit, and none of all there are is cheaper
        for share in (0, 0.3, 0.6, 0.9):
            budget = int(lowest + share * (highest - lowest))
            found = search.within(budget)
            assert found is not None
            assert found.peak.bytes <= budget
            assert found.again_ns <= 1.01 * min(cost for peak, cost in plans if peak <= budget)


class TestChain:
    def test_regions_that_run_several_times_are_none_of_its(self) -> None:
        step, _ = recorded("shared", False)
        choice = among("shared")
        chain = Chain(Replay(step), choice)
        bare = peak_under(step, []).bytes
        assert chain.within(bare) == []
        used = {number for budget in range(chain.floor, bare, (bare - chain.floor) // 20)
                for number in chain.within(budget) or []}
        assert {choice[number].modules[0] for number in used} <= {"embed", "head"}


class NeedsRoom(Search):
    """Finds only plans with room to spare, as a chain may where regions share something."""

    def _fitting(self, budget: int) -> Iterator[frozenset[int]]:
        return super()._fitting(budget - 50_000)


class TestSmallest:
    def test_what_was_found_with_room_to_spare_is_not_forgotten(self) -> None:
        step, _ = recorded("gpt", False)
        found = NeedsRoom(step, among("gpt"))
        bare, smallest = found.plan([]).peak.bytes, Search(step, among("gpt")).smallest().peak.bytes
        # GIVEN a search that finds nothing within exactly the lowest peak that it has found
        assert found.within(smallest) is None
        # THEN that is the smallest all the same
        assert smallest <= found.smallest().peak.bytes < bare - 50_000


class TestCandidates:
    def test_of_modules_that_save_the_same_one_stands_for_all(self) -> None:
        step, _ = recorded("gpt", False)
        paths = [one.modules[0] for one in candidates(step) if not one.keep and len(one.modules) == 1]
        # The head is one linear layer; the outermost module is no candidate.
        assert "head" in paths
        assert "GPT" not in paths
        assert all(path in paths for path in PARTS["gpt"])

    def test_what_saves_nothing_is_none(self) -> None:
        step, _ = recorded("resnet", False)
        assert "blocks.0.short" not in [one.modules[0] for one in candidates(step)]  # nn.Identity

    def test_a_module_that_is_called_again_and_again_runs_again_as_often(self) -> None:
        step, _ = recorded("shared", False)
        (block,) = (one for one in candidates(step) if one.modules == ("block",) and not one.keep)
        assert len(block.regions) == 4
        assert 0 < block.again_ns < step.work_ns
