"""The allocator's model held against the rules written plainly, on requests that Hypothesis makes up."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plain_allocator import FREE, KIB, MIB, USED, WAITING, Failed, Places, Plain

from memdiag.allocator import Allocator, Event, OutOfMemory, Settings

CAPACITY = 512 * MIB
STATES = {"active_allocated": USED, "active_awaiting_free": WAITING, "inactive": FREE}
CONFS = ["", "max_split_size_mb:20", "max_split_size_mb:40,max_non_split_rounding_mb:30", "large_segment_size_mb:36",
         "roundup_power2_divisions:4", "roundup_power2_divisions:[1:2,4:8,>:1]", "garbage_collection_threshold:0.3",
         "garbage_collection_threshold:0.6,max_split_size_mb:24"]

sizes = st.one_of(
    st.integers(1, 4 * KIB), st.integers(1, 2 * MIB), st.integers(MIB, 24 * MIB), st.integers(20 * MIB, 120 * MIB),
    st.sampled_from([512, MIB, MIB + 1, 2 * MIB, 10 * MIB - 512, 10 * MIB, 19 * MIB - 512, 19 * MIB,
                     20 * MIB, 40 * MIB]))
pools = st.sampled_from([None, None, None, "private"])
steps = st.one_of(
    st.tuples(st.just("malloc"), sizes, st.integers(0, 2), pools),
    st.tuples(st.just("malloc"), sizes, st.just(0), st.none()),
    st.tuples(st.just("free"), st.integers(0, 1 << 30)), st.tuples(st.just("free"), st.integers(0, 1 << 30)),
    st.tuples(st.just("record_stream"), st.integers(0, 1 << 30), st.integers(0, 2)),
    st.tuples(st.just("finish"), st.integers(0, 2)), st.just(("empty_cache",)), st.just(("release_pool",)))
allocators = st.tuples(
    st.sampled_from([*CONFS, *(f"expandable_segments:True,{conf}".rstrip(",") for conf in CONFS[:6])]),
    st.sampled_from([None, None, 100 * MIB, 301 * MIB]), st.sampled_from([None, 60 * MIB, 256 * MIB]))


def both(about: tuple[str, int | None, int | None], listener: Any = None) -> tuple[Allocator, Plain]:
    conf, limit, memory = about
    if "threshold" in conf and limit is None:
        limit = 200 * MIB
    parsed = Settings.parse(conf)
    return (Allocator(parsed, capacity=CAPACITY, limit=limit, driver=Places(memory), listener=listener),
            Plain(parsed, Places(memory), limit, CAPACITY))


def do(step: tuple[Any, ...], allocator: Allocator, plain: Plain, live: list[int]) -> None:
    """Asks both the same, and compares the answers."""
    if step[0] == "malloc":
        try:
            expected: int | None = plain.malloc(*step[1:])
        except Failed:
            expected = None
        try:
            found: int | None = allocator.malloc(*step[1:])
        except OutOfMemory:
            found = None
        assert found == expected
        if found is not None:
            live.append(found)
    elif step[0] in ("empty_cache", "finish"):
        getattr(allocator, step[0])(*step[1:])
        getattr(plain, step[0])(*step[1:])
    elif step[0] == "release_pool":
        allocator.release_pool("private")
        plain.released.append("private")
    elif live:
        number = step[1] % len(live)
        address = live.pop(number) if step[0] == "free" else live[number]
        getattr(allocator, step[0])(address, *step[2:])
        getattr(plain, step[0])(address, *step[2:])


def layout(allocator: Allocator) -> list[tuple[int, int, str, int]]:
    return [(block.address, block.size, STATES[block.state], block.requested)
            for segment in allocator.segments() for block in segment.blocks]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(allocators, st.lists(steps, min_size=15, max_size=80))
def test_every_answer_is_that_of_the_plain_rules(about: tuple[str, int | None, int | None], script: list[Any]) -> None:
    # GIVEN the model and the plain rules, with the same settings, limits and addresses of segments
    allocator, plain = both(about)
    live: list[int] = []
    peaks: dict[str, int] = {}

    for step in script:
        # WHEN both are asked the same
        do(step, allocator, plain, live)

        # THEN blocks are the same, and the statistics say what is there
        assert layout(allocator) == plain.layout()
        numbers = plain.numbers()
        stats = allocator.stats
        assert {name: getattr(stats, name).current for name in numbers} == numbers
        peaks = {name: max(peaks.get(name, 0), value) for name, value in numbers.items()}
        assert all(getattr(stats, name).peak >= peak for name, peak in peaks.items())
        assert (stats.num_alloc_retries, stats.num_ooms) == (plain.retries, plain.ooms)
        assert allocator.largest_hole() == max(
            (size for _, size, state, _ in plain.layout() if state == FREE), default=0)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(allocators, st.lists(steps, min_size=15, max_size=80))
def test_blocks_tile_segments_and_the_events_tell_them(about: tuple[str, int | None, int | None],
                                                       script: list[Any]) -> None:
    # GIVEN a model with a listener
    events: list[Event] = []
    allocator, plain = both(about, events.append)
    live: list[int] = []

    # WHEN requests are made
    for step in script:
        do(step, allocator, plain, live)

    # THEN blocks fill their segments, no two neighbours are free, and segments do not overlap
    end = 0
    for segment in allocator.segments():
        assert segment.address >= end
        end = segment.address
        for block in segment.blocks:
            assert block.address == end
            end += block.size
        states = [block.state for block in segment.blocks]
        assert ("inactive", "inactive") not in itertools.pairwise(states)

    # AND what the events tell is what is there
    active, reserved = {}, 0
    for event in events:
        if event.action == "alloc":
            assert event.address not in active
            active[event.address] = event.size
        elif event.action == "free_completed":
            assert active.pop(event.address) == event.size
        elif event.action in ("segment_alloc", "segment_map"):
            reserved += event.size
        elif event.action in ("segment_free", "segment_unmap"):
            reserved -= event.size
    assert active == {block.address: block.requested for segment in allocator.segments() for block in segment.blocks
                      if block.state != "inactive"}
    assert reserved == allocator.stats.reserved_bytes.current
    assert sum(event.action == "oom" for event in events) == allocator.stats.num_ooms


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(allocators, st.lists(steps, min_size=10, max_size=40), st.lists(steps, min_size=10, max_size=40))
def test_a_model_goes_on_from_the_segments_of_another(about: tuple[str, int | None, int | None], script: list[Any],
                                                      rest: list[Any]) -> None:
    # GIVEN a model in the midst of something, with no frees that wait and no memory that is short
    first, plain = both((about[0].replace("garbage_collection_threshold:0.3", "").replace(
        "garbage_collection_threshold:0.6,", ""), None, None))
    live: list[int] = []
    for step in script:
        if step[0] != "record_stream":
            do(step, first, plain, live)

    # WHEN another begins with its segments
    driver = Places()
    driver.count = plain.driver.count
    second = Allocator(first.settings, capacity=CAPACITY, driver=driver, segments=first.segments())

    # THEN their statistics agree, and they answer alike from there on
    assert [getattr(second.stats, name).current for name in plain.numbers()] == list(plain.numbers().values())
    for step in rest:
        if step[0] not in ("record_stream", "empty_cache", "release_pool"):
            do(step, second, plain, live)
            assert layout(second) == plain.layout()
