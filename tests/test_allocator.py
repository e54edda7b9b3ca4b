"""The allocator's model, rule by rule. Sizes and places are worked out by hand from what the rules say."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memdiag.allocator import (
    AddressSpace,
    Allocator,
    BlockState,
    Event,
    OutOfMemory,
    RangeState,
    SegmentState,
    Settings,
    ordered,
)
from memdiag.allocator.ordered import Ordered
from memdiag.allocator.rules import MIB, round_size, segment_size

GIB = 1024 * MIB


def sizes(allocator: Allocator) -> list[list[tuple[int, str]]]:
    return [[(block.size, block.state) for block in segment.blocks] for segment in allocator.segments()]


def current(allocator: Allocator, *names: str) -> tuple[int, ...]:
    return tuple(getattr(allocator.stats, name).current for name in names)


@pytest.mark.parametrize(("size", "rounded"), [(1, 512), (511, 512), (512, 512), (513, 1024), (MIB, MIB),
                                               (MIB + 1, MIB + 512)])
def test_sizes_are_multiples_of_512(size: int, rounded: int) -> None:
    assert round_size(size, Settings()) == rounded


@pytest.mark.parametrize(("size", "rounded"), [
    (1200 * MIB, 1280 * MIB), (1024 * MIB, 1024 * MIB), (1024 * MIB + 1, 1280 * MIB), (2047 * MIB, 2048 * MIB),
    (2048, 2048), (2049, 2560), (1500, 1536)])
def test_sizes_are_rounded_to_quarters_of_powers_of_two(size: int, rounded: int) -> None:
    assert round_size(size, Settings.parse("roundup_power2_divisions:4")) == rounded


@pytest.mark.parametrize(("size", "segment"), [
    (512, 2 * MIB), (MIB, 2 * MIB), (MIB + 512, 20 * MIB), (10 * MIB - 512, 20 * MIB), (10 * MIB, 10 * MIB),
    (11 * MIB, 12 * MIB), (GIB + 512, GIB + 2 * MIB)])
def test_sizes_of_new_segments(size: int, segment: int) -> None:
    assert segment_size(size, Settings()) == segment


def test_a_tail_up_to_one_mib_is_handed_out_too() -> None:
    allocator = Allocator()
    allocator.malloc(19 * MIB)
    allocator.malloc(19 * MIB - 512)
    assert sizes(allocator) == [[(20 * MIB, "active_allocated")],
                                [(19 * MIB - 512, "active_allocated"), (MIB + 512, "inactive")]]
    assert current(allocator, "allocated_bytes", "requested_bytes", "reserved_bytes", "inactive_split_bytes") == (
        39 * MIB - 512, 38 * MIB - 512, 40 * MIB, MIB + 512)


def test_the_smallest_hole_that_fits_then_the_lowest() -> None:
    # GIVEN holes of 4, 3 and 3 MiB, none beside another
    allocator = Allocator()
    blocks = [allocator.malloc(size * MIB) for size in (4, 2, 3, 2, 3, 2)]
    for hole in blocks[0::2]:
        allocator.free(hole)

    # THEN 2.5 MiB go to the first of the two smaller ones
    assert allocator.malloc(5 * MIB // 2) == blocks[2]
    assert allocator.malloc(3 * MIB) == blocks[4]
    assert allocator.malloc(3 * MIB) == blocks[0]


def test_streams_and_pools_share_nothing() -> None:
    allocator = Allocator()
    first = allocator.malloc(512, stream=1)
    allocator.free(first)
    assert allocator.fits(512, stream=1)
    assert not allocator.fits(512, stream=2)
    assert not allocator.fits(512, stream=1, pool="a graph's")
    assert not allocator.fits(2 * MIB, stream=1)
    assert allocator.malloc(512, stream=1) == first


def test_a_block_that_another_stream_uses_is_free_later() -> None:
    # GIVEN a block of stream 1 that streams 2 and 3 use
    events: list[Event] = []
    allocator = Allocator(listener=events.append)
    block = allocator.malloc(512, stream=1)
    for stream in (1, 2, 3):
        allocator.record_stream(block, stream)

    # WHEN it is freed, and stream 2 has done its work
    allocator.free(block)
    allocator.finish(2)
    other = allocator.malloc(512, stream=1)

    # THEN it is not allocated, but active, and not given to others
    assert other == block + 512
    assert current(allocator, "allocation", "active", "allocated_bytes", "active_bytes") == (1, 2, 512, 1024)

    # AND it is free at the first request after stream 3 has done its work too
    allocator.finish(3)
    assert current(allocator, "active") == (2,)
    assert allocator.malloc(512, stream=1) == block
    assert [event.action for event in events] == ["segment_alloc", "alloc", "free_requested", "alloc", "free_completed",
                                                  "alloc"]


def test_memory_is_given_back_to_try_again_and_then_it_fails() -> None:
    # GIVEN a device of 100 MiB, where 40 MiB are in use and 40 are a free segment
    events: list[Event] = []
    allocator = Allocator(capacity=100 * MIB, listener=events.append)
    kept, gone = allocator.malloc(40 * MIB), allocator.malloc(40 * MIB)
    allocator.free(gone)

    # WHEN 50 MiB are asked for, THEN the free segment makes room
    allocator.malloc(50 * MIB)
    assert allocator.stats.num_alloc_retries == 1
    assert current(allocator, "reserved_bytes", "segment") == (90 * MIB, 2)

    # WHEN there is no such segment, THEN it fails, and says how things are
    with pytest.raises(OutOfMemory) as failed:
        allocator.malloc(20 * MIB - 1, stream=3)
    assert (failed.value.requested, failed.value.size, failed.value.segment_size) == (20 * MIB - 1, 20 * MIB, 20 * MIB)
    assert (failed.value.device_free, failed.value.largest_hole, failed.value.stream) == (10 * MIB, 0, 3)
    assert (failed.value.allocated, failed.value.reserved, failed.value.limit) == (90 * MIB, 90 * MIB, None)
    assert allocator.stats.num_ooms == 1
    assert events[-1] == Event("oom", 0, 20 * MIB, 3, None, 10 * MIB)

    # AND what is freed can be had
    allocator.free(kept)
    allocator.malloc(20 * MIB)


def test_fragmentation_is_seen_in_the_largest_hole() -> None:
    allocator = Allocator(capacity=100 * MIB)
    blocks = [allocator.malloc(25 * MIB - MIB) for _ in range(4)]
    for block in blocks[::2]:
        allocator.free(block)
    allocator.malloc(23 * MIB - 512)  # leaves a hole of more than 1 MiB, which pins its segment
    allocator.free(blocks[1])
    with pytest.raises(OutOfMemory) as failed:
        allocator.malloc(100 * MIB)
    assert failed.value.largest_hole == MIB + 512


@pytest.mark.parametrize(("settings", "limit", "expected"), [
    ("per_process_memory_fraction:0.5", None, 50 * MIB), ("per_process_memory_fraction:1", None, None),
    ("per_process_memory_fraction:0.5", 30 * MIB, 30 * MIB), ("", None, None)])
def test_limits(settings: str, limit: int | None, expected: int | None) -> None:
    allocator = Allocator(Settings.parse(settings), capacity=100 * MIB, limit=limit)
    assert allocator.limit == expected
    allocator.malloc(expected or 100 * MIB)
    with pytest.raises(OutOfMemory):
        allocator.malloc(1)


def test_a_private_pool_keeps_its_segments_until_it_is_released() -> None:
    allocator = Allocator(capacity=60 * MIB)
    block = allocator.malloc(20 * MIB, pool="graph")
    allocator.free(block)
    allocator.empty_cache()
    assert [segment.pool for segment in allocator.segments()] == ["graph"]

    # WHEN a request to a private pool fails, nothing is given back
    cached = allocator.malloc(40 * MIB)
    allocator.free(cached)
    with pytest.raises(OutOfMemory):
        allocator.malloc(30 * MIB, pool="graph")
    assert allocator.stats.num_alloc_retries == 0
    assert len(allocator.segments()) == 2

    # AND once it is released, an emptied cache of its own takes it alone
    allocator.release_pool("graph")
    assert allocator.releasable() == [(cached, 40 * MIB), (block, 20 * MIB)]
    allocator.empty_cache("graph")
    assert [segment.pool for segment in allocator.segments()] == [None]


def test_pools_that_do_not_split_and_that_help_out() -> None:
    allocator = Allocator(capacity=40 * MIB)
    allocator.add_pool("whole", no_split=True, use_on_oom=True)
    whole = allocator.malloc(2 * MIB, pool="whole")
    assert sizes(allocator) == [[(20 * MIB, "active_allocated")]]
    allocator.free(whole)
    allocator.malloc(20 * MIB)
    assert allocator.malloc(3 * MIB) == whole
    assert (allocator.stats.num_alloc_retries, allocator.segments()[0].pool) == (0, "whole")


def test_what_is_freed_while_a_graph_is_captured_waits_for_its_end() -> None:
    # GIVEN two blocks, one of which another stream used before the capture, and one in it
    allocator = Allocator()
    before, within = allocator.malloc(512), allocator.malloc(512)
    allocator.record_stream(before, 7)
    allocator.begin_capture("graph")
    allocator.record_stream(within, 7)

    # WHEN both are freed in it
    allocator.free(before)
    allocator.free(within)
    allocator.finish(7)
    allocator.malloc(512, pool="graph")
    allocator.malloc(512)

    # THEN neither is free until it has ended; then the one that only the capture used is, the other waits for stream 7
    assert current(allocator, "active") == (4,)
    allocator.end_capture("graph")
    assert allocator.malloc(512) == within
    assert current(allocator, "active") == (4,)
    allocator.finish(7)
    assert allocator.malloc(512) == before


def test_an_expandable_segment_grows_in_place_and_gives_whole_pages_back() -> None:
    # GIVEN an expandable segment with 30, 30 and 30 MiB in pages of 20
    events: list[Event] = []
    allocator = Allocator(Settings.parse("expandable_segments:True"), capacity=GIB, listener=events.append)
    first, second, third = (allocator.malloc(30 * MIB) for _ in range(3))
    assert (second - first, third - second) == (30 * MIB, 30 * MIB)
    assert [(event.address - first, event.size) for event in events if event.action == "segment_map"] == [
        (0, 40 * MIB), (40 * MIB, 20 * MIB), (60 * MIB, 40 * MIB)]
    assert current(allocator, "reserved_bytes", "segment", "inactive_split") == (100 * MIB, 0, 0)

    # WHEN the middle is freed and the cache emptied, THEN the whole page in it goes, and the rest of it stays free
    allocator.free(second)
    assert allocator.releasable() == [(first + 40 * MIB, 20 * MIB)]
    allocator.empty_cache()
    assert sizes(allocator) == [[(30 * MIB, "active_allocated"), (10 * MIB, "inactive")],
                                [(30 * MIB, "active_allocated"), (10 * MIB, "inactive")]]

    # AND what is next goes where its end can be mapped, at the lowest address
    assert allocator.malloc(25 * MIB) == second
    assert events[-2] == Event("segment_map", first + 40 * MIB, 20 * MIB, 0)

    # AND a hole is taken before the end of what is mapped, which can grow
    assert allocator.malloc(5 * MIB) == second + 25 * MIB
    assert allocator.malloc(5 * MIB) == third + 30 * MIB


def test_an_expandable_segment_that_is_all_free_goes_as_a_whole() -> None:
    allocator = Allocator(Settings.parse("expandable_segments:True"), capacity=GIB)
    first = allocator.malloc(5 * MIB)
    allocator.free(first)
    allocator.empty_cache()
    assert allocator.segments() == []
    assert allocator.malloc(5 * MIB) != first


@pytest.mark.parametrize(("conf", "fails"), [("", True), ("expandable_segments:True", False)])
def test_expandable_segments_serve_what_others_cannot(conf: str, fails: bool) -> None:
    # GIVEN all of a device reserved by three requests, then 25 MiB where each of them was
    allocator = Allocator(Settings.parse(conf), capacity=120 * MIB)
    for block in [allocator.malloc(40 * MIB) for _ in range(3)]:
        allocator.free(block)
    for _ in range(3):
        allocator.malloc(25 * MIB)

    # WHEN 30 MiB of the 45 that are left are asked for, THEN three holes of 15 do not serve them, and one of 45 does
    assert allocator.largest_hole() == (15 if fails else 45) * MIB
    if fails:
        with pytest.raises(OutOfMemory):
            allocator.malloc(30 * MIB)
    else:
        allocator.malloc(30 * MIB)


def test_old_segments_are_collected() -> None:
    # GIVEN a limit of 200 MiB of which half may be reserved before collections begin, and two free segments, one of
    # which was free for longer
    allocator = Allocator(Settings.parse("garbage_collection_threshold:0.5"), limit=200 * MIB)
    old, new, kept = allocator.malloc(40 * MIB), allocator.malloc(45 * MIB), allocator.malloc(40 * MIB)
    allocator.free(old)
    for _ in range(3):
        allocator.malloc(11 * MIB, stream=9)
        allocator.free(allocator.segments()[-1].address)
    allocator.free(new)

    # WHEN a new segment is needed, THEN the old ones go
    allocator.malloc(60 * MIB)
    assert new in [segment.address for segment in allocator.segments()]
    assert old not in [segment.address for segment in allocator.segments()]
    assert kept in [segment.address for segment in allocator.segments()]
    assert allocator.stats.num_alloc_retries == 0


def test_blocks_above_the_largest_size_to_split_are_kept_whole() -> None:
    # GIVEN no blocks of 32 MiB or more to be split, and free ones of 32 and 64
    allocator = Allocator(Settings.parse("max_split_size_mb:32"), capacity=128 * MIB)
    small, large = allocator.malloc(32 * MIB), allocator.malloc(64 * MIB)
    allocator.free(small)
    allocator.free(large)

    # THEN smaller requests do not get them, and larger ones whole if little is left
    assert not allocator.fits(12 * MIB)
    assert allocator.malloc(45 * MIB) == large
    assert sizes(allocator)[1] == [(64 * MIB, "active_allocated")]
    allocator.free(large)
    assert not allocator.fits(33 * MIB)

    # AND where memory is short, as much goes as is needed: one that is large enough
    allocator.malloc(33 * MIB)
    assert allocator.stats.num_alloc_retries == 0
    assert next(segment.address for segment in allocator.segments()) == small
    assert current(allocator, "reserved_bytes") == (66 * MIB,)


def test_of_large_blocks_as_many_go_as_are_enough() -> None:
    # GIVEN three free segments of 32 MiB on a device that is full
    allocator = Allocator(Settings.parse("max_split_size_mb:32"), capacity=96 * MIB)
    blocks = [allocator.malloc(32 * MIB) for _ in range(3)]
    for block in blocks:
        allocator.free(block)

    # WHEN 64 MiB are asked for, THEN two of them go, those at the highest addresses
    allocator.malloc(64 * MIB)
    assert blocks[0] in [segment.address for segment in allocator.segments()]
    assert current(allocator, "reserved_bytes", "segment") == (96 * MIB, 2)
    assert allocator.stats.num_alloc_retries == 0


def test_nothing_is_asked_for_or_freed() -> None:
    allocator = Allocator()
    assert allocator.malloc(0) == 0
    allocator.free(0)
    assert allocator.segments() == []


def test_blocks_that_are_not_in_use_cannot_be_freed() -> None:
    allocator = Allocator()
    block = allocator.malloc(512)
    allocator.free(block)
    for act in (allocator.free, allocator.request_free, lambda address: allocator.record_stream(address, 1)):
        with pytest.raises(ValueError, match="no block in use begins at"):
            act(block)
    with pytest.raises(ValueError, match="waits"):
        allocator.complete_free(block)
    allocator.malloc(512)
    with pytest.raises(ValueError, match="nothing that can be given back"):
        allocator.release(block)


def test_a_segment_outside_of_all_ranges() -> None:
    segment = SegmentState(1 << 40, 0, True, True, None, (BlockState(1 << 40, 2 * MIB, 0, "inactive"),))
    assert Allocator(segments=[segment]).segments() == [segment]
    with pytest.raises(ValueError, match="is in none of the ranges"):
        Allocator(segments=[segment], ranges=[RangeState(1 << 41, MIB, 0, True, None)])


def test_statistics_have_pytorchs_names() -> None:
    # GIVEN the names that PyTorch's own summary looks up
    torch = pytest.importorskip("torch")
    known = set(re.findall(r"[\"']([a-z_]+)[\"'.]", inspect.getsource(torch.cuda.memory)))
    documented = set(re.findall(r'``"([a-z_]+)', torch.cuda.memory_stats.__doc__))

    # WHEN ours are listed
    allocator = Allocator()
    allocator.free(allocator.malloc(512))
    found = allocator.stats.as_dict()

    # THEN it knows them all
    assert {name.split(".")[0] for name in found} <= known | documented
    assert (found["allocated_bytes.all.current"], found["allocated_bytes.all.peak"]) == (0, 512)
    assert found["num_ooms"] == 0


def test_the_default_driver_counts_pages_and_never_repeats_an_address() -> None:
    space = AddressSpace(memory=4 * MIB)
    first = space.allocate(3 * MIB)
    assert (first is not None, space.free(), space.allocate(1)) == (True, 0, None)
    space.release(first or 0, 3 * MIB)
    assert space.allocate(MIB) == (first or 0) + 4 * MIB
    assert AddressSpace().free() is None


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 60))), st.integers(0, 60))
def test_ordered_keys_are_those_of_a_sorted_list(changes: list[tuple[bool, int]], asked: int) -> None:
    # GIVEN runs so short that there are many
    most, ordered._MOST = ordered._MOST, 4
    try:
        keys: Ordered[int] = Ordered()
        plain: set[int] = set()

        # WHEN keys are added and removed
        for add, key in changes:
            if add and key not in plain:
                keys.add(key)
                plain.add(key)
            elif not add and key in plain:
                keys.remove(key)
                plain.remove(key)

        # THEN it has the same as a plain set, in order
        expected: list[Any] = sorted(plain)
        assert (list(keys), len(keys)) == (expected, len(expected))
        assert keys.at_least(asked) == next((key for key in expected if key >= asked), None)
        assert keys.above(asked) == next((key for key in expected if key > asked), None)
        assert keys.greatest() == (expected[-1] if expected else None)
    finally:
        ordered._MOST = most


def test_a_key_that_is_not_there_cannot_be_removed() -> None:
    keys: Ordered[int] = Ordered()
    keys.add(5)
    with pytest.raises(KeyError):
        keys.remove(4)
