"""All blocks of a device: split, merged, and seen as segments. What is done when is for the allocator to say."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from memdiag.allocator import rules
from memdiag.allocator.blocks import UNMAPPED, Block, Pool, Range
from memdiag.allocator.settings import Settings
from memdiag.allocator.state import ALLOCATED, FREE, WAITING, BlockState, PoolId, RangeState, SegmentState


class Heap:
    """The blocks of a device, and the pools they are in.

    Attributes:
        blocks: all of them, by address; also unmapped ones.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._default = (Pool(small=True), Pool(small=False))
        self._private: dict[PoolId, tuple[Pool, Pool]] = {}
        self.blocks: dict[int, Block] = {}

    def pools(self, owner: PoolId | None) -> tuple[Pool, Pool]:
        """The small and the large pool; of a private pool made where it is new."""
        if owner is None:
            return self._default
        found = self._private.get(owner)
        if found is None:
            found = self._private[owner] = (Pool(True, owner), Pool(False, owner))
        return found

    def add(self, address: int, size: int, stream: int, pool: Pool) -> Block:
        """A new segment, as one free block that is in no order yet."""
        block = self.blocks[address] = Block(address, size, stream, pool, FREE, None)
        return block

    def add_range(self, state: RangeState) -> Block:
        """A new expandable segment, as one unmapped block."""
        return self._restore_range(state, [])

    def remove(self, block: Block) -> None:
        """A free or unmapped block that is all of its segment."""
        block.pool.take(block)
        del self.blocks[block.address]

    def split(self, block: Block, size: int, state: str) -> Block:
        """Cuts a block, which is in no order, after so many bytes. The rest, in the given state, is in no order."""
        rest = Block(block.address + size, block.size - size, block.stream, block.pool, state, block.range)
        rest.before, rest.after = block, block.after
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        self.blocks[rest.address] = rest
        return rest

    def merge(self, block: Block) -> tuple[int, int]:
        """Makes a block, which is in no order, one with those neighbours that are in its state.

        Returns:
            How many they were, and their bytes.
        """
        merged = merged_bytes = 0
        before, after, state = block.before, block.after, block.state
        if before is not None and before.state is state:
            block.pool.take(before)
            del self.blocks[block.address]
            block.address, block.before = before.address, before.before
            self.blocks[block.address] = block
            if block.before is not None:
                block.before.after = block
            merged, merged_bytes = 1, before.size
        if after is not None and after.state is state:
            block.pool.take(after)
            del self.blocks[after.address]
            block.after = after.after
            if block.after is not None:
                block.after.before = block
            merged, merged_bytes = merged + 1, merged_bytes + after.size
        block.size += merged_bytes
        return merged, merged_bytes

    def segments(self) -> list[SegmentState]:
        """All segments with their blocks, by address; each mapped stretch of an expandable one is a segment."""
        heads = (block for block in self.blocks.values()
                 if block.state is not UNMAPPED and (block.before is None or block.before.state is UNMAPPED))
        return [SegmentState(head.address, head.stream, head.pool.small, head.range is not None, head.pool.owner,
                             tuple(_stretch(head))) for head in sorted(heads, key=lambda head: head.address)]

    def largest_hole(self) -> int:
        """Bytes of the largest free block in any pool of any stream; 0 without one."""
        pools = (pool for pair in (self._default, *self._private.values()) for pool in pair)
        ends = (free.greatest() for pool in pools for free in pool.free.values())
        return max((end[0] for end in ends if end is not None), default=0)

    def restore(self, segments: Iterable[SegmentState], ranges: Iterable[RangeState]) -> None:
        """Puts segments in, expandable ones into their virtual ranges.

        Raises:
            ValueError: when an expandable one is in none of the ranges.
        """
        expandable = []
        for segment in segments:
            if segment.expandable:
                expandable.append(segment)
            else:
                self._restore_blocks(segment, None, None)
        for state in ranges:
            self._restore_range(state, [segment for segment in expandable if _within(segment, state)])
        missing = [segment for segment in expandable if segment.address not in self.blocks]
        if missing:
            raise ValueError(f"the expandable segment at {missing[0].address:#x} is in none of the ranges")

    def _restore_range(self, state: RangeState, segments: list[SegmentState]) -> Block:
        in_range = Range(state.address, state.size, rules.page_size(state.small, self._settings))
        at, last = state.address, None
        for segment in sorted(segments, key=lambda segment: segment.address):
            last = self._unmapped(at, segment.address, state, in_range, last)
            last = self._restore_blocks(segment, in_range, last)
            at = segment.address + segment.size
        last = self._unmapped(at, state.address + state.size, state, in_range, last)
        assert last is not None
        return last

    def _unmapped(self, start: int, end: int, state: RangeState, in_range: Range, last: Block | None) -> Block | None:
        if start >= end:
            return last
        pool = self.pools(state.pool)[not state.small]
        return self._restore_block(BlockState(start, end - start, 0, UNMAPPED), state.stream, pool, in_range, last)

    def _restore_blocks(self, segment: SegmentState, in_range: Range | None, last: Block | None) -> Block | None:
        pool = self.pools(segment.pool)[not segment.small]
        for state in segment.blocks:
            last = self._restore_block(state, segment.stream, pool, in_range, last)
        return last

    def _restore_block(self, state: BlockState, stream: int, pool: Pool, in_range: Range | None,
                       last: Block | None) -> Block:
        # States are compared by identity, so the text that came in is replaced by ours.
        kind = next(known for known in (ALLOCATED, WAITING, FREE, UNMAPPED) if known == state.state)
        block = self.blocks[state.address] = Block(state.address, state.size, stream, pool, kind, in_range)
        block.requested, block.before = state.requested, last
        if last is not None:
            last.after = block
        if kind in (FREE, UNMAPPED):
            pool.put(block)
        return block


def _stretch(head: Block) -> Iterator[BlockState]:
    """The blocks from one on, up to the end of its segment or of what is mapped."""
    block: Block | None = head
    while block is not None and block.state is not UNMAPPED:
        yield BlockState(block.address, block.size, block.requested, block.state)
        block = block.after


def _within(segment: SegmentState, state: RangeState) -> bool:
    return (segment.pool, segment.stream, segment.small) == (state.pool, state.stream, state.small) and (
        state.address <= segment.address < state.address + state.size)
