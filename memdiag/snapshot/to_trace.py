"""From a snapshot to a trace: the allocator's own record, read as every other run is.

Costs are in ``docs/snapshots.md``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memdiag.allocator.state import OOM
from memdiag.errors import MemdiagError
from memdiag.snapshot.data import Event, Snapshot
from memdiag.snapshot.frames import Place
from memdiag.snapshot.holes import largest_hole, segment_facts
from memdiag.snapshot.known import Births, Known, known
from memdiag.snapshot.peaks import follow
from memdiag.snapshot.phases import Seen, Stacks, Stretch, stretches
from memdiag.snapshot.window import part_of
from memdiag.trace import NONE, Kind, Level, Phase, Pool, Trace
from memdiag.trace.model import RESERVED_PEAK, SCHEMA, SNAPSHOT, as_table
from memdiag.version import __version__

Ints = NDArray[np.int64]


def trace_of(snapshot: Snapshot, device: int | None = None, events: tuple[int, int] | None = None) -> Trace:
    """A snapshot as a trace.

    Args:
        device: only that one; all that the file has where None.
        events: only those of the record from the first of these numbers up to, not including, the second; of several
            devices in order of time. What was there when they begin is there, and roles are told by the whole record.

    Raises:
        MemdiagError: when the file has no such device or events, or its events cannot have happened.
    """
    there = snapshot.devices()
    if device is not None and device not in there:
        has = f"it has {', '.join(map(str, there))}" if there else "it has none"
        raise MemdiagError(f"{snapshot.path}: no memory of device {device} is in this snapshot; {has}")
    if not there:
        raise MemdiagError(f"{snapshot.path}: the snapshot is empty: no segment and no event is in it; take it while "
                           "the memory is in use")
    return _Building(snapshot, there if device is None else [device], events).trace()


class _Building:
    """A trace that is put together. Events of the devices are numbered on, in order of time where they have times."""

    def __init__(self, snapshot: Snapshot, devices: Sequence[int], events: tuple[int, int] | None) -> None:
        self._snapshot, self._devices = snapshot, list(devices)
        self._courses = {device: follow(snapshot, device) for device in devices}
        self._text: dict[str, int] = {}
        self._rows: dict[str, list[tuple[Any, ...]]] = {name: [] for name in SCHEMA}
        merged = [(device, number) for device in devices for number in range(len(snapshot.trace(device)))]
        self._timed = all("time_us" in event for device in devices for event in snapshot.trace(device))
        if self._timed and len(self._devices) > 1:
            merged.sort(key=lambda pair: self._event(*pair)["time_us"])
        self._events = [self._event(*pair) for pair in merged]
        self._number: dict[int, Ints] = {
            device: np.empty(len(snapshot.trace(device)) + 1, dtype=np.int64) for device in devices}
        for at, (of, number) in enumerate(merged):
            self._number[of][number] = at
        for numbers in self._number.values():
            numbers[-1] = len(merged)
        self._stacks = stacks = Stacks()
        self._empty: list[Any] = []
        self._seen: list[Seen] = [stacks.of(event.get("frames", self._empty)) for event in self._events]
        # The state has the stacks of blocks whose events are not in the record any more.
        self._at = {(segment.device, block.address): block.frames for segment in snapshot.segments
                    for block in segment.blocks if block.frames}
        self._stretches = stretches(self._events, self._seen, snapshot.annotations)
        self._failures: list[dict[str, Any]] = []
        self._range = (0, len(merged)) if events is None else events
        if not 0 <= self._range[0] < self._range[1] <= len(merged) and events is not None:
            raise MemdiagError(f"{snapshot.path}: has no events {events[0]}:{events[1]}; it has 0:{len(merged)}")

    def trace(self) -> Trace:
        born, died = self._lives()
        memory = self._memory_events(born, died)  # of each event, how many memory events come before it
        self._spans(memory)
        for place, device in enumerate(self._devices):
            self._allocations(place, device, born[device], died[device], memory)
            self._statistics(place, device)
        self._out_of_memory(memory)
        tables = {name: as_table(name, dict(zip(SCHEMA[name], zip(*rows, strict=True), strict=True)))
                  for name, rows in self._rows.items() if rows}
        whole = Trace(self._about(), list(self._text), tables)
        first, last = self._range
        return whole if self._range == (0, len(self._events)) else part_of(whole, int(memory[first]), int(memory[last]))

    def _event(self, device: int, number: int) -> Event:
        return self._snapshot.trace(device)[number]

    def _lives(self) -> tuple[dict[int, Ints], dict[int, Ints]]:
        """Birth and death of the blocks of each device, in merged events; none of what was freed before."""
        born, died = {}, {}
        for device, course in self._courses.items():
            blocks, number = course.blocks, self._number[device]
            was_there = blocks.born == NONE
            born[device] = np.where(was_there, NONE, number[np.maximum(blocks.born, 0)])
            died[device] = number[np.maximum(blocks.freed, 0)]
            died[device][blocks.freed == NONE] = NONE
        return born, died

    def _memory_events(self, born: dict[int, Ints], died: dict[int, Ints]) -> Ints:
        is_one = np.zeros(len(self._events) + 1, dtype=np.int64)
        for events in (*born.values(), *died.values()):
            is_one[events[(events != NONE) & (events < len(self._events))]] = 1
        return np.concatenate([[0], np.cumsum(is_one[:-1])])

    # --- spans --------------------------------------------------------------------------------------------------

    def _spans(self, memory: Ints) -> None:
        """Steps, phases in them, and runs of events of one operator in these."""
        self._span_of = np.full(len(self._events), NONE, dtype=np.int64)
        self._step_of = np.full(len(self._events), NONE, dtype=np.int64)
        self._run_end = np.arange(1, len(self._events) + 1)
        number = 0
        for cycle, closed in _cycles(self._stretches):
            start, end = cycle[0].start, cycle[-1].end
            step = NONE
            if closed:
                step = self._span(NONE, Kind.STEP, str(number), start, end, memory, None)
                self._step_of[start:end] = number
                live = sum(int(course.allocated[np.searchsorted(self._number[device][:-1], end)])
                           for device, course in self._courses.items())
                self._rows["steps"].append((
                    number, Level.FULL, memory[start], memory[end], self._time(start), self._time(end - 1), live, NONE,
                    NONE, 0))
                number += 1
            for one in cycle:
                self._phase(step, one, memory)

    def _phase(self, step: int, one: Stretch, memory: Ints) -> None:
        if one.phase is None:
            return
        phase = self._span(step, Kind.PHASE, one.phase.label, one.start, one.end, memory, None)
        self._span_of[one.start:one.end] = phase
        at = one.start
        while at < one.end:
            place, end = self._seen[at].place, at + 1
            while end < one.end and self._alike(at, end):
                end += 1
            if place.operator is not None:
                span = self._span(phase, Kind.OPERATOR, place.operator, at, end, memory, self._line(at))
                self._span_of[at:end] = span
                self._run_end[at:end] = end
            at = end

    def _alike(self, one: int, other: int) -> bool:
        """Whether two events that follow each other are taken for those of one call of an operator."""
        a, b = self._seen[one].place, self._seen[other].place
        return a.operator == b.operator and a.line == b.line

    def _span(self, parent: int, kind: Kind, name: str, start: int, end: int, memory: Ints, line: str | None) -> int:
        rows = self._rows["spans"]
        rows.append((
            len(rows), parent, kind, self._intern(name), memory[start], memory[end], self._time(start),
            self._time(end - 1), 0, self._intern(line), NONE, NONE, NONE, 0, NONE))
        return len(rows) - 1

    # --- memory -------------------------------------------------------------------------------------------------

    def _allocations(self, place: int, device: int, born: Ints, died: Ints, memory: Ints) -> None:
        blocks = self._courses[device].blocks
        there = np.flatnonzero(died != NONE)
        first = len(self._rows["allocations"])
        streams = {segment.address: segment.stream for segment in self._courses[device].start.segments}
        starts = np.array(sorted(streams), dtype=np.int64)
        for row in there.tolist():
            event = int(born[row])
            if event == NONE:
                at = int(np.searchsorted(starts, blocks.address[row], side="right")) - 1
                stream = streams[int(starts[at])] if at >= 0 else NONE
                before = self._before(device, int(blocks.address[row]), int(died[row])).place
                self._rows["allocations"].append((
                    place, Pool.ALLOCATOR, blocks.address[row], blocks.bytes[row], NONE, NONE, NONE,
                    self._intern(_line(before)), self._intern(before.inner), _signed(stream)))
            else:
                self._rows["allocations"].append((
                    place, Pool.ALLOCATOR, blocks.address[row], blocks.bytes[row], memory[event], self._time(event),
                    self._span_of[event], self._intern(self._line(event)),
                    self._intern(self._seen[event].place.inner), _signed(self._events[event]["stream"])))
            if died[row] < len(self._events):
                self._rows["frees"].append((
                    len(self._rows["allocations"]) - 1, memory[died[row]], self._time(int(died[row]))))
        for found in self._known(device, born[there], died[there], there):
            proof = self._intern(found.proof)
            since = [NONE] * len(found.rows) if found.since is None else (memory[found.since] + 1).tolist()
            self._rows["claims"] += [(first + row, event, found.role, NONE, proof) for row, event in zip(
                found.rows.tolist(), since, strict=True)]

    def _before(self, device: int, address: int, died: int) -> Seen:
        """What is known of the birth of a block that was there before the record."""
        stays = died == len(self._events)
        return self._stacks.of(self._at.get((device, address), self._empty) if stays else self._empty)

    def _known(self, device: int, born: Ints, died: Ints, rows: Ints) -> list[Known]:
        blocks = self._courses[device].blocks
        stretch = np.full(len(self._events) + 1, len(self._stretches), dtype=np.int64)
        for at, one in enumerate(self._stretches):
            stretch[one.start:one.end] = at
        places = zip(born.tolist(), died.tolist(), blocks.address[rows].tolist(), strict=True)
        seen = [self._before(device, address, end) if event == NONE else self._seen[event]
                for event, end, address in places]
        unit = np.zeros(len(born), dtype=np.int64)
        unit[born != NONE] = self._run_end[born[born != NONE]]
        return known(Births(
            bytes=blocks.bytes[rows], requested=blocks.requested[rows], born=born, died=died, stretch=stretch,
            phases=[one.phase for one in self._stretches],
            unit=unit, module=np.array([one.module for one in seen], dtype=bool),
            workspace=[one.place.workspace for one in seen],
            optimizer=np.array([one.place.optimizer for one in seen], dtype=bool)))

    def _statistics(self, place: int, device: int) -> None:
        # Before the first event of the range, and after each of them.
        numbers, (first, last) = self._number[device][:-1], self._range
        begins, ends = np.searchsorted(numbers, first), np.searchsorted(numbers, last)
        reserved = int(self._courses[device].reserved[begins:ends + 1].max())
        self._rows["device_stats"].append((NONE, place, self._intern(RESERVED_PEAK), reserved))

    def _out_of_memory(self, memory: Ints) -> None:
        for place, device in enumerate(self._devices):
            course = self._courses[device]
            for number, event in enumerate(self._snapshot.trace(device)):
                if event["action"] != OOM:
                    continue
                at = int(self._number[device][number])
                stretch = next((one for one in self._stretches if one.start <= at < one.end), None)
                phase = Phase.OTHER if stretch is None or stretch.phase is None else stretch.phase
                self._rows["out_of_memory"].append((
                    memory[at], self._time(at), place, event["size"], course.allocated[number + 1],
                    course.reserved[number + 1], self._step_of[at], phase, self._span_of[at],
                    self._intern(self._line(at)), self._intern(self._seen[at].place.inner), NONE))
                self._failures.append({
                    "at": at, "free_bytes": event.get("device_free"),
                    "largest_hole_bytes": largest_hole(self._snapshot, device, course, number)})
        order = sorted(range(len(self._failures)), key=lambda row: self._failures[row]["at"])
        self._rows["out_of_memory"] = [self._rows["out_of_memory"][row] for row in order]
        self._failures = [self._failures[row] for row in order]

    # --- facts --------------------------------------------------------------------------------------------------

    def _about(self) -> dict[str, Any]:
        snapshot = self._snapshot
        settings = snapshot.settings or {}
        conf = settings.get("PYTORCH_CUDA_ALLOC_CONF", settings.get("PYTORCH_ALLOC_CONF"))
        about: dict[str, Any] = {
            "source": SNAPSHOT, "snapshot": snapshot.path, "memdiag": __version__, "torch": None, "cuda": None,
            "python": None, "argv": None, "script": None, "device": "cuda", "devices": [
                f"cuda:{device}" for device in self._devices],
            "allocator_settings": conf, "started_ns": self._time(0) if self._events and self._timed else None,
            "segments": {f"cuda:{device}": segment_facts(
                [one for one in snapshot.segments if one.device == device]) for device in self._devices},
            "not_seen": list(self._not_seen()),
        }
        if self._failures:
            last = self._failures[-1]["at"]
            about["failed_requests"] = [
                {key: value for key, value in one.items() if key != "at"} for one in self._failures]
            about["ended_out_of_memory"] = not any(event["action"] == "alloc" for event in self._events[last + 1:])
        return about

    def _not_seen(self) -> Iterable[str]:
        yield ("whose each tensor is: a snapshot names no parameters and no modules. Roles are told by births, deaths, "
               "stacks and sizes, and what these do not show is unknown")
        yield "shapes and dtypes, what autograd saved and when it was read, and memory outside PyTorch's allocator"
        if not self._events:
            yield ("the course of the memory: the file has a state, but no events "
                   "(torch.cuda.memory._record_memory_history was not on)")
            return
        yield "versions, the script and its arguments: the file does not have them"
        there = sum(int((course.blocks.born == NONE).sum()) for course in self._courses.values())
        if there:
            yield f"where {there:,} blocks were allocated that were there before the record began"
        without = sum(one.empty for one in self._seen)
        if without:
            yield f"the stacks of {without:,} of {len(self._seen):,} events: they were not recorded"
        if any(one.phase is Phase.FORWARD for one in self._stretches):
            yield "what was evaluation: whatever calls modules outside backward counts as forward"
        if not self._timed and len(self._devices) > 1:
            yield "the order of events of different devices: they have no times"
        for device, course in self._courses.items():
            if course.start.unsettled:
                yield (f"up to 1 MiB of each of {course.start.unsettled:,} blocks on cuda:{device}, which may be "
                       "larger than the events tell")
            if course.differs:
                yield (f"on cuda:{device}, why {course.differs:,} blocks have other sizes than the allocator's rules "
                       "give them")
        for doubt in self._snapshot.doubts:
            yield f"whether the file is whole: {doubt}"

    def _time(self, event: int) -> int:
        """Nanoseconds; where there are no times, none."""
        if not self._events:
            return NONE
        time: int | None = self._events[event].get("time_us")
        return NONE if time is None or time >= 1 << 53 else time * 1000

    def _line(self, event: int) -> str | None:
        return _line(self._seen[event].place)

    def _intern(self, text: str | None) -> int:
        return NONE if text is None else self._text.setdefault(text, len(self._text))


def _line(place: Place) -> str | None:
    return None if place.line is None else f"{place.line[0]}:{place.line[1]}"


def _signed(stream: int) -> int:
    """A stream's handle as the trace's column has it."""
    return stream - (1 << 64) if stream >= 1 << 63 else stream


def _cycles(found: Sequence[Stretch]) -> list[tuple[list[Stretch], bool]]:
    """The stretches of each step, and whether it came to its end: with the optimizer's step that the next is not one of
    any more, or where none is in the record, with a backward.
    """
    closing = Phase.OPTIMIZER if any(one.phase is Phase.OPTIMIZER for one in found) else Phase.BACKWARD
    cycles: list[tuple[list[Stretch], bool]] = []
    mine: list[Stretch] = []
    for one in found:
        mine.append(one)
        if one.phase is closing:
            cycles.append((mine, True))
            mine = []
    return [*cycles, *([(mine, False)] if mine else [])]
