"""The state of a device where its events begin: the last state, with every event undone.

Undoing says which blocks and segments there were, to the byte, but for one thing: what a freed block had beyond what
was asked for. A large block may own a tail of up to 1 MiB that was not worth splitting off, and its ``free_completed``
has the requested size alone. The tail looks free. What can be said of it:

- up to 1 MiB between the block and what follows it is tail, since no free block of the large pool is that small;
- of more, some may be tail: the first block that is put into it, while the block is there, begins where the tail ends;
- where none is, it is not known, taken to be none, and counted.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NoReturn

from memdiag.allocator import rules
from memdiag.allocator.settings import Settings
from memdiag.allocator.state import (
    ALLOC,
    ALLOCATED,
    FREE,
    FREE_COMPLETED,
    FREE_REQUESTED,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    WAITING,
    BlockState,
    PoolId,
    SegmentState,
)
from memdiag.errors import MemdiagError
from memdiag.snapshot.data import Event, Snapshot


@dataclass(frozen=True)
class Start:
    """A device where its events begin.

    Attributes:
        segments: by address, with their blocks. The pool of one that was freed is the default one where its event does
            not name it (``pool_id``), as in most versions.
        outside: blocks in use that are in no segment of the file. PyTorch writes none; other tools do.
        unsettled: how many blocks may have a tail that is not known, of up to 1 MiB each.
        completing: the numbers of ``free_requested`` events after which the memory was free, where the record was made
            without ``free_completed``.
    """

    segments: tuple[SegmentState, ...]
    outside: tuple[BlockState, ...]
    unsettled: int
    completing: frozenset[int]


def roll_back(snapshot: Snapshot, device: int) -> Start:
    """The state of a device before the first event of its trace; the last state where it has no events.

    Settings that the file does not name are taken to be the default ones.

    Raises:
        MemdiagError: when the events do not lead to the file's state, or its settings cannot be read.
    """
    trace = snapshot.trace(device)
    settings = settings_of(snapshot)
    undo = _Undo(snapshot, device, settings)
    for number in range(len(trace) - 1, -1, -1):
        undo.event(number, trace[number])
    outside, gaps = undo.placed()
    settled = _settled_later(gaps, trace, undo.completing)
    for gap in gaps:
        gap.block.size += settled.get(gap.start, 0)
    segments = [held.state() for held in undo.held.values()]
    return Start(tuple(sorted(segments, key=lambda segment: segment.address)),
                 tuple(block.as_state() for block in outside), len(gaps) - len(settled), frozenset(undo.completing))


def settings_of(snapshot: Snapshot) -> Settings:
    """The allocator's settings; where the file has none, the default ones, but for what is seen of expandable segments.

    Raises:
        MemdiagError: when they cannot be read.
    """
    found = Settings.from_snapshot(snapshot.settings)
    if snapshot.settings is None:
        expandable = (any(segment.expandable for segment in snapshot.segments)
                      or any(event["action"] == SEGMENT_MAP for trace in snapshot.traces for event in trace))
        found = replace(found, expandable_segments=expandable)
    return found


def private_pool(pool: tuple[int, int]) -> PoolId | None:
    """A pool's number as the allocator's model has it: None for the default pool."""
    return None if pool == (0, 0) else pool


@dataclass
class _Block:
    """A block in use. Its size is known for certain where it is still there at the end, or was never split."""

    __slots__ = ("address", "certain", "requested", "size", "state")

    address: int
    size: int
    requested: int
    state: str
    certain: bool

    @property
    def end(self) -> int:
        return self.address + self.size

    def as_state(self) -> BlockState:
        return BlockState(self.address, self.size, self.requested, self.state)


class _Held:
    """A segment, or a mapped stretch of an expandable one, with its blocks in use by address."""

    __slots__ = ("address", "blocks", "expandable", "pool", "size", "small", "stream")

    def __init__(self, address: int, size: int, stream: int, small: bool, expandable: bool,
                 pool: PoolId | None) -> None:
        self.address, self.size, self.stream = address, size, stream
        self.small, self.expandable, self.pool = small, expandable, pool
        self.blocks: list[_Block] = []

    @property
    def end(self) -> int:
        return self.address + self.size

    def part(self, start: int, end: int) -> _Held:
        return _Held(start, end - start, self.stream, self.small, self.expandable, self.pool)

    def state(self) -> SegmentState:
        return SegmentState(self.address, self.stream, self.small, self.expandable, self.pool, tuple(self._tiles()))

    def _tiles(self) -> Iterator[BlockState]:
        at = self.address
        for block in self.blocks:
            if block.address > at:
                yield BlockState(at, block.address - at, 0, FREE)
            yield block.as_state()
            at = block.end
        if at < self.end:
            yield BlockState(at, self.end - at, 0, FREE)


@dataclass(frozen=True)
class _Gap:
    """What looks free behind a block, of which up to 1 MiB may be the block's."""

    block: _Block
    start: int
    end: int


class _Undo:
    """A device's state, from which events are taken away, the last first."""

    def __init__(self, snapshot: Snapshot, device: int, settings: Settings) -> None:
        self._path, self._device, self._settings = snapshot.path, device, settings
        trace = snapshot.trace(device)
        actions = {event["action"] for event in trace}
        # Either kind of event about frees may have been left out of the record (skip_actions).
        self._completions = FREE_COMPLETED in actions
        self._requests = FREE_REQUESTED in actions or not _frees_unasked(trace)
        self.completing: set[int] = set()
        own = [segment for segment in snapshot.segments if segment.device == device]
        self.held = {segment.address: _Held(segment.address, segment.size, segment.stream, segment.small,
                                            segment.expandable, private_pool(segment.pool)) for segment in own}
        self._live = {block.address: _Block(block.address, block.size,
                                            block.size if block.requested_size is None else block.requested_size,
                                            block.state, True)
                      for segment in own for block in segment.blocks if block.state != FREE}
        self._ranges = _Ranges(trace, settings) if SEGMENT_UNMAP in actions else None
        self._starts = sorted(address for address, held in self.held.items() if held.expandable)

    def event(self, number: int, event: Event) -> None:
        """Takes an event away.

        Raises:
            MemdiagError: when the state is none that it could have led to.
        """
        action = event["action"]
        if action == ALLOC:
            if self._live.pop(event["addr"], None) is None:
                self._disagree(number, event, "no block in use begins there afterwards")
        elif action == FREE_COMPLETED:
            self._bring_back(number, event, WAITING if self._requests else ALLOCATED)
        elif action == FREE_REQUESTED:
            block = self._live.get(event["addr"])
            if block is not None and block.state == WAITING:
                block.state = ALLOCATED
            elif self._completions:
                self._disagree(number, event, "no block that was freed begins there")
            else:
                self._bring_back(number, event, ALLOCATED)
                self.completing.add(number)
        elif action == SEGMENT_ALLOC:
            held = self.held.pop(event["addr"], None)
            if held is None or held.size != event["size"]:
                self._disagree(number, event, "there is no such segment afterwards")
        elif action == SEGMENT_FREE:
            if event["addr"] in self.held:
                self._disagree(number, event, "the segment is there afterwards")
            pool = private_pool(tuple(event.get("pool_id", (0, 0))))
            self.held[event["addr"]] = _Held(event["addr"], event["size"], event["stream"],
                                             event["size"] <= rules.SMALL_SEGMENT, False, pool)
        elif action == SEGMENT_MAP:
            self._unmap(number, event)
        elif action == SEGMENT_UNMAP:
            self._map(number, event)

    def placed(self) -> tuple[list[_Block], list[_Gap]]:
        """Puts the blocks in use into their segments, and gives them the tails that are certain.

        Returns:
            The blocks that are in none, and the gaps that may be a tail in part.

        Raises:
            MemdiagError: when two of them overlap.
        """
        segments = sorted(self.held.values(), key=lambda held: held.address)
        starts = [held.address for held in segments]
        outside = []
        for one, other in pairwise(segments):
            if one.end > other.address:
                self._fail(f"before the first event, segments at {one.address:#x} and {other.address:#x} overlap")
        for address in sorted(self._live):
            block = self._live[address]
            at = bisect_right(starts, address) - 1
            if at < 0 or block.end > segments[at].end:
                outside.append(block)
                continue
            before = segments[at].blocks[-1:]
            if before and before[0].end > address:
                self._fail(f"before the first event, blocks at {before[0].address:#x} and {address:#x} overlap")
            segments[at].blocks.append(block)
        return outside, [gap for held in segments for gap in self._tails(held)]

    def _tails(self, held: _Held) -> Iterator[_Gap]:
        for number, block in enumerate(held.blocks, start=1):
            end = held.blocks[number].address if number < len(held.blocks) else held.end
            room = end - block.address
            if block.certain or room == block.size:
                continue
            if not rules.splits(room, block.size, held.small, self._settings.expandable_segments, self._settings):
                block.size = room
            elif not held.small and not self._settings.expandable_segments:
                yield _Gap(block, block.end, end)

    def _bring_back(self, number: int, event: Event, state: str) -> None:
        address = event["addr"]
        if address in self._live:
            self._disagree(number, event, "a block in use begins there afterwards")
        size = rules.round_size(event["size"], self._settings)
        self._live[address] = _Block(address, size, event["size"], state, False)

    def _unmap(self, number: int, event: Event) -> None:
        start, end = event["addr"], event["addr"] + event["size"]
        at = bisect_right(self._starts, start) - 1
        held = self.held[self._starts[at]] if at >= 0 else None
        if held is None or end > held.end:
            self._disagree(number, event, "it is not mapped afterwards")
        del self.held[self._starts.pop(at)]
        for part in (held.part(held.address, start), held.part(end, held.end)):
            if part.size:
                self._add(part)

    def _map(self, number: int, event: Event) -> None:
        start, end = event["addr"], event["addr"] + event["size"]
        at = bisect_right(self._starts, start)
        before = self.held[self._starts[at - 1]] if at else None
        after = self.held[self._starts[at]] if at < len(self._starts) else None
        if before is not None and before.end > start or after is not None and after.address < end:
            self._disagree(number, event, "it is mapped afterwards")
        assert self._ranges is not None
        part = self._ranges.like(event)
        for beside in (before, after):
            # Virtual ranges are larger than the device: mapped stretches that touch are of the same one.
            if beside is not None and (beside.end == start or beside.address == end):
                part = beside.part(min(part.address, beside.address), max(part.end, beside.end))
                self._starts.remove(beside.address)
                del self.held[beside.address]
        self._add(part)

    def _add(self, part: _Held) -> None:
        self.held[part.address] = part
        self._starts.insert(bisect_left(self._starts, part.address), part.address)

    def _disagree(self, number: int, event: Event, why: str) -> NoReturn:
        self._fail(f"event {number:,} ({event['action']} of {event['size']:,} bytes at {event['addr']:#x}) does not "
                   f"lead to what follows: {why}")

    def _fail(self, why: str) -> NoReturn:
        raise MemdiagError(
            f"{self._path}: the events of device {self._device} and its segments are not of one history: {why}; take "
            "the snapshot while the history is being recorded, with no action skipped")


class _Ranges:
    """Tells what a stretch of an expandable segment was that is no longer mapped."""

    def __init__(self, trace: Iterable[Event], settings: Settings) -> None:
        self._page = rules.page_size(False, settings)
        self._small = {event["addr"]: rules.is_small(rules.round_size(event["size"], settings))
                       for event in trace if event["action"] in (ALLOC, FREE_COMPLETED)}
        self._addresses = sorted(self._small)

    def like(self, event: Event) -> _Held:
        """The stretch of an event: of the pool whose blocks were in it, or whose pages it is made of.

        A stretch of the small pool in which no event tells of a block, and whose pages of 2 MiB happen to be as many
        as pages of the large pool are, is taken to be of that.
        """
        address, size = event["addr"], event["size"]
        at = bisect_left(self._addresses, address)
        inside = self._addresses[at:at + 1]
        small = self._small[inside[0]] if inside and inside[0] < address + size else size % self._page != 0
        return _Held(address, size, event["stream"], small, True, private_pool(tuple(event.get("pool_id", (0, 0)))))


def _frees_unasked(trace: Iterable[Event]) -> bool:
    """Whether blocks were born and became free with no request for it: then none were recorded.

    A record that has both begins with a ``free_completed`` at times, and a block may wait for streams long.
    """
    born: set[int] = set()
    for event in trace:
        if event["action"] == ALLOC:
            born.add(event["addr"])
        elif event["action"] == FREE_COMPLETED and event["addr"] in born:
            return True
    return False


def _settled_later(gaps: list[_Gap], trace: Iterable[Event], completing: set[int]) -> dict[int, int]:
    """For starts of gaps, how much of each is its block's tail, where an event tells."""
    waiting = {gap.block.address: gap for gap in gaps}
    starts = sorted(gap.start for gap in gaps)
    by_start = {gap.start: gap for gap in gaps}
    found: dict[int, int] = {}
    for number, event in enumerate(trace):
        if not waiting:
            break
        if event["action"] == ALLOC:
            at = bisect_right(starts, event["addr"]) - 1
            gap = by_start[starts[at]] if at >= 0 else None
            if gap is not None and event["addr"] < gap.end and waiting.pop(gap.block.address, None):
                if event["addr"] - gap.start <= rules.SMALL_SIZE:
                    found[gap.start] = event["addr"] - gap.start
        elif event["action"] == FREE_COMPLETED or number in completing:
            waiting.pop(event["addr"], None)  # from now on what is free begins at the block itself
    return found
