"""What a memory snapshot says, in one form whatever version of PyTorch wrote it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

Event: TypeAlias = dict[str, Any]
"""An entry of ``device_traces`` as PyTorch wrote it: ``action``, ``addr``, ``size``, ``stream``, ``frames``, …"""
Frame: TypeAlias = dict[str, Any]
"""``name``, ``filename`` and ``line``; of all events that share it, the same object."""


@dataclass(frozen=True)
class Block:
    """A piece of a segment. Sizes in bytes.

    Attributes:
        requested_size: what was asked for; 0 for a free block, None where the file does not say.
        state: one of ``ALLOCATED``, ``WAITING`` and ``FREE`` of :mod:`memdiag.allocator.state`.
        frames: of its allocation, innermost first; none where they were not recorded.
    """

    __slots__ = ("address", "frames", "requested_size", "size", "state")

    address: int
    size: int
    requested_size: int | None
    state: str
    frames: list[Frame]


@dataclass(frozen=True)
class Segment:
    """Memory that the allocator holds in one piece; of an expandable segment, a mapped stretch.

    Attributes:
        small: whether it serves requests up to 1 MiB (``segment_type``).
        pool: ``segment_pool_id``: (0, 0) for the default pool, else of a graph's pool or a ``MemPool``.
        blocks: all of it, by ascending address.
        frames: of its own allocation.
    """

    __slots__ = ("address", "blocks", "device", "expandable", "frames", "pool", "size", "small", "stream")

    device: int
    address: int
    size: int
    stream: int
    small: bool
    pool: tuple[int, int]
    expandable: bool
    blocks: tuple[Block, ...]
    frames: list[Frame]


@dataclass(frozen=True)
class Snapshot:
    """A snapshot: the state when it was taken, and the events that led there.

    Attributes:
        path: of the file.
        segments: by device and address.
        traces: for each device its events, oldest first; empty where no history was recorded.
        settings: ``allocator_settings``; None where the file has none (PyTorch before 2.1, and some tools).
        annotations: ``external_annotations``: ``stage`` (START or END), ``name``, ``device``, ``time_us``.
        doubts: what in the file does not agree with the rest of it, in words; empty for a file of PyTorch's own.
    """

    path: str
    segments: tuple[Segment, ...]
    traces: list[list[Event]]
    settings: dict[str, Any] | None
    annotations: list[dict[str, Any]]
    doubts: tuple[str, ...]

    def devices(self) -> list[int]:
        """Numbers of the devices that have a segment or an event."""
        return sorted({segment.device for segment in self.segments}
                      | {device for device, trace in enumerate(self.traces) if trace})

    def trace(self, device: int) -> list[Event]:
        """A device's events; none where the file has no list for it."""
        return self.traces[device] if device < len(self.traces) else []
