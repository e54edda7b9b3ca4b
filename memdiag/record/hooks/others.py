"""Profilers of the script's own, which the recording must make way for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.autograd.profiler as profiler

from memdiag.record.patch import replaced


class OtherProfilers:
    """Notices when the script starts and stops a profiler.

    Args:
        make_way: called before one starts.
        step: the current step.
    """

    def __init__(self, make_way: Callable[[], None], step: Callable[[], int]) -> None:
        self._make_way, self._step = make_way, step
        self._stopped_in: int | None = None
        self._undo: list[Callable[[], None]] = []

    def start(self) -> None:
        self._undo = [
            replaced(profiler, "_prepare_profiler", self._watch_prepare),
            replaced(profiler, "_disable_profiler", self._watch_disable),
        ]

    def stop(self) -> None:
        while self._undo:
            self._undo.pop()()

    def quiet_since(self, step: int) -> bool:
        """Whether none runs, and a whole step has passed since the last one stopped.

        What began under it writes its end into memory that it has given back, so nothing of it may still be open.
        """
        return self._stopped_in is not None and step > self._stopped_in + 1

    def _watch_prepare(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def prepare(*args: Any, **kwargs: Any) -> Any:
            self._make_way()
            self._stopped_in = None
            return original(*args, **kwargs)

        return prepare

    def _watch_disable(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def disable(*args: Any, **kwargs: Any) -> Any:
            self._stopped_in = self._step()
            return original(*args, **kwargs)

        return disable
