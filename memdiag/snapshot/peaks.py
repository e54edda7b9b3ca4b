"""How much memory was in use, event by event, from the state in which a device's events begin; and where it was most.

Events name the requested size; the block that a request gets is larger by the rounding, and by a tail that was not
worth splitting off. Where it lies is known, so the free block that it was cut from is, and with it the block's size, by
the allocator's rule of splitting.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import numpy as np

from memdiag.allocator import rules
from memdiag.allocator.state import (
    ALLOC,
    FREE,
    FREE_COMPLETED,
    FREE_REQUESTED,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    WAITING,
    BlockState,
)
from memdiag.errors import MemdiagError
from memdiag.snapshot.data import Event, Snapshot
from memdiag.snapshot.rollback import Start, roll_back, settings_of

_Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
_BYTES, _FREED, _GONE = 1, 4, 5  # of a row of Blocks
_NOWHERE = -1  # the segment of a block that is in none
_MOST = 1 << 62
"""Bytes in all that are counted; addresses of blocks in segments allow no more, those of other tools might."""


@dataclass(frozen=True)
class Peak:
    """The most there was of something.

    Attributes:
        event: the number of the event after which it was first reached; -1 for before the first one.
    """

    bytes: int
    event: int


@dataclass(frozen=True)
class Blocks:
    """All blocks that were in use at some time: those from before the events first, then by birth.

    Attributes:
        address, bytes, requested: of each; ``bytes`` is what the allocator counts.
        born: the number of the event that allocated it; -1 where it was there before.
        freed: of the event that freed it; -1 where it was freed before, the count of events where it never is.
        gone: of the event after which its memory is free, when the streams that use it are done; as ``freed``.
    """

    address: _Bytes
    bytes: _Bytes
    requested: _Bytes
    born: _Bytes
    freed: _Bytes
    gone: _Bytes


@dataclass(frozen=True)
class Course:
    """Bytes before the first event, and after each of them: arrays of one more than there are events.

    Attributes:
        allocated: of blocks handed out and not yet freed (``allocated_bytes`` of PyTorch's statistics).
        active: with those that were freed, but that other streams may still use (``active_bytes``).
        reserved: of segments (``reserved_bytes``).
        start: the state before the first event.
        differs: how many of the blocks in use at the end are not of the size that the file says. Where it is 0, as
            for all of PyTorch's own files that were tried, the rule of splitting was met.
    """

    allocated: _Bytes
    active: _Bytes
    reserved: _Bytes
    blocks: Blocks
    start: Start
    differs: int

    def peak(self, of: str = "allocated") -> Peak:
        """The most of ``allocated``, ``active`` or ``reserved``, and where."""
        values: _Bytes = getattr(self, of)
        at = int(values.argmax())
        return Peak(int(values[at]), at - 1)


def follow(snapshot: Snapshot, device: int) -> Course:
    """Follows a device's events from the state in which they begin.

    Raises:
        MemdiagError: when an event cannot have happened in the state that those before it lead to.
    """
    start = roll_back(snapshot, device)
    forward = _Forward(snapshot, device, start)
    for number, event in enumerate(snapshot.trace(device)):
        forward.event(number, event)
    return forward.course(start)


class _Forward:
    """The state of a device, to which events are done."""

    def __init__(self, snapshot: Snapshot, device: int, start: Start) -> None:
        self._snapshot, self._device, self._settings = snapshot, device, settings_of(snapshot)
        trace = snapshot.trace(device)
        self._completing = start.completing
        self._end = len(trace)
        self._held = _union([*((segment.address, segment.size) for segment in start.segments),
                             *((event["addr"], event["size"]) for event in trace
                               if event["action"] in (SEGMENT_ALLOC, SEGMENT_MAP))])
        # Free blocks by address: size, segment, whether that is of the small pool; and addresses by where they end.
        self._free: dict[int, tuple[int, int, bool]] = {}
        self._ends: dict[int, int] = {}
        # Blocks in use by address: row, segment, whether that is of the small pool.
        self._in_use: dict[int, tuple[int, int, bool]] = {}
        self._rows: list[list[int]] = []  # as the fields of Blocks
        self._segments = self._allocated = self._active = self._reserved = 0
        for segment in start.segments:
            number = self._segment(segment.expandable)
            self._reserved += segment.size
            for block in segment.blocks:
                if block.state == FREE:
                    self._put(block.address, block.size, number, segment.small)
                else:
                    self._was_there(block, number, segment.small)
        for block in start.outside:
            self._was_there(block, _NOWHERE, False)
        self._counts: tuple[list[int], list[int], list[int]] = [self._allocated], [self._active], [self._reserved]

    def event(self, number: int, event: Event) -> None:
        """Does one.

        Raises:
            MemdiagError: when it cannot happen now.
        """
        action = event["action"]
        if action == ALLOC:
            self._alloc(number, event)
        elif action == FREE_COMPLETED or number in self._completing:
            self._completed(number, event)
        elif action == FREE_REQUESTED:
            self._requested(number, event)
        elif action == SEGMENT_ALLOC:
            self._reserved += event["size"]
            self._put(event["addr"], event["size"], self._segment(False), event["size"] <= rules.SMALL_SEGMENT)
        elif action == SEGMENT_FREE:
            if self._free.get(event["addr"], (0,))[0] != event["size"]:
                self._disagree(number, event, "no free segment of that size begins there")
            self._reserved -= event["size"]
            self._take(event["addr"])
        elif action == SEGMENT_MAP:
            self._reserved += event["size"]
            self._put(event["addr"], event["size"], self._segment(True), False)
        elif action == SEGMENT_UNMAP:
            self._unmap(number, event)
        if self._active > _MOST:
            self._disagree(number, event, "more is in use than there are addresses")
        allocated, active, reserved = self._counts
        allocated.append(self._allocated)
        active.append(self._active)
        reserved.append(self._reserved)

    def course(self, start: Start) -> Course:
        """All that was counted."""
        columns = np.array(self._rows, dtype=np.int64).reshape(-1, 6).T.copy()
        allocated, active, reserved = (np.array(values, dtype=np.int64) for values in self._counts)
        return Course(allocated, active, reserved, Blocks(*columns), start, self._differing())

    def _differing(self) -> int:
        mine = {tuple(self._rows[row][:2]) for row, _, _ in self._in_use.values()}
        theirs = {(block.address, block.size) for segment in self._snapshot.segments
                  if segment.device == self._device for block in segment.blocks if block.state != FREE}
        return len(mine - theirs)

    def _segment(self, expandable: bool) -> int:
        """A number for a segment. Mapped stretches that touch are of one virtual range, so all may have the same."""
        if expandable:
            return 0
        self._segments += 1
        return self._segments

    def _was_there(self, block: BlockState, segment: int, small: bool) -> None:
        row = self._hand_out(block.address, block.size, block.requested, -1, segment, small)
        if block.state == WAITING:
            self._allocated -= block.size
            row[_FREED] = -1

    def _alloc(self, number: int, event: Event) -> None:
        address, requested = event["addr"], event["size"]
        size = rules.round_size(requested, self._settings)
        if address in self._in_use:
            self._disagree(number, event, "a block in use begins there")
        found = self._free.get(address)
        if found is None:
            if self._is_held(address):
                self._disagree(number, event, "no free block begins there")
            self._hand_out(address, size, requested, number, _NOWHERE, False)
            return
        room, segment, small = found
        if room < size:
            self._disagree(number, event, f"the free block there has {room:,} bytes")
        self._take(address)
        if rules.splits(room, size, small, self._settings.expandable_segments, self._settings):
            self._put(address + size, room - size, segment, small)
        else:
            size = room
        self._hand_out(address, size, requested, number, segment, small)

    def _hand_out(self, address: int, size: int, requested: int, born: int, segment: int, small: bool) -> list[int]:
        self._in_use[address] = len(self._rows), segment, small
        row = [address, size, requested, born, self._end, self._end]
        self._rows.append(row)
        self._allocated += size
        self._active += size
        return row

    def _requested(self, number: int, event: Event) -> None:
        row = self._block(number, event)[0]
        if row[_FREED] != self._end:
            self._disagree(number, event, "the block there was freed before")
        self._allocated -= row[_BYTES]
        row[_FREED] = number

    def _completed(self, number: int, event: Event) -> None:
        row, segment, small = self._block(number, event)
        if row[_FREED] == self._end:
            self._allocated -= row[_BYTES]
            row[_FREED] = number
        row[_GONE] = number
        self._active -= row[_BYTES]
        del self._in_use[event["addr"]]
        if segment != _NOWHERE:
            self._put(event["addr"], row[_BYTES], segment, small)

    def _block(self, number: int, event: Event) -> tuple[list[int], int, bool]:
        found = self._in_use.get(event["addr"])
        if found is None:
            self._disagree(number, event, "no block in use begins there")
        row, segment, small = found
        return self._rows[row], segment, small

    def _unmap(self, number: int, event: Event) -> None:
        start, end = event["addr"], event["addr"] + event["size"]
        address = next((at for at, (size, _, _) in self._free.items() if at <= start and end <= at + size), None)
        if address is None:
            self._disagree(number, event, "not all of it is free")
        size, segment, small = self._free[address]
        self._reserved -= event["size"]
        self._take(address)
        for part, until in ((address, start), (end, address + size)):
            if part < until:
                self._put(part, until - part, segment, small)

    def _put(self, address: int, size: int, segment: int, small: bool) -> None:
        """A free block, together with the free ones beside it in its segment."""
        after = self._free.get(address + size)
        if after is not None and after[1] == segment:
            self._take(address + size)
            size += after[0]
        before = self._ends.get(address)
        if before is not None and self._free[before][1] == segment:
            size += self._free[before][0]
            self._take(before)
            address = before
        self._free[address] = size, segment, small
        self._ends[address + size] = address

    def _take(self, address: int) -> None:
        size = self._free.pop(address)[0]
        del self._ends[address + size]

    def _is_held(self, address: int) -> bool:
        """Whether it is in what was a segment at any time."""
        at = bisect_right(self._held, (address, _MOST)) - 1
        return at >= 0 and address < self._held[at][1]

    def _disagree(self, number: int, event: Event, why: str) -> NoReturn:
        raise MemdiagError(
            f"{self._snapshot.path}: event {number:,} of device {self._device} ({event['action']} of {event['size']:,} "
            f"bytes at {event['addr']:#x}) does not follow from what was before it: {why}; take the snapshot while the "
            "history is being recorded, with no action skipped")


def _union(parts: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Where stretches of memory begin and end, those that touch as one."""
    found: list[tuple[int, int]] = []
    for address, size in sorted(parts):
        if found and address <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], address + size)
        else:
            found.append((address, address + size))
    return found
