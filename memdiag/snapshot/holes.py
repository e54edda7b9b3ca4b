"""The segments of a device, and the holes in them: at the end of a record, and at any event of it."""

from __future__ import annotations

from typing import Any

import numpy as np

from memdiag.allocator.state import FREE, SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP
from memdiag.snapshot.data import Segment, Snapshot
from memdiag.snapshot.peaks import Course


def largest_hole(snapshot: Snapshot, device: int, course: Course, event: int) -> int:
    """Bytes of the largest free block after an event, of whatever pool and stream; before the first for -1."""
    held = {segment.address: (segment.size, segment.expandable) for segment in course.start.segments}
    for one in snapshot.trace(device)[:event + 1]:
        action = one["action"]
        if action in (SEGMENT_ALLOC, SEGMENT_MAP):
            held[one["addr"]] = one["size"], action == SEGMENT_MAP
        elif action == SEGMENT_FREE:
            held.pop(one["addr"], None)
        elif action == SEGMENT_UNMAP:
            held = _without(held, one["addr"], one["size"])
    blocks = course.blocks
    there = (blocks.born <= event) & (blocks.gone > event)
    order = np.argsort(blocks.address[there])
    starts, ends = blocks.address[there][order], (blocks.address + blocks.bytes)[there][order]
    largest = 0
    for start, end in _joined(held):
        first, last = np.searchsorted(starts, start), np.searchsorted(starts, end)
        free = np.append(starts[first:last], end) - np.insert(ends[first:last], 0, start)
        largest = max(largest, int(free.max()))
    return largest


def _joined(held: dict[int, tuple[int, bool]]) -> list[tuple[int, int]]:
    """Start and end of each segment; mapped stretches that touch are one."""
    found: list[tuple[int, int]] = []
    joins = False
    for address, (size, expandable) in sorted(held.items()):
        if found and joins and expandable and found[-1][1] == address:
            found[-1] = found[-1][0], address + size
        else:
            found.append((address, address + size))
        joins = expandable
    return found


def _without(held: dict[int, tuple[int, bool]], address: int, size: int) -> dict[int, tuple[int, bool]]:
    left = {}
    for start, (length, expandable) in held.items():
        end = start + length
        if not expandable or end <= address or start >= address + size:
            left[start] = length, expandable
            continue
        if start < address:
            left[start] = address - start, True
        if end > address + size:
            left[address + size] = end - address - size, True
    return left


def segment_facts(segments: list[Segment]) -> dict[str, Any]:
    """Of a device's segments at the end of the record: how many, their bytes, the largest free block, and bytes that
    are free in segments that are not; and the same by stream and pool.

    A part of an expandable segment can be given back, so nothing of it is an inactive split.
    """
    groups: dict[tuple[Any, ...], list[Segment]] = {}
    for segment in segments:
        groups.setdefault((segment.stream, segment.pool, segment.small, segment.expandable), []).append(segment)
    return {
        **_sums(segments),
        "groups": [
            {"stream": stream, "pool": list(pool), "small": small, "expandable": expandable, **_sums(mine)}
            for (stream, pool, small, expandable), mine in sorted(groups.items())],
    }


def _sums(segments: list[Segment]) -> dict[str, int]:
    free = [(segment, block.size) for segment in segments for block in segment.blocks if block.state == FREE]
    split = sum(size for segment, size in free if not segment.expandable and size < segment.size)
    return {"count": len(segments), "bytes": sum(segment.size for segment in segments),
            "free_bytes": sum(size for _, size in free),
            "largest_hole_bytes": max((size for _, size in free), default=0), "inactive_split_bytes": split}
