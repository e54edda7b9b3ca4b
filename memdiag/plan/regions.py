"""What may be a checkpoint, and what running it again takes."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, replace
from statistics import median_low

import numpy as np

from memdiag.plan.replay import Region
from memdiag.plan.step import Call, Step
from memdiag.trace import NONE

_INDEX = re.compile(r"\d+")


@dataclass(frozen=True)
class Candidate:
    """A module that may be a checkpoint.

    Attributes:
        path: of the module.
        regions: one for each of its calls in the step.
        again_ns: time that they take to run again, until all is there that was saved: as long as they took at first,
            and of repeated blocks as long as the median one.
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
    found = _distinct(step)
    alike: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for one, kind in found:
        alike[kind].append(one.again_ns)
    return sorted((replace(one, again_ns=int(median_low(alike[kind]))) for one, kind in found),
                  key=lambda one: one.regions[0].calls[0].first)


def _distinct(step: Step) -> list[tuple[Candidate, tuple[object, ...]]]:
    """Candidates, and of which kind each is: repeated blocks save as much, and have the same path but for an index."""
    calls: dict[str, list[Call]] = defaultdict(list)
    for call in step.calls:
        if not call.outermost:
            calls[call.path].append(call)
    best: dict[frozenset[int], tuple[Candidate, tuple[object, ...]]] = {}
    for path, mine in calls.items():
        saved, times = [], 0
        for call in mine:
            rows = np.flatnonzero((step.saves.span >= call.first) & (step.saves.span <= call.last))
            if (step.saves.unpacked[rows] != NONE).any():
                saved += rows.tolist()
                times += int(step.saves.time_ns[rows].max()) - call.start_ns
        key = frozenset(saved)
        if saved and (key not in best or times < best[key][0].again_ns):
            rows = np.array(saved)
            sizes = step.size[step.saves.allocation[rows]] * (step.saves.allocation[rows] != NONE)
            kind = (_INDEX.sub("*", path), *sizes.tolist())
            best[key] = Candidate(path, tuple(Region((call,)) for call in mine), times), kind
    return list(best.values())
