"""What was there before the recording: every storage that Python's tensors know, and when it goes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from time import time_ns

from memdiag.record.facts import all_tensors, plain, storage_of


@plain
def take(known: Callable[[int], bool], gone: Callable[[int, int, int], None]) -> list[tuple[int, int, str, bool]]:
    """Storages that were allocated unseen.

    On the CPU the profiler makes no event when they are freed, so each gets a finalizer.

    Args:
        known: whether an address is that of an allocation that was seen.
        gone: called by finalizers, with the time in ns, the address and the bytes.

    Returns:
        (address, bytes, device, whether it is foreign) of each.
    """
    found: dict[int, tuple[int, int, str, bool]] = {}
    for thing in all_tensors():
        storage = storage_of(thing)
        if storage is None or storage[0] in found or known(storage[0]):
            continue
        address, size, foreign = storage
        found[address] = address, size, str(thing.device), foreign
        weakref.finalize(thing.untyped_storage(), _note, gone, address, size).atexit = False
    return list(found.values())


def _note(gone: Callable[[int, int, int], None], address: int, size: int) -> None:
    gone(time_ns(), address, size)
