"""Light recording: memory and phases only, folded to a few rows per step as it is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import count
from typing import Any

from memdiag.record import marks as m
from memdiag.record.marks import Entry
from memdiag.record.reading.alike import Alike
from memdiag.record.reading.failures import EVENT as OUT_OF_MEMORY
from memdiag.record.reading.heap import UNRECORDED, Heap, Live
from memdiag.record.reading.loopstate import ENTERS, LoopState
from memdiag.record.reading.rows import Rows
from memdiag.trace import NONE, Phase, Role
from memdiag.trace.model import SAVED

_GONE = -1  # a moment that is no mark


class Fold:
    """Reads light chunks.

    Of a light step a row per phase is kept, and of its allocations those that outlive the next step too; how many
    others were left when the recording ended is counted by size and step of birth. The events of the highest light
    step so far are held back, to become a trace of their own if nothing tops it.

    Attributes:
        alike: what is known of the steps in which saves were not noted.
    """

    def __init__(self, rows: Rows, heap: Heap, loop: LoopState, accelerator: bool) -> None:
        self._rows, self._heap, self._loop, self._accelerator = rows, heap, loop, accelerator
        self._peaks: dict[Phase, int] = {}
        self._found: int | None = None  # live when this phase began, until something happens in it
        self._young: list[tuple[int, Live]] = []  # with their address
        self._step = _StepEvents(loop, heap, 0)
        self._highest: _StepEvents | None = None
        self.alike = Alike(heap)
        self._watching = True
        self._watched = True  # from the beginning of the step on

    def chunk(
        self, roots: list[Any], entries: list[Entry], packed: list[tuple[int, int, bool]],
        gone: list[tuple[int, int, int]],
    ) -> None:
        """Reads a chunk.

        Args:
            roots: memory events.
            entries: marks, placed by their time.
            packed: (time, address, whether it has a history) of tensors that autograd saved.
            gone: (time, address, bytes) of memory that was freed without an event.
        """
        moments = [(entry[1].start_ns if entry[0] == m.MODULE else entry[1], entry) for entry in entries
                   if entry[0] not in (m.LINE, m.SAVE, m.CUT)]
        moments += [(saved[0], (m.SAVE, *saved)) for saved in packed]
        moments += [(freed[0], (_GONE, *freed)) for freed in gone]
        moments.sort(key=lambda moment: moment[0])
        events = sorted(roots, key=lambda event: event.start_time_ns)
        if self._step.number != self._loop.step or not self._step.events and not self._step.phases:
            self._step = _StepEvents(self._loop, self._heap, events[0].start_time_ns if events else 0)
        at = 0
        for event in events:
            time = event.start_time_ns
            while at < len(moments) and moments[at][0] <= time:
                self._moment(moments[at][1])
                at += 1
            if event.name == OUT_OF_MEMORY:
                self._heap.out_of_memory(time, self._loop.step, self._loop.phase, UNRECORDED, NONE)
                continue
            self._memory(event, time)
        for _, entry in moments[at:]:
            self._moment(entry)

    def _memory(self, event: Any, time: int) -> None:
        heap, fields = self._heap, event.extra_fields
        if self._found is not None:
            self._touch(self._found)
            self._found = None
        address, size, total = fields.ptr, fields.alloc_size, fields.total_allocated
        if size > 0:
            device = str(fields.device) if self._accelerator else "cpu"
            live = heap.allocated(address, size, total, device, time, self._loop.step, None)
            self._young.append((address, live))
            self._touch(heap.live_bytes())
            self._step.events.append((address, live, True, time))
        elif (freed := heap.freed(address, size, total, time)) is not None:
            self._step.events.append((address, freed, False, time))

    def _touch(self, now: int) -> None:
        if now > self._peaks.get(self._loop.phase, -1):
            self._peaks[self._loop.phase] = now

    def _moment(self, entry: Entry) -> None:
        loop, kind, time = self._loop, entry[0], entry[1]
        event = self._heap.next_event
        before = loop.phase
        if kind == m.MODULE:
            if not loop.nested:
                loop.module(entry[1].grad, event, entry[1].start_ns)
        elif kind == m.CLAIM:
            self._heap.claim(entry[2], loop.step)
        elif kind == m.OUTPUTS:
            self._heap.computed(entry[2])
        elif kind == m.SAVE:
            live = self._heap.find(entry[2])
            if live is not None:
                live.history = live.history or entry[3]
            if live is not None and not live.claims:
                self._heap.say(live, Role.SAVED_ACTIVATIONS, None, SAVED)
        elif kind == m.WATCHED:
            self.watches(entry[2])
        elif kind == _GONE:
            self._heap.is_gone(entry[2], entry[3], time)
        elif kind == m.STEP_END:
            entry[2].read = not entry[2].closes
            if entry[2].closes:
                self._step_ends(entry[2], time)
        elif kind in ENTERS:
            if kind == m.BACKWARD_START and entry[3]:
                loop.graph_backward(time, entry[2])
            loop.enter(ENTERS[kind], event, time)
        elif kind not in (m.RANDOM_SET, m.AUTOCAST_END):  # of no use without operators
            loop.leave(event, time)
        if loop.phase is not before:
            self._step.phases.append((len(self._step.events), loop.phase))
            self._found = self._heap.live_bytes()

    def _step_ends(self, end: Any, time: int) -> None:
        heap, loop = self._heap, self._loop
        step = loop.step
        if self._watched:
            self.alike.watched(step, self._step.made())
        else:
            self.alike.unwatched(self._step.made(), self._step.in_phases())
        self._watched = self._watching
        self._rows["phase_peaks"].extend(
            (step, phase, heap.next_event, bytes_) for phase, bytes_ in self._peaks.items())
        highest = max(self._peaks.values(), default=0)
        if highest > max(heap.full_peak_bytes, self._highest.bytes if self._highest else 0):
            self._step.bytes = highest
            self._highest = self._step
        loop.close_step(end, heap.live_bytes(), heap.next_event, time)
        still_young: list[tuple[int, Live]] = []
        for address, live in self._young:
            if heap.is_live(address, live):
                if live.step < step:
                    heap.register(address, live)
                else:
                    still_young.append((address, live))
        self._young = still_young
        self._peaks = {}
        self._found = heap.live_bytes()
        self._step = _StepEvents(loop, heap, time)

    def watches(self, watching: bool) -> None:
        """From here on saves are noted, or are not."""
        self._watching = watching
        self._watched = watching and (self._watched or not self._step.events)

    def to_full(self) -> None:
        """Full recording takes over: what light recording left alive becomes known to it."""
        for address, live in self._young:
            if self._heap.is_live(address, live):
                self._heap.register(address, live)
        self._young = []

    def finish(self) -> None:
        """Counts what light steps left alive, and hands over the highest of them."""
        if not self._watched:
            self.alike.unwatched(self._step.made(), self._step.in_phases(), whole=False)
        left = Counter(
            (live.step, live.bytes) for address, live in self._young if self._heap.is_live(address, live))
        self._rows["survivors"].extend((step, size, number) for (step, size), number in sorted(left.items()))
        if self._peaks and max(self._peaks.values()) > 0:
            # The stretch after the last step, or a step that never ended.
            self._rows["phase_peaks"].extend(
                (self._loop.step, phase, self._heap.next_event, bytes_) for phase, bytes_ in self._peaks.items())
            highest = max(self._peaks.values())
            if highest > max(self._heap.full_peak_bytes, self._highest.bytes if self._highest else 0):
                self._step.bytes = highest
                self._highest = self._step

    def highest_step(self, text: Rows) -> Rows | None:
        """Rows of the trace of the highest light step; None where a full step was higher.

        Args:
            text: the rows of the run, whose text the step's rows share.
        """
        return None if self._highest is None else self._highest.rows(text)


class _StepEvents:
    """One light step, as it is read: what was there when it began, and what happened."""

    def __init__(self, loop: LoopState, heap: Heap, start_ns: int) -> None:
        self.number = loop.step
        self.start_ns = start_ns
        self.bytes = 0
        self.first_phase = loop.phase
        self.before = heap.everything()
        self.events: list[tuple[int, Live, bool, int]] = []
        self.phases: list[tuple[int, Phase]] = []

    def made(self) -> list[Live]:
        """Its allocations, in order."""
        return [live for _, live, arrives, _ in self.events if arrives]

    def in_phases(self) -> Iterator[tuple[Live, bool, Phase]]:
        """Whose each event is, whether it arrives, and the phase."""
        phase, changes = self.first_phase, list(reversed(self.phases))
        for position, (_, live, arrives, _) in enumerate(self.events):
            while changes and changes[-1][0] <= position:
                phase = changes.pop()[1]
            yield live, arrives, phase

    def rows(self, text: Rows) -> Rows:
        rows = Rows(text)
        new_span = count().__next__
        loop = LoopState(rows, new_span, self.start_ns)
        loop.step, loop.phase = self.number, self.first_phase
        numbers: dict[int, int] = {}
        owners: list[Live] = []
        for address, live in self.before:
            numbers[id(live)] = len(owners)
            owners.append(live)
            rows["allocations"].append(
                (live.device, live.pool, address, live.bytes, NONE, live.time_ns, NONE, NONE, NONE, NONE))
        changes = list(reversed(self.phases))
        number = 0
        for position, (address, live, arrives, time) in enumerate(self.events):
            while changes and changes[-1][0] <= position:
                loop.set(changes.pop()[1], number, time)
            if arrives:
                numbers[id(live)] = len(owners)
                owners.append(live)
                rows["allocations"].append(
                    (live.device, live.pool, address, live.bytes, number, time, loop.span, NONE, NONE, NONE))
            elif id(live) in numbers:
                rows["frees"].append((numbers[id(live)], number, time))
            else:
                continue
            number += 1
        loop.finish(number, self.events[-1][3] if self.events else self.start_ns)
        for row, live in enumerate(owners):
            if live.id != NONE:
                rows["continues"].append((row, live.id))
            for role, (name, proof, from_birth) in live.claims.items():
                if from_birth or live.id == NONE:
                    rows["claims"].append((row, NONE, role, rows.intern(name), rows.intern(proof)))
        return rows
