"""The peak of a step under a plan: its events once more, as they would come.

Saved bytes are not subtracted, for under a plan the peak moves. What a checkpointed region makes in forward goes when
Python lets go of it. Before backward comes to the region all of it is made anew, in its order, until everything that
was saved at first is there; each of these goes as backward has used it. What the region was given, and a copy of the
random state, stay until backward is through with it.

Time is told in slots: what is between events ``k - 1`` and ``k`` is in slot ``2 k``, event ``k`` itself in ``2 k + 1``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from memdiag.plan.step import Call, Ints, Mask, Step
from memdiag.trace import NONE


@dataclass(frozen=True)
class Region:
    """Module calls that follow each other, as one checkpoint."""

    calls: tuple[Call, ...]


@dataclass(frozen=True)
class Peak:
    """The highest moment of a step.

    Attributes:
        bytes: live then.
        event: of the recorded step; the last one before it, where that is inside a region that runs again.
        region: the region that runs again then; None where none does.
    """

    bytes: int
    event: int
    region: Region | None


def peak_under(step: Step, plan: Sequence[Region]) -> Peak:
    """The peak of a step under a plan.

    Args:
        step: as it was recorded, without these checkpoints.
        plan: regions that do not overlap.
    """
    return _changes(step, plan).peak(step)


def live_under(step: Step, plan: Sequence[Region]) -> tuple[Ints, Ints, Ints]:
    """Live bytes at each moment of a step under a plan; the slot of each, and the number of the region that runs again
    then (NONE: none does)."""
    return _changes(step, plan).live(step)


def excess_under(step: Step, plan: Sequence[Region], budget: int) -> int:
    """By how much a step under a plan is above a budget: bytes, summed over all its moments."""
    live, _, _ = live_under(step, plan)
    return int(np.maximum(live - budget, 0).sum())


def _changes(step: Step, plan: Sequence[Region]) -> _Changes:
    saves, changes = step.saves, _Changes()
    inside = np.full(len(saves.span), NONE, dtype=np.int64)  # the region that saved it
    for number, region in enumerate(plan):
        for call in region.calls:
            inside[(saves.span >= call.first) & (saves.span <= call.last)] = number
    given_until: dict[int, int] = {}
    for number, region in enumerate(plan):
        mine = inside == number
        asked = mine & (saves.unpacked != NONE)
        if not asked.any():
            continue  # nothing runs again
        over = 2 * int(saves.released[mine].max())
        for allocation in region.calls[0].arguments.tolist():
            given_until[allocation] = max(given_until.get(allocation, 0), over)
        changes.comes_and_goes(2 * region.calls[0].start, over, step.random_state)
        _runs_again(changes, step, region, mine, 2 * int(saves.unpacked[asked].min()))
    _goes_otherwise(changes, step, inside, given_until)
    return changes


def _goes_otherwise(changes: _Changes, step: Step, inside: Ints, given_until: dict[int, int]) -> None:
    """What regions saved goes earlier, if nothing else saved it; what they were given stays longer."""
    saves, known = step.saves, step.saves.allocation != NONE
    in_region = np.unique(saves.allocation[known & (inside != NONE)])
    elsewhere = np.full(len(step.size), NONE, dtype=np.int64)
    others = known & (inside == NONE)
    np.maximum.at(elsewhere, saves.allocation[others], 2 * saves.released[others])
    dies = 2 * step.died + 1
    goes = dies.copy()
    freed = in_region[(step.let_go[in_region] != NONE) & (step.born[in_region] >= step.first)]
    goes[freed] = np.maximum(2 * step.let_go[freed], elsewhere[freed])
    given = np.fromiter(given_until, dtype=np.int64, count=len(given_until))
    goes[given] = np.maximum(goes[given], np.fromiter(given_until.values(), dtype=np.int64, count=len(given)))
    for allocation in np.flatnonzero((goes != dies) & (step.size > 0)).tolist():
        changes.comes_and_goes(int(dies[allocation]), int(goes[allocation]), int(step.size[allocation]))


def _runs_again(changes: _Changes, step: Step, region: Region, mine: Mask, slot: int) -> None:
    """A region runs again in a slot, until it has saved all that it saved at first."""
    saves = step.saves
    start, stop = region.calls[0].start, int(saves.packed[mine].max())
    known = np.flatnonzero(mine & (saves.allocation != NONE))
    saved = saves.allocation[known]
    used = np.full(len(step.size), NONE, dtype=np.int64)
    np.maximum.at(used, saved, saves.used[known])
    comes = np.full(len(step.size), NONE, dtype=np.int64)
    made = (step.born >= start) & (step.born < stop) & (step.size > 0)
    comes[made] = 2 * step.born[made] + 1
    # Autocast begins anew: weights that it had cast for others before are cast again where they are saved first.
    cast = known[step.cached[saved] & (step.born[saved] < start)][::-1]
    comes[saves.allocation[cast]] = 2 * saves.packed[cast]
    events = [(2 * start, step.random_state), (2 * stop, -step.random_state)]  # as it was before, to be set back
    for allocation in np.flatnonzero(comes != NONE).tolist():
        size = int(step.size[allocation])
        events.append((int(comes[allocation]), size))
        if used[allocation] != NONE:
            changes.goes_after(2 * int(used[allocation]), size)
            continue
        let_go = int(step.let_go[allocation])
        goes = 2 * int(step.died[allocation]) + 1 if let_go == NONE else 2 * let_go
        events.append((min(goes, 2 * stop), -size))
    changes.window(slot, [size for _, size in sorted(events, key=lambda event: event[0])], region)


@dataclass
class _Changes:
    """What comes and goes at other times than it did: in which slot, in which order within the slot, how much.

    Within a slot first comes what has nothing to do with regions that run again; then these, one after the other; then
    what they have made for what follows in the same slot.
    """

    _rows: list[tuple[int, int, int, int]] = field(default_factory=list)  # slot, order, bytes, region
    _regions: list[Region] = field(default_factory=list)
    _order: int = 0

    def comes_and_goes(self, comes: int, goes: int, size: int) -> None:
        """Bytes that are there from one slot to another; where it goes before it comes, they are gone in between."""
        self._rows.append((comes, 0, size, NONE))
        self._rows.append((goes, 0, -size, NONE))

    def goes_after(self, slot: int, size: int) -> None:
        """Bytes that go, after all that runs again in the slot."""
        self._rows.append((slot, 1 << 60, -size, NONE))

    def window(self, slot: int, sizes: list[int], region: Region) -> None:
        """Bytes that come, and that go where they are negative, one after the other."""
        self._regions.append(region)
        for size in sizes:
            self._order += 1
            self._rows.append((slot, self._order, size, len(self._regions) - 1))

    def peak(self, step: Step) -> Peak:
        live, slot, region = self.live(step)
        highest = int(live.argmax())
        number = int(region[highest])
        return Peak(
            int(live[highest]), int(slot[highest] - 1) // 2, None if number == NONE else self._regions[number])

    def live(self, step: Step) -> tuple[Ints, Ints, Ints]:
        """Live bytes at each moment of the step, its slot, and the region that runs again then."""
        rows = np.array(self._rows, dtype=np.int64).reshape(-1, 4)
        rows = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
        recorded = 2 * np.arange(step.first, step.last, dtype=np.int64) + 1
        after = np.searchsorted(recorded, rows[:, 0], side="right")
        change = np.insert(np.diff(step.live, prepend=step.before), after, rows[:, 2])
        region = np.insert(np.full(len(recorded), NONE, dtype=np.int64), after, rows[:, 3])
        return step.before + np.cumsum(change), np.insert(recorded, after, rows[:, 0]), region
