"""Writes to what a checkpoint would need again, between the forward and backward."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from memdiag.record.facts import plain, storage_of
from memdiag.record.frames import user_line
from memdiag.record.regions.calls import Fact, Key
from memdiag.trace.model import WRITTEN_LATER


class _Kept(NamedTuple):
    tensor: weakref.ref[torch.Tensor]
    forward: int
    calls: frozenset[Key]


class Later:
    """Sees the torch functions that the script calls between a forward and backward, and notes which of them write in
    place to what a module call was given or has read.

    What is written inside the forward is seen where it runs aside.

    Args:
        note: is given the number of the forward and the fact.
    """

    def __init__(self, note: Callable[[int, Fact], None]) -> None:
        self._note = note
        self._kept: dict[int, list[_Kept]] = {}  # by address
        self._count: Counter[str] = Counter()
        self._forward = 0

    def forward_begins(self, number: int, read: Mapping[int, tuple[weakref.ref[torch.Tensor], frozenset[Key]]]) -> None:
        """The script's own forward is next, after it ran aside and ``read`` what was there before, by address."""
        self._forward = number
        self._count.clear()
        for address, (tensor, calls) in read.items():
            self._kept.setdefault(address, []).append(_Kept(tensor, number, calls))

    @plain
    def given(self, path: str, tensors: Iterable[torch.Tensor]) -> None:
        """A module call begins, in the script's own forward."""
        key = path, self._count[path]
        self._count[path] += 1
        for tensor in tensors:
            found = None if isinstance(tensor, torch.nn.Parameter) else storage_of(tensor)
            if found is not None:
                kept = _Kept(weakref.ref(tensor if tensor._base is None else tensor._base), self._forward,
                             frozenset((key,)))
                self._kept.setdefault(found[0], []).append(kept)

    def over(self) -> None:
        """Backward begins, or the step is over."""
        self._kept.clear()

    @plain
    def called(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType) -> None:
        """The script calls a torch function outside all modules."""
        name = function.__name__
        written = kwargs.get("out")
        if written is None and args and (name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))):
            written = args[0]
        for tensor in tree_leaves(written):
            found = storage_of(tensor) if isinstance(tensor, torch.Tensor) else None
            for kept in self._kept.get(found[0], ()) if found is not None else ():
                if kept.tensor() is not None:  # else the memory is another's by now
                    for key in sorted(kept.calls):
                        self._note(kept.forward, Fact(*key, WRITTEN_LATER, f"Tensor.{name}", user_line(frame)))


_IN_PLACE = frozenset((
    "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__",
    "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"))
