"""A trace with what readers derive from it, each thing computed once."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from memdiag.trace.ledger import Roles, roles
from memdiag.trace.model import NONE, Phase, Role, Trace
from memdiag.trace.nesting import Nesting, nesting, span_rows
from memdiag.trace.peak import PhasePeaks, Worst, phase_at, phase_peaks, span_steps, worst
from memdiag.trace.places import Place, at, birth
from memdiag.trace.timeline import Lives, Timeline, devices, lives, of_device, timeline

Rows = NDArray[np.int64]


class View:
    """What a run did on one device.

    Args:
        of: the run's view, where ``trace`` is the highest light step of that run.
        device: without it, the first accelerator, or the CPU where there is none.
    """

    def __init__(self, trace: Trace, of: View | None = None, device: str | None = None) -> None:
        self.trace = trace
        self._of = of
        self._device = device

    @cached_property
    def device(self) -> str:
        if self._device is not None:
            return self._device
        return devices(self.trace)[0] if self._of is None else self._of.device

    @property
    def run(self) -> View:
        """The view of the whole run: itself, where it is not that of a step told apart."""
        return self if self._of is None else self._of

    @cached_property
    def rows_in_run(self) -> Rows:
        """For each allocation, its row among the run's own; NONE where it has none there."""
        count = len(self.trace["allocations"]["bytes"])
        if self._of is None:
            return np.arange(count, dtype=np.int64)
        rows, continues = np.full(count, NONE, dtype=np.int64), self.trace["continues"]
        rows[continues["allocation"]] = continues["row"]
        return rows

    @cached_property
    def other_devices(self) -> list[str]:
        return [name for name in devices(self.trace) if name != self.device]

    @cached_property
    def line(self) -> Timeline:
        return timeline(self.trace, self.device)

    @cached_property
    def life(self) -> Lives:
        return lives(self.trace)

    @cached_property
    def nest(self) -> Nesting:
        return nesting(self.trace)

    @cached_property
    def roles(self) -> Roles:
        return roles(self.trace, None if self._of is None else self._of.roles)

    @cached_property
    def mine(self) -> NDArray[np.bool_]:
        """Allocations of the device's allocator."""
        return of_device(self.trace, self.device)

    @cached_property
    def span_steps(self) -> Rows:
        """The number of the step around each span; NONE outside steps."""
        closed = None if self._of is None else self._of.trace["steps"]["step"]
        return span_steps(self.trace, self.nest, closed)

    @cached_property
    def phases(self) -> Rows:
        """For each memory event, the row of the innermost phase span around it, or NONE."""
        return phase_at(self.trace, len(self.line.live))

    def within(self, *phases: Phase) -> NDArray[np.bool_]:
        """Whether each memory event is in one of these phases."""
        names = at(self.trace["spans"]["name"], self.phases)
        found: NDArray[np.bool_] = np.isin(names, self.trace.numbers(*(phase.label for phase in phases)))
        return found

    @cached_property
    def phase_peaks(self) -> PhasePeaks:
        """The peak of every phase of every step."""
        return phase_peaks(self.trace, self.nest, self.line)

    @cached_property
    def born_in(self) -> Rows:
        """Row of the span that each allocation was born in."""
        return span_rows(self.trace, self.trace["allocations"]["span"])

    @cached_property
    def born_step(self) -> Rows:
        """The step that each allocation was born in; NONE outside steps and for memory from before."""
        found = self.nest.of(self.span_steps, self.born_in)
        # What a light step left has no span, and its event is when it was known to stay: its time is its own.
        steps = self.trace["steps"]
        left = np.flatnonzero((self.born_in == NONE) & (self.life.born != NONE))
        row = np.searchsorted(steps["end_ns"], self.life.born_ns[left], side="right")
        within = row < len(steps["step"])
        left, row = left[within], row[within]
        begun = steps["start_ns"][row] <= self.life.born_ns[left]
        found[left[begun]] = steps["step"][row[begun]]
        return found

    @cached_property
    def worst(self) -> Worst:
        return worst(self.trace, self.line)

    @cached_property
    def of_peak(self) -> View | None:
        """The view that holds the events around the peak; None where they were folded away."""
        seen = self.worst.trace
        return None if seen is None else self if seen is self.trace else View(seen, of=self)

    def alive_after(self, event: int) -> Rows:
        """The allocations of the device that are alive after an event; before the first one for NONE."""
        return np.flatnonzero(self.mine & (self.life.born <= event) & (self.life.died > event))

    def by_role(self, event: int) -> dict[Role, int]:
        """Bytes of every role after an event, those with none included; they sum to what is alive."""
        alive = self.alive_after(event)
        role = self.roles.of(alive, np.full(len(alive), event, dtype=np.int64))
        size = self.trace["allocations"]["bytes"][alive]
        return {which: int(size[role == which].sum()) for which in Role}

    def phase_of(self, event: int) -> str | None:
        """The innermost phase around an event; None outside phases."""
        around = int(self.phases[event])
        return None if around == NONE else self.trace.text[self.trace["spans"]["name"][around]]

    def highest(self, statistic: str) -> int | None:
        """The highest value of a statistic of the device over the steps; None where it has none, as the CPU."""
        trace, stats = self.trace, self.trace["device_stats"]
        if self.device not in trace.about.get("devices", ()):
            return None
        mine = np.isin(stats["name"], trace.numbers(statistic))
        mine &= stats["device"] == trace.about["devices"].index(self.device)
        return int(stats["value"][mine].max()) if mine.any() else None

    def live_after(self, event: int) -> int:
        """Bytes in the allocator after an event; before the first one for NONE."""
        return self.line.start_bytes if event == NONE else int(self.line.live[event])

    def where(self, event: int) -> tuple[int | None, str | None, Place]:
        """Step, phase and place of an event that allocated."""
        trace = self.trace
        if event == NONE:
            return None, None, Place(None, None, None)
        allocation = int(np.flatnonzero(trace["allocations"]["event"] == event)[0])
        around, phase = int(self.phases[event]), self.phase_of(event)
        within = around if around != NONE else int(self.born_in[allocation])
        step = int(self.span_steps[within]) if within != NONE else NONE
        return None if step == NONE else step, phase, birth(trace, self.nest, allocation)
