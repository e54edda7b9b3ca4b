"""How much a request takes, and where from: the caching allocator's arithmetic.

Source: ``c10/cuda/CUDACachingAllocator.cpp`` (``round_size``, ``get_allocation_size``, ``should_split``,
``get_free_block``) and the constants of ``c10/core/AllocatorConfig.h``. All sizes are bytes.
"""

from __future__ import annotations

from memdiag.allocator.settings import MIB, Settings

MIN_BLOCK = 512
"""Of all blocks the size is a multiple of it, unless rounded to parts of a power of two."""
SMALL_SIZE = MIB
"""The largest request that goes to the small pool."""
SMALL_SEGMENT = 2 * MIB
"""The small pool's segments, and pages of its expandable ones."""
MIN_OWN_SEGMENT = 10 * MIB
"""The smallest request whose new segment is made for it alone."""
SEGMENT_ROUNDING = 2 * MIB


def round_size(size: int, settings: Settings) -> int:
    """The size of the block that a request of so many bytes gets."""
    if size < MIN_BLOCK:
        return MIN_BLOCK
    parts = settings.divisions(size)
    if parts > 1 and size > MIN_BLOCK * parts:
        return _round_to_part(size, parts)
    return (size + MIN_BLOCK - 1) // MIN_BLOCK * MIN_BLOCK


def _round_to_part(size: int, parts: int) -> int:
    """Up to the next of so many equal steps from one power of two to the next."""
    # Both are powers of two and the size is more than 512 times the parts, so a step is 512 bytes at least.
    step = (1 << (size.bit_length() - 1)) // parts
    return (size + step - 1) // step * step


def is_small(size: int) -> bool:
    """Whether a block of this (rounded) size comes from the small pool."""
    return size <= SMALL_SIZE


def segment_size(size: int, settings: Settings) -> int:
    """Of a new segment for a block of this (rounded) size."""
    if size <= SMALL_SIZE:
        return SMALL_SEGMENT
    if size < MIN_OWN_SEGMENT:
        return settings.large_segment_size
    return (size + SEGMENT_ROUNDING - 1) // SEGMENT_ROUNDING * SEGMENT_ROUNDING


def page_size(small: bool, settings: Settings) -> int:
    """Of the pages that an expandable segment is mapped in."""
    return SMALL_SEGMENT if small else settings.large_segment_size


def may_take(block: int, size: int, settings: Settings) -> bool:
    """Whether a free block of one size may serve a (rounded) size: with a largest size to split, not all do."""
    limit = settings.max_split_size
    if size < limit:
        return block < limit
    return block < size + settings.max_non_split_rounding


def splits(block: int, size: int, small: bool, expandable: bool, settings: Settings) -> bool:
    """Whether what is left of a block beyond a (rounded) size becomes a free block; else it is handed out too.

    Args:
        small: whether the block is of the small pool.
        expandable: whether new segments are expandable, not whether this one is.
    """
    if small or expandable:
        return block - size >= MIN_BLOCK
    return size < settings.max_split_size and block - size > SMALL_SIZE
