"""A moment of a run: what is alive then, what it is, and what would be left without some of it."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from memdiag.diagnose.flow import Flow
from memdiag.diagnose.model import Ints, Mask
from memdiag.diagnose.removal import Removal
from memdiag.diagnose.saves import Matrices, Saves
from memdiag.policy import FINDING_SHARE
from memdiag.trace import NONE, Kind, Phase
from memdiag.trace.model import SNAPSHOT
from memdiag.trace.places import Place, module_names, operator_names, relative
from memdiag.trace.view import View


class Moment:
    """A run, and the moment of its peak. Masks are over all allocations of ``at``, so that a rule that says what
    stands out at the peak also says what else in the run is of the same kind.

    Attributes:
        run: the view of the whole run.
        at: the view that holds the events around the peak: the run's, or that of its highest light step.
        event: the event that made the peak, in ``at``; or another one to look at instead, where one is given.
        peak_bytes: live then.
        size: bytes of each allocation; 0 where it is not of the device's allocator.
        alive: whether it was live at the peak.
        role: what it was then; for others, what it was at first.
        when: the moment, in a sentence.
    """

    when = "at the peak"

    def __init__(self, run: View, at: View, event: int | None = None) -> None:
        self.run, self.at = run, at
        self.event, self.peak_bytes = run.worst.event, run.worst.bytes
        if event is not None:
            self.event, self.peak_bytes = event, at.live_after(event)
        self.size: Ints = np.where(at.mine, at.trace["allocations"]["bytes"], 0)
        self.alive: Mask = at.mine & (at.life.born <= self.event) & (at.life.died > self.event)
        everything = np.arange(len(self.size), dtype=np.int64)
        self.role: Ints = at.roles.of(everything, np.where(self.alive, self.event, at.life.born)).astype(np.int64)

    @cached_property
    def step(self) -> int:
        """The step of the peak; NONE outside steps."""
        step, _, _ = self.at.where(self.event)
        return NONE if step is None else step

    @cached_property
    def phase(self) -> str | None:
        """The phase of the peak."""
        return self.at.where(self.event)[1]

    @cached_property
    def saves(self) -> Saves:
        return Saves(self.at)

    @cached_property
    def flow(self) -> Flow:
        return Flow(self.at)

    def around(self, matrices: Matrices, between_products: bool = False) -> Mask:
        """Matrices, and what of their size is made on the way to them, from them, and for them in backward."""
        return self.flow.together(matrices.saved, self.saves.alike(matrices.shapes), between_products)

    @cached_property
    def operators(self) -> Ints:
        """Text of the operator that made each allocation."""
        return operator_names(self.at.trace, self.at.nest, self.at.born_in)

    def made_by(self, *operators: str) -> Mask:
        """Allocations that one of these operators made."""
        found: Mask = np.isin(self.operators, self.at.trace.numbers(*operators))
        return found

    def bytes_of(self, chosen: Mask) -> int:
        """Bytes of ``chosen`` that are alive at the peak."""
        return int(self.size[chosen & self.alive].sum())

    def matters(self, chosen: Mask) -> bool:
        """Whether ``chosen`` is enough of the peak to be a finding."""
        return self.bytes_of(chosen) >= max(1.0, FINDING_SHARE * self.peak_bytes)

    @cached_property
    def _removal(self) -> Removal:
        return Removal(self.run, self.at, self.step, self.size)

    def without(
        self, chosen: Mask, since: Ints | None = None, during: tuple[Phase, ...] = (), keeping: int = 0,
        part: Ints | None = None,
    ) -> tuple[int, int]:
        """The peak that would be left without these allocations: :meth:`Removal.without`."""
        return self._removal.without(chosen, since, during, keeping, part)

    def saving(
        self, chosen: Mask, since: Ints | None = None, during: tuple[Phase, ...] = (), keeping: int = 0,
        part: Ints | None = None,
    ) -> int:
        """Bytes by which the peak would fall without ``chosen``: fewer than they are where it then lies elsewhere."""
        return self.peak_bytes - self.without(chosen, since, during, keeping, part)[0]

    def step_ends(self) -> Ints:
        """For each allocation, the event at which the step that made it ends."""
        spans, nest = self.at.trace["spans"], self.at.nest
        step = nest.of(nest.step, self.at.born_in)
        ends = np.zeros(len(self.size), dtype=np.int64)
        ends[step != NONE] = spans["end_event"][step[step != NONE]]
        return ends

    def kept_since(self) -> Ints:
        """For each allocation, the event from which on nothing but who keeps it needs it.

        What no backward reads is of no use once the outermost module call that made it is over, and what one does read
        when the last node that did so in its own step has ended; else it is needed until that step ends.
        """
        spans, nest, ends = self.at.trace["spans"], self.at.nest, self.step_ends()
        read = self.saves.last_read
        module = nest.of(nest.outer_module, self.at.born_in)
        since = ends.copy()
        unread = self.saves.never_read & (module != NONE)
        since[unread] = spans["end_event"][module[unread]]
        in_step = (read != NONE) & (read < ends)
        since[in_step] = self._node_ends(read[in_step])
        return since

    def _node_ends(self, events: Ints) -> Ints:
        """The event at which the node of backward has ended that ran at each of these events."""
        spans, nest = self.at.trace["spans"], self.at.nest
        nodes = np.flatnonzero((spans["kind"] == Kind.NODE) & (nest.node == np.arange(len(nest.node))))
        nodes = nodes[np.argsort(spans["start_event"][nodes], kind="stable")]
        row = np.searchsorted(spans["start_event"][nodes], events, side="right") - 1
        known = row >= 0
        ends = events.copy()
        ends[known] = np.maximum(events[known], spans["end_event"][nodes[row[known]]])
        return ends

    def replaced(self, chosen: Mask) -> Ints:
        """For each allocation, the event at which the one after the next of its kind is born.

        A loop that takes one batch at a time has the last one still while it makes the next.
        """
        table, born = self.at.trace["allocations"], self.at.life.born
        since = self.at.life.died.copy()
        rows = np.flatnonzero(chosen)
        kinds, group = np.unique(
            np.stack([table["line"][rows], table["kernel"][rows], table["bytes"][rows]]), axis=1, return_inverse=True)
        for number in range(kinds.shape[1]):
            alike = rows[group.reshape(-1) == number]
            alike = alike[np.argsort(born[alike], kind="stable")]
            since[alike[:-2]] = born[alike[2:]]
        return since

    def origin(self, chosen: Mask) -> str:
        """Where most of the bytes of ``chosen`` at the peak were born, as a piece of evidence."""
        place = self.main_birth(chosen)
        if self.at is not self.run and place == Place(None, None, None):
            again = "" if self.step == NONE else f": record it in full (`--steps {self.step}:{self.step + 1}`)"
            return f"what made them is not known of a step in light{again}"
        where = " › ".join(part for part in (place.module, place.operator) if part) or "code outside modules"
        return f"the largest part comes from {where}" + (f" at {place.line}" if place.line else "")

    def main_birth(self, chosen: Mask) -> Place:
        """The module, operator and line that most of the bytes of ``chosen`` at the peak were born at.

        In a snapshot, which names no modules, a line that all layers share counts once for each size it makes.
        """
        trace = self.at.trace
        mine = np.flatnonzero(chosen & self.alive)
        if not len(mine):
            return Place(None, None, None)
        rows = self.at.born_in[mine]
        key = np.stack([
            module_names(trace, self.at.nest, rows), operator_names(trace, self.at.nest, rows),
            trace["allocations"]["line"][mine], self.size[mine] * (trace.about.get("source") == SNAPSHOT)], axis=1)
        keys, group = np.unique(key, axis=0, return_inverse=True)
        total = np.zeros(len(keys), dtype=np.int64)
        np.add.at(total, group.reshape(-1), self.size[mine])
        module, operator, line = (trace.string(int(number)) for number in keys[total.argmax()][:3])
        return Place(module, operator, relative(trace, line))
