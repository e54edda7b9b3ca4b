"""Snapshots for tests of replays: read plainly, and rolled back to where their events begin, as tests need it."""

from __future__ import annotations

import pickle
from bisect import bisect_left
from pathlib import Path
from typing import Any

from memdiag.allocator import BlockState, SegmentState, Settings
from memdiag.allocator.rules import MIB, round_size

PAGE = 2 * MIB
STATES = {"active_pending_free": "active_awaiting_free"}
Event = dict[str, Any]


class NoGlobals(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} in a snapshot")


def read(path: Path) -> Any:
    with path.open("rb") as file:
        return NoGlobals(file).load()


def at_end(snapshot: dict[str, Any], device: int) -> list[SegmentState]:
    found = []
    for segment in snapshot["segments"]:
        if segment["device"] != device:
            continue
        blocks, address = [], segment["address"]
        for block in segment["blocks"]:
            state = STATES.get(block["state"], block["state"])
            requested = 0 if state == "inactive" else block.get("requested_size", 0)
            blocks.append(BlockState(address, block["size"], requested, state))
            address += block["size"]
        pool = tuple(segment.get("segment_pool_id", (0, 0)))
        found.append(SegmentState(segment["address"], segment["stream"], segment["segment_type"] == "small",
                                  bool(segment.get("is_expandable")), pool if any(pool) else None, tuple(blocks)))
    return sorted(found, key=lambda segment: segment.address)


def at_start(end: list[SegmentState], events: list[Event], settings: Settings) -> list[SegmentState]:
    """What was there before the first event, if all is of the default pool.

    Active blocks and memory are rolled back; what is between the blocks is free. But in large segments that are not
    expandable, up to 1 MiB behind a block may be part of it: a smaller gap is, since no free block is so small, and of
    a larger one what is before the first block that begins in it while the block before is still there.
    """
    active = {block.address: block for segment in end for block in segment.blocks if block.state != "inactive"}
    segments = {segment.address: (segment.size, segment.small, segment.stream) for segment in end
                if not segment.expandable}
    pages = {page: (segment.small, segment.stream) for segment in end if segment.expandable
             for page in range(segment.address, segment.address + segment.size, PAGE)}
    owners = pages | mapped_for(events, settings)
    for event in reversed(events):
        action, address, size = event["action"], event.get("addr", 0), event.get("size", 0)
        covered = range(address, address + size, PAGE)
        if action == "free_completed":
            active[address] = BlockState(address, round_size(size, settings), size, "active_allocated")
        elif action == "alloc":
            del active[address]
        elif action == "segment_alloc":
            del segments[address]
        elif action == "segment_free":
            segments[address] = size, size <= PAGE, event["stream"]
        elif action == "segment_map":
            for page in covered:
                del pages[page]
        elif action == "segment_unmap":
            for page in covered:
                pages[page] = owners.get(page) or nearest(owners, page)
    starts = sorted(active)
    stretches = [(address, size, small, stream, False) for address, (size, small, stream) in segments.items()]
    found = []
    for address, size, small, stream, expandable in sorted(stretches + stretched(pages)):
        first, last = bisect_left(starts, address), bisect_left(starts, address + size)
        blocks = [active[start] for start in starts[first:last]]
        if not small and not expandable:
            blocks = with_tails(blocks, address + size, events)
        found.append(SegmentState(address, stream, small, expandable, None, filled(blocks, address, address + size)))
    return found


def mapped_for(events: list[Event], settings: Settings) -> dict[int, tuple[bool, int]]:
    """For pages that are mapped: the request behind tells whether it is a small one, and its stream."""
    found, waiting = {}, []
    for event in events:
        if event["action"] == "segment_map":
            waiting.append(event)
        elif event["action"] in ("alloc", "oom"):
            owner = round_size(event["size"], settings) <= MIB, event["stream"]
            for new in waiting:
                found |= dict.fromkeys(range(new["addr"], new["addr"] + new["size"], PAGE), owner)
            waiting = []
    return found


def nearest(owners: dict[int, tuple[bool, int]], page: int) -> tuple[bool, int]:
    """A page's owner, where only its neighbours in the same range have one."""
    return owners[min(owners, key=lambda other: abs(other - page))]


def stretched(pages: dict[int, tuple[bool, int]]) -> list[tuple[int, int, bool, int, bool]]:
    found: list[tuple[int, int, bool, int, bool]] = []
    for page in sorted(pages):
        small, stream = pages[page]
        if found and found[-1][0] + found[-1][1] == page and found[-1][2:4] == (small, stream):
            found[-1] = (found[-1][0], found[-1][1] + PAGE, small, stream, True)
        else:
            found.append((page, PAGE, small, stream, True))
    return found


def with_tails(blocks: list[BlockState], end: int, events: list[Event]) -> list[BlockState]:
    found = []
    for block, following in zip(blocks, [*(other.address for other in blocks), end][1:], strict=True):
        own = block.address + block.size
        if 0 < following - own <= MIB:
            own = following
        elif following > own:
            first = next((event for event in events if decides(event, block.address, own, following)), None)
            if first is not None and first["action"] == "alloc" and first["addr"] - own <= MIB:
                own = first["addr"]
        found.append(block._replace(size=own - block.address))
    return found


def decides(event: Event, address: int, own: int, following: int) -> bool:
    return event["action"] == "alloc" and own <= event["addr"] < following or (
        event["action"] == "free_completed" and event["addr"] == address)


def filled(blocks: list[BlockState], start: int, end: int) -> tuple[BlockState, ...]:
    found, at = [], start
    for block in blocks:
        if block.address > at:
            found.append(BlockState(at, block.address - at, 0, "inactive"))
        found.append(block)
        at = block.address + block.size
    if at < end:
        found.append(BlockState(at, end - at, 0, "inactive"))
    return tuple(found)
