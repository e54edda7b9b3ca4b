"""Letting work of ours be done before a signal's handler interrupts it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import NoReturn

_INTERRUPTING = (signal.SIGINT, signal.SIGTERM)


class SignalsKept:
    """Keeps handlers of Python's for Ctrl-C and termination from running between :meth:`hold` and :meth:`release`.

    Blocking the signals would not do: another thread of the process would take them, and Python runs the handler on
    this one. On other threads than the main one no handler runs, and nothing is done.
    """

    def __init__(self) -> None:
        self._due: list[Callable[[], object]] = []
        self._before: dict[int, Callable[[int, FrameType | None], object]] = {}

    def hold(self) -> None:
        """Keeps them from now on. Where it raises, it was what a handler raised just before, and nothing is kept."""
        if threading.current_thread() is not threading.main_thread():
            return
        handlers = {number: signal.getsignal(number) for number in _INTERRUPTING}
        self._before = {number: handler for number, handler in handlers.items() if callable(handler)}
        try:
            for number in self._before:
                signal.signal(number, self._keep)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Puts the handlers back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def deliver(self) -> None:
        """Runs the handlers that are due; what one of them raises comes out, and the others wait on."""
        while self._due:
            self._due.pop(0)()

    def is_due(self, error: BaseException) -> None:
        """A handler ran before it could be kept: what it raised is for :meth:`deliver` to raise."""
        self._due.append(partial(_raise, error.with_traceback(None)))

    def interruptible(self, action: Callable[[], object]) -> BaseException | None:
        """Runs something that signals may interrupt, while they are kept otherwise; returns what it raised."""
        raised: BaseException | None = None
        try:
            self.release()
            action()
        except BaseException as error:
            raised = error
        while True:
            try:
                self.hold()
                return raised
            except BaseException as error:
                raised = error if raised is None else raised

    def _keep(self, number: int, frame: FrameType | None) -> None:
        self._due.append(partial(self._before[number], number, frame))


class SignalsWait:
    """A block in which no handler runs: an exception from one in its midst would lose what is being read. They run
    when it has ended.

    A class, because the frames of a generator's context manager would be in the exception's traceback.
    """

    def __enter__(self) -> None:
        self._kept = SignalsKept()
        self._kept.hold()

    def __exit__(self, *_: object) -> None:
        self._kept.release()
        self._kept.deliver()


def _raise(error: BaseException) -> NoReturn:
    raise error
