"""The allocator's statistics, by their names in ``torch.cuda.memory_stats`` (``c10/core/CachingDeviceAllocator.h``)."""

from __future__ import annotations

from typing import Final

PEAKED: Final = ("allocation", "allocated_bytes", "active", "active_bytes", "requested_bytes", "segment",
                 "reserved_bytes", "inactive_split", "inactive_split_bytes")
COUNTED: Final = ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "num_device_alloc", "num_device_free")


class Stat:
    """A count or a sum of bytes: now, and at most."""

    __slots__ = ("current", "peak")

    def __init__(self) -> None:
        self.current = self.peak = 0

    def add(self, amount: int) -> None:
        self.current += amount
        if self.current > self.peak:
            self.peak = self.current


class Stats:
    """Of one device, over all its pools.

    Attributes:
        allocation, allocated_bytes: blocks in use, and their bytes.
        active, active_bytes: with those that were freed and that other streams may still use.
        requested_bytes: what was asked for, of active blocks.
        segment: segments taken from the device; expandable ones do not count.
        reserved_bytes: all memory taken from the device.
        inactive_split, inactive_split_bytes: free blocks that cannot be given back, because others of their segment are
            in use; none of expandable segments.
        num_alloc_retries: requests for which everything that was free was given back, to try again.
        num_ooms: requests that failed all the same.
        num_sync_all_streams: how often it waited for all that other streams still used.
        num_device_alloc, num_device_free: segments asked for and given back, and ranges mapped and unmapped.
    """

    __slots__ = (*PEAKED, *COUNTED)

    def __init__(self) -> None:
        self.allocation, self.allocated_bytes = Stat(), Stat()
        self.active, self.active_bytes = Stat(), Stat()
        self.requested_bytes = Stat()
        self.segment, self.reserved_bytes = Stat(), Stat()
        self.inactive_split, self.inactive_split_bytes = Stat(), Stat()
        self.num_alloc_retries = self.num_ooms = self.num_sync_all_streams = 0
        self.num_device_alloc = self.num_device_free = 0

    def handed_out(self, size: int, requested: int) -> None:
        """A block of ``size`` bytes serves a request of ``requested`` bytes."""
        self.allocation.add(1)
        self.allocated_bytes.add(size)
        self.active.add(1)
        self.active_bytes.add(size)
        self.requested_bytes.add(requested)

    def free_requested(self, size: int) -> None:
        self.allocation.current -= 1
        self.allocated_bytes.current -= size

    def free_completed(self, size: int, requested: int) -> None:
        self.active.current -= 1
        self.active_bytes.current -= size
        self.requested_bytes.current -= requested

    def split_changed(self, blocks: int, size: int) -> None:
        """So many more (or, negative, fewer) free blocks are parts of split segments, with so many more bytes."""
        self.inactive_split.add(blocks)
        self.inactive_split_bytes.add(size)

    def as_dict(self) -> dict[str, int]:
        """With keys such as ``allocated_bytes.all.peak``."""
        found = {f"{name}.all.{part}": getattr(getattr(self, name), part)
                 for name in PEAKED for part in ("current", "peak")}
        return found | {name: getattr(self, name) for name in COUNTED}
