"""Blocks and pools: pieces of segments, linked to their neighbours, and free ones in order of size."""

from __future__ import annotations

from memdiag.allocator.ordered import Ordered
from memdiag.allocator.state import FREE, PoolId

UNMAPPED = "unmapped"
"""The state of a block of virtual space that has no memory; the others are those of ``state``."""


class Range:
    """The virtual space of an expandable segment, which is mapped in pages."""

    __slots__ = ("address", "page", "size")

    def __init__(self, address: int, size: int, page: int) -> None:
        self.address, self.size, self.page = address, size, page

    def up(self, address: int) -> int:
        """The page boundary at or above an address in it."""
        return address + (self.address - address) % self.page

    def pages(self, address: int, size: int) -> tuple[int, int]:
        """Where the whole pages in a part of it begin and end; at or before the beginning where there are none."""
        end = address + size
        return self.up(address), end - (end - self.address) % self.page


class Block:
    """A piece of a segment. Blocks of a segment are linked; no two neighbours are both free, nor both unmapped.

    Attributes:
        requested: bytes that were asked for, of a block in use.
        range: of the expandable segment it is in; None in others.
        users: streams that use it beside its own.
        waits: how many streams' work must be over before a block that was freed is free.
        since: how often its pool had been searched when it became free.
    """

    __slots__ = ("address", "after", "before", "pool", "range", "requested", "since", "size", "state", "stream",
                 "users", "waits")

    def __init__(self, address: int, size: int, stream: int, pool: Pool, state: str, in_range: Range | None) -> None:
        self.address, self.size, self.requested = address, size, 0
        self.stream, self.pool, self.state, self.range = stream, pool, state, in_range
        self.before: Block | None = None
        self.after: Block | None = None
        self.users: set[int] | None = None
        self.waits = self.since = 0

    @property
    def split(self) -> bool:
        """Whether its segment has other blocks."""
        return self.before is not None or self.after is not None

    def room(self) -> int:
        """Its size, with what can be mapped right behind it."""
        after = self.after
        return self.size + (after.size if after is not None and after.state is UNMAPPED else 0)


class Pool:
    """Blocks that small, or large, requests of one kind are served from.

    Attributes:
        owner: the private pool that it is part of.
        no_split: whether its blocks are handed out whole.
        free: for each stream, size and address of its free blocks.
        unmapped: for each stream, addresses of its unmapped blocks.
        searches: how often a free block was looked for, while ages of blocks are kept.
    """

    __slots__ = ("free", "no_split", "owner", "searches", "small", "unmapped")

    def __init__(self, small: bool, owner: PoolId | None = None) -> None:
        self.small, self.owner, self.no_split = small, owner, False
        self.free: dict[int, Ordered[tuple[int, int]]] = {}
        self.unmapped: dict[int, Ordered[int]] = {}
        self.searches = 0

    def put(self, block: Block) -> None:
        """Into the order that it belongs in, by its state."""
        if block.state is FREE:
            block.since = self.searches
            free = self.free.get(block.stream)
            if free is None:
                free = self.free[block.stream] = Ordered()
            free.add((block.size, block.address))
        else:
            unmapped = self.unmapped.get(block.stream)
            if unmapped is None:
                unmapped = self.unmapped[block.stream] = Ordered()
            unmapped.add(block.address)

    def take(self, block: Block) -> None:
        """Out of the order that it is in."""
        if block.state is FREE:
            self.free[block.stream].remove((block.size, block.address))
        else:
            self.unmapped[block.stream].remove(block.address)

    def all_free(self) -> list[int]:
        """Addresses of its free blocks, by stream, size and address."""
        return [address for stream in sorted(self.free) for _, address in self.free[stream]]
