"""A snapshot's state where its events begin, and its peaks. Oracles: the allocator's model, whose states are known at
every event; and real files, whose events must lead from the state that was worked out to the one in the file."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memdiag.allocator import Allocator, Event, OutOfMemory, SegmentState, Settings
from memdiag.allocator.rules import MIB
from memdiag.errors import MemdiagError
from memdiag.snapshot.data import Block, Segment, Snapshot
from memdiag.snapshot.peaks import follow
from memdiag.snapshot.read import read_snapshot
from memdiag.snapshot.rollback import roll_back

POOL = (1, 0)
CONFS: dict[str, dict[str, Any]] = {
    "": {}, "max_split_size_mb:20": {"max_split_size": 20 * MIB},
    "expandable_segments:True": {"expandable_segments": True},
    "roundup_power2_divisions:4": {"roundup_power2_divisions": {str(1 << n): 4 for n in range(16)}},
    "garbage_collection_threshold:0.5": {"garbage_collection_threshold": 0.5},
    "expandable_segments:True,roundup_power2_divisions:4":
        {"expandable_segments": True, "roundup_power2_divisions": {str(1 << n): 4 for n in range(16)}}}
sizes = st.one_of(st.integers(1, 2 * MIB), st.integers(MIB, 24 * MIB), st.integers(20 * MIB, 90 * MIB),
                  st.sampled_from([512, MIB, MIB + 1, 19 * MIB, 19 * MIB + 512, 20 * MIB, 39 * MIB + 512, 40 * MIB]))
steps = st.one_of(
    st.tuples(st.just("malloc"), sizes, st.integers(0, 2), st.sampled_from([None, None, None, POOL])),
    st.tuples(st.just("malloc"), sizes, st.just(0), st.none()),
    st.tuples(st.just("free"), st.integers(0, 1 << 30)), st.tuples(st.just("free"), st.integers(0, 1 << 30)),
    st.tuples(st.just("record_stream"), st.integers(0, 1 << 30), st.integers(0, 2)),
    st.tuples(st.just("finish"), st.integers(0, 2)), st.just(("empty_cache",)))


class History:
    """A run of the model: its events, and what was there before the first and after each of them."""

    def __init__(self, conf: str, script: list[tuple[Any, ...]]) -> None:
        self.events: list[Event] = []
        self.between: dict[int, list[SegmentState]] = {}  # states after whole steps, by the count of events
        self.counts: dict[int, tuple[int, int, int]] = {}
        self.allocator = Allocator(Settings.parse(conf), capacity=1 << 30, limit=300 * MIB, listener=self.events.append)
        self.live: list[int] = []
        self.look()
        for step in script:
            self.do(step)
            self.look()

    def do(self, step: tuple[Any, ...]) -> None:
        if step[0] == "malloc":
            with contextlib.suppress(OutOfMemory):
                self.live.append(self.allocator.malloc(*step[1:]))
        elif step[0] in ("empty_cache", "finish"):
            getattr(self.allocator, step[0])(*step[1:])
        elif self.live:
            number = step[1] % len(self.live)
            address = self.live.pop(number) if step[0] == "free" else self.live[number]
            getattr(self.allocator, step[0])(address, *step[2:])

    def look(self) -> None:
        stats = self.allocator.stats
        self.between[len(self.events)] = self.allocator.segments()
        self.counts[len(self.events)] = (stats.allocated_bytes.current, stats.active_bytes.current,
                                         stats.reserved_bytes.current)


def segment(state: SegmentState) -> Segment:
    blocks = tuple(Block(*block, []) for block in state.blocks)
    pool: Any = state.pool or (0, 0)
    return Segment(0, state.address, state.size, state.stream, state.small, pool, state.expandable, blocks, [])


def entry(event: Event) -> dict[str, Any]:
    if event.action == "oom":
        return {"action": "oom", "size": event.size, "stream": event.stream, "device_free": 0}
    return {"action": event.action, "addr": event.address, "size": event.size, "stream": event.stream,
            "pool_id": event.pool or (0, 0)}


def snapshot(history: History, first: int, conf: str) -> Snapshot:
    """What PyTorch would have saved at the end, had it kept the events from one on."""
    last = history.between[len(history.events)]
    trace = [entry(event) for event in history.events[first:]]
    return Snapshot("made up", tuple(map(segment, last)), [trace], CONFS[conf], [], ())


def without_tails(segments: Any) -> list[tuple[Any, ...]]:
    return [(state.address, state.size, state.stream, state.small, state.expandable, state.pool,
             [(block.address, block.requested, block.state) for block in state.blocks if block.state != "inactive"])
            for state in segments]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from([*CONFS]), st.lists(steps, min_size=15, max_size=80), st.integers(0, 1 << 30))
def test_a_state_of_the_allocator_is_found_again(conf: str, script: list[tuple[Any, ...]], cut: int) -> None:
    # GIVEN a history of which the beginning is lost, as in a ring buffer that wrapped
    history = History(conf, script)
    first = sorted(history.between)[cut % len(history.between)]
    truth = history.between[first]

    # WHEN the last state is rolled back
    start = roll_back(snapshot(history, first, conf), 0)

    # THEN it is what was there, to the byte; where it says that tails are not known, but for these
    assert start.outside == ()
    assert without_tails(start.segments) == without_tails(truth)
    if not start.unsettled:
        assert list(start.segments) == truth
    ends = {block.address: block.size for state in start.segments for block in state.blocks if block.requested}
    tails = [block.size - ends[block.address] for state in truth for block in state.blocks if block.requested]
    assert all(0 <= tail <= MIB for tail in tails)
    assert sum(tail > 0 for tail in tails) <= start.unsettled


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from([*CONFS]), st.lists(steps, min_size=15, max_size=80), st.integers(0, 1 << 30))
def test_the_counts_are_those_of_the_allocator(conf: str, script: list[tuple[Any, ...]], cut: int) -> None:
    # GIVEN a history of which the beginning is lost
    history = History(conf, script)
    first = sorted(history.between)[cut % len(history.between)]

    # WHEN its events are followed
    found = follow(snapshot(history, first, conf), 0)

    # THEN allocated, active and reserved are the allocator's own, wherever these were looked at
    assert found.differs == 0
    for count, (allocated, active, reserved) in history.counts.items():
        if count >= first:
            at = count - first
            assert found.reserved[at] == reserved
            if not found.start.unsettled:
                assert (found.allocated[at], found.active[at]) == (allocated, active)
            else:
                assert 0 <= active - found.active[at] <= found.start.unsettled * MIB

    # AND the blocks, each over its life, add up to the same
    blocks, events = found.blocks, len(history.events) - first
    for at in {0, events // 2, events}:
        allocated = blocks.bytes[(blocks.born < at) & (blocks.freed >= at)].sum()
        assert allocated == found.allocated[at]
        assert blocks.bytes[(blocks.born < at) & (blocks.gone >= at)].sum() == found.active[at]


def small(*events: dict[str, Any], blocks: list[tuple[int, int, str]] | None = None, address: int = 0) -> Snapshot:
    """A segment of 20 MiB with blocks (size, requested size, state), at the end of events."""
    at, made = address, []
    for size, requested, state in blocks or [(20 * MIB, 0, "inactive")]:
        made.append(Block(at, size, requested, state, []))
        at += size
    held = Segment(0, address, 20 * MIB, 0, False, (0, 0), False, tuple(made), [])
    return Snapshot("made up", (held,), [list(events)], None, [], ())


def event(action: str, addr: int, size: int) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "stream": 0}


USED = "active_allocated"


def test_a_tail_that_nothing_can_be_told_of_is_counted() -> None:
    # GIVEN a block that was freed before anything was put behind it
    given = small(event("free_requested", 0, 5 * MIB), event("free_completed", 0, 5 * MIB))

    # WHEN it is rolled back
    start = roll_back(given, 0)

    # THEN it has what was asked for, and is said not to be known
    assert [block.size for block in start.segments[0].blocks] == [5 * MIB, 15 * MIB]
    assert start.unsettled == 1


def test_a_later_block_tells_where_a_tail_ends() -> None:
    # GIVEN a block of 5 MiB, behind which another was put 512 KiB further, before it was freed
    given = small(event("alloc", 5 * MIB + 524288, 3 * MIB), event("free_requested", 0, 5 * MIB),
                  event("free_completed", 0, 5 * MIB),
                  blocks=[(5 * MIB + 524288, 0, "inactive"), (3 * MIB, 3 * MIB, USED),
                          (12 * MIB - 524288, 0, "inactive")])

    # WHEN it is rolled back
    start = roll_back(given, 0)

    # THEN the block has these 512 KiB
    assert [block.size for block in start.segments[0].blocks] == [5 * MIB + 524288, 15 * MIB - 524288]
    assert start.unsettled == 0


def test_less_than_what_could_be_free_is_tail() -> None:
    # GIVEN a freed block that ended 512 KiB before the segment did
    given = small(event("free_requested", 0, 20 * MIB - 524288), event("free_completed", 0, 20 * MIB - 524288))

    # THEN it had all of it, and the peak counts it
    assert [block.size for block in roll_back(given, 0).segments[0].blocks] == [20 * MIB]
    assert follow(given, 0).peak().bytes == 20 * MIB


@pytest.mark.parametrize("kept", ["free_requested", "free_completed"])
def test_either_kind_of_free_may_be_left_out(kept: str) -> None:
    # GIVEN a record that has one event for a free
    given = small(event("alloc", 0, 19 * MIB), event(kept, 0, 19 * MIB))

    # WHEN it is followed
    found = follow(given, 0)

    # THEN the block is freed by it, and was not waiting for anything
    assert found.allocated.tolist() == [0, 20 * MIB, 0]
    assert found.active.tolist() == [0, 20 * MIB, 0]


def test_what_is_freed_but_still_in_use_by_streams_is_active() -> None:
    # GIVEN a block that was freed before the record began, and whose streams were done in it
    given = small(event("free_completed", 0, 19 * MIB), event("alloc", 0, 19 * MIB),
                  event("free_requested", 0, 19 * MIB), blocks=[(20 * MIB, 19 * MIB, "active_awaiting_free")])

    # WHEN it is followed
    found = follow(given, 0)

    # THEN it is active from the start, and never allocated
    assert found.active.tolist() == [20 * MIB, 0, 20 * MIB, 20 * MIB]
    assert found.allocated.tolist() == [0, 0, 20 * MIB, 0]
    assert found.blocks.freed.tolist() == [-1, 2]
    assert found.blocks.gone.tolist() == [0, 3]


@pytest.mark.parametrize(("events", "words"), [
    ([event("alloc", 0, MIB)], "no block in use begins there afterwards"),
    ([event("free_completed", 0, MIB), event("alloc", 0, MIB), event("free_requested", 512, MIB)],
     "no block that was freed"),
    ([event("segment_alloc", 512, MIB)], "no such segment afterwards"),
    ([event("segment_free", 0, 20 * MIB)], "the segment is there afterwards"),
    ([event("segment_free", 4 * MIB, MIB)], "segments at 0x0 and 0x400000 overlap"),
    ([event("segment_map", 0, MIB)], "not mapped afterwards"),
    ([event("free_completed", 0, 4 * MIB), event("free_completed", MIB, 4 * MIB)],
     "blocks at 0x0 and 0x100000 overlap"),
    ([event("free_completed", 0, 4 * MIB), event("free_completed", 0, 4 * MIB)], "in use begins there afterwards"),
])
def test_events_of_another_history_are_refused(events: list[dict[str, Any]], words: str) -> None:
    # GIVEN events that do not lead to the state THEN they are refused, with the file and the event
    with pytest.raises(MemdiagError, match=words) as refused:
        roll_back(small(*events), 0)
    assert "made up" in str(refused.value)
    assert "device 0" in str(refused.value)


def test_blocks_outside_of_all_segments_are_counted_apart() -> None:
    # GIVEN events of a tool that has no segment for them
    far = 1 << 40
    given = small(event("free_completed", far, 600), event("alloc", far, 5 * MIB),
                  event("free_completed", far, 5 * MIB))

    # WHEN they are followed
    found = follow(given, 0)

    # THEN they count with their rounding, and the start says that they are nowhere
    assert [block.address for block in found.start.outside] == [far]
    assert found.allocated.tolist() == [1024, 0, 5 * MIB, 0]


FILES = ["attention_from_process_start", "small_from_process_start", "lm_small_forward_fp32_ctx128",
         "lm_small_forward_autocast_bf16_ctx128", "lm_medium_train_ctx128", "lm_medium_train_ctx512",
         "four_streams_synthetic", "lm_few_frames", "oom_expandable_three_gpus", "old_format_torch_2.0"]


@pytest.mark.data
@pytest.mark.parametrize("name", FILES)
def test_real_events_lead_to_the_state_of_their_file(data_folder: Path, name: str) -> None:
    # GIVEN a real snapshot
    given = read_snapshot(data_folder / "snapshots" / f"{name}.pickle")
    for device in given.devices():

        # WHEN its events are followed from the state in which they begin
        found = follow(given, device)

        # THEN they end with the blocks and the bytes that the file has
        own = [held for held in given.segments if held.device == device]
        assert found.differs == 0
        assert found.reserved[-1] == sum(held.size for held in own)
        for values, states in ((found.allocated, (USED,)), (found.active, (USED, "active_awaiting_free"))):
            assert values[-1] == sum(b.size for held in own for b in held.blocks if b.state in states)


@pytest.mark.data
@pytest.mark.parametrize(("name", "allocated", "reserved"), [
    ("lm_medium_train_ctx128", 7_026_606_592, 7_235_174_400),
    ("lm_medium_train_ctx512", 12_434_494_464, 12_660_506_624)])
def test_known_peaks(data_folder: Path, name: str, allocated: int, reserved: int) -> None:
    # GIVEN a training step whose peaks are known WHEN it is followed
    found = follow(read_snapshot(data_folder / "snapshots" / f"{name}.pickle"), 0)

    # THEN they are found, and nothing was left open
    assert found.peak().bytes == allocated
    assert found.peak("reserved").bytes == reserved
    assert found.start.unsettled == 0
