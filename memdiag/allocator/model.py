"""The caching allocator of one CUDA device: requests in; addresses, segments and failures out.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` (``DeviceCachingAllocator``), as of PyTorch 2.13;
``docs/allocator.md`` says which they are, what earlier versions did otherwise and what is not modelled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from memdiag.allocator import rules
from memdiag.allocator.blocks import UNMAPPED, Block, Pool
from memdiag.allocator.driver import AddressSpace, Driver
from memdiag.allocator.heap import Heap
from memdiag.allocator.settings import UNLIMITED, Settings
from memdiag.allocator.state import (
    ALLOC,
    ALLOCATED,
    FREE,
    FREE_COMPLETED,
    FREE_REQUESTED,
    OOM,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    WAITING,
    Event,
    OutOfMemory,
    PoolId,
    RangeState,
    SegmentState,
)
from memdiag.allocator.stats import Stats

RANGE_WITHOUT_CAPACITY = 1 << 45
"""Bytes of virtual space for an expandable segment on a device whose size is not known: more than any has."""


class _Request(NamedTuple):
    requested: int
    size: int  # rounded
    stream: int
    pool: Pool
    expandable: bool
    capturing: bool


class Allocator:
    """One device's caching allocator.

    Args:
        settings: as ``PYTORCH_ALLOC_CONF`` has them.
        capacity: bytes of the device's memory that there are for the allocator; None for as much as is asked for.
        limit: the most that it may reserve; None for the part of ``capacity`` that ``settings.memory_fraction`` says,
            or no limit where that is 1.
        driver: where segments come from; by default an ``AddressSpace`` of ``capacity`` bytes.
        listener: called with each event, in the order in which PyTorch's history has them.
        segments: what is there already. The default driver does not know of it: hand in one with what is left.
        ranges: the virtual ranges of those that are expandable. Where none are given, those of one pool and stream are
            in one range that begins with the first of them.

    Attributes:
        stats: PyTorch's statistics.
        limit: the most that it may reserve, in bytes; None for no limit.
    """

    def __init__(self, settings: Settings | None = None, *, capacity: int | None = None, limit: int | None = None,
                 driver: Driver | None = None, listener: Callable[[Event], None] | None = None,
                 segments: Iterable[SegmentState] = (), ranges: Iterable[RangeState] = ()) -> None:
        self.settings = settings if settings is not None else Settings()
        self.stats = Stats()
        self.limit = limit
        if limit is None and capacity is not None and self.settings.memory_fraction < 1:
            self.limit = int(self.settings.memory_fraction * capacity)
        self._capacity = capacity
        self._driver: Driver = driver if driver is not None else AddressSpace(capacity)
        self._listener = listener
        self._released: list[PoolId] = []  # private pools that nobody uses any more
        self._overflow: list[PoolId] = []  # private pools that serve others when memory is short
        self._captures: list[PoolId] = []
        self._deferred: list[Block] = []  # freed during a capture, and used by other streams
        self._captured_users: dict[Block, set[int]] = {}
        self._pending: dict[int, deque[Block]] = {}  # by stream, freed blocks that it may still use
        self._over: dict[int, int] = {}  # how many of them it does not use any more
        self._ages = self.limit is not None and self.settings.garbage_collection_threshold > 0
        self._heap = Heap(self.settings)
        self._blocks = self._heap.blocks
        self._restore(list(segments), list(ranges))

    def malloc(self, requested: int, stream: int = 0, pool: PoolId | None = None, *, again: bool = False) -> int:
        """The address of a block for so many bytes; 0 for none, for which PyTorch does not ask the allocator.

        Args:
            pool: the private pool to take it from. As within ``torch.cuda.use_mem_pool`` or a graph's capture, a
                request that fails then gives nothing back to the device to try again.
            again: look through no free blocks, as in the midst of a second try: a replay knows that it was one. What
                was freed since the first is not looked at then.

        Raises:
            OutOfMemory: as PyTorch raises ``OutOfMemoryError``. The allocator can be used on.
        """
        if requested == 0:
            return 0
        capturing = pool is not None or bool(self._captures)
        if not capturing and (self._deferred or self._over):
            self._complete_those_over()
        request = self._request(requested, stream, pool, capturing)
        block = None if again else self._search(request)
        if block is None:
            request, block = self._more(request)
        return self._hand_out(block, request)

    def free(self, address: int) -> None:
        """Gives a block back. Where other streams use it, it is free only when their work is over.

        Raises:
            ValueError: when no block in use begins there.
        """
        if address == 0:
            return
        block = self._requested(address)
        if not block.users:
            self._complete(block)
        elif self._captures:
            block.state = WAITING
            self._deferred.append(block)
        else:
            self._wait(block)

    def request_free(self, address: int) -> None:
        """The first half of ``free``, of a replay that knows itself when the second comes: ``complete_free``."""
        self._requested(address).state = WAITING

    def complete_free(self, address: int) -> None:
        """A block that was freed is used by no stream any more."""
        block = self._blocks.get(address)
        if block is None or block.state is not WAITING:
            raise ValueError(f"no block that was freed and waits begins at {address:#x}")
        self._complete(block)

    def record_stream(self, address: int, stream: int) -> None:
        """A stream uses a block that was allocated for another."""
        block = self._in_use(address)
        if stream == block.stream:
            return
        if block.users is None:
            block.users = set()
        block.users.add(stream)
        if self._captures:
            self._captured_users.setdefault(block, set()).add(stream)

    def finish(self, stream: int) -> None:
        """All that a stream was given to do so far is over. The allocator notices when it is next asked for memory."""
        if stream in self._pending:
            self._over[stream] = len(self._pending[stream])

    def empty_cache(self, pool: PoolId | None = None) -> None:
        """Gives back to the device what is free: whole segments, and whole pages of expandable ones.

        Args:
            pool: do so for this private pool alone, if it has been released.
        """
        self._release_cached(pool)

    def release(self, address: int) -> None:
        """Gives back one segment that is all free, or the whole pages of one free block, as a replay knows it was.

        Raises:
            ValueError: when nothing that can be given back begins there.
        """
        block = self._blocks.get(address)
        if block is None or block.state is not FREE or block.range is not None:
            free = (block for block in self._blocks.values() if block.state is FREE and block.range is not None)
            block = next((block for block in free if _pages(block)[0] == address), None)
        if block is None or (block.range is None and block.split):
            raise ValueError(f"nothing that can be given back begins at {address:#x}")
        if block.range is None:
            self._release(block)
        else:
            self._unmap(block)

    def releasable(self) -> list[tuple[int, int]]:
        """Address and size of all that ``empty_cache`` would give back, in its order, if no free waits."""
        pools = [] if self._captures else list(reversed(self._heap.pools(None)))
        pools += [part for released in self._released for part in self._heap.pools(released)]
        found = []
        for pool in pools:
            blocks = [self._blocks[address] for address in pool.all_free()]
            found += [(block.address, block.size) for block in blocks if block.range is None and not block.split]
            pages = [_pages(block) for block in blocks if block.range is not None]
            found += [(start, end - start) for start, end in pages if start < end]
        return found

    def in_use(self, address: int) -> bool:
        """Whether a block that was not freed begins there."""
        block = self._blocks.get(address)
        return block is not None and block.state is ALLOCATED

    def add_pool(self, pool: PoolId, *, no_split: bool = False, use_on_oom: bool = False) -> None:
        """A private pool with options, as ``torch.cuda.MemPool`` has; pools without need not be added."""
        for part in self._heap.pools(pool):
            part.no_split = no_split
        if use_on_oom and pool not in self._overflow:
            self._overflow.append(pool)

    def release_pool(self, pool: PoolId) -> None:
        """Nobody uses a private pool any more: its free segments may be given back."""
        if pool not in self._released:
            self._released.append(pool)

    def begin_capture(self, pool: PoolId) -> None:
        """A graph's capture begins. While one lasts, no freed block's streams are looked at and no cache is emptied."""
        self._captures.append(pool)

    def end_capture(self, pool: PoolId) -> None:
        self._captures.remove(pool)

    def fits(self, requested: int, stream: int = 0, pool: PoolId | None = None) -> bool:
        """Whether a request would be served from what is free, without a new segment. Changes nothing."""
        return self._best(self._request(requested, stream, pool, False)) is not None

    def segments(self) -> list[SegmentState]:
        """All segments with their blocks, by address; each mapped stretch of an expandable one is a segment."""
        return self._heap.segments()

    def largest_hole(self) -> int:
        """Bytes of the largest free block in any pool of any stream; 0 without one."""
        return self._heap.largest_hole()

    # Free blocks

    def _request(self, requested: int, stream: int, pool: PoolId | None, capturing: bool) -> _Request:
        size = rules.round_size(requested, self.settings)
        small, large = self._heap.pools(pool)
        return _Request(requested, size, stream, small if rules.is_small(size) else large,
                        self.settings.expandable_segments, capturing)

    def _search(self, request: _Request) -> Block | None:
        """The free block that serves a request best, taken out of its order."""
        if self._ages:
            request.pool.searches += 1
        block = self._best(request)
        if block is not None:
            request.pool.take(block)
        return block

    def _best(self, request: _Request) -> Block | None:
        free, blocks = request.pool.free.get(request.stream), self._blocks
        key = free.at_least((request.size, 0)) if free is not None else None
        if free is None or key is None:
            return None
        block = blocks[key[1]]
        if block.range is not None:
            if request.expandable:
                # A block that can grow counts as large as it can become: others come first.
                while block.range is not None and (key := free.above(key)) is not None:
                    if (larger := blocks[key[1]]).room() >= block.room():
                        break
                    block = larger
            else:
                while (block := blocks[key[1]]).range is not None:
                    if (key := free.above(key)) is None:
                        return None
        return block if rules.may_take(block.size, request.size, self.settings) else None

    def _hand_out(self, block: Block, request: _Request) -> int:
        """Makes a free block, which is in no order any more, one in use; splits off what is too much."""
        pool, size = request.pool, request.size
        # Expandable segments are left out of what is "inactive split": their pages can be given back.
        was_split, counts = block.split, block.range is None
        if not pool.no_split and rules.splits(block.size, size, pool.small, request.expandable, self.settings):
            rest = self._heap.split(block, size, FREE)
            pool.put(rest)
            if counts and was_split:
                self.stats.split_changed(0, -size)
            elif counts:
                self.stats.split_changed(1, rest.size)
        elif counts and was_split:
            self.stats.split_changed(-1, -block.size)
        block.state, block.requested = ALLOCATED, request.requested
        if self._listener is not None:
            self._say(ALLOC, block, block.address, request.requested)
        self.stats.handed_out(block.size, request.requested)
        return block.address

    def _in_use(self, address: int) -> Block:
        block = self._blocks.get(address)
        if block is None or block.state is not ALLOCATED:
            raise ValueError(f"no block in use begins at {address:#x}")
        return block

    def _requested(self, address: int) -> Block:
        """A block that is being freed, counted as not allocated; its state is still to be set."""
        block = self._in_use(address)
        self.stats.free_requested(block.size)
        if self._listener is not None:
            self._say(FREE_REQUESTED, block, address, block.requested)
        return block

    def _complete(self, block: Block) -> None:
        """Makes a block free, and one with its free neighbours."""
        size, requested = block.size, block.requested
        if self._listener is not None:
            self._say(FREE_COMPLETED, block, block.address, requested)
        block.state, block.requested = FREE, 0
        merged, merged_bytes = self._heap.merge(block)
        block.pool.put(block)
        if block.range is None:
            if block.before is not None or block.after is not None:
                self.stats.split_changed(1 - merged, block.size - merged_bytes)
            elif merged:
                self.stats.split_changed(-merged, -merged_bytes)
        self.stats.free_completed(size, requested)

    def _say(self, action: str, block: Block, address: int, size: int) -> None:
        if self._listener is not None:
            self._listener(Event(action, address, size, block.stream, block.pool.owner))

    # Frees that wait for other streams

    def _wait(self, block: Block) -> None:
        block.state = WAITING
        for stream in sorted(block.users or ()):
            self._pending.setdefault(stream, deque()).append(block)
            block.waits += 1
        block.users = None

    def _wait_for_deferred(self) -> None:
        """What was freed during a capture waits from now on; for what a capture did, nobody waits."""
        for block in self._deferred:
            block.users = (block.users or set()) - self._captured_users.pop(block, set())
            self._wait(block)
            if not block.waits:
                self._complete(block)
        self._deferred.clear()

    def _complete_those_over(self) -> None:
        self._wait_for_deferred()
        for stream, count in self._over.items():
            waiting = self._pending[stream]
            for _ in range(count):
                self._one_less(waiting.popleft())
            if not waiting:
                del self._pending[stream]
        self._over.clear()

    def _synchronize(self, pool: PoolId | None) -> None:
        """Waits for all streams, and completes all frees, or those of a private pool alone."""
        self.stats.num_sync_all_streams += 1
        self._wait_for_deferred()
        for stream, waiting in list(self._pending.items()):
            over = self._over.pop(stream, 0)
            left: deque[Block] = deque()
            for number, block in enumerate(waiting):
                if pool is None or block.pool.owner == pool:
                    self._one_less(block)
                else:
                    left.append(block)
                    if number < over:
                        self._over[stream] = len(left)
            if left:
                self._pending[stream] = left
            else:
                del self._pending[stream]

    def _one_less(self, block: Block) -> None:
        block.waits -= 1
        if not block.waits:
            self._complete(block)

    # New segments

    def _more(self, request: _Request) -> tuple[_Request, Block]:
        """A block for a request that nothing free serves, and the request that it is for."""
        if self._ages:
            self._collect_garbage()
        block = self._new(request)
        if block is None and (found := self._from_overflow(request)) is not None:
            return found
        if block is None and self._release_oversize(request):
            block = self._new(request)
        if block is None and not request.capturing:
            self._release_cached(None)
            self.stats.num_alloc_retries += 1
            block = self._new(request)
        if block is None:
            raise self._out_of_memory(request)
        return request, block

    def _from_overflow(self, request: _Request) -> tuple[_Request, Block] | None:
        """A free block of a private pool that serves others when memory is short, and the request to that pool."""
        if request.pool.owner is not None:
            return None
        for overflow in self._overflow:
            pool = self._heap.pools(overflow)[not request.pool.small]
            other = request._replace(pool=pool, expandable=False)
            if (block := self._search(other)) is not None:
                return other, block
        return None

    def _out_of_memory(self, request: _Request) -> OutOfMemory:
        device_free = self._driver.free()
        if self._listener is not None:
            self._listener(Event(OOM, 0, request.size, request.stream, request.pool.owner, device_free))
        self.stats.num_ooms += 1
        return OutOfMemory(
            requested=request.requested, size=request.size,
            segment_size=rules.segment_size(request.size, self.settings), stream=request.stream,
            pool=request.pool.owner, device_free=device_free, limit=self.limit,
            allocated=self.stats.allocated_bytes.current, reserved=self.stats.reserved_bytes.current,
            largest_hole=self.largest_hole())

    def _new(self, request: _Request) -> Block | None:
        """A block in memory that was just taken from the device; None where there is none."""
        size = rules.segment_size(request.size, self.settings)
        if self.limit is not None and self.stats.reserved_bytes.current + size > self.limit:
            return None
        if request.expandable:
            return self._expand(request)
        address = self._driver.allocate(size)
        if address is None:
            return None
        block = self._heap.add(address, size, request.stream, request.pool)
        self.stats.segment.add(1)
        self.stats.reserved_bytes.add(size)
        self.stats.num_device_alloc += 1
        self._say(SEGMENT_ALLOC, block, address, size)
        return block

    # Expandable segments

    def _expand(self, request: _Request) -> Block | None:
        block = self._expandable(request)
        if block.state is UNMAPPED and not self._map(block, min(block.size, request.size)):
            return None
        while block.size < request.size:
            following = block.after
            assert following is not None
            if not self._map(following, min(request.size - block.size, following.size)):
                return None
            block = following  # which has become one with the block before it
        request.pool.take(block)
        return block

    def _expandable(self, request: _Request) -> Block:
        """The first block, by address, from which on there is room enough in free and unmapped blocks."""
        for address in request.pool.unmapped.get(request.stream, ()):
            block = self._blocks[address]
            if block.before is not None and block.before.state is FREE:
                block = block.before
            if _has_room(block, request.size):
                return block
        size = self._range_size(request.pool.small)
        return self._heap.add_range(RangeState(self._driver.reserve(size), size, request.stream, request.pool.small,
                                               request.pool.owner))

    def _range_size(self, small: bool) -> int:
        """An eighth more than the device has, so that pages given back at the front can be used at the end."""
        size = RANGE_WITHOUT_CAPACITY if self._capacity is None else self._capacity + self._capacity // 8
        page = rules.page_size(small, self.settings)
        return (size + page - 1) // page * page

    def _map(self, block: Block, size: int) -> bool:
        """Maps the first bytes of an unmapped block, in whole pages, and makes it one with free neighbours."""
        assert block.range is not None
        address, mapped = block.address, block.range.up(block.address + size) - block.address
        if not self._driver.map(address, mapped):
            return False
        block.pool.take(block)
        if mapped < block.size:
            block.pool.put(self._heap.split(block, mapped, UNMAPPED))
        block.state = FREE
        self._heap.merge(block)
        block.pool.put(block)
        self.stats.reserved_bytes.add(mapped)
        self.stats.num_device_alloc += 1
        self._say(SEGMENT_MAP, block, address, mapped)
        return True

    def _unmap(self, block: Block) -> None:
        """Gives the whole pages of a free block back; what is before and behind them stays free."""
        pool, (start, end) = block.pool, _pages(block)
        if start >= end:
            return
        pool.take(block)
        if start > block.address:
            pages = self._heap.split(block, start - block.address, FREE)
            pool.put(block)
            block = pages
        if end < start + block.size:
            pool.put(self._heap.split(block, end - start, FREE))
        block.state = UNMAPPED
        self._heap.merge(block)
        pool.put(block)
        self._driver.unmap(start, end - start)
        self.stats.reserved_bytes.current -= end - start
        self.stats.num_device_free += 1
        self._say(SEGMENT_UNMAP, block, start, end - start)
        if not block.split:
            self._heap.remove(block)
            self._driver.unreserve(block.address, block.size)

    # Giving back

    def _release(self, block: Block) -> None:
        """Gives back a segment that is one free block."""
        self.stats.num_device_free += 1
        self._say(SEGMENT_FREE, block, block.address, block.size)
        self._driver.release(block.address, block.size)
        self.stats.segment.current -= 1
        self.stats.reserved_bytes.current -= block.size
        self._heap.remove(block)

    def _release_all(self, pool: Pool) -> None:
        expandable = []
        for address in pool.all_free():
            block = self._blocks[address]
            if block.range is not None:
                expandable.append(block)
            elif not block.split:
                self._release(block)
        for block in expandable:
            self._unmap(block)

    def _release_cached(self, pool: PoolId | None) -> None:
        """All that is free and can be given back: of the default pool, unless a graph is captured, and of private pools
        that nobody uses; or of one of these alone."""
        if pool is None and not self._captures:
            self._synchronize(None)
            small, large = self._heap.pools(None)
            self._release_all(large)
            self._release_all(small)
        for released in self._released:
            if pool is not None:
                if released != pool:
                    continue
                self._synchronize(pool)
            for part in self._heap.pools(released):
                self._release_all(part)

    def _release_oversize(self, request: _Request) -> bool:
        """Where blocks have a largest size to be split: gives back the smallest free one that is large enough; or, if
        none is, several of the largest until they are together. Whether that is enough."""
        least = self.settings.max_split_size
        free = request.pool.free.get(request.stream)
        if least == UNLIMITED or free is None:
            return False
        wanted = max(request.size, least)
        key = free.at_least((wanted, 0))
        if key is not None and self._blocks[key[1]].range is None:
            self._release(self._blocks[key[1]])
            return True
        released = 0
        for size, address in reversed([key for key in free if least <= key[0] < wanted]):
            if released >= wanted:
                break
            if self._blocks[address].range is None:
                released += size
                self._release(self._blocks[address])
        return released >= wanted

    def _collect_garbage(self) -> None:
        """Gives back segments that have been free for long, once more than the threshold is reserved."""
        assert self.limit is not None
        wanted = self.stats.reserved_bytes.current - int(self.settings.garbage_collection_threshold * self.limit)
        if wanted <= 0:
            return
        _, pool = self._heap.pools(None)
        whole = [block for address in pool.all_free() if not (block := self._blocks[address]).split]
        age, count, reclaimed, went = sum(pool.searches - block.since for block in whole), len(whole), 0, True
        while reclaimed < wanted and went and count:
            oldest, went, left = age / count, False, []  # the average stays while a round lasts
            for block in whole:
                if block.range is None and pool.searches - block.since >= oldest:
                    went = True
                    reclaimed += block.size
                    age -= pool.searches - block.since
                    count -= 1
                    self._release(block)
                else:
                    left.append(block)
            whole = left

    # What was there before

    def _restore(self, segments: list[SegmentState], ranges: list[RangeState]) -> None:
        self._heap.restore(segments, ranges or self._ranges_of(segments))
        for segment in segments:
            if not segment.expandable:
                self.stats.segment.add(1)
            self.stats.reserved_bytes.add(segment.size)
            for block in segment.blocks:
                if block.state != FREE:
                    self.stats.handed_out(block.size, block.requested)
                    if block.state == WAITING:
                        self.stats.free_requested(block.size)
                elif not segment.expandable and len(segment.blocks) > 1:
                    self.stats.split_changed(1, block.size)

    def _ranges_of(self, segments: list[SegmentState]) -> list[RangeState]:
        first: dict[tuple[PoolId | None, int, bool], int] = {}
        for segment in segments:
            if segment.expandable:
                key = segment.pool, segment.stream, segment.small
                first[key] = min(first.get(key, segment.address), segment.address)
        return [RangeState(address, self._range_size(small), stream, small, pool)
                for (pool, stream, small), address in first.items()]


def _pages(block: Block) -> tuple[int, int]:
    """Where the whole pages of a block of an expandable segment begin and end."""
    assert block.range is not None
    return block.range.pages(block.address, block.size)


def _has_room(block: Block | None, size: int) -> bool:
    """Whether a block and the free and unmapped ones right behind it have so many bytes together."""
    room = 0
    while room < size and block is not None and block.state in (FREE, UNMAPPED):
        room, block = room + block.size, block.after
    return room >= size
