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
from memdiag.plan.replay import live_under
from memdiag.plan.step import Ints, Step
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


_NO_LABELS = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros((0, 3), dtype=np.int64)


class Chain:
    """Candidates that run once, as ways through the forward.

    Attributes:
        floor: bytes that no plan gets below: what is there before the first part, after it, and in the optimizer.
    """

    def __init__(self, step: Step, among: Sequence[Candidate]) -> None:
        mine = [number for number, one in enumerate(among) if len(one.regions) == 1 and len(one.regions[0].calls) == 1]
        calls = {number: among[number].regions[0].calls[0] for number in mine}
        events = {call.first: call.start for call in calls.values()} | {
            call.last + 1: call.end for call in calls.values()}
        self._ids = np.array(sorted(events), dtype=np.int64)
        self._starts = np.array([events[key] for key in self._ids.tolist()], dtype=np.int64)
        parts = max(len(self._ids) - 1, 0)
        # The slot from which on backward asks for what a part, or one before it, has saved.
        saves = step.saves
        part = np.searchsorted(self._ids, saves.span, side="right") - 1
        asked = np.full(parts + 1, 2 * step.last + 2, dtype=np.int64)
        used = (saves.unpacked != NONE) & (part >= 0)
        np.minimum.at(asked, np.clip(part[used], 0, parts), 2 * saves.unpacked[used])
        over = np.minimum.accumulate(asked)  # of part p: when the parts up to p are no more as they were
        self._over = np.concatenate([[2 * step.last + 2], over[:-1]]) if parts else over
        self._base, self._slots, _ = live_under(step, [])
        self._ways: list[list[_Way]] = [[] for _ in range(parts)]
        self._parts = parts
        for number in range(parts):
            needed = self._highest(self._base, self._slots, number, number + 1)
            self._ways[number].append(_Way(NONE, number + 1, 0, 0, needed))
        for number, call in calls.items():
            begin, end = (int(np.searchsorted(self._ids, key)) for key in (call.first, call.last + 1))
            live, slots, _ = live_under(step, among[number].regions)
            between = (slots > 2 * self._starts[end]) & (slots < self._over[end])
            bare = self._base[np.searchsorted(self._slots, slots[between], side="right") - 1]
            freed = int((bare - live[between]).min()) if between.any() else 0
            self._ways[begin].append(_Way(
                number, end, freed, among[number].again_ns, self._highest(live, slots, begin, end)))
        before = self._slots < 2 * self._starts[0] if parts else np.ones(len(self._slots), dtype=bool)
        after = self._slots >= self._over[0] if parts else before
        self.floor = int(self._base[before | after].max(initial=0))
        tail = (self._slots >= 2 * self._starts[-1]) & (self._slots < self._over[parts]) if parts else after
        self._tail = int(self._base[tail].max(initial=0))

    def _highest(self, live: Ints, slots: Ints, begin: int, end: int) -> int:
        """The highest of what is live while forward and backward are between two parts."""
        forward = (slots >= 2 * self._starts[begin]) & (slots < 2 * self._starts[end])
        backward = (slots >= self._over[end]) & (slots < self._over[begin])
        return int(live[forward | backward].max(initial=0))

    def within(self, budget: int) -> list[int] | None:
        """Numbers of the candidates of the cheapest plan; None where none fits."""
        if self.floor > budget or not self._parts:
            return [] if int(self._base.max()) <= budget else None
        waiting: dict[int, list[tuple[Ints, Ints, Ints]]] = defaultdict(list)
        waiting[0] = [(np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64), np.full((1, 3), NONE))]
        labels: list[tuple[Ints, Ints, Ints]] = []
        for part in range(self._parts + 1):
            found = waiting.pop(part, None)
            if found is None:
                labels.append(_NO_LABELS)
                continue
            freed, spent, came = _best(*(np.concatenate(columns) for columns in zip(*found, strict=True)))
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
    """Labels of which no other has freed as much in less time; thinned out, where there are too many, to one of each
    stretch of time, the one that has freed most."""
    order = np.lexsort((-freed, spent))
    freed, spent, came = freed[order], spent[order], came[order]
    more = np.concatenate([[True], freed[1:] > np.maximum.accumulate(freed)[:-1]])
    freed, spent, came = freed[more], spent[more], came[more]
    if len(freed) > PLAN_LABELS:
        cell = (spent - spent[0]) * (PLAN_LABELS - 1) // max(int(spent[-1] - spent[0]), 1)
        last = np.concatenate([cell[1:] != cell[:-1], [True]])
        freed, spent, came = freed[last], spent[last], came[last]
    return freed, spent, came
