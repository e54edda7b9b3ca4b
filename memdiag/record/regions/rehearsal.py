"""The step that plans are made from: each of its forwards runs aside from the stream before the script runs it.

Up to this step the backwards and the optimizers' steps are timed, by the same clock as the second forward.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import torch
from torch import nn

from memdiag.record.clock import worked_ns
from memdiag.record.hooks.lines import Lines
from memdiag.record.hooks.loop import Loop
from memdiag.record.hooks.modules import Modules
from memdiag.record.marks import AUTOCAST_END, Marks
from memdiag.record.patch import replaced
from memdiag.record.reading.consume import Consumer
from memdiag.record.reading.rows import Rows
from memdiag.record.regions.calls import Fact
from memdiag.record.regions.later import Later
from memdiag.record.regions.probe import probe
from memdiag.record.regions.second import second_forward
from memdiag.record.regions.state import forget
from memdiag.trace import Phase


class Rehearsals:
    """Sees what the forwards of one step do when they run twice, and when Python lets go of what they make.

    Args:
        step: counted from 0.
        rows: where what is seen goes.
        active: whether the recording sees what happens.
        aside: a context in which nothing is recorded; it says whether that can be.
        say: notes what was not seen.
    """

    def __init__(
        self, step: int, rows: Rows, marks: Marks, modules: Modules, lines: Lines, loop: Loop, consumer: Consumer,
        active: Callable[[], bool], aside: Callable[[], AbstractContextManager[bool]], say: Callable[[str], None],
    ) -> None:
        self._step, self._rows, self._marks = step, rows, marks
        self._modules, self._lines, self._loop, self._consumer = modules, lines, loop, consumer
        self._active, self._aside, self._say = active, aside, say
        self._count = 0  # forwards that ran aside
        self._making: set[str] = set()
        self._not_keepable: set[str] = set()
        self._later = Later(self._note)

    def start(self) -> None:
        self._undo = replaced(torch, "clear_autocast_cache", self._watch_autocast)
        self._loop.clock, self._loop.worked = worked_ns, self._worked

    def stop(self) -> None:
        self._undo()

    def forward_begins(self) -> None:
        """An outermost module is about to be called."""
        mine = self._loop.steps.closed == self._step
        self._modules.rehearse = self._rehearse if mine else None
        self._consumer.planned = mine

    def forward_over(self) -> None:
        """Backward begins, or the step is over."""
        if self._modules.given is not None:
            self._later.over()
            self._lines.called = self._modules.given = None
            forget()

    def _rehearse(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            with self._aside() as can_be:
                if not can_be:
                    return
                probed = probe(module, args, kwargs, self._modules.names.of)
                made, timed = second_forward(module, args, kwargs, self._modules.names.of, probed.disturbed)
        except Exception as error:  # the script's own call comes next, and is none of this
            self._say(f"what plans are made from: `{self._modules.names.of(module)}` cannot run a second time "
                      f"({type(error).__name__}: {error})")
            return
        number = self._consumer.heap.device_number
        self._rows["second_forwards"].extend(
            (self._step, self._count, number(one.device), one.bytes, one.died) for one in made)
        self._rows["second_calls"].extend(
            (self._step, self._count, self._rows.intern(call.path), call.start_ns, call.end_ns) for call in timed)
        for fact in probed.facts:
            self._note(self._count, fact)
        self._making |= probed.making
        self._not_keepable |= probed.not_keepable
        self._consumer.keepable = frozenset(self._making - self._not_keepable)
        self._later.forward_begins(self._count, probed.read)
        self._modules.given, self._loop.backward_begins = self._later.given, self.forward_over
        self._lines.called = self._called
        self._count += 1

    def _worked(self, phase: Phase, took_ns: int) -> None:
        """A backward, or the step of an optimizer, is over."""
        self._rows["step_times"].append((self._loop.steps.closed, phase, took_ns))
        if self._loop.steps.closed > self._step:
            self._loop.clock = None

    def _note(self, forward: int, fact: Fact) -> None:
        """A row for something about a module call."""
        intern = self._rows.intern
        self._rows["region_facts"].append((
            self._step, forward, intern(fact.module), fact.call, intern(fact.kind), intern(fact.text),
            intern(fact.line)))

    def _called(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType) -> None:
        """A torch function of the script's own, since a forward that ran aside as well."""
        if not self._modules.depth:
            self._later.called(function, args, kwargs, frame)

    def _watch_autocast(self, original: Callable[[], None]) -> Callable[[], None]:
        def clear() -> None:
            if self._active():
                self._marks.instant(AUTOCAST_END)
            original()

        return clear
