"""The consumer on events as a machine with two CUDA devices makes them: made up here, to run on any machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from memdiag.diagnose.oom import out_of_memory
from memdiag.record import inventory
from memdiag.record import marks as m
from memdiag.record.facts import SaveTimes
from memdiag.record.process import machine
from memdiag.record.reading.consume import Consumer
from memdiag.record.reading.failures import Request
from memdiag.record.reading.heap import Heap
from memdiag.record.reading.rows import Rows
from memdiag.trace import NONE, Kind, Level, Phase, Trace
from memdiag.trace.model import SCHEMA, as_table
from memdiag.trace.timeline import timeline
from memdiag.trace.view import View

MAIN, THREAD_0, THREAD_1 = 1, 7, 8  # the script's thread, and backward's thread of each device


@dataclass
class Event:
    name: str
    start_time_ns: int
    end_time_ns: int
    start_tid: int
    extra_fields: Any
    children: list[Event] = field(default_factory=list)


class Stream:
    """Makes events in the order of a clock, with each device's own total."""

    def __init__(self) -> None:
        self.now = 100
        self.totals = {"cuda:0": 0, "cuda:1": 0}
        self.entries: list[Any] = []

    def tick(self) -> int:
        self.now += 10
        return self.now

    def memory(self, address: int, size: int, device: str, thread: int = MAIN) -> Event:
        self.totals[device] += size
        fields = SimpleNamespace(
            ptr=address, alloc_size=size, total_allocated=self.totals[device], total_reserved=1 << 21,
            device=torch.device(device))
        return Event("[memory]", self.tick(), self.now, thread, fields)

    def mark(self, *entry: Any) -> Event:
        name = f"{m.PREFIX}{len(self.entries)}"
        self.entries.append(entry)
        return Event(name, self.tick(), self.now, MAIN, SimpleNamespace())

    def around(self, name: str, sequence: int, thread: int, *inside: Any) -> Event:
        """An operator or node, whose children are made inside it, in order."""
        event = Event(name, self.tick(), 0, thread, SimpleNamespace(inputs=[], sequence_number=sequence))
        event.children = [make() for make in inside]
        event.end_time_ns = self.tick()
        return event


def read(roots: list[Event], entries: list[Any], failed: Sequence[Request] = ()) -> tuple[Trace, bool]:
    rows = Rows()
    consumer = Consumer(rows, 0, accelerator=True, failed_requests=lambda: list(failed))
    closed = consumer.chunk(Level.FULL, roots, entries, SaveTimes(), [])
    consumer.finish(10**9)
    tables = {
        name: as_table(name, dict(zip(columns, zip(*rows[name], strict=True), strict=True)))
        for name, columns in SCHEMA.items() if rows[name]}
    return Trace({"devices": consumer.heap.devices}, list(rows._text), tables), closed


def node(name: str) -> str:
    return f"autograd::engine::evaluate_function: {name}"


@pytest.fixture
def two_devices() -> tuple[Trace, bool]:
    """A forward on two devices, then a backward whose nodes run on a thread for each, at the same time."""
    s = Stream()
    line = s.mark(m.LINE, "/project/train.py:3", True)
    line.children = [
        s.around("aten::mul", 5, MAIN, lambda: s.memory(0x1000, 512, "cuda:0")),
        s.around("aten::exp", 6, MAIN, lambda: s.memory(0x9000, 1024, "cuda:1")),
    ]
    start = s.mark(m.BACKWARD_START, s.now, "/project/train.py:4", False)
    # Thread 1 begins first and ends last: their events interleave.
    on_1 = s.around(node("ExpBackward0"), 6, THREAD_1, lambda: s.memory(0xA000, 2048, "cuda:1", THREAD_1))
    on_0 = s.around(
        node("MulBackward0"), 5, THREAD_0,
        # A recomputation on this thread, whose numbers begin anew and meet one of the main thread's.
        lambda: s.around("aten::cos", 6, THREAD_0, lambda: s.memory(0x2000, 256, "cuda:0", THREAD_0)),
        lambda: s.memory(0x1000, -512, "cuda:0", THREAD_0))
    late_1 = s.around(node("ExpBackward0"), 6, THREAD_1, lambda: s.memory(0xB000, 4096, "cuda:1", THREAD_1))
    end = s.mark(m.BACKWARD_END, s.now)
    after = s.memory(0x3000, 128, "cuda:0")
    cut = s.mark(m.CUT)
    last = s.memory(0xA000, -2048, "cuda:1", THREAD_1)  # a thread that has not quite ended
    # The tree lists roots by thread, as it likes.
    return read([on_0, on_1, late_1, last, line, start, end, after, cut], s.entries)


class TestTwoThreadsAndDevices:
    def test_each_device_has_its_own_total(self, two_devices: tuple[Trace, bool]) -> None:
        # GIVEN / WHEN
        trace, closed = two_devices
        # THEN live bytes at the end are those of the allocations that were not freed
        assert closed
        assert trace.about["devices"] == ["cuda:0", "cuda:1"]
        assert timeline(trace, "cuda:0").live[-1] == 256 + 128
        assert timeline(trace, "cuda:1").live[-1] == 1024 + 4096
        # and nothing was booked as unseen
        assert trace.not_seen == []

    def test_events_are_in_the_order_of_time(self, two_devices: tuple[Trace, bool]) -> None:
        trace, _ = two_devices
        times = np.concatenate([trace["allocations"]["time_ns"], trace["frees"]["time_ns"]])
        events = np.concatenate([trace["allocations"]["event"], trace["frees"]["event"]])
        assert sorted(events) == list(range(9 - 1))
        assert list(np.diff(times[np.argsort(events)]) > 0) == [True] * 7

    def test_what_other_threads_do_is_backward(self, two_devices: tuple[Trace, bool]) -> None:
        trace, _ = two_devices
        phases = {}
        for row, address in enumerate(trace["allocations"]["address"]):
            for span in trace.ancestors(int(trace["allocations"]["span"][row])):
                if trace["spans"]["kind"][span] == Kind.PHASE:
                    phases[hex(address)] = trace.text[trace["spans"]["name"][span]]
        backward, forward = Phase.BACKWARD.label, Phase.FORWARD.label
        assert phases == {
            "0x1000": forward, "0x9000": forward, "0xa000": backward, "0x2000": backward, "0xb000": backward,
            "0x3000": Phase.OTHER.label}

    def test_a_node_has_the_line_of_its_forward_operator(self, two_devices: tuple[Trace, bool]) -> None:
        # GIVEN a recomputation that reuses the number of aten::exp
        trace, _ = two_devices
        spans = trace["spans"]
        nodes = np.flatnonzero(spans["kind"] == Kind.NODE)
        forward = {trace.text[spans["name"][n]]: trace.text[spans["name"][trace.span_row(int(spans["forward"][n]))]]
                   for n in nodes}
        # THEN the later ExpBackward0 still belongs to it
        assert forward == {"MulBackward0": "aten::mul", "ExpBackward0": "aten::exp"}
        assert {trace.string(int(spans["line"][n])) for n in nodes} == {"/project/train.py:3"}
        assert len(nodes) == 3


class TestDevices:
    def test_memory_that_changes_without_an_event_is_booked(self) -> None:
        # GIVEN an allocator whose total jumps by 4096 between two events
        rows = Rows()
        heap = Heap(rows)
        heap.allocated(0x10, 512, 512, "cuda:0", 1, 0, None)
        heap.allocated(0x20, 512, 512 + 4096 + 512, "cuda:0", 2, 0, None)
        # THEN that is a mark of this size, and what is live is what was seen
        assert [mark[3] for mark in rows["marks"]] == [4096]
        assert heap.live_bytes() == 1024

    def test_an_inventory_takes_the_allocators_blocks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # GIVEN a segment with a block in use, one that is free, and one in use after it
        blocks = [{"size": 512, "state": "active_allocated"}, {"size": 1024, "state": "inactive"},
                  {"size": 2048, "state": "active_allocated"}]
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
        monkeypatch.setattr(
            torch.cuda, "memory_snapshot", lambda: [{"address": 0x7F0000, "device": 1, "blocks": blocks}])
        # WHEN what is there is listed, the last being known already
        found = inventory.take(lambda address: address == 0x7F0000 + 1536, lambda *_: None)
        # THEN the first is there, in its true size
        assert [item for item in found if item[2].startswith("cuda")] == [(0x7F0000, 512, "cuda:1", False)]

    def test_names_wake_no_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # GIVEN CUDA that fails when it is initialised
        def wake() -> None:
            raise AssertionError("CUDA was initialised")

        monkeypatch.setattr(torch.cuda, "_lazy_init", wake)
        # WHEN / THEN
        assert set(machine.device_names(["cpu", "cuda:0"])) == {"cpu"}
        assert machine.device_stats() == []


def test_a_request_that_fails_on_a_backward_thread() -> None:
    # GIVEN a backward whose node runs on a thread of its device and fails there
    s = Stream()
    line = s.mark(m.LINE, "/project/train.py:3", True)
    line.children = [s.around("aten::mul", 5, MAIN, lambda: s.memory(0x1000, 512, "cuda:0"))]
    start = s.mark(m.BACKWARD_START, s.now, "/project/train.py:4", False)
    on_0 = s.around(node("MulBackward0"), 5, THREAD_0, lambda: s.around(
        "aten::mul", -1, THREAD_0,
        lambda: Event("[OutOfMemory]", s.tick(), s.now, THREAD_0, SimpleNamespace())))
    end = s.mark(m.BACKWARD_END, s.now)
    roots = [on_0, line, start, end, s.mark(m.CUT)]
    # WHEN it is read
    trace, _ = read(roots, s.entries, [Request(1 << 30, 4096, "cuda:0")])
    oom, _ = out_of_memory(View(trace))
    # THEN it is placed in that node, with the line of the call and that of the forward
    assert oom is not None
    assert (oom.device, oom.requested_bytes, oom.reserved_bytes, oom.allocated_bytes) == ("cuda:0", 1 << 30, 4096, 512)
    assert (oom.phase, oom.operator) == ("backward", "MulBackward0")
    assert (oom.line, oom.forward_line) == ("/project/train.py:4", "/project/train.py:3")


def test_a_request_whose_size_was_not_read() -> None:
    s = Stream()
    roots = [Event("[OutOfMemory]", s.tick(), s.now, MAIN, SimpleNamespace()), s.mark(m.CUT)]
    trace, _ = read(roots, s.entries)
    assert trace["out_of_memory"]["bytes"].tolist() == [NONE]
    assert trace["out_of_memory"]["device"].tolist() == [NONE]
