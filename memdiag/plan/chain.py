"""The cheapest plan within a budget, among regions that run one after the other.

Backward comes to what forward made last first. So while it is at one part of the forward, all that came before is as
forward left it, and all that came after is gone; what a plan frees in the earlier parts is one sum. A plan is then a
way through the parts, each bare or inside a region, and of all ways to a part only those count of which no other has
freed as much in less time (labels). Each part must fit when forward is at it, and when backward is, what the earlier
ones freed taken off. Bytes are exact as long as regions share no tensor; where they do, the replay tells, and the
budget is lowered by what is too much.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memdiag.plan.regions import Candidate
from memdiag.plan.replay import Replay, Replayed
from memdiag.plan.step import Ints
from memdiag.policy import PLAN_LABELS
from memdiag.trace import NONE


@dataclass(frozen=True)
class _Way:
    """From one part to another.

    Attributes:
        candidate: the region between them; NONE where the part stays bare.
        end: the part that it leads to.
        freed: bytes that are not there while backward is at later parts.
        needed: the highest that live memory comes while forward and backward are at it, if nothing before is freed.
    """

    candidate: int
    end: int
    freed: int
    again_ns: int
    needed: int


_APART = 4
"""Of repeated blocks, and runs of them, so many at either end are replayed each for itself. Those between do above what
is there before them as the last of the first did: all else in the step being equal, exactly that."""

_NO_LABELS = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros((0, 3), dtype=np.int64)


class Chain:
    """Candidates that run once, as ways through the forward.

    Attributes:
        floor: bytes that no plan gets below: what is there before the first part, after it, and in the optimizer.
        whole: all candidates run once.
    """

    def __init__(self, replay: Replay, among: Sequence[Candidate]) -> None:
        step = replay.step
        mine = [number for number, one in enumerate(among) if len(one.regions) == 1]
        self.whole = len(mine) == len(among)
        calls = {number: among[number].regions[0].calls for number in mine}
        events = {begin[0].first: begin[0].start for begin in calls.values()} | {
            end[-1].last + 1: end[-1].end for end in calls.values()}
        ids = np.array(sorted(events), dtype=np.int64)
        starts = 2 * np.array([events[key] for key in ids.tolist()], dtype=np.int64)
        parts = self._parts = max(len(ids) - 1, 0)
        # The slot from which on backward asks for what a part, or one before it, has saved.
        saves, end = step.saves, 2 * step.last + 2
        part = np.searchsorted(ids, saves.span, side="right") - 1
        asked = np.full(parts + 1, end, dtype=np.int64)
        used = (saves.unpacked != NONE) & (part >= 0)
        np.minimum.at(asked, np.clip(part[used], 0, parts), 2 * saves.unpacked[used])
        over = np.minimum.accumulate(asked)  # of part p: when the parts up to p are no more as they were
        over = np.concatenate([[end], over[:-1]]) if parts else over
        bare = replay.under([])
        self._ways: list[list[_Way]] = [[] for _ in range(parts)]

        def needed(live: Replayed, begin: int, end: int) -> int:
            forward = live.highest(int(starts[begin]), int(starts[end]))
            return max(forward, live.highest(int(over[end]), int(over[begin])))

        for number in range(parts):
            self._ways[number].append(_Way(NONE, number + 1, 0, 0, needed(bare, number, number + 1)))
        kinds: dict[object, list[int]] = defaultdict(list)
        for number in calls:
            kinds[among[number].kind].append(number)
        for alike in kinds.values():
            seen: tuple[int, int, int] | None = None
            for place, number in enumerate(alike):
                run = calls[number]
                begin, end = (int(np.searchsorted(ids, key)) for key in (run[0].first, run[-1].last + 1))
                levels = bare.before(int(starts[begin])), bare.before(int(over[end]))
                if seen is None or place < _APART or place >= len(alike) - _APART:
                    live = replay.under(among[number].regions)
                    seen = (live.freed(int(starts[end]), int(over[end])),
                            live.highest(int(starts[begin]), int(starts[end])) - levels[0],
                            live.highest(int(over[end]), int(over[begin])) - levels[1])
                freed, forward, backward = seen
                self._ways[begin].append(_Way(
                    number, end, freed, among[number].again_ns, max(forward + levels[0], backward + levels[1])))
        self._highest = bare.peak.bytes
        if parts:
            self.floor = max(bare.highest(0, int(starts[0])), bare.highest(int(over[0]), 2 * step.last + 2))
            self._tail = bare.highest(int(starts[-1]), int(over[parts]))
        else:
            self.floor = self._tail = self._highest

    def within(self, budget: int) -> list[int] | None:
        """Numbers of the candidates of the cheapest plan; None where none fits."""
        if self.floor > budget or not self._parts:
            return [] if self._highest <= budget else None
        # What is still needed at a part or later: to have freed more than that is of no use.
        most = [max(way.needed for way in ways) for ways in self._ways] + [self._tail]
        enough = np.maximum.accumulate(most[::-1])[::-1] - budget
        waiting: dict[int, list[tuple[Ints, Ints, Ints]]] = defaultdict(list)
        waiting[0] = [(np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64), np.full((1, 3), NONE))]
        labels: list[tuple[Ints, Ints, Ints]] = []
        for part in range(self._parts + 1):
            found = waiting.pop(part, None)
            if found is None:
                labels.append(_NO_LABELS)
                continue
            freed, spent, came = (np.concatenate(columns) for columns in zip(*found, strict=True))
            freed, spent, came = _best(np.minimum(freed, enough[part]), spent, came)
            labels.append((freed, spent, came))
            for way in self._ways[part] if part < self._parts else []:
                fits = np.flatnonzero(way.needed - freed <= budget)
                if len(fits):
                    waiting[way.end].append((
                        freed[fits] + way.freed, spent[fits] + way.again_ns,
                        np.stack([np.full(len(fits), part), fits, np.full(len(fits), way.candidate)], axis=1)))
        freed, spent, _ = labels[-1]
        fits = np.flatnonzero(self._tail - freed <= budget)
        if not len(fits):
            return None
        return self._back(labels, int(fits[spent[fits].argmin()]))

    def _back(self, labels: list[tuple[Ints, Ints, Ints]], row: int) -> list[int]:
        """The regions of the way that a label at the end has come."""
        chosen, part = [], self._parts
        while part > 0:
            part, row, candidate = (int(number) for number in labels[part][2][row])
            if candidate != NONE:
                chosen.append(candidate)
        return chosen[::-1]


def _best(freed: Ints, spent: Ints, came: Ints) -> tuple[Ints, Ints, Ints]:
    """Labels of which no other has freed as much in less time; where there are too many, some of each stretch."""
    order = np.lexsort((-freed, spent))
    freed, spent, came = freed[order], spent[order], came[order]
    more = np.concatenate([[True], freed[1:] > np.maximum.accumulate(freed)[:-1]])
    freed, spent, came = freed[more], spent[more], came[more]
    if len(freed) > PLAN_LABELS:
        few = np.linspace(0, len(freed) - 1, PLAN_LABELS).astype(np.int64)
        freed, spent, came = freed[few], spent[few], came[few]
    return freed, spent, came
