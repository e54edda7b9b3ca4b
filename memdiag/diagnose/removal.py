"""What would be left of the peak without some of what is alive: computed from its events, and from what is known of the
steps that have none."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from memdiag.diagnose.model import Ints, Mask
from memdiag.trace import NONE, Kind, Phase
from memdiag.trace.places import at
from memdiag.trace.timeline import event_count
from memdiag.trace.view import View


class Removal:
    """What is left of the peak without some allocations.

    Args:
        run: the view of the whole run.
        at: the view that holds the events around the peak; masks are over its allocations.
        step: that of the peak; NONE outside steps.
        size: bytes of each allocation.
    """

    def __init__(self, run: View, at: View, step: int, size: Ints) -> None:
        self.run, self.at, self.step, self.size = run, at, step, size

    def without(
        self, chosen: Mask, since: Ints | None = None, during: tuple[Phase, ...] = (), keeping: int = 0,
        part: Ints | None = None,
    ) -> tuple[int, int]:
        """The peak that would be left without these allocations.

        Args:
            since: of each allocation, the event from which on it would be gone; its birth where None.
            during: phases in which they would be gone; all where there are none.
            keeping: bytes of them that would be there at any time, if as much is.
            part: bytes of each, of those that are not chosen, that would be gone as long as it lives.

        Returns:
            Bytes, and the event that makes that peak; NONE where it lies before the first event, or where no event of
            ``at`` does.
        """
        line, life = self.at.line, self.at.life
        start = life.born if since is None else np.maximum(since, life.born)
        before = line.start_bytes - max(0, int(self.size[chosen & (start == NONE)].sum()) - keeping)
        start = np.maximum(start, 0)
        left = line.live - self._freed(chosen, start, during, keeping, part)
        best = int(left.argmax()) if len(left) else NONE
        highest = max(before, int(left[best]) if len(left) else 0)
        elsewhere = 0
        if self._others.any():
            lasting = np.maximum(self._lasting(chosen & (not during), start) - keeping, 0)
            elsewhere = self._elsewhere(
                lasting, self._freed(chosen & (life.born >= self._began), start, during, 0, part))
        if elsewhere > highest:
            return elsewhere, NONE
        return highest, best if highest > before else NONE

    def _freed(
        self, chosen: Mask, start: Ints, during: tuple[Phase, ...], keeping: int, part: Ints | None
    ) -> Ints:
        """Bytes that would be gone after each event; arguments as in :meth:`without`."""
        life = self.at.life
        gone = chosen & (start < life.died)
        delta = np.zeros(len(self.at.line.live) + 1, dtype=np.int64)
        np.add.at(delta, start[gone], self.size[gone])
        np.subtract.at(delta, life.died[gone], self.size[gone])
        freed = np.maximum(np.cumsum(delta[:-1]) - keeping, 0)
        if part is not None:
            delta[:] = 0
            smaller = np.flatnonzero((part > 0) & ~chosen & (life.born != NONE))
            np.add.at(delta, life.born[smaller], part[smaller])
            np.subtract.at(delta, life.died[smaller], part[smaller])
            freed += np.cumsum(delta[:-1])
        if during:
            freed[~self.at.within(*during)] = 0
        return freed

    @cached_property
    def _began(self) -> int:
        """The event with which the step of the peak began; 0 outside steps."""
        spans = self.at.trace["spans"]
        rows = np.flatnonzero((spans["kind"] == Kind.STEP) & (self.at.span_steps == self.step) & (self.step != NONE))
        return int(spans["start_event"][rows[0]]) if len(rows) else 0

    def _lasting(self, chosen: Mask, start: Ints) -> Ints:
        """Bytes of ``chosen`` that would be gone all through each of the run's steps, and what follows the last."""
        run, steps = self.run, self.run.trace["steps"]
        if self.at is run:
            gone = np.flatnonzero(chosen)
            since = start[gone]
        else:
            gone = self.at.rows_in_run[chosen & (self.at.life.born == NONE)]
            gone = gone[gone != NONE]
            since = run.life.born[gone]
        begins = np.append(steps["start_event"], steps["end_event"][-1:] if len(steps["step"]) else 0)
        ends = np.append(steps["end_event"], event_count(run.trace))
        # What a light step left was there from its own end on, though its event comes later.
        first = np.where(
            (run.born_in[gone] == NONE) & (run.born_step[gone] != NONE),
            np.searchsorted(steps["step"], run.born_step[gone], side="right"), np.searchsorted(begins, since))
        last = np.searchsorted(ends, run.life.died[gone], side="right")
        there = np.zeros(len(begins) + 1, dtype=np.int64)
        size = np.where(last > first, run.trace["allocations"]["bytes"][gone], 0)
        np.add.at(there, np.minimum(first, last), size)
        np.subtract.at(there, last, size)
        return np.cumsum(there[:-1])

    @cached_property
    def _others(self) -> Mask:
        """Of the peaks of the run's phases, those of steps that ``at`` has no events of."""
        run, steps, peaks = self.run, self.run.trace["steps"], self.run.phase_peaks
        other: Mask = peaks.step != self.step
        if self.at is run:
            folded = run.trace["phase_peaks"]["step"]
            after = not np.isin(folded, steps["step"]).all()
            other &= np.isin(peaks.step, folded) | (peaks.step == NONE) & after
        elif self.step not in steps["step"]:
            other &= peaks.step != NONE  # it is the stretch after the last step
        if len(steps["step"]):  # what follows the last step, and never has more than that left, adds nothing
            other &= (peaks.step != NONE) | (peaks.bytes > steps["end_bytes"][-1])
        return other

    @cached_property
    def _phases(self) -> dict[Phase, Mask]:
        """Events of each phase of the peak's step."""
        mine = at(self.at.span_steps, self.at.phases) == self.step
        return {phase: mine & self.at.within(phase) for phase in Phase}

    def _elsewhere(self, lasting: Ints, freed: Ints) -> int:
        """The highest of the other peaks.

        A step of training does what others do: each of their phases is taken to fall by as much as the same phase of
        the peak's step does by what is gone of its own. What has no backward is a step of its own kind.

        Args:
            lasting: bytes that would be gone all through each step, and after the last.
            freed: bytes of what the peak's step made, that would be gone after each event of ``at``.
        """
        steps, peaks = self.run.trace["steps"], self.run.phase_peaks
        left = peaks.bytes - lasting[np.where(
            peaks.step == NONE, len(steps["step"]), np.searchsorted(steps["step"], peaks.step))]
        if self._phases[Phase.BACKWARD].any():
            live = self.at.line.live
            for phase, here in self._phases.items():
                if here.any():
                    left[peaks.phase == phase] -= live[here].max() - (live - freed)[here].max()
        return int(left[self._others].max(initial=0))
