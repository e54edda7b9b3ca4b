"""The peak of a step under a plan: its events once more, as they would come.

Saved bytes are not subtracted, for under a plan the peak moves. What a checkpointed region makes in forward goes when
Python lets go of it. Before backward comes to the region all of it is made anew, in its order, until everything that
was saved at first is there; each of these goes as backward has used it. What the region was given, and a copy of the
random state, stay until backward is through with it.

Where a region keeps operators, what these make stays from forward on. They do not run again: what they have made is
taken up where they ran at first, and goes as if it had been made anew there. What would have been made after the last
tensor that was saved is never taken up, and goes when backward is through with the region.

Time is told in slots: what is between events ``k - 1`` and ``k`` is in slot ``2 k``, event ``k`` itself in ``2 k + 1``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memdiag.plan.step import Call, Ints, Step
from memdiag.trace import NONE

_AFTER = 1 << 60  # order of what goes after all that runs again in a slot
_NONE: Ints = np.zeros(0, dtype=np.int64)
_WINDOW = 1 << 32  # orders that one region has in the slot in which it runs again


@dataclass(frozen=True)
class Region:
    """Module calls that follow each other, as one checkpoint.

    Attributes:
        keep: names of operators whose results are kept instead of made anew.
    """

    calls: tuple[Call, ...]
    keep: tuple[str, ...] = ()


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
    return Replay(step).under(plan).peak


class Replay:
    """A step, to be replayed under many plans. What a region does by itself is worked out once."""

    def __init__(self, step: Step) -> None:
        self.step = step
        saves = step.saves
        order = np.argsort(saves.span, kind="stable")
        self._span, self._allocation, self._packed, self._unpacked, self._released, self._used = (
            column[order] for column in (
                saves.span, saves.allocation, saves.packed, saves.unpacked, saves.released, saves.used))
        self._by_allocation = np.argsort(self._allocation, kind="stable")
        self._savers = self._allocation[self._by_allocation]
        self._parts: dict[int, tuple[Region, _Part | None]] = {}

    def under(self, plan: Sequence[Region]) -> Replayed:
        """The step under a plan of regions that do not overlap."""
        parts = [part for part in map(self._part, plan) if part is not None]
        if not parts:
            return Replayed(self.step, [], _NONE, _NONE, _NONE)
        rows = _Rows(parts)
        self._goes_otherwise(rows, parts)
        return Replayed(self.step, [part.region for part in parts], *rows.sorted())

    def _part(self, region: Region) -> _Part | None:
        found = self._parts.get(id(region))
        if found is None:  # the region is kept with it: nothing else can have its id
            found = self._parts[id(region)] = region, self._alone(region)
        return found[1]

    def _alone(self, region: Region) -> _Part | None:
        """What a region does, whatever else is in the plan; None where it saves nothing."""
        step, calls = self.step, region.calls
        low, high = np.searchsorted(self._span, (calls[0].first, calls[-1].last + 1))
        if low == high:
            return None
        asked = self._unpacked[low:high]
        asked = asked[asked != NONE]
        start, stop = calls[0].start, int(self._packed[low:high].max())
        over = 2 * int(self._released[low:high].max())
        slot = 2 * int(asked.min()) if len(asked) else over
        known = low + np.flatnonzero(self._allocation[low:high] != NONE)
        saved, which = np.unique(self._allocation[known], return_inverse=True)
        used = np.full(len(saved), NONE, dtype=np.int64)
        np.maximum.at(used, which, self._used[known])
        first_packed = np.full(len(saved), step.last, dtype=np.int64)
        np.minimum.at(first_packed, which, self._packed[known])

        made = step.made_between(start, stop)
        # Autocast begins anew: weights that it had cast for others before are cast again where they are saved first.
        cast = step.cached[saved] & (step.born[saved] < start)
        kept, taken, not_made = self._kept(region)
        held = np.array([2 * start, over]), np.array([1, -1]) * step.random_state
        if not len(asked):  # backward does not come to it: nothing runs again
            return _Part(region, low, high, slot, over, _NONE, *held, self._given(calls), saved, kept,
                         np.full(len(kept), over), _Taken(_NONE, _NONE, _NONE, _NONE))
        if len(not_made):
            made = made[~np.isin(made, not_made)]
        again = kept[taken <= 2 * stop]  # of what is kept, what is taken up again
        comes = np.concatenate([2 * step.born[made] + 1, 2 * first_packed[cast]])
        ids = np.concatenate([made, saved[cast], again])
        comes = np.concatenate([comes, np.full(len(again), NONE)])  # it is there when the region begins to run
        used_at = _looked_up(saved, used, ids)
        natural = np.where(step.let_go[ids] == NONE, 2 * step.died[ids] + 1, 2 * step.let_go[ids])
        goes = np.minimum(natural, 2 * stop)
        # As it was before, to be set back.
        random = np.array([2 * start, 2 * stop]), np.array([1, -1]) * step.random_state
        within = used_at == NONE
        when = np.concatenate([random[0], comes, goes[within]])
        sizes = np.concatenate([random[1], step.size[ids], -step.size[ids][within]])
        tie = np.concatenate([[0, 1], 2 + 2 * np.arange(len(ids)), 3 + 2 * np.flatnonzero(within)])
        order = np.lexsort((tie, when))
        place = np.empty(len(order), dtype=np.int64)
        place[order] = np.arange(len(order))
        ends = np.full(len(ids), NONE, dtype=np.int64)
        ends[within] = place[2 + len(ids):]
        mine = slice(len(ids) - len(again), None)
        return _Part(
            region, low, high, slot, over, sizes[order], np.concatenate([held[0], 2 * used_at[~within]]),
            np.concatenate([held[1], -step.size[ids[~within]]]), self._given(calls), saved, kept,
            np.where(taken <= 2 * stop, slot, over),
            _Taken(again, place[2:2 + len(ids)][mine], ends[mine], 2 * used_at[mine]))

    def _given(self, calls: Sequence[Call]) -> Ints:
        """What comes into a region from outside."""
        given = np.unique(np.concatenate([call.arguments for call in calls]))
        born = self.step.born[given]
        outside: Ints = given[(born < calls[0].start) | (born >= calls[-1].end)]
        return outside

    def _kept(self, region: Region) -> tuple[Ints, Ints, Ints]:
        """Allocations that are kept, the slot in which each is taken up, and all that is not made again."""
        operators, calls = self.step.operators, region.calls
        kept, taken, not_made = [], [], []
        if region.keep:
            low, high = np.searchsorted(operators.start, (calls[0].start, calls[-1].end))
            for row in range(low, high):
                start, end = int(operators.start[row]), int(operators.end[row])
                if operators.name[row] in region.keep and end <= calls[-1].end:
                    inside = self.step.made_between(start, end)
                    made = inside[self.step.died[inside] >= end]
                    kept.append(made)
                    taken.append(np.full(len(made), 2 * end))
                    not_made.append(inside)
        return (np.concatenate([_NONE, *kept]), np.concatenate([_NONE, *taken]), np.concatenate([_NONE, *not_made]))

    def _goes_otherwise(self, rows: _Rows, parts: Sequence[_Part]) -> None:
        """What regions saved goes earlier, if nothing else saved it; what they were given, or keep, stays longer."""
        step = self.step
        inside = np.zeros(len(self._span), dtype=bool)
        for part in parts:
            inside[part.low:part.high] = True
        given = np.concatenate([part.given for part in parts])
        given_until = np.concatenate([np.full(len(part.given), part.over) for part in parts])
        kept = np.concatenate([part.kept for part in parts])
        own = np.concatenate([kept, *(part.saved for part in parts)])
        ids, place = np.unique(np.concatenate([own, given]), return_inverse=True)
        freed = np.zeros(len(ids), dtype=bool)
        freed[place[:len(own)]] = True
        sized = step.size[ids] > 0
        ids, freed = ids[sized], freed[sized]
        dies = 2 * step.died[ids] + 1
        goes = dies.copy()
        freed &= (step.let_go[ids] != NONE) & (step.born[ids] >= step.first)
        goes[freed] = np.maximum(2 * step.let_go[ids[freed]], self._saved_elsewhere(ids[freed], inside))
        _at_least(goes, ids, given, given_until)
        for number, part in enumerate(parts):
            if len(part.kept):
                self._taken_up(rows, part, _WINDOW * (number + 1), ids, goes)
        other = np.flatnonzero(goes != dies)
        rows.add(dies[other], 0, step.size[ids[other]])
        rows.add(goes[other], 0, -step.size[ids[other]])

    def _taken_up(self, rows: _Rows, part: _Part, order: int, ids: Ints, goes: Ints) -> None:
        """What is kept stays until the region runs again, which has it from then on. The replay has a second one of it
        there, in the place of the first; where something else has the first for longer, the second is taken off."""
        _at_least(goes, ids, part.kept, part.kept_until)
        taken, size = part.taken, self.step.size[part.taken.ids]
        at = np.searchsorted(ids, taken.ids)
        longer = goes[at] > part.slot
        saved = taken.used >= 0
        covered = longer & saved & (goes[at] <= taken.used)
        goes[at[covered]] = part.slot
        off = longer & ~covered
        rows.add(np.full(off.sum(), part.slot), order + 2 * taken.begins[off] - 1, -size[off])
        rows.add(taken.used[off & saved], _AFTER - 1, size[off & saved])
        off &= ~saved
        rows.add(np.full(off.sum(), part.slot), order + 2 * taken.ends[off] + 1, size[off])

    def _saved_elsewhere(self, ids: Ints, inside: Ints) -> Ints:
        """The slot until which something outside the regions has each saved; NONE where nothing has."""
        low, high = np.searchsorted(self._savers, ids), np.searchsorted(self._savers, ids, side="right")
        until = np.full(len(ids), NONE, dtype=np.int64)
        counts = high - low
        owner = np.repeat(np.arange(len(ids)), counts)
        rows = self._by_allocation[np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts - low, counts)]
        outside = ~inside[rows]
        np.maximum.at(until, owner[outside], 2 * self._released[rows[outside]])
        return until


@dataclass(frozen=True)
class _Taken:
    """What is kept and taken up again: allocations, where in the order of the region each begins and ends to be there
    (NONE: it goes later), and the slot in which backward has used it (negative: nothing there has saved it)."""

    ids: Ints
    begins: Ints
    ends: Ints
    used: Ints


@dataclass(frozen=True)
class _Part:
    """What one region does.

    Attributes:
        low, high: its saves, among all in the order of their spans.
        slot: in which it runs again.
        over: the slot in which backward is through with it.
        sizes: bytes that come while it runs again, and go where they are negative, one after the other.
        others, other_sizes: slots in which something else of it comes or goes, and bytes: the random state that it
            keeps, then what backward has used.
        given, saved: allocations.
        kept, kept_until: allocations, and the slots until which they stay.
    """

    region: Region
    low: int
    high: int
    slot: int
    over: int
    sizes: Ints
    others: Ints
    other_sizes: Ints
    given: Ints
    saved: Ints
    kept: Ints
    kept_until: Ints
    taken: _Taken


def _looked_up(keys: Ints, values: Ints, wanted: Ints) -> Ints:
    """The values of sorted keys; NONE for others."""
    if not len(keys):
        return np.full(len(wanted), NONE, dtype=np.int64)
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], NONE)


def _at_least(goes: Ints, ids: Ints, which: Ints, until: Ints) -> None:
    """Raises some slots, of allocations that are among the sorted ids."""
    at = np.searchsorted(ids, which)
    there = at < len(ids)
    there[there] = ids[at[there]] == which[there]
    np.maximum.at(goes, at[there], until[there])


class _Rows:
    """What comes and goes at other times than it did: in which slot, in which order within the slot, how much.

    Within a slot first comes what has nothing to do with regions that run again; then these, one after the other; then
    what they have made for what follows in the same slot.
    """

    def __init__(self, parts: Sequence[_Part]) -> None:
        counts = [len(part.sizes) for part in parts]
        number = np.repeat(np.arange(len(parts)), counts)
        within = np.concatenate([2 * np.arange(count) for count in counts])
        others = np.concatenate([part.others for part in parts])
        order = np.full(len(others), _AFTER)
        begins = np.cumsum([0, *(len(part.others) for part in parts[:-1])])
        order[begins] = order[begins + 1] = 0  # the random states
        self._columns = [
            (np.repeat([part.slot for part in parts], counts), _WINDOW * (number + 1) + within,
             np.concatenate([part.sizes for part in parts]), number),
            (others, order, np.concatenate([part.other_sizes for part in parts]), np.full(len(others), NONE))]

    def add(self, slots: Ints, order: int | Ints, sizes: Ints) -> None:
        """Bytes that come; that go, where they are negative."""
        if len(slots):
            orders = np.full(len(slots), order) if isinstance(order, int) else order
            self._columns.append((slots, orders, sizes, np.full(len(slots), NONE)))

    def sorted(self) -> tuple[Ints, Ints, Ints]:
        """Slots, sizes and regions, in their order."""
        slot, order, size, region = (np.concatenate(column) for column in zip(*self._columns, strict=True))
        rows = np.lexsort((order, slot))
        return slot[rows], size[rows], region[rows]


class Replayed:
    """A step under a plan: what was recorded, and what comes and goes besides."""

    def __init__(self, step: Step, regions: Sequence[Region], slots: Ints, sizes: Ints, region: Ints) -> None:
        self._step, self._regions, self._region = step, regions, region
        self._slots, self._more = slots, np.cumsum(sizes)
        self._at = np.clip((slots + 1) // 2 - step.first, 0, len(step.live))  # recorded events before each

    @property
    def peak(self) -> Peak:
        step, rows = self._step, self._rows_live()
        cuts, more = self._pieces(0, len(step.live), 0, len(self._at))
        pieces = np.maximum.reduceat(step.live, cuts) + more
        highest = int(pieces.argmax())
        if len(rows) and rows.max() > pieces[highest]:
            row = int(rows.argmax())
            number = int(self._region[row])
            region = None if number == NONE else self._regions[number]
            return Peak(int(rows[row]), int(self._slots[row] - 1) // 2, region)
        begin = int(cuts[highest])
        end = int(cuts[highest + 1]) if highest + 1 < len(cuts) else len(step.live)
        return Peak(int(pieces[highest]), step.first + begin + int(step.live[begin:end].argmax()), None)

    @property
    def live(self) -> tuple[Ints, Ints, Ints]:
        """Live bytes at each moment of the step, its slot, and the number of the region that runs again then (NONE:
        none does)."""
        step = self._step
        recorded = np.arange(len(step.live))
        live = step.live + self._added(recorded)
        slots = 2 * (recorded + step.first) + 1
        return (np.insert(live, self._at, self._rows_live()), np.insert(slots, self._at, self._slots),
                np.insert(np.full(len(recorded), NONE, dtype=np.int64), self._at, self._region))

    def highest(self, begin: int, end: int) -> int:
        """The highest that live memory is in the slots from one to another; 0 where nothing comes or goes there."""
        step, found = self._step, 0
        low, high = np.searchsorted(self._slots, (begin, end))
        start, stop = (min(max(slot // 2 - step.first, 0), len(step.live)) for slot in (begin, end))
        if start < stop:
            cuts, more = self._pieces(start, stop, low, high)
            found = int((np.maximum.reduceat(step.live[:stop], cuts) + more).max())
        return max(found, int(self._rows_live(low, high).max(initial=0)))

    def _pieces(self, start: int, stop: int, low: int, high: int) -> tuple[Ints, Ints]:
        """Where recorded events begin between which nothing else comes or goes, and what is there more in each."""
        cuts = np.concatenate([[start], self._at[low:high]])
        more = np.concatenate([[self._more[low - 1] if low else 0], self._more[low:high]])
        last = np.append(cuts[1:] != cuts[:-1], True) & (cuts < stop)
        return cuts[last], more[last]

    def freed(self, begin: int, end: int) -> int:
        """Bytes that are less than without the plan, at the least, between two slots."""
        low, high = np.searchsorted(self._slots, begin, side="right"), np.searchsorted(self._slots, end)
        most = int(self._more[low:high].max(initial=self._more[low - 1] if low else 0))
        return -most

    def before(self, slot: int) -> int:
        """Live bytes when a slot begins."""
        event, row = slot // 2 - self._step.first, int(np.searchsorted(self._slots, slot))
        recorded = self._step.live[min(event, len(self._step.live)) - 1] if event > 0 else self._step.before
        return int(recorded) + (int(self._more[row - 1]) if row else 0)

    def excess(self, budget: int) -> int:
        """By how much the step is above a budget: bytes, summed over all its moments."""
        live = self._step.live + self._added(np.arange(len(self._step.live)))
        return int(np.maximum(live - budget, 0).sum() + np.maximum(self._rows_live() - budget, 0).sum())

    def _added(self, recorded: Ints) -> Ints:
        """What is there more than was recorded after each event."""
        return np.concatenate([[0], self._more])[np.searchsorted(self._at, recorded, side="right")]

    def _rows_live(self, low: int = 0, high: int | None = None) -> Ints:
        """Live bytes after each thing that comes or goes besides."""
        at = self._at[low:high]
        before = np.where(at > 0, self._step.live[at - 1], self._step.before)
        return before + self._more[low:high]
