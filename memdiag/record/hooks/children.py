"""Processes that the script starts through ``multiprocessing``: they are not recorded, and that is to be said."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

from memdiag.record.patch import replaced

# Whose processes do not train: those that make batches, compile, or keep shared objects.
_HELPERS = ("torch.utils.data.", "torch._inductor.", "multiprocessing.managers")


class Children:
    """Counts them.

    Attributes:
        started: how many, but for those that cannot be training.
    """

    def __init__(self) -> None:
        self.started = 0
        self._undo: Callable[[], None] | None = None

    def start(self) -> None:
        self._undo = replaced(BaseProcess, "start", self._watch_start)

    def stop(self) -> None:
        if self._undo is not None:
            self._undo()

    def _watch_start(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def start(process: Any) -> Any:
            target = getattr(process, "_target", None)  # forgotten once it has started
            module = getattr(target, "__module__", None) or ""
            result = original(process)
            self.started += not module.startswith(_HELPERS)
            return result

        return start
