"""Gradients that an optimizer never sees, and gradients that it sees twice."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from memdiag.diagnose.evidence import Evidence
from memdiag.diagnose.model import Advice, Finding, Ints, Mask, Severity
from memdiag.policy import ACCUMULATION_STEPS
from memdiag.trace import Kind, Phase, Role
from memdiag.trace.model import ACCUMULATED, GRAD, USED, ZEROED
from memdiag.units import format_bytes

_OF_COLLECTIVES = "given to c10d::"


def accumulation(found: Evidence) -> Iterable[Finding]:
    steps = _steps(found)
    marks = _Marks(found)
    gradients = _gradients(found)
    yield from _thrown_away(found, steps, marks, gradients)
    yield from _used_again(found, steps, marks, gradients)


@dataclass(frozen=True)
class _Step:
    """A step that has ended: its backwards and optimizer's steps as rows of spans, in the order of time.

    Attributes:
        failed: a request in it had no memory.
    """

    end_event: int
    phases: list[tuple[Phase, int]]
    failed: bool

    def rows(self, phase: Phase) -> list[int]:
        return [row for which, row in self.phases if which is phase]


class _Marks:
    """When the script zeroed gradients, and when it used them otherwise."""

    def __init__(self, found: Evidence) -> None:
        trace, marks = found.run.trace, found.run.trace["marks"]
        kinds = [trace.string(int(kind)) for kind in marks["kind"]]
        self._zeroed = np.array([kind == ZEROED for kind in kinds], dtype=bool)
        self._used = np.array([kind == USED for kind in kinds], dtype=bool)
        self._in_place = np.array([(trace.string(int(text)) or "").endswith("_") for text in marks["text"]], dtype=bool)
        self._event, self._bytes = marks["event"], marks["bytes"]

    def zeroed(self, first: int, last: int) -> int:
        """Bytes that were zeroed between two events."""
        return int(self._bytes[self._zeroed & self._between(first, last)].sum())

    def used(self, first: int, last: int) -> bool:
        return bool((self._used & self._between(first, last)).any())

    def written(self, first: int, last: int) -> bool:
        """Whether they were zeroed, or changed in another way."""
        return bool(((self._zeroed | self._used & self._in_place) & self._between(first, last)).any())

    def _between(self, first: int, last: int) -> Mask:
        found: Mask = (self._event >= first) & (self._event <= last)
        return found


def _steps(found: Evidence) -> list[_Step]:
    trace, nest = found.run.trace, found.run.nest
    spans, table = trace["spans"], trace["steps"]
    wanted = {phase.label: phase for phase in (Phase.BACKWARD, Phase.OPTIMIZER)}
    rows = np.flatnonzero(spans["kind"] == Kind.PHASE)
    of_step: dict[int, list[tuple[Phase, int]]] = {}
    for row in rows[np.argsort(spans["start_ns"][rows], kind="stable")].tolist():
        phase = wanted.get(trace.text[spans["name"][row]])
        if phase is not None:
            of_step.setdefault(int(nest.of(found.run.span_steps, np.array([row]))[0]), []).append((phase, row))
    failed = set(trace["out_of_memory"]["step"].tolist())
    return [
        _Step(int(end), of_step.get(int(step), []), int(step) in failed)
        for step, end in zip(table["step"], table["end_event"], strict=True)]


def _gradients(found: Evidence) -> Ints:
    """Allocations that are, or become, the gradient of a parameter; buffers of collectives are not among them."""
    trace, claims = found.run.trace, found.run.trace["claims"]
    proofs = [trace.string(int(proof)) or "" for proof in claims["proof"]]
    of_role = claims["role"] == Role.GRADIENTS
    mine = of_role & np.array([proof in (GRAD, ACCUMULATED) for proof in proofs], dtype=bool)
    buffers = of_role & np.array([proof.startswith(_OF_COLLECTIVES) for proof in proofs], dtype=bool)
    return np.setdiff1d(claims["allocation"][mine], claims["allocation"][buffers])


def _thrown_away(found: Evidence, steps: list[_Step], marks: _Marks, gradients: Ints) -> Iterable[Finding]:
    """Several backwards for an optimizer's step, and all that the first ones left was gone before the next began."""
    several = [step for step in steps if len(step.rows(Phase.BACKWARD)) > 1 and step.rows(Phase.OPTIMIZER)]
    lost, number, size = 0, 0, 0
    for step in several:
        of_step = [
            _left(found, marks, gradients, row, following)
            for (phase, row), (next_phase, following) in pairwise(step.phases)
            if phase is next_phase is Phase.BACKWARD]
        if step.failed or not of_step or not all(of_step):
            return
        lost, number, size = lost + len(of_step), number + len(step.rows(Phase.BACKWARD)), max(size, *of_step)
    if len(several) < ACCUMULATION_STEPS:
        return
    yield Finding(
        None, "accumulation_error", "Gradients are thrown away before the optimizer uses them", Severity.HIGH, 0, 0.0,
        [f"{len(several)} steps of the optimizer had {number} backwards, of which {lost} left nothing: their "
         f"gradients, {format_bytes(size)} at most, were let go or zeroed before the next backward, and nothing had "
         "read them",
         "each update is that of its last micro-batch alone"],
        [Advice("call `zero_grad()` once for each step of the optimizer, right after it", None)])


def _left(found: Evidence, marks: _Marks, gradients: Ints, backward: int, following: int) -> int:
    """Bytes of gradients that a backward left, where all of them were lost before the next; else 0."""
    spans, life = found.run.trace["spans"], found.run.life
    start, end, then = (int(spans[name][row]) for name, row in (
        ("start_event", backward), ("end_event", backward), ("start_event", following)))
    size = found.run.trace["allocations"]["bytes"]
    born, died = life.born[gradients], life.died[gradients]
    made = ((born >= start) & (born < end)).any()  # what is added to a gradient that is there is gone at once
    there = (born < end) & (died >= end)
    left = int(size[gradients[there & (died >= then)]].sum())
    if not made or marks.used(end, then) or marks.zeroed(end, then) < left:
        return 0
    return int(size[gradients[there]].sum())


def _used_again(found: Evidence, steps: list[_Step], marks: _Marks, gradients: Ints) -> Iterable[Finding]:
    """Steps of the optimizer with a backward in between that only adds to the gradients of the first."""
    life, spans = found.run.life, found.run.trace["spans"]
    again = between = 0
    for before, step in pairwise(steps):
        ends = [before.rows(Phase.OPTIMIZER), step.rows(Phase.BACKWARD), step.rows(Phase.OPTIMIZER)]
        if not all(ends):
            continue
        between += 1
        first, second = (
            gradients[(life.born[gradients] < end) & (life.died[gradients] >= end)]
            for end in (before.end_event, step.end_event))
        stepped, begins = int(spans["start_event"][ends[0][-1]]), int(spans["start_event"][ends[1][-1]])
        if len(first) and np.array_equal(first, second) and not marks.written(stepped, begins):
            again += 1
    if again < ACCUMULATION_STEPS:
        return
    yield Finding(
        None, "accumulation_error", "The optimizer uses gradients that it has used before", Severity.HIGH, 0, 0.0,
        [f"between {again} of {between} pairs of steps of the optimizer nothing let go of the gradients or zeroed "
         "them: the backward in between was added to what the step before had used",
         "a step of the optimizer for each micro-batch, or no `zero_grad()`"],
        [Advice("accumulate over all micro-batches, then one `optimizer.step()` and one `zero_grad()`", None)])
