"""The highest moment: of the run, and of each phase of each step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memdiag.trace.model import NONE, Kind, Phase, Role, Trace
from memdiag.trace.nesting import Nesting, span_rows
from memdiag.trace.timeline import Timeline, timeline

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Worst:
    """The moment of the highest live bytes of a device, in full or light recording.

    Attributes:
        trace: the trace that holds the events around it: the run's, or that of its highest light step; None where
            they were folded away.
        event: in that trace, the event that made the peak; NONE before its first event or where folded away.
        bytes: live in the allocator.
        step, phase: where folded away; None where ``trace`` tells them.
    """

    trace: Trace | None
    event: int
    bytes: int
    step: int | None = None
    phase: Phase | None = None


def worst(trace: Trace, line: Timeline) -> Worst:
    """Where a run peaked: the one place that chooses between what was recorded in full and what was folded."""
    if trace.peak_step is not None:
        light = timeline(trace.peak_step, line.device)
        if light.peak_bytes > line.peak_bytes:
            return Worst(trace.peak_step, light.peak_event, light.peak_bytes)
    elif len(trace["phase_peaks"]["bytes"]):  # the process was killed before the light step's events were written
        step, phase, size = _folded(trace)
        row = int(size.argmax())
        if int(size[row]) > line.peak_bytes:
            number = None if step[row] == NONE else int(step[row])
            return Worst(None, NONE, int(size[row]), number, Phase(phase[row]))
    return Worst(trace, line.peak_event, line.peak_bytes)


def span_steps(trace: Trace, nest: Nesting, closed: Rows | None = None) -> Rows:
    """The number of the step around each span row; NONE outside steps.

    The recording goes on after the last step: that stretch has a span too. It counts as a step, unfinished, where
    autograd saved something in it, and is no step otherwise (an evaluation at the end, a checkpoint written).

    Args:
        closed: the steps that ended, where ``trace`` does not say so itself (it is the ``peak_step`` of another).
    """
    spans = trace["spans"]
    numbers = np.full(len(spans["id"]), NONE, dtype=np.int64)
    steps = np.flatnonzero(spans["kind"] == Kind.STEP)
    numbers[steps] = [int(trace.text[i]) for i in spans["name"][steps]]
    claims, born_in = trace["claims"], trace["allocations"]["span"]
    saved = claims["allocation"][claims["role"] == Role.SAVED_ACTIVATIONS]
    saved_in = np.concatenate([trace["saves"]["span"], born_in[saved]])
    began = np.isin(steps, nest.of(nest.step, span_rows(trace, saved_in)))
    finished = np.isin(numbers[steps], trace["steps"]["step"] if closed is None else closed)
    numbers[steps[~(finished | began)]] = NONE
    return nest.of(numbers, nest.step)


def phase_at(trace: Trace, events: int) -> Rows:
    """For each memory event, the row of the innermost phase span around it, or NONE."""
    spans = trace["spans"]
    around = np.full(events, NONE, dtype=np.int64)
    # Spans are in order of id, so what encloses comes before what it encloses and is overwritten by it.
    for row in np.flatnonzero(spans["kind"] == Kind.PHASE):
        around[spans["start_event"][row] : spans["end_event"][row]] = row
    return around


@dataclass(frozen=True)
class PhasePeaks:
    """Peak live bytes by step and phase, in the order of the run. ``step`` is NONE outside steps."""

    step: Rows
    phase: Rows
    bytes: NDArray[np.int64]


def phase_peaks(trace: Trace, nest: Nesting, line: Timeline) -> PhasePeaks:
    """The peak of every phase of every step, full and folded.

    A phase that comes several times in a step has one peak. What a phase finds when it starts counts as its own. A
    phase span in which nothing happened at all, neither memory nor work, is left out.
    """
    spans = trace["spans"]
    is_phase = spans["kind"] == Kind.PHASE
    rows = np.flatnonzero(is_phase)
    busy = (spans["end_event"][rows] > spans["start_event"][rows]) | np.isin(spans["id"][rows], spans["parent"])
    rows = rows[busy]

    before = np.concatenate([[line.start_bytes], line.live])
    peak = np.zeros(len(is_phase), dtype=np.int64)
    peak[rows] = before[np.minimum(spans["start_event"][rows], len(line.live))]
    around = phase_at(trace, len(line.live))
    inside = around != NONE
    np.maximum.at(peak, around[inside], line.live[inside])

    labels = {phase.label: int(phase) for phase in Phase}
    folded_step, folded_phase, folded_bytes = _folded(trace)
    step = np.concatenate([span_steps(trace, nest)[rows], folded_step])
    phase = np.concatenate([
        np.array([labels[trace.text[i]] for i in spans["name"][rows]], dtype=np.int64), folded_phase])
    size = np.concatenate([peak[rows], folded_bytes])
    # One row for each pair, where it first came; steps in order, and what is outside them last.
    pair = np.where(step == NONE, step.max(initial=0) + 1, step) * len(Phase) + phase
    pairs, first, group = np.unique(pair, return_index=True, return_inverse=True)
    highest = np.zeros(len(pairs), dtype=np.int64)
    np.maximum.at(highest, group, size)
    return PhasePeaks(step[first], phase[first], highest)


def _folded(trace: Trace) -> tuple[Rows, Rows, Rows]:
    """Step (NONE outside steps), phase and peak of what was folded.

    The stretch after the last step counts as one, unfinished, where a backward ran in it.
    """
    folded = trace["phase_peaks"]
    began = folded["step"][folded["phase"] == Phase.BACKWARD]
    is_step = np.isin(folded["step"], trace["steps"]["step"]) | np.isin(folded["step"], began)
    return np.where(is_step, folded["step"], NONE), folded["phase"].astype(np.int64), folded["bytes"]
