"""Plans that fit a budget, and cost little: led by the chain, judged by the replay."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

import numpy as np

from memdiag.plan.chain import Chain
from memdiag.plan.regions import Candidate
from memdiag.plan.replay import Peak, Region, Replay
from memdiag.plan.step import Step
from memdiag.policy import PLAN_AIMS, PLAN_LEAST_MOMENTS, PLAN_MOMENTS, PLAN_POINTS, PLAN_TOLERANCE


@dataclass(frozen=True)
class Plan:
    """Modules that are checkpoints together.

    Attributes:
        chosen: in the order in which they run; none is inside another.
        peak: of the step.
        again_ns: time that the step takes longer.
    """

    chosen: tuple[Candidate, ...]
    peak: Peak
    again_ns: int


class Search:
    """Looks for plans of one step among candidates."""

    def __init__(self, step: Step, among: Sequence[Candidate]) -> None:
        self._step, self._among = step, among
        regions = [(number, region.calls) for number, one in enumerate(among) for region in one.regions]
        self._owner = np.array([number for number, _ in regions], dtype=np.int64)
        self._begins = np.array([calls[0].first for _, calls in regions], dtype=np.int64)
        self._ends = np.array([calls[-1].last for _, calls in regions], dtype=np.int64)
        self._numbers = {id(one): number for number, one in enumerate(among)}
        self._met: dict[int, frozenset[int]] = {}
        self._peaks: dict[frozenset[int], Peak] = {}
        self._replay = Replay(step)
        self._chain = Chain(self._replay, among)
        self._replays = 0  # that may still be made for what is looked for now

    def _meets(self, number: int) -> frozenset[int]:
        """The others of which some part runs inside a candidate, or it inside them."""
        found = self._met.get(number)
        if found is None:
            mine = self._owner == number
            together = (self._begins[None, :] <= self._ends[mine, None]) & (
                self._begins[mine, None] <= self._ends[None, :])
            found = self._met[number] = frozenset(self._owner[together.any(axis=0)].tolist()) - {number}
        return found

    def plan(self, chosen: Iterable[Candidate]) -> Plan:
        """A plan of one's own, of candidates of this search."""
        return self._plan(frozenset(self._numbers[id(one)] for one in chosen))

    def within(self, budget: int) -> Plan | None:
        """A cheap plan whose peak is at most the budget, in bytes; None where none was found.

        The chain knows the cheapest of what runs once, as far as regions share nothing. Where it does not know all, or
        has found none, another is grown: one candidate after the other, each time the one that lowers what is above the
        budget, summed over all moments, by most for its time, in the place of what it meets. Of both, what is not
        needed is left out, the dearest first, and candidates are exchanged for cheaper ones as long as that fits. The
        cheapest is it, those that other searches have come by among them. Of very long steps only so much is tried.
        """
        found = [self._improved(self._pruned(chosen, budget), budget) for chosen in self._fitting(budget)]
        found += [chosen for chosen, peak in self._peaks.items() if peak.bytes <= budget]
        return self._plan(min(found, key=self._ns)) if found else None

    def smallest(self) -> Plan:
        """The plan with the lowest peak that is found, and of these the cheapest."""
        bare = self.plan([]).peak.bytes
        lowest = min(peak.bytes for peak in self._peaks.values())
        low = min(self._untouched(), lowest) - 1  # nothing is found within it
        while lowest - low > PLAN_TOLERANCE * bare:
            budget = (low + lowest) // 2
            chosen = next(self._fitting(budget), None)
            low, lowest = (budget, lowest) if chosen is None else (low, self._peak(chosen).bytes)
        found = self.within(lowest)
        assert found is not None  # it was replayed, so it is known
        return found

    def _untouched(self) -> int:
        """The highest where no plan changes anything: before the first candidate, and after all that was saved."""
        begins = min((region.calls[0].start for one in self._among for region in one.regions), default=self._step.last)
        over = int(self._step.saves.released.max(initial=self._step.first))
        bare, end = self._replay.under([]), 2 * self._step.last + 2
        return max(bare.highest(0, 2 * begins), bare.highest(2 * over + 1, end))

    def frontier(self, smallest: Plan) -> list[Plan]:
        """From no checkpoint at all to the smallest peak: plans of which none is lower and cheaper than another."""
        bare = self.plan([])
        found = [bare]
        for number in range(1, PLAN_POINTS):
            budget = bare.peak.bytes - (bare.peak.bytes - smallest.peak.bytes) * number // PLAN_POINTS
            if budget < found[-1].peak.bytes:
                plan = self.within(budget)
                found += [] if plan is None else [plan]
        return list(_undominated([*found, smallest]))

    def _fitting(self, budget: int) -> Iterator[frozenset[int]]:
        """Choices that fit, cheap ones, each found in its own way."""
        self._replays = max(PLAN_MOMENTS // max(len(self._step.live), PLAN_LEAST_MOMENTS), 1)
        led = self._led(budget)
        if led is not None:
            yield led
            if self._chain.whole:
                return
        grown = self._grown(budget)
        if grown is not None:
            yield grown

    def _led(self, budget: int) -> frozenset[int] | None:
        """The cheapest of regions that run one after the other."""
        aim = budget
        for _ in range(PLAN_AIMS):
            numbers = self._chain.within(aim)
            if numbers is None:
                return None
            over = self._peak(frozenset(numbers)).bytes - budget
            if over <= 0:
                return frozenset(numbers)
            aim -= over  # what regions share was counted twice
        return None

    def _grown(self, budget: int) -> frozenset[int] | None:
        """One candidate after the other, each time the best. One is tried anew only when it is first by what it was
        worth when it was last tried: mostly it is worth less then, and others stay behind it."""
        chosen: frozenset[int] = frozenset()
        excess = self._excess(chosen, budget)
        waiting = [(-inf, number) for number in self._largest()]
        while excess:
            useless = []
            while waiting:
                if not self._replays:
                    return None
                _, number = heappop(waiting)
                tried = chosen - self._meets(number) | {number}
                left = self._excess(tried, budget)
                if left >= excess:
                    useless.append((0.0, number))
                    continue
                worth = (excess - left) / max(self._ns(tried) - self._ns(chosen), 1)
                if not waiting or -worth <= waiting[0][0]:
                    useless += [(-inf, out) for out in chosen - tried]
                    chosen, excess = tried, left
                    break
                heappush(waiting, (-worth, number))
            else:
                return None
            for one in useless:
                heappush(waiting, one)
        return chosen

    def _largest(self) -> list[int]:
        """Candidates that save most, not more than half as many as may be tried."""
        largest = sorted(range(len(self._among)), key=lambda number: -self._among[number].saved_bytes)
        return sorted(largest[:max(self._replays // 2, 1)])

    def _pruned(self, chosen: frozenset[int], budget: int) -> frozenset[int]:
        for number in self._dearest(chosen):
            if self._replays and self._peak(chosen - {number}).bytes <= budget:
                chosen -= {number}
        return chosen

    def _improved(self, chosen: frozenset[int], budget: int) -> frozenset[int]:
        while (better := self._cheaper(chosen, budget)) is not None:
            chosen = self._pruned(better, budget)
        return chosen

    def _cheaper(self, chosen: frozenset[int], budget: int) -> frozenset[int] | None:
        """The same with one exchanged for another, where that is cheaper and fits."""
        for out in self._dearest(chosen):
            for number in range(len(self._among)):
                if not self._replays:
                    return None
                tried = (chosen - {out}) - self._meets(number) | {number}
                if self._ns(tried) < self._ns(chosen) and self._peak(tried).bytes <= budget:
                    return tried
        return None

    def _dearest(self, chosen: frozenset[int]) -> list[int]:
        return sorted(chosen, key=lambda number: (-self._among[number].again_ns, number))

    def _plan(self, chosen: frozenset[int]) -> Plan:
        return Plan(tuple(self._among[number] for number in sorted(chosen)), self._peak(chosen), self._ns(chosen))

    def _ns(self, chosen: frozenset[int]) -> int:
        return sum(self._among[number].again_ns for number in chosen)

    def _peak(self, chosen: frozenset[int]) -> Peak:
        found = self._peaks.get(chosen)
        if found is None:
            self._replays = max(self._replays - 1, 0)
            found = self._peaks[chosen] = self._replay.under(self._regions(chosen)).peak
        return found

    def _excess(self, chosen: frozenset[int], budget: int) -> int:
        self._replays = max(self._replays - 1, 0)
        return self._replay.under(self._regions(chosen)).excess(budget)

    def _regions(self, chosen: frozenset[int]) -> list[Region]:
        return [region for number in sorted(chosen) for region in self._among[number].regions]


def _undominated(plans: Iterable[Plan]) -> Iterator[Plan]:
    """Highest peak first."""
    cheapest: int | None = None
    kept = []
    for plan in sorted(plans, key=lambda plan: (plan.peak.bytes, plan.again_ns)):
        if cheapest is None or plan.again_ns < cheapest:
            cheapest = plan.again_ns
            kept.append(plan)
    return reversed(kept)
