"""Live bytes over the run: every event, its time, and the peak."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memdiag.trace.model import NONE, Pool, Trace

Bytes = NDArray[np.int64]


@dataclass(frozen=True)
class Lives:
    """Birth and death of every allocation, by event number.

    Attributes:
        born: event of birth; NONE for memory from before the recording.
        died: event of death; one past the last event for what was alive at the end.
        born_ns, died_ns: the same as times; ``died_ns`` is NONE for what was alive at the end.
    """

    born: NDArray[np.int64]
    died: NDArray[np.int64]
    born_ns: NDArray[np.int64]
    died_ns: NDArray[np.int64]


def lives(trace: Trace) -> Lives:
    allocations, frees = trace["allocations"], trace["frees"]
    count = len(allocations["event"])
    died = np.full(count, event_count(trace), dtype=np.int64)
    died_ns = np.full(count, NONE, dtype=np.int64)
    died[frees["allocation"]] = frees["event"]
    died_ns[frees["allocation"]] = frees["time_ns"]
    return Lives(allocations["event"], died, allocations["time_ns"], died_ns)


def event_count(trace: Trace) -> int:
    """Number of memory events on all devices."""
    last = NONE
    for table in ("allocations", "frees"):
        events = trace[table]["event"]
        if len(events):
            last = max(last, int(events.max()))
    return last + 1


@dataclass(frozen=True)
class Timeline:
    """Allocated bytes of one device's allocator after each memory event of the run.

    Attributes:
        device: "cpu", "cuda:0"…
        start_bytes: allocated before the first event.
        live: bytes after event ``k``; events of other devices and pools leave it as it was.
        time_ns: time of event ``k``.
    """

    device: str
    start_bytes: int
    live: Bytes
    time_ns: NDArray[np.int64]

    @property
    def peak_bytes(self) -> int:
        return max(self.start_bytes, int(self.live.max(initial=0)))

    @property
    def peak_event(self) -> int:
        """The event whose allocation made the peak; NONE where it came before the first event."""
        return int(self.live.argmax()) if self.live.max(initial=0) > self.start_bytes else NONE


def devices(trace: Trace) -> list[str]:
    """Devices that PyTorch's allocators served, accelerators first: the first is the one a report is about."""
    names: list[str] = trace.about.get("devices", [])
    allocations = trace["allocations"]
    used = [names[i] for i in np.unique(allocations["device"][allocations["pool"] == Pool.ALLOCATOR]) if i != NONE]
    return sorted(used, key=lambda name: (name == "cpu", len(name), name)) or ["cpu"]


def of_device(trace: Trace, device: str, pool: Pool = Pool.ALLOCATOR) -> NDArray[np.bool_]:
    """Which allocations belong to a device and pool."""
    names: list[str] = trace.about.get("devices", [])
    index = names.index(device) if device in names else NONE
    allocations = trace["allocations"]
    mine: NDArray[np.bool_] = (allocations["device"] == index) & (allocations["pool"] == pool)
    return mine


def timeline(trace: Trace, device: str, pool: Pool = Pool.ALLOCATOR) -> Timeline:
    life = lives(trace)
    mine = of_device(trace, device, pool)
    size = trace["allocations"]["bytes"]
    events = event_count(trace)
    delta = np.zeros(events, dtype=np.int64)
    time_ns = np.zeros(events, dtype=np.int64)
    born = life.born != NONE
    time_ns[life.born[born]] = life.born_ns[born]
    died = life.died < events
    time_ns[life.died[died]] = life.died_ns[died]
    np.add.at(delta, life.born[mine & born], size[mine & born])
    np.subtract.at(delta, life.died[mine & died], size[mine & died])
    start = int(size[mine & ~born].sum())
    return Timeline(device, start, start + np.cumsum(delta), time_ns)
