"""Observes a real run and writes its trace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memdiag.record.options import Options

if TYPE_CHECKING:
    from memdiag.record.recorder import Recorder

__all__ = ["Options", "Recorder"]


def __getattr__(name: str) -> Any:
    # Late, because the recorder imports torch, and torch reads its environment then: a script's first lines may set it.
    if name == "Recorder":
        from memdiag.record.recorder import Recorder

        return Recorder
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
