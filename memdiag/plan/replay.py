"""The peak of a step under a plan: its events once more, as they would come.

Saved bytes are not subtracted: under a plan the peak moves. What a checkpointed region makes in forward goes when
Python lets go of it; before backward comes to it, it is made anew, all of it in its order, and goes as backward uses
it; what the region was given stays until backward is through with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memdiag.plan.step import Call, Ints, Mask, Step
from memdiag.trace import NONE

# A slot is a moment of the step: event k itself is slot 2k + 1; what is between two events is in the even slot there.


@dataclass(frozen=True)
class Region:
    """Module calls that run one after the other, as one checkpoint."""

    calls: tuple[Call, ...]

    @property
    def start(self) -> int:
        return self.calls[0].start


@dataclass(frozen=True)
class Peak:
    """The highest moment of a step.

    Attributes:
        bytes: live then.
        event: of the recorded step; where a region runs again, the event before it.
        region: the region that runs again then; None where none does.
    """

    bytes: int
    event: int
    region: Region | None


class Replay:
    """Peaks of one step under plans.

    Args:
        step: as it was recorded, without these checkpoints.
        random_state: bytes of the random state that each region keeps, on this device; and again while it runs anew.
    """

    def __init__(self, step: Step, random_state: int = 0) -> None:
        self._step = step
        self._random_state = random_state

    def peak(self, plan: Sequence[Region]) -> Peak:
        """The peak under a plan, whose regions do not overlap."""
        step = self._step
        inside = np.full(len(step.saved), NONE, dtype=np.int64)
        for number, region in enumerate(plan):
            for call in region.calls:
                inside[(step.saver >= call.first) & (step.saver <= call.last)] = number
        moments = _Moments(step)
        ends: dict[int, int] = {}  # slots until which arguments stay
        regions = []
        for number, region in enumerate(plan):
            mine = inside == number
            used = mine & (step.unpacked != NONE)
            if not used.any():
                continue
            again, gone = int(step.unpacked[used].min()), int(step.released[mine].max())
            regions.append((region, mine, again))
            for allocation in region.calls[0].arguments.tolist():
                ends[allocation] = max(ends.get(allocation, 0), 2 * gone)
            if self._random_state:
                moments.add(2 * region.start, 2 * gone, self._random_state)
        self._forward(moments, inside, ends)
        for region, mine, again in regions:
            self._again(moments, region, mine, again)
        return moments.peak([region for region, _, _ in regions])

    def _forward(self, moments: _Moments, inside: Ints, ends: dict[int, int]) -> None:
        """What forward made, and what regions were given, goes at another time."""
        step = self._step
        regions = np.unique(step.saved[(inside != NONE) & (step.saved != NONE)])
        changed = np.union1d(regions, np.fromiter(ends, dtype=np.int64, count=len(ends)))
        changed = changed[(step.size[changed] > 0)]
        in_region = np.zeros(len(step.size), dtype=bool)
        in_region[regions] = True
        outside = np.full(len(step.size), NONE, dtype=np.int64)
        other = (inside == NONE) & (step.saved != NONE)
        np.maximum.at(outside, step.saved[other], 2 * step.released[other])
        for allocation in changed.tolist():
            old = 2 * int(step.died[allocation]) + 1
            new = old
            if in_region[allocation] and step.let_go[allocation] != NONE and step.born[allocation] >= step.first:
                new = max(int(step.let_go[allocation]), int(outside[allocation]))
            new = max(new, ends.get(allocation, 0))
            if new != old:
                moments.move(allocation, old, new)

    def _again(self, moments: _Moments, region: Region, mine: Mask, again: int) -> None:
        """A region runs again, until it has saved all that it saved at first."""
        step = self._step
        start, stop = region.start, int(step.packed[mine].max())
        rows = np.flatnonzero((step.born >= start) & (step.born < stop) & (step.size > 0))
        released = np.full(len(step.size), NONE, dtype=np.int64)
        np.maximum.at(released, step.saved[mine & (step.saved != NONE)],
                      step.released[mine & (step.saved != NONE)])
        window = moments.window(again)
        over = 2 * stop  # what Python still has then goes when the region stops
        events = [(2 * start, 0, self._random_state)] if self._random_state else []
        for allocation in rows.tolist():
            size, slot = int(step.size[allocation]), 2 * int(step.born[allocation]) + 1
            events.append((slot, 1, size))
            if released[allocation] != NONE:
                window.goes_later(size, int(released[allocation]))
                continue
            gone = int(step.let_go[allocation])
            if gone == NONE:
                gone = 2 * int(step.died[allocation]) + 1
            events.append((min(gone, over), 0, -size))
        if self._random_state:
            events.append((over, 0, -self._random_state))
        window.runs(sorted(events, key=lambda event: (event[0], event[1])))


class _Moments:
    """What changes, and when: slots, an order within a slot, and bytes."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._slots: list[int] = []
        self._order: list[int] = []
        self._bytes: list[int] = []
        self._window: list[int] = []
        self._windows = 0

    def _change(self, slot: int, order: int, size: int, window: int = NONE) -> None:
        self._slots.append(slot)
        self._order.append(order)
        self._bytes.append(size)
        self._window.append(window)

    def add(self, begin: int, end: int, size: int) -> None:
        """Something that was not there."""
        self._change(begin, 0, size)
        self._change(end, 0, -size)

    def move(self, allocation: int, old: int, new: int) -> None:
        """An allocation goes at another time."""
        size = int(self._step.size[allocation])
        self._change(old, 0, size)
        self._change(new, 0, -size)

    def window(self, again: int) -> _Window:
        self._windows += 1
        return _Window(self, 2 * again, self._windows - 1)

    def peak(self, regions: list[Region]) -> Peak:
        step = self._step
        live = np.concatenate([[step.before], step.live])
        recorded = 2 * np.arange(step.first, step.last, dtype=np.int64) + 1
        slot = np.concatenate([recorded, np.array(self._slots, dtype=np.int64)])
        order = np.concatenate([np.zeros(len(recorded), dtype=np.int64), np.array(self._order, dtype=np.int64)])
        change = np.concatenate([np.diff(live), np.array(self._bytes, dtype=np.int64)])
        window = np.concatenate([np.full(len(recorded), NONE), np.array(self._window, dtype=np.int64)])
        sequence = np.lexsort((order, slot))
        total = step.before + np.cumsum(change[sequence])
        highest = int(total.argmax())
        at = int(sequence[highest])
        number = int(window[at])
        return Peak(int(total[highest]), int(slot[at] - 1) // 2, None if number == NONE else regions[number])


class _Window:
    """The stretch of backward in which a region runs again."""

    def __init__(self, moments: _Moments, slot: int, number: int) -> None:
        self._moments, self._slot, self._number = moments, slot, number
        self._later: list[tuple[int, int]] = []

    def goes_later(self, size: int, released: int) -> None:
        self._later.append((size, released))

    def runs(self, events: list[tuple[int, int, int]]) -> None:
        for number, (_, _, size) in enumerate(events, 1):
            self._moments._change(self._slot, number, size, self._number)
        for size, released in self._later:
            # What the first node lets go of in the same slot goes after the region has run.
            order = len(events) + 1 if 2 * released == self._slot else 0
            self._moments._change(2 * released, order, -size)
