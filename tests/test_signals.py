"""Signals wait while the recording reads what it has heard."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from memdiag.record.process.signals import SignalsWait


def work(number: signal.Signals, said: list[str]) -> None:
    with SignalsWait():
        os.kill(os.getpid(), number)
        said.append("block done")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_handler_runs_after_the_block(number: signal.Signals) -> None:
    # GIVEN a handler of the script's that raises
    said: list[str] = []

    def handler(*_: object) -> None:
        said.append("handled")
        raise InterruptedError

    before = signal.signal(number, handler)
    try:
        # WHEN the signal comes inside the block
        with pytest.raises(InterruptedError):
            work(number, said)
        # THEN the block was done first, and the handler is in place again
        assert said == ["block done", "handled"]
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)


def test_an_ignored_signal_stays_ignored() -> None:
    # GIVEN a script that ignores termination, WHEN it comes, THEN nothing happens
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with SignalsWait():
            os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_other_threads_are_left_alone() -> None:
    # GIVEN a thread, which cannot set handlers, WHEN it reads, THEN nothing is raised
    errors: list[BaseException] = []

    def read() -> None:
        try:
            with SignalsWait():
                pass
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    assert errors == []
