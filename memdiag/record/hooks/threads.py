"""Training on a thread other than the one that started: handing the stream over."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from memdiag.record.patch import replaced


class Threads:
    """Which thread is recorded.

    The profiler sees the thread that opened it, and only that thread can close it. So the first thread gives the
    stream up where it waits for another one to end, if it has not trained itself, and whichever thread calls a module
    with gradients first then takes it, until that thread ends.

    Args:
        may_end: whether nothing is going on that an end of the stream would cut in two.
        begin: opens the stream on the calling thread.
        end: closes it there.

    Attributes:
        recorded: the recorded thread's identifier; None while nobody has the stream.
        moved: the stream went to another thread.
        missed: module calls with gradients on threads that were not recorded.
    """

    def __init__(
        self, may_end: Callable[[], bool], begin: Callable[[], None], end: Callable[[], None]
    ) -> None:
        self._may_end, self._begin, self._end = may_end, begin, end
        self.recorded: int | None = threading.get_ident()
        self._first = self.recorded
        self._trained = False
        self.moved = False
        self.missed = 0
        self._lock = threading.Lock()
        self._farewell = threading.local()
        self._undo: list[Callable[[], None]] = []

    def start(self) -> None:
        self._undo = [
            replaced(threading.Thread, "join", self._watch_wait),
            replaced(threading, "_shutdown", self._watch_wait),
        ]

    def stop(self) -> None:
        while self._undo:
            self._undo.pop()()

    def is_recorded(self) -> bool:
        return threading.get_ident() == self.recorded

    def trains(self) -> None:
        """The recorded thread has called a module with gradients: the stream stays here."""
        self._trained = True

    def elsewhere(self, grad: bool) -> None:
        """A thread that is not recorded calls a module."""
        if not grad:
            return
        if self.recorded is not None:
            self.missed += 1
            return
        with self._lock:
            if self.recorded is not None:
                return
            self.recorded = threading.get_ident()
        self.moved = True
        self._trained = True
        # Goes when the thread does, on that thread: the last moment at which the stream can be closed.
        self._farewell.last = _Last(self._gives_up)
        self._begin()

    def _gives_up(self) -> None:
        if self.is_recorded():
            self._end()
            self.recorded = None

    def _watch_wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wait(*args: Any, **kwargs: Any) -> Any:
            if self._trained or not self.is_recorded() or not self._may_end():
                return original(*args, **kwargs)
            self._end()
            self.recorded = None
            try:
                return original(*args, **kwargs)
            finally:
                with self._lock:
                    mine = self.recorded is None
                    if mine:
                        self.recorded = self._first
                if mine:
                    self._begin()

        return wait


class _Last:
    """Calls a function when it is let go."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __del__(self) -> None:
        self._call()
