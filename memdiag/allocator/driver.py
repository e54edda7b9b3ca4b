"""Where segments come from: what CUDA's driver does for the allocator."""

from __future__ import annotations

from typing import Protocol

from memdiag.allocator.settings import MIB

_GRANULARITY = 2 * MIB  # of device memory, which the driver hands out in such pages


class Driver(Protocol):
    """Gives memory and addresses. A replay hands in one that gives those of a recorded run."""

    def allocate(self, size: int) -> int | None:
        """The address of so many bytes; None where there is not enough."""

    def release(self, address: int, size: int) -> None:
        """Takes back what ``allocate`` gave."""

    def reserve(self, size: int) -> int:
        """The address of so much virtual space, which has no memory yet."""

    def unreserve(self, address: int, size: int) -> None:
        """Takes back what ``reserve`` gave, of which nothing is mapped any more."""

    def map(self, address: int, size: int) -> bool:
        """Puts memory behind a part of virtual space; False where there is not enough."""

    def unmap(self, address: int, size: int) -> None:
        """Takes that memory back."""

    def free(self) -> int | None:
        """Bytes that the device has left; None where that is not known."""


class AddressSpace:
    """A device's memory with addresses of our own: each new one is above all before it.

    Where the real driver puts things cannot be known. The order of addresses decides between free blocks of equal size
    alone, so a model with this differs from a device in which of several equal segments a block is in.

    Args:
        memory: bytes that may be in use at once; None without an end.
    """

    def __init__(self, memory: int | None = None, first: int = 0x7F00_0000_0000) -> None:
        self._memory = memory
        self._next = first
        self._used = 0

    def allocate(self, size: int) -> int | None:
        return self.reserve(size) if self._take(size) else None

    def release(self, address: int, size: int) -> None:
        self._used -= _in_pages(size)

    def reserve(self, size: int) -> int:
        address = self._next
        self._next += _in_pages(size)
        return address

    def unreserve(self, address: int, size: int) -> None:
        pass  # addresses are not used again

    def map(self, address: int, size: int) -> bool:
        return self._take(size)

    def unmap(self, address: int, size: int) -> None:
        self._used -= _in_pages(size)

    def free(self) -> int | None:
        return None if self._memory is None else max(self._memory - self._used, 0)

    def _take(self, size: int) -> bool:
        if self._memory is not None and self._used + _in_pages(size) > self._memory:
            return False
        self._used += _in_pages(size)
        return True


def _in_pages(size: int) -> int:
    return (size + _GRANULARITY - 1) // _GRANULARITY * _GRANULARITY
