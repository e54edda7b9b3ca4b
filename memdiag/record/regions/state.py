"""What Python code keeps between calls: a picture of it to compare with, and the way back to it."""

from __future__ import annotations

import itertools
import pickle
import random
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterable
from functools import cache
from types import CellType, CodeType, FunctionType, MethodType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from memdiag import policy
from memdiag.record.frames import holds_state, is_users

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_NUMPY = (np.random.Generator, np.random.RandomState)
_Undo = Callable[[], None]


class Same:
    """Equal to the picture of the very same object. It keeps the object, so that no other gets its id."""

    def __init__(self, thing: Any) -> None:
        self._thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self._thing is other._thing

    __hash__ = None  # type: ignore[assignment]


def picture(thing: Any, depth: int = policy.PROBED_DEPTH, seen: set[int] | None = None) -> Any:
    """Equal to another picture where nothing has changed that can be seen: items of containers, attributes of objects,
    states of random generators. Tensors are themselves; their values are none of this."""
    if isinstance(thing, _PLAIN):
        return type(thing), repr(thing) if isinstance(thing, (float, complex)) else thing
    state = _random_state(thing)
    if state is not None:
        return state
    if isinstance(thing, np.ndarray):
        return (thing.shape, thing.tobytes()) if _small(thing) else Same(thing)
    if type(thing).__module__ == itertools.__name__:
        return repr(thing)
    seen = set() if seen is None else seen
    items = items_of(thing) if depth and id(thing) not in seen and len(seen) < policy.PROBED_OBJECTS else None
    if items is None:
        return Same(thing)
    seen.add(id(thing))
    if len(items) > policy.PROBED_ITEMS:
        return type(thing), len(items)
    found = [picture(item, depth - 1, seen) for item in items]
    return [type(thing), *found] if isinstance(thing, CONTAINERS) else [Same(thing), *found]


CONTAINERS = (list, tuple, deque, set, dict)


def items_of(thing: Any) -> list[Any] | None:
    """What is in a container or an object, with the names it has there; None for what is neither."""
    if isinstance(thing, (list, tuple, deque, set)):
        return list(thing)
    if isinstance(thing, dict):
        return [part for item in thing.items() for part in item]
    mine = holds_state(thing.__class__) or isinstance(thing, (Namespace, SimpleNamespace))
    if mine and not isinstance(thing, (nn.Module, torch.Tensor)) and hasattr(thing, "__dict__"):
        return [part for item in vars(thing).items() for part in item]
    return None


def _small(array: np.ndarray[Any, Any]) -> bool:
    return array.nbytes <= policy.PROBED_BYTES and array.dtype != object


def _random_state(thing: Any) -> Any:
    """The state of a random generator; None for anything else."""
    if isinstance(thing, random.Random):
        return thing.getstate() if not isinstance(thing, random.SystemRandom) else None
    if isinstance(thing, torch.Generator):
        return thing.get_state().numpy().tobytes()
    if isinstance(thing, _NUMPY):
        return pickle.dumps(_bits(thing))
    return None


def _bits(thing: Any) -> Any:
    return thing.bit_generator.state if isinstance(thing, np.random.Generator) else thing.get_state(legacy=False)


def keep(thing: Any, undo: list[_Undo], seen: set[int], depth: int = policy.PROBED_DEPTH) -> None:
    """Notes how to put back what :func:`picture` sees of a thing."""
    if id(thing) in seen or isinstance(thing, _PLAIN) or len(seen) > policy.PROBED_OBJECTS:
        return
    seen.add(id(thing))
    back = _way_back(thing)
    if back is not None:
        undo.append(back)
    items = items_of(thing) if depth else None
    for item in items or () if items is None or len(items) <= policy.PROBED_ITEMS else ():
        keep(item, undo, seen, depth - 1)


def _way_back(thing: Any) -> _Undo | None:
    if isinstance(thing, random.Random) and not isinstance(thing, random.SystemRandom):
        state = thing.getstate()
        return lambda: thing.setstate(state)
    if isinstance(thing, torch.Generator):
        bits = thing.get_state()
        return lambda: None if torch.equal(thing.get_state(), bits) else void(thing.set_state(bits))
    if isinstance(thing, _NUMPY):
        numpys = _bits(thing)
        if isinstance(thing, np.random.Generator):
            return lambda: setattr(thing.bit_generator, "state", numpys)
        return lambda: thing.set_state(numpys)
    if isinstance(thing, np.ndarray):
        values = thing.copy() if _small(thing) and thing.flags.writeable else None
        return None if values is None else lambda: np.copyto(thing, values)
    if isinstance(thing, (list, deque)):
        sequence = list(thing)
        return lambda: _refill(thing, thing.extend, sequence)
    if isinstance(thing, (dict, set)):
        contents = thing.copy()
        return lambda: _refill(thing, thing.update, contents)
    if items_of(thing) is not None and not isinstance(thing, tuple):
        attributes = dict(vars(thing))
        return lambda: _refill(vars(thing), vars(thing).update, attributes)
    return None


def void(_: Any) -> None:
    return None


def _refill(holder: Any, fill: Callable[[Any], None], contents: Any) -> None:
    if len(holder) != len(contents) or any(
        now is not then for now, then in zip(_flat(holder), _flat(contents), strict=True)
    ):
        holder.clear()
        fill(contents)


def _flat(holder: Any) -> Iterable[Any]:
    return (part for item in holder.items() for part in item) if isinstance(holder, dict) else iter(holder)


# --- what functions of the script reach beside their arguments ------------------------------------------------------


class Reached(NamedTuple):
    """A variable outside a function: a global, or one of an enclosing function."""

    name: str
    scope: dict[str, Any] | CellType

    def value(self) -> Any:
        if isinstance(self.scope, dict):
            return self.scope.get(self.name)
        try:
            return self.scope.cell_contents
        except ValueError:  # it has no value yet
            return None

    def way_back(self) -> _Undo:
        scope, value = self.scope, self.value()
        if isinstance(scope, dict):
            return lambda: None if scope.get(self.name) is value else scope.__setitem__(self.name, value)
        return lambda: None if self.value() is value else setattr(scope, "cell_contents", value)


def code_of(kind: Any) -> tuple[FunctionType, ...]:
    """The functions of a class that are the script's own."""
    return _code_of(kind)


def forget() -> None:
    """Lets go of the script's classes."""
    _code_of.cache_clear()
    holds_state.cache_clear()


@cache
def _code_of(kind: Any) -> tuple[FunctionType, ...]:
    found = []
    for base in kind.__mro__:
        for value in vars(base).values():
            function = getattr(value, "__func__", getattr(value, "fget", value))  # of static methods, of properties
            while hasattr(function, "__wrapped__"):
                function = function.__wrapped__
            if isinstance(function, FunctionType) and is_users(function.__code__.co_filename):
                found.append(function)
    return tuple(found)


def reached(functions: Iterable[Any]) -> list[Reached]:
    """The variables that functions use, and the script's functions that these call, beside what they are given."""
    found: dict[tuple[int, str], Reached] = {}
    todo, seen = list(functions), set()
    while todo:
        function = todo.pop()
        function = function.__func__ if isinstance(function, MethodType) else function
        if not isinstance(function, FunctionType) or function in seen:
            continue
        seen.add(function)
        if not is_users(function.__code__.co_filename):
            continue
        scope = function.__globals__
        mine = [Reached(name, scope) for name in _names(function.__code__) if name in scope]
        mine += [Reached(name, cell) for name, cell in
                 zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)]
        for one in mine:
            todo.append(one.value())
            found.setdefault((id(one.scope), one.name), one)
    return list(found.values())


def _names(code: CodeType) -> set[str]:
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    return set(code.co_names).union(*map(_names, inner))
