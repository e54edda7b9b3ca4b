"""Plans that fit a budget, and cost little: chosen by replaying them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from memdiag.plan.chain import Chain
from memdiag.plan.regions import Candidate
from memdiag.plan.replay import Peak, Region, excess_under, peak_under
from memdiag.plan.step import Step

_AIMS = 4  # times that the chain's aim is lowered, by what regions share


@dataclass(frozen=True)
class Plan:
    """Modules that are checkpoints together.

    Attributes:
        chosen: in the order in which they run; none inside another.
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
        self._meets = [{j for j, b in enumerate(among) if i != j and a.overlaps(b)} for i, a in enumerate(among)]
        self._peaks: dict[frozenset[int], Peak] = {}
        self._chain = Chain(step, among)

    def plan(self, chosen: Iterable[Candidate]) -> Plan:
        """A plan of one's own."""
        return self._plan(frozenset(self._among.index(one) for one in chosen))

    def within(self, budget: int) -> Plan | None:
        """A cheap plan whose peak is at most the budget, in bytes; None where none was found.

        One candidate after the other is taken: the one that lowers what is above the budget, summed over all moments,
        by most for its time; in its place goes what it meets. Then whatever is not needed is left out, the dearest
        first, and each is exchanged for a cheaper one as long as that fits.
        """
        found = [self._improved(self._pruned(chosen, budget), budget)
                 for chosen in (self._led(budget), self._grown(budget)) if chosen is not None]
        return self._plan(min(found, key=self._ns)) if found else None

    def _led(self, budget: int) -> frozenset[int] | None:
        """The cheapest of regions that run one after the other."""
        aim = budget
        for _ in range(_AIMS):
            numbers = self._chain.within(aim)
            if numbers is None:
                return None
            over = self._peak(frozenset(numbers)).bytes - budget
            if over <= 0:
                return frozenset(numbers)
            aim -= over
        return None

    def _grown(self, budget: int) -> frozenset[int] | None:
        chosen: frozenset[int] = frozenset()
        excess = self._excess(chosen, budget)
        while excess:
            best: tuple[float, int, frozenset[int]] | None = None
            for number in range(len(self._among)):
                if number in chosen:
                    continue
                tried = chosen - self._meets[number] | {number}
                left = self._excess(tried, budget)
                costs = self._ns(tried) - self._ns(chosen)
                if left < excess:
                    worth = (excess - left) / max(costs, 1)
                    if best is None or worth > best[0]:
                        best = worth, left, tried
            if best is None:
                return None
            _, excess, chosen = best
        return chosen

    def _pruned(self, chosen: frozenset[int], budget: int) -> frozenset[int]:
        for number in sorted(chosen, key=lambda one: -self._among[one].again_ns):
            if self._peak(chosen - {number}).bytes <= budget:
                chosen -= {number}
        return chosen

    def _improved(self, chosen: frozenset[int], budget: int) -> frozenset[int]:
        again = True
        while again:
            again = False
            for out in sorted(chosen, key=lambda one: -self._among[one].again_ns):
                for number in range(len(self._among)):
                    tried = (chosen - {out}) - self._meets[number] | {number}
                    if self._ns(tried) < self._ns(chosen) and self._peak(tried).bytes <= budget:
                        chosen, again = self._pruned(tried, budget), True
                        break
                if again:
                    break
        return chosen

    def _plan(self, chosen: frozenset[int]) -> Plan:
        return Plan(tuple(self._among[number] for number in sorted(chosen)), self._peak(chosen), self._ns(chosen))

    def _ns(self, chosen: frozenset[int]) -> int:
        return sum(self._among[number].again_ns for number in chosen)

    def _peak(self, chosen: frozenset[int]) -> Peak:
        found = self._peaks.get(chosen)
        if found is None:
            found = self._peaks[chosen] = peak_under(self._step, self._regions(chosen))
        return found

    def _excess(self, chosen: frozenset[int], budget: int) -> int:
        return excess_under(self._step, self._regions(chosen), budget)

    def _regions(self, chosen: frozenset[int]) -> list[Region]:
        return [region for number in sorted(chosen) for region in self._among[number].regions]
