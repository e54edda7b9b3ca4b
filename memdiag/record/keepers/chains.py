"""A way from a root down to a tensor, link by link, and how the script would write it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from logging import LogRecord
from types import CellType, CodeType, FrameType, FunctionType, MethodType, TracebackType
from typing import Any

import torch
from torch import nn

from memdiag.record.frames import locals_of
from memdiag.record.hooks.saves import Packed
from memdiag.record.keepers.roots import GENERATOR, GLOBAL, LOCAL, Root, frame_of
from memdiag.trace.model import BOUNDED_ITEM, ITS_GRAPH

VARIABLE, MODULE_VARIABLE, ATTRIBUTE, ITEM, CELL, CACHE, RECORD, GRADIENT, GRAPH, OTHER = range(10)
NAMED = frozenset({VARIABLE, MODULE_VARIABLE, ATTRIBUTE, CELL, CACHE, RECORD})
ANY = "[*]"

Hops = dict[tuple[int, int], int]

CONTAINERS = (list, tuple, set, frozenset, deque)
_MODULE_PARTS = frozenset({"_modules", "_parameters", "_buffers"})
_MOST_SLOTS = 100  # of a class, looked through for an attribute


@dataclass(frozen=True)
class Link:
    """One step of a chain.

    Attributes:
        kind: VARIABLE, ATTRIBUTE…
        text: how the script would write it; ANY for an item whose key says little.
        at: position of the object that it leads to.
        name: of the variable, the attribute; of a RECORD, the line that made it.
        owner: class of the object that has the attribute.
        code: of the function that has the variable.
        file: of the module that has the variable.
    """

    kind: int
    text: str
    at: int
    name: str = ""
    owner: type | None = None
    code: CodeType | None = None
    file: str | None = None


def links(root: Root, things: list[Any], hops: Hops) -> list[Link]:
    """The links of a chain.

    Args:
        things: from what the root is, or is bound to, to the tensor.
        hops: steps that autograd's graph stands for: (id of the parent, id of the child) -> GRAPH or GRADIENT.
    """
    found: list[Link] = []
    if root.kind == LOCAL:
        found.append(Link(VARIABLE, root.name, 0, root.name, code=root.code, file=root.file))
    at = 0
    while at < len(things) - 1:
        link = _link(root, things, at, hops, first=not found)
        found.append(link)
        at = link.at
    return found


def _link(root: Root, things: list[Any], at: int, hops: Hops, first: bool) -> Link:
    parent, child = things[at], things[at + 1]
    dot = "" if first else "."
    arrow = "" if first else " → "
    if at == 0 and root.kind == GLOBAL:
        name = _key(parent, child)
        return Link(MODULE_VARIABLE, str(name), 1, str(name), file=root.file)
    if isinstance(parent, Packed):
        return Link(GRAPH, " → saved tensor", at + 1)
    hop = hops.get((id(parent), id(child)))
    if hop == GRADIENT:
        return Link(GRADIENT, f"{dot}grad", at + 1)
    if hop == GRAPH:
        return Link(GRAPH, f"{arrow}{ITS_GRAPH} ({_node_name(parent)} …)", at + 1)
    if isinstance(parent, type):
        if isinstance(child, dict) and at + 2 < len(things):  # the class's own dictionary
            name = str(_key(child, things[at + 2]))
            return Link(ATTRIBUTE, f"{parent.__qualname__}.{name}", at + 2, name, owner=parent)
        return Link(OTHER, f"{arrow}{parent.__qualname__}", at + 1)
    if isinstance(parent, torch.Tensor) and isinstance(child, torch.Tensor):
        return Link(OTHER, f"{dot}_base" if parent._base is child else f"{dot}grad", at + 1)
    if isinstance(parent, FunctionType):
        return _of_function(parent, things, at, arrow)
    if type(parent).__name__ == "_lru_cache_wrapper":
        code = getattr(getattr(parent, "__wrapped__", None), "__code__", None)
        skip = 2 if isinstance(child, dict) and at + 2 < len(things) else 1
        # With or without a limit: the usual one, of 128 results, is none for tensors.
        return Link(CACHE, f"{arrow}its cache", at + skip, code=code, file=getattr(code, "co_filename", None))
    if isinstance(parent, MethodType):
        return Link(OTHER, f"{arrow}{parent.__func__.__qualname__}", at + 1)
    if isinstance(parent, CellType):
        return Link(OTHER, f"{arrow}closure", at + 1)
    if isinstance(parent, BaseException) and isinstance(child, TracebackType):
        return Link(OTHER, f"{dot}__traceback__", at + 1)
    if isinstance(parent, BaseException) and child is parent.args:
        return Link(OTHER, f"{dot}args", at + 1)
    if isinstance(parent, TracebackType):
        return Link(OTHER, "", at + 1)
    frame = parent if isinstance(parent, FrameType) else frame_of(parent)
    if frame is not None:
        return _of_frame(frame, child, at, root if at == 0 and root.kind == GENERATOR else None, arrow)
    if isinstance(parent, LogRecord):
        return Link(RECORD, f"{arrow}log record", at + 1, f"{parent.pathname}:{parent.lineno}")
    attributes = getattr(parent, "__dict__", None)
    if isinstance(attributes, dict):
        if child is attributes and at + 2 < len(things):
            return _attribute(parent, str(_key(attributes, things[at + 2])), things, at + 2, dot)
        if child is not attributes:
            for name, value in attributes.items():
                if value is child:
                    return _attribute(parent, str(name), things, at + 1, dot)
    if isinstance(parent, dict):
        key = _key(parent, child)
        return Link(ITEM, f"[{key!r}]" if isinstance(key, str) else ANY, at + 1)
    if isinstance(parent, CONTAINERS):
        most = parent.maxlen if isinstance(parent, deque) else None
        return Link(ITEM, ANY if most is None else BOUNDED_ITEM.format(most), at + 1)
    slot = _slot(parent, child)
    if slot is not None:
        return _attribute(parent, slot, things, at + 1, dot)
    return Link(OTHER, f" → {type(child).__name__}", at + 1)


def _key(mapping: dict[Any, Any], child: Any) -> Any:
    return next((key for key, value in mapping.items() if value is child), "?")


def _attribute(parent: Any, name: str, things: list[Any], at: int, dot: str) -> Link:
    owner = getattr(type(parent), "_forward_cls", None) or type(parent)  # a node of a custom Function: its context
    part = things[at]
    if isinstance(parent, nn.Module) and name in _MODULE_PARTS and isinstance(part, dict) and at + 1 < len(things):
        name = str(_key(part, things[at + 1]))
        return Link(ATTRIBUTE, f"[{name}]" if name.isdigit() else f"{dot}{name}", at + 1, name, owner=owner)
    return Link(ATTRIBUTE, f"{dot}{name}", at, name, owner=owner)


def _slot(parent: Any, child: Any) -> str | None:
    tried = 0
    for kind in type(parent).__mro__:
        names = vars(kind).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else tuple(names):
            tried += 1
            member = vars(kind).get(name)
            if tried > _MOST_SLOTS or member is None:
                continue
            try:
                if member.__get__(parent) is child:
                    return str(name)
            except AttributeError:  # not set
                continue
    return None


def _of_function(parent: FunctionType, things: list[Any], at: int, arrow: str) -> Link:
    code, child = parent.__code__, things[at + 1]
    text = f"{arrow}{parent.__qualname__}()"
    if child is parent.__closure__ and at + 3 < len(things):
        for name, cell in zip(code.co_freevars, parent.__closure__ or (), strict=True):
            if cell is things[at + 2]:
                return Link(CELL, f"{text} → {name}", at + 3, name, code=code, file=code.co_filename)
    defaults = parent.__defaults__
    if defaults is not None and child is defaults and at + 2 < len(things):
        names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
        for name, value in zip(names, defaults, strict=True):
            if value is things[at + 2]:
                return Link(VARIABLE, f"{text} → {name}", at + 2, name, code=code, file=code.co_filename)
    if child is parent.__dict__ and at + 2 < len(things):
        name = str(_key(parent.__dict__, things[at + 2]))
        return Link(ATTRIBUTE, f"{arrow}{parent.__qualname__}.{name}", at + 2, name, owner=FunctionType)
    return Link(OTHER, text, at + 1)


def _of_frame(frame: FrameType, child: Any, at: int, root: Root | None, arrow: str) -> Link:
    code = frame.f_code
    if isinstance(child, FrameType):
        return Link(OTHER, "", at + 1)
    name = next((name for name, value in locals_of(frame).items() if value is child), None)
    if name is None:
        return Link(OTHER, f"{arrow}{code.co_name}()", at + 1)
    text = name if root is not None else f"{arrow}locals of {code.co_name}() → {name}"
    return Link(VARIABLE, text, at + 1, name, code=code, file=code.co_filename)


def _node_name(head: Any) -> str:
    node = head.grad_fn if isinstance(head, torch.Tensor) else head
    return str(node.name()).rpartition("::")[2] if node is not None else "AccumulateGrad"
