"""What refers to objects: as the collector knows it, within a budget of work."""

from __future__ import annotations

import gc
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memdiag import policy

_LEVEL_COST, _MOST_TARGETS = 22, 480  # of looking at one object, in comparisons; beyond it, Python looks at each object
_WORTH_AN_INDEX = 16  # objects looked for at once: comparing them with all references costs as much as an index
_CHUNK = 10_000


class Referrers:
    """Looks for referrers, again and again, among the objects of the moment in which it is made.

    Attributes:
        cut: there was no time to look for the referrers of all.
        own: containers of ours that refer to the script's objects: they are among the referrers.
    """

    def __init__(self, objects: list[Any]) -> None:
        self._count = len(objects)
        self._budget = policy.WALK_COMPARISONS
        self._objects = objects if self._count <= policy.WALK_INDEX else []
        self._index: _Index | None = None
        self.cut = False
        self.own: list[Any] = [self._objects]

    def of(self, targets: dict[int, Any]) -> list[Any]:
        """Objects that refer to any of the targets, which are by their id."""
        if self._index is None and self._objects and len(targets) > _WORTH_AN_INDEX:
            self._index = _Index(self._objects)
        if self._index is not None:
            return self._index.of(targets)
        targets = self._affordable(targets)
        if not targets:
            return []
        self.own.append(targets)
        if len(targets) <= _MOST_TARGETS:
            return gc.get_referrers(*targets.values())
        referents = gc.get_referents
        return [thing for thing in gc.get_objects() if any(id(child) in targets for child in referents(thing))]

    def close(self) -> None:
        self._objects.clear()
        self._index = None

    def _affordable(self, targets: dict[int, Any]) -> dict[int, Any]:
        each = self._budget // max(self._count, 1) - _LEVEL_COST
        if each < min(len(targets), _MOST_TARGETS):
            self.cut = True
            targets = {key: targets[key] for key in list(targets)[: max(each, 0)]}
        if targets:
            self._budget -= self._count * (_LEVEL_COST + min(len(targets), _MOST_TARGETS))
        return targets


class _Index:
    """All references of many objects, by what they refer to."""

    def __init__(self, objects: list[Any]) -> None:
        self._objects = objects
        parts: list[NDArray[np.int64]] = []
        lengths: list[NDArray[np.int64]] = []
        for start in range(0, len(objects), _CHUNK):
            referents = [gc.get_referents(thing) for thing in objects[start : start + _CHUNK]]
            lengths.append(np.fromiter(map(len, referents), np.int64))
            parts.append(np.fromiter(map(id, chain.from_iterable(referents)), np.int64))
        children = np.concatenate(parts)
        del parts
        order = np.argsort(children)
        self._children = children[order]
        del children
        self._parents = np.searchsorted(np.cumsum(np.concatenate(lengths)), order, side="right").astype(np.int32)

    def of(self, targets: dict[int, Any]) -> list[Any]:
        wanted = np.fromiter(targets, np.int64)
        first = np.searchsorted(self._children, wanted, side="left").tolist()
        after = np.searchsorted(self._children, wanted, side="right").tolist()
        parents = {parent for a, b in zip(first, after, strict=True) if b > a for parent in self._parents[a:b].tolist()}
        return [self._objects[parent] for parent in sorted(parents)]
