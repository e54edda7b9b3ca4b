"""What may be a checkpoint, and what running it again takes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from memdiag.plan.replay import Region
from memdiag.plan.step import Call, Step
from memdiag.trace import NONE


@dataclass(frozen=True)
class Candidate:
    """A module that may be a checkpoint.

    Attributes:
        path: of the module.
        regions: one for each of its calls in the step.
        again_ns: time that they take to run again, as long as they took at first, until all is there that was saved.
    """

    path: str
    regions: tuple[Region, ...]
    again_ns: int

    def overlaps(self, other: Candidate) -> bool:
        """Whether one runs inside the other."""
        return any(
            a.first <= b.last and b.first <= a.last
            for mine in self.regions for theirs in other.regions for a in mine.calls for b in theirs.calls)


def candidates(step: Step) -> list[Candidate]:
    """Modules below the outermost that save something which backward asks for, in the order in which they first run.

    Of modules that save the same, one inside the other, the one that runs the least again stands for all.
    """
    calls: dict[str, list[Call]] = defaultdict(list)
    for call in step.calls:
        if not call.outermost:
            calls[call.path].append(call)
    best: dict[frozenset[int], Candidate] = {}
    for path, mine in calls.items():
        saved, times = [], 0
        for call in mine:
            rows = np.flatnonzero((step.saves.span >= call.first) & (step.saves.span <= call.last))
            if (step.saves.unpacked[rows] != NONE).any():
                saved += rows.tolist()
                times += int(step.saves.time_ns[rows].max()) - call.start_ns
        key = frozenset(saved)
        if saved and (key not in best or times < best[key].again_ns):
            best[key] = Candidate(path, tuple(Region((call,)) for call in mine), times)
    return sorted(best.values(), key=lambda one: one.regions[0].calls[0].first)
