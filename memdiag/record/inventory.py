"""What was there before the recording: every storage that Python's tensors know, and when it goes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from time import time_ns
from typing import Any

import torch

from memdiag.record.facts import all_tensors, innermost, plain, storage_of

Item = tuple[int, int, str, bool]


@plain
def take(known: Callable[[int], bool], gone: Callable[[int, int, int], None], no_events: bool = False) -> list[Item]:
    """Storages that were allocated unseen; on CUDA all blocks that the allocator has handed out, in their true size.

    On the CPU the profiler makes no event when they are freed, so each gets a finalizer; on other devices it does.

    Args:
        known: whether an address is that of an allocation that was seen.
        gone: called by finalizers, with the time in ns, the address and the bytes.
        no_events: nothing is recorded for now: storages of every device get a finalizer.

    Returns:
        (address, bytes, device, whether it is foreign) of each.
    """
    blocks = _cuda_blocks()
    found: dict[int, Item] = {}
    seen: set[int] = set()
    for thing in all_tensors():
        storage = storage_of(thing)
        if storage is None or storage[0] in seen or known(storage[0]):
            continue
        address, size, foreign = storage
        seen.add(address)
        device = thing.device
        if foreign or not (device.type == "cuda" and blocks):
            found[address] = address, size, str(device), foreign
        if not (no_events or foreign or device.type == "cpu"):
            continue
        weakref.finalize(innermost(thing).untyped_storage(), _note, gone, address, size).atexit = False
    return [*found.values(), *(block for block in blocks if not known(block[0]))]


def _cuda_blocks() -> list[Item]:
    """What CUDA's caching allocator has handed out, to libraries too; empty where another allocator is in use."""
    cuda: Any = torch.cuda
    if not cuda.is_initialized() or cuda.get_allocator_backend() != "native":
        return []
    blocks: list[Item] = []
    for segment in cuda.memory_snapshot():
        address = segment["address"]
        for block in segment["blocks"]:
            # Others are free, or wait for a stream: neither is in allocated_bytes.
            if block["state"] == "active_allocated":
                blocks.append((address, block["size"], f"cuda:{segment['device']}", False))
            address += block["size"]
    return blocks


def _note(gone: Callable[[int, int, int], None], address: int, size: int) -> None:
    gone(time_ns(), address, size)
