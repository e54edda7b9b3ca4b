"""Which containers take the memory that a process gains beside its tensors: those whose arrays have become more."""

from __future__ import annotations

import array
import gc
import inspect
import mmap
import sys
from collections import defaultdict, deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch

from memdiag import policy
from memdiag.record.facts import plain, storage_of
from memdiag.record.frames import is_users, locals_of

STOPPED = "who keeps memory beside the tensors: there are more objects than a look has time for"
_RAW = frozenset({bytes, bytearray, array.array})
_BUILT_IN: tuple[type, ...] = (list, dict, set, frozenset, deque)
_NO_CONTAINERS: tuple[type, ...] = (tuple, type, FunctionType, CodeType, FrameType, ModuleType, torch.Tensor)
_MOST_REMEMBERED = 64  # parts of a container whose ids are kept to the next look
_MOST_KEYS = 16  # of a dictionary that is one of a kind by its keys, as a record is
_MOST_FOUND = 3


class Part(NamedTuple):
    """One of the objects that make a container grow.

    Attributes:
        things: the container, a tuple in it where there is one, and the array.
        group: parts with the same come from the same growth.
        bytes: that the container keeps, or all containers of its kind together.
    """

    things: tuple[Any, ...]
    group: int
    bytes: int


@dataclass(frozen=True)
class _Entry:
    """A container at a look: no reference to it."""

    type: type
    kind: Hashable
    bytes: int
    first: int  # id of its oldest part
    count: int
    parts: frozenset[int]  # their ids, where they are few


@dataclass
class _Found:
    """A container while a look goes on.

    Attributes:
        key: it has at the next look, if it is there then.
    """

    key: Hashable
    entry: _Entry
    parts: list[tuple[int, tuple[Any, ...]]] = field(repr=False)  # bytes, and the way down: the oldest first


class Containers:
    """Looks for containers whose arrays have become more since the last look.

    A look happens where the process has grown beside its tensors, and goes once over all objects that the garbage
    collector knows. NumPy's arrays are none of these, so they are looked for in what is. Nothing of the script's is
    kept from look to look but numbers.
    """

    def __init__(self) -> None:
        self._least: int | None = None  # bytes beside the tensors, the least at any step's end
        self._grown = 0
        self._since = 0  # bytes by which the process grew from the last look to this
        self._before: dict[Hashable, _Entry] | None = None

    def due(self, beside: int) -> bool:
        """Whether the process has grown enough for a look.

        Args:
            beside: bytes of the process that are not tensors, at a step's end.
        """
        first = self._least is None
        self._least = beside if self._least is None else min(self._least, beside)
        grown = beside - self._least
        if first or grown < max(policy.HOST_LOOK_BYTES, policy.LOOK_AGAIN * self._grown):
            return False
        self._since, self._grown = grown - self._grown, grown
        return True

    @plain
    def look(self) -> tuple[list[Part], str | None]:
        """Parts of the containers that have grown the most since the last look, a few of each; none at the first look.

        Returns:
            The parts, and what the look had no time for: None where it saw all.
        """
        found = _survey()
        if found is None:
            self._before = None
            return [], STOPPED
        before, self._before = self._before, {one.key: one.entry for one in found}
        return ([] if before is None else _grown(found, before, self._since)), None


def _grown(found: list[_Found], before: dict[Hashable, _Entry], since: int) -> list[Part]:
    """What has grown by a share of the process's own growth: containers, and kinds of which there are more."""
    growth: dict[Hashable, int] = defaultdict(int)  # of a kind: of its containers that were not there, or are no more
    total: dict[Hashable, int] = defaultdict(int)
    for entry in before.values():
        growth[entry.kind] -= entry.bytes
    single: list[tuple[int, _Found]] = []
    fresh: dict[Hashable, list[_Found]] = defaultdict(list)
    for one in found:
        entry, then = one.entry, before.get(one.key)
        total[entry.kind] += entry.bytes
        growth[entry.kind] += entry.bytes
        if then is not None and _is_same(entry, then):
            growth[entry.kind] -= entry.bytes - then.bytes
            single.append((entry.bytes - then.bytes, one))
        else:
            fresh[entry.kind].append(one)
    wanted: list[tuple[int, int, list[tuple[Any, ...]]]] = [
        (grown, one.entry.bytes, _new_parts(one, before[one.key])) for grown, one in single]
    for kind, listed in fresh.items():
        some = [listed[at] for at in sorted({0, len(listed) // 2, len(listed) - 1})]
        wanted.append((growth[kind], total[kind], [max(one.parts, key=lambda part: part[0])[1] for one in some]))
    enough = max(1, round(policy.HOST_CONTAINER_SHARE * since))
    wanted = sorted((one for one in wanted if one[0] >= enough), key=lambda one: -one[0])[:_MOST_FOUND]
    return [Part(things, group, kept) for group, (_, kept, parts) in enumerate(wanted) for things in parts]


def _is_same(entry: _Entry, then: _Entry) -> bool:
    """Whether what is at an address is what was there at the look before: lists often follow one another there."""
    if entry.type is not then.type:
        return False
    return not issubclass(entry.type, _BUILT_IN) or entry.first == then.first or not entry.parts.isdisjoint(then.parts)


def _new_parts(one: _Found, then: _Entry) -> list[tuple[Any, ...]]:
    """The oldest and the newest part that came since the look before; where parts were replaced, the largest of these.

    What was replaced, such as an attribute, was bound to another array: each part has its own statement then.
    """
    new = [part for part in one.parts if id(part[1][-1]) not in then.parts] or one.parts
    if one.entry.count <= then.count:
        return [max(new, key=lambda part: part[0])[1]]
    return [new[at][1] for at in sorted({0, len(new) - 1})]


# --- one look -------------------------------------------------------------------------------------------------------


def _survey() -> list[_Found] | None:
    """All containers with arrays, or the like, right in them; None where there are too many objects to look at."""
    measure = _Measure()
    found: dict[Hashable, _Found] = {}
    if not _add_objects(found, measure):
        return None
    # Only now: while all objects are listed, what a frame shows its variables with could not be emptied again.
    _add_variables(found, measure)
    return list(found.values())


def _add_objects(found: dict[Hashable, _Found], measure: _Measure) -> bool:
    """Adds what the collector knows, and what is right in that. False where there is too much."""
    work = 0
    things = gc.get_objects()
    skipped = {kind for kind in set(map(type, things))
               if issubclass(kind, _NO_CONTAINERS) or str(kind.__module__).startswith("memdiag.")}
    namespaces = {id(vars(module)) for module in list(sys.modules.values()) if isinstance(module, ModuleType)}
    may_own: list[tuple[Any, dict[Any, Any]]] = []
    for thing in things:
        kind = type(thing)
        if kind in skipped or kind in _BUILT_IN and len(thing) > policy.HOST_LOOK_ITEMS:
            continue
        inside = gc.get_referents(thing)  # in C, for all types alike: no code of the script's is asked
        work += 1 + len(inside)
        if work > policy.HOST_LOOK_OBJECTS:
            return False
        types = set(map(type, inside))
        if measure.may_have(types):
            _add(found, thing, inside, measure, id(thing) in namespaces)
        if dict not in types:
            continue
        for one in inside:
            if type(one) is not dict or len(one) > policy.HOST_LOOK_ITEMS:
                continue
            work += len(one)
            if measure.may_have(set(map(type, one.values()))):
                _add_unseen(found, one, measure)
                if kind.__dictoffset__ and not issubclass(kind, _BUILT_IN):
                    may_own.append((thing, one))
    for thing, mapping in may_own:
        if id(mapping) in found and object.__getattribute__(thing, "__dict__") is mapping:
            _give_to_owner(found, thing, mapping)
    return True


def _give_to_owner(found: dict[Hashable, _Found], thing: Any, attributes: dict[str, Any]) -> None:
    """Makes one container of an object and its dictionary, whether it happens to have one by now or not."""
    parts = [(size, (thing, *way)) for size, way in found.pop(id(attributes)).parts]
    if id(thing) not in found:
        found[id(thing)] = _Found(id(thing), _entry(thing, parts, namespace=False), parts)


def _add(found: dict[Hashable, _Found], thing: Any, inside: list[Any], measure: _Measure, namespace: bool) -> None:
    if issubclass(type(thing), list):
        inside.reverse()  # a list shows its items last first
    parts = [(size, (thing, *way)) for size, way in measure.parts(inside)]
    if parts:
        found[id(thing)] = _Found(id(thing), _entry(thing, parts, namespace), parts)


def _add_unseen(found: dict[Hashable, _Found], thing: dict[Any, Any], measure: _Measure) -> None:
    """Adds a dictionary that the collector does not know, for no part of it could be in a cycle; arrays cannot."""
    if id(thing) in found or gc.is_tracked(thing) or len(thing) > policy.HOST_LOOK_ITEMS:
        return
    _add(found, thing, gc.get_referents(thing), measure, namespace=False)


def _add_variables(found: dict[Hashable, _Found], measure: _Measure) -> None:
    """Adds the arrays that variables of the script's running functions refer to, each as a container of its own, and
    their dictionaries that the collector does not know."""
    for top in sys._current_frames().values():
        frame: FrameType | None = top
        while frame is not None:
            code = frame.f_code
            if code.co_flags & inspect.CO_OPTIMIZED and is_users(code.co_filename):
                for name, value in locals_of(frame).items():
                    if type(value) is dict:
                        _add_unseen(found, value, measure)
                        continue
                    parts = measure.parts([value])
                    if len(parts) == 1 and not gc.is_tracked(value):
                        key = code.co_filename, code.co_firstlineno, name
                        size, way = parts[0]
                        entry = _Entry(type(value), key, size, id(way[-1]), 1, frozenset({id(way[-1])}))
                        found[key] = _Found(key, entry, parts)
            frame = frame.f_back
    # As in roots.py: a frame that refers to itself would live on, with all that its callers refer to.
    del top, frame


def _entry(thing: Any, parts: list[tuple[int, tuple[Any, ...]]], namespace: bool) -> _Entry:
    kind: Any = type(thing)
    if issubclass(type(thing), dict):
        keys = list(dict.keys(thing)) if len(parts) <= _MOST_KEYS and not namespace else []
        few = 0 < len(keys) <= _MOST_KEYS
        kind = (type(thing), tuple(sorted(key for key in keys if type(key) is str)) if few else id(thing))
    ids = [id(things[-1]) for _, things in parts]
    return _Entry(type(thing), kind, sum(size for size, _ in parts), ids[0], len(ids),
                  frozenset(ids if len(ids) <= _MOST_REMEMBERED else ()))


class _Measure:
    """Measures what is right in a container, or in a tuple in it. Types are judged once."""

    def __init__(self) -> None:
        numpy: Any = sys.modules.get("numpy")  # never imported for this
        self._array: type | None = getattr(numpy, "ndarray", None)
        self._judged: set[type] = set()
        self._telling: set[type] = set()
        self._arrays: set[type] = set()
        self._tuples: set[type] = set()

    def may_have(self, types: Iterable[type]) -> bool:
        """Whether something of one of these types has bytes, or is a tuple."""
        telling = False
        for kind in types:
            if kind not in self._judged:
                self._judge(kind)
            telling = telling or kind in self._telling
        return telling

    def _judge(self, kind: type) -> None:
        self._judged.add(kind)
        if self._array is not None and issubclass(kind, self._array):
            self._arrays.add(kind)
        elif issubclass(kind, tuple):
            self._tuples.add(kind)
        elif kind not in _RAW and kind is not torch.Tensor:
            return
        self._telling.add(kind)

    def parts(self, inside: list[Any]) -> list[tuple[int, tuple[Any, ...]]]:
        """Bytes, and the way down, of each that has any of its own; what several share counts once."""
        found: list[tuple[int, tuple[Any, ...]]] = []
        counted: set[int] = set()
        for thing in inside:
            kind = type(thing)
            if kind not in self._judged:
                self._judge(kind)
            if kind not in self._telling:
                continue
            ways = [(thing, part) for part in tuple.__iter__(thing)] if kind in self._tuples else [(thing,)]
            for way in ways:
                size = self._bytes(way[-1], counted)
                if size:
                    found.append((size, way))
        return found

    def _bytes(self, part: Any, counted: set[int]) -> int:
        kind = type(part)
        if kind in _RAW:
            key, size = id(part), sys.getsizeof(part)
        elif kind is torch.Tensor:
            storage = storage_of(part) if part.device.type == "cpu" else None
            if storage is None or not storage[2]:
                return 0  # the allocator's: the tensors' own account has it
            key, size, _ = storage
        elif self._array is not None and (kind in self._arrays or issubclass(kind, self._array)):
            owner = self._owner(part)
            if owner is None:
                return 0
            if type(owner) in _RAW:
                key, size = id(owner), sys.getsizeof(owner)
            else:
                key, size = id(owner), int(self._of_array("nbytes", owner))
        else:
            return 0
        if key in counted:
            return 0
        counted.add(key)
        return size

    def _owner(self, view: Any) -> Any:
        """What has an array's memory; None where that is a tensor, or a file that is mapped."""
        while True:
            base = self._of_array("base", view)
            if isinstance(base, (torch.Tensor, mmap.mmap)):
                return None
            if type(base) in _RAW:
                return base
            if self._array is None or not issubclass(type(base), self._array):
                return view
            view = base

    def _of_array(self, name: str, owner: Any) -> Any:
        """An attribute as NumPy has it, whatever a subclass makes of it."""
        return getattr(self._array, name).__get__(owner)
