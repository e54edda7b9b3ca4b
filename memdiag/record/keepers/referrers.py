"""What refers to objects: as the collector knows it, within a budget of work."""

from __future__ import annotations

import gc
from itertools import chain, compress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memdiag import policy

_LEVEL_COST, _MOST_TARGETS = 22, 480  # of looking at one object, in comparisons; beyond it, Python looks at each object
_WORTH_AN_INDEX = 16  # objects looked for at once: comparing them with all references costs as much as an index
_CHUNK = 10_000


class Referrers:
    """Looks for referrers, again and again, in one walk. It keeps no reference to what it looks through.

    Attributes:
        cut: there was no time to look for the referrers of all.
    """

    def __init__(self, objects: int) -> None:
        self._objects = objects
        self._budget = policy.WALK_COMPARISONS
        self._index: _Index | None = None
        self.cut = False

    def of(self, targets: dict[int, Any]) -> list[Any]:
        """Objects that refer to any of the targets, which are by their id."""
        if self._index is None and self._objects <= policy.WALK_INDEX and len(targets) > _WORTH_AN_INDEX:
            self._index = _Index()
        if self._index is not None:
            return self._index.of(targets)
        targets = self._affordable(targets)
        if not targets:
            return []
        if len(targets) <= _MOST_TARGETS:
            found = gc.get_referrers(*targets.values())
        else:
            referents = gc.get_referents
            found = [thing for thing in gc.get_objects() if any(id(child) in targets for child in referents(thing))]
        return [thing for thing in found if thing is not targets]

    def _affordable(self, targets: dict[int, Any]) -> dict[int, Any]:
        each = self._budget // max(self._objects, 1) - _LEVEL_COST
        if each < min(len(targets), _MOST_TARGETS):
            self.cut = True
            targets = {key: targets[key] for key in list(targets)[: max(each, 0)]}
        if targets:
            self._budget -= self._objects * (_LEVEL_COST + min(len(targets), _MOST_TARGETS))
        return targets


class _Index:
    """All references of the moment in which it is made, by what they refer to: as numbers, so that it keeps nothing
    alive, and that nobody who counts references sees it."""

    def __init__(self) -> None:
        parents: list[NDArray[np.int64]] = []
        children: list[NDArray[np.int64]] = []
        objects = gc.get_objects()
        for start in range(0, len(objects), _CHUNK):
            chunk = objects[start : start + _CHUNK]
            referents = [gc.get_referents(thing) for thing in chunk]
            lengths = np.fromiter(map(len, referents), np.int64)
            parents.append(np.repeat(np.fromiter(map(id, chunk), np.int64), lengths))
            children.append(np.fromiter(map(id, chain.from_iterable(referents)), np.int64))
        every = np.concatenate(children)
        order = np.argsort(every)
        self._children, self._parents = every[order], np.concatenate(parents)[order]

    def of(self, targets: dict[int, Any]) -> list[Any]:
        wanted = np.fromiter(targets, np.int64)
        first = np.searchsorted(self._children, wanted, side="left").tolist()
        after = np.searchsorted(self._children, wanted, side="right").tolist()
        parents = {key for a, b in zip(first, after, strict=True) if b > a for key in self._parents[a:b].tolist()}
        objects = gc.get_objects()
        return list(compress(objects, map(parents.__contains__, map(id, objects))))
