"""Putting a function of ours in the place of one of torch's, and back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


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
    replacement = functools.wraps(original)(watch(original))
    setattr(owner, name, replacement)

    def undo() -> None:
        if owner.__dict__.get(name) is replacement:
            setattr(owner, name, original)

    return undo
