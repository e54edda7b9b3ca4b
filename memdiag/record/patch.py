"""Putting a function of ours in the place of one of torch's, and back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
UNCOUNTED = "<memdiag, not counted: importlib _bootstrap>"
"""The name of the file of functions of ours that others are called through."""


def uncounted(function: F) -> F:
    """Makes a function of ours one that warnings pass over.

    A warning that is raised further in may count its way out to the frame that it names. Python counts no frame whose
    file is called like a part of its import system, so that ours do not change which one that is.
    """
    if isinstance(function, FunctionType):
        function.__code__ = _renamed(function.__code__)
    return function


@functools.cache
def _renamed(code: CodeType) -> CodeType:
    return code.replace(co_filename=UNCOUNTED)


def replaced(owner: Any, name: str, watch: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Puts ``watch(original)`` in the place of ``owner.name``.

    A version of torch that has no such function needs no watching: then nothing happens.

    Returns:
        What undoes it, unless somebody has put another in its place since: that one stays.
    """
    original = owner.__dict__.get(name)
    if original is None:
        return lambda: None
    # functools.wraps: whoever looks at it sees the original's name and signature.
    replacement = functools.wraps(original)(uncounted(watch(original)))
    setattr(owner, name, replacement)

    def undo() -> None:
        if owner.__dict__.get(name) is replacement:
            setattr(owner, name, original)

    return undo
