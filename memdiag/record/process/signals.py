"""Letting work of ours be done before a signal's handler interrupts it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_INTERRUPTING = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def signals_wait() -> Iterator[None]:
    """Handlers of Python's for Ctrl-C and termination run when the block has ended: an exception from one of them in
    its midst would lose what is being read.

    Blocking the signals would not do: another thread of the process would take them, and Python runs the handler on
    this one. On other threads than the main one no handler runs, and nothing is done.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    before = {number: signal.getsignal(number) for number in _INTERRUPTING}
    held = [number for number, handler in before.items() if callable(handler)]
    for number in held:
        signal.signal(number, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        for number in held:
            signal.signal(number, before[number])
        for caught, frame in came:
            handler = before[signal.Signals(caught)]
            if callable(handler):
                handler(caught, frame)
