"""Keys in order, with a next one: what free blocks are found by."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from typing import Generic, TypeVar

_MOST = 1024
"""Keys in a run. Putting one in or out moves a part of them, which for so few takes less than finding the place."""

Key = TypeVar("Key", int, tuple[int, int])


class Ordered(Generic[Key]):
    """Distinct keys in ascending order, as short sorted runs one after the other.

    A key's run is found by bisection among the last keys of the runs, so the cost of everything is logarithmic in the
    number of keys, but for moving the runs themselves when one in about 500 additions makes a new one.
    """

    __slots__ = ("_last", "_runs")

    def __init__(self) -> None:
        self._runs: list[list[Key]] = []
        self._last: list[Key] = []

    def __len__(self) -> int:
        return sum(map(len, self._runs))

    def __iter__(self) -> Iterator[Key]:
        for run in self._runs:
            yield from run

    def add(self, key: Key) -> None:
        runs, last = self._runs, self._last
        if not runs:
            runs.append([key])
            last.append(key)
            return
        at = bisect_left(last, key)
        if at == len(last):
            at -= 1
            last[at] = key
        run = runs[at]
        insort(run, key)
        if len(run) > _MOST:
            half = len(run) // 2
            runs.insert(at + 1, run[half:])
            del run[half:]
            last.insert(at, run[-1])

    def remove(self, key: Key) -> None:
        """Takes a key out that is in."""
        runs, last = self._runs, self._last
        at = bisect_left(last, key)
        run = runs[at]
        place = bisect_left(run, key)
        if run[place] != key:
            raise KeyError(key)
        del run[place]
        if not run:
            del runs[at], last[at]
        elif place == len(run):
            last[at] = run[-1]

    def at_least(self, key: Key) -> Key | None:
        """The smallest key that is this one or greater."""
        at = bisect_left(self._last, key)
        if at == len(self._last):
            return None
        run = self._runs[at]
        return run[bisect_left(run, key)]

    def above(self, key: Key) -> Key | None:
        """The smallest key that is greater."""
        at = bisect_right(self._last, key)
        if at == len(self._last):
            return None
        run = self._runs[at]
        return run[bisect_right(run, key)]

    def greatest(self) -> Key | None:
        return self._last[-1] if self._last else None
