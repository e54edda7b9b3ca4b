"""What gathers in the stream before it is read stays bounded, whatever the script does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from memdiag.record import Options, Recorder
from memdiag.record.gathering import Gathering
from memdiag.trace import Level

LIMIT = 60_000


@given(st.lists(st.tuples(st.integers(3, 300), st.integers(1, 20_000)), min_size=30, max_size=200))
def test_a_chunk_has_room_for_the_limit_and_what_one_change_of_pace_adds(steps: list[tuple[int, int]]) -> None:
    # GIVEN steps of so many marks and events, which differ as they like
    gathering = Gathering()
    marks = events = 0
    longest = 0
    for more_marks, more_events in steps:
        marks, events = marks + more_marks, events + more_events
        # WHEN each may be the end of a chunk
        if gathering.enough(Level.LIGHT, 0, marks, at_step_end=True):
            gathering.read(Level.LIGHT, 0, marks, events)
            longest = max(longest, marks)
            marks = events = 0
        # THEN none is more than twice as long as the longest before it, and the first is one step
        assert marks <= 2 * longest


@given(st.integers(1, 300), st.integers(1, 20_000))
def test_of_steps_that_are_alike_no_chunk_is_over_the_limit_by_more_than_a_step(marks: int, events: int) -> None:
    # GIVEN a run of equal steps
    gathering = Gathering()
    gathered = 0
    for _ in range(300):
        gathered += 1
        # WHEN a chunk ends where the gathering says so
        if gathering.enough(Level.LIGHT, gathered, gathered * marks, at_step_end=True):
            gathering.read(Level.LIGHT, gathered, gathered * marks, gathered * events)
            gathered = 0
        # THEN what is left to gather is within the limit
        assert gathered * events <= LIMIT


@given(st.integers(100, 5_000), st.integers(10, 300), st.integers(100, 5_000))
def test_many_small_calls_between_large_steps_do_not_hide_them(calls: int, steps: int, events: int) -> None:
    # GIVEN thousands of calls that leave next to nothing, then steps of many events, again and again
    gathering = Gathering()
    ended = marks = gathered = 0

    def come(end: int, more_marks: int, more_events: int) -> None:
        nonlocal ended, marks, gathered
        ended, marks, gathered = ended + end, marks + more_marks, gathered + more_events
        if gathering.enough(Level.LIGHT, ended, marks, at_step_end=bool(end)):
            gathering.read(Level.LIGHT, ended, marks, gathered)
            ended = marks = gathered = 0

    most = 0
    for _ in range(3):
        for _ in range(calls):
            come(0, 3, 2)
            most = max(most, gathered)
        for _ in range(steps):
            come(1, 7, events)
            most = max(most, gathered)
    # THEN what gathers is within the limit
    assert most <= LIMIT + events


@pytest.mark.parametrize(("level", "model", "example", "calls"), [
    (Level.FULL, nn.GRU(4, 4), torch.ones(60, 2, 4), 160),  # thousands of events for one mark
    (Level.LIGHT, nn.Sequential(*(nn.Linear(4, 4) for _ in range(80))), torch.ones(2, 4), 1500),
])
def test_a_long_evaluation_is_read_in_parts(
    level: Level, model: nn.Module, example: torch.Tensor, calls: int, tmp_path: Path
) -> None:
    # GIVEN a recording that counts what it reads at once
    recorder = Recorder(tmp_path / "run.mdiag", Options(steps=None if level is Level.FULL else (0, 0)))
    read = recorder._read_chunk
    parts: list[int] = []

    def counting(*args: Any) -> None:
        before = recorder._consumer.events_read
        read(*args)
        parts.append(recorder._consumer.events_read - before)

    recorder._read_chunk = counting  # type: ignore[method-assign]
    # WHEN it evaluates for long, without a step
    with recorder, torch.no_grad():
        for _ in range(calls):
            model(example)
    # THEN it was read now and then, however rarely it is looked at who holds what
    assert sum(parts) > 3 * LIMIT
    assert max(parts) < LIMIT + 3 * sum(parts) / calls  # read before a call, and told by the chunk before
