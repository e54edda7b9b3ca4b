"""What an allocator holds at a moment, and what happens in it: plain values that go in and out of the model."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

ALLOCATED, WAITING, FREE = "active_allocated", "active_awaiting_free", "inactive"
"""States of a block, by PyTorch's names: in use; freed, but other streams may still use it; free."""

ALLOC, FREE_REQUESTED, FREE_COMPLETED, OOM = "alloc", "free_requested", "free_completed", "oom"
SEGMENT_ALLOC, SEGMENT_FREE = "segment_alloc", "segment_free"
SEGMENT_MAP, SEGMENT_UNMAP = "segment_map", "segment_unmap"

PoolId = Hashable
"""Of a private pool (a ``MemPool``, a graph's pool): whatever its user has; PyTorch has pairs of numbers."""


class Event(NamedTuple):
    """Something that happened, as PyTorch's history has it.

    Attributes:
        address: for an ``oom`` 0.
        size: in bytes; of ``alloc`` and ``free`` events the size that was asked for, of an ``oom`` the rounded size.
        pool: the private pool that it is about.
        device_free: for an ``oom`` what the device had free, if that is known.
    """

    action: str
    address: int
    size: int
    stream: int
    pool: PoolId | None = None
    device_free: int | None = None


class BlockState(NamedTuple):
    """A piece of a segment.

    Attributes:
        requested: the bytes that were asked for; 0 for a free block.
        state: ``ALLOCATED``, ``WAITING`` or ``FREE``.
    """

    address: int
    size: int
    requested: int
    state: str


@dataclass(frozen=True)
class SegmentState:
    """Memory taken from the device in one piece, or a mapped stretch of an expandable segment.

    Attributes:
        small: whether it is of the small pool.
        pool: the private pool that owns it; None for the default pool.
        blocks: all of it, by ascending address.
    """

    address: int
    stream: int
    small: bool
    expandable: bool
    pool: PoolId | None
    blocks: tuple[BlockState, ...]

    @property
    def size(self) -> int:
        return sum(block.size for block in self.blocks)

    @property
    def active(self) -> int:
        """Bytes of blocks in use, or that other streams may still use."""
        return sum(block.size for block in self.blocks if block.state != FREE)


class RangeState(NamedTuple):
    """The virtual range of an expandable segment, of which parts are mapped."""

    address: int
    size: int
    stream: int
    small: bool
    pool: PoolId | None


class OutOfMemory(Exception):
    """A request found no room, after all was given back that could be.

    Attributes:
        requested: the bytes that were asked for.
        size: these rounded, as in PyTorch's ``oom`` event.
        segment_size: of the segment that could not be had, which is what PyTorch's message names.
        stream, pool: where they were asked for.
        device_free: what the device had left for new segments, where that is known.
        limit: the most that may be reserved; None without a limit.
        allocated, reserved: as the statistics have them at that moment.
        largest_hole: bytes of the largest free block in any pool of any stream. Where it is not smaller than ``size``,
            it was of another pool or stream, or too large to be given to such a request.
    """

    def __init__(self, *, requested: int, size: int, segment_size: int, stream: int, pool: PoolId | None,
                 device_free: int | None, limit: int | None, allocated: int, reserved: int, largest_hole: int) -> None:
        super().__init__(f"{requested} bytes requested, {reserved} reserved, {allocated} of them allocated; the "
                         f"largest hole has {largest_hole}")
        self.requested, self.size, self.segment_size = requested, size, segment_size
        self.stream, self.pool = stream, pool
        self.device_free, self.limit = device_free, limit
        self.allocated, self.reserved, self.largest_hole = allocated, reserved, largest_hole
