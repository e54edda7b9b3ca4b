"""Records of requests, made once more to the allocator's model: records of real GPUs, and the model's own."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_allocator_properties import allocators, both, do, steps

from memdiag.allocator import BlockState, Event, SegmentState, Settings
from memdiag.allocator.rules import MIN_BLOCK
from memdiag.snapshot.read import read_snapshot
from memdiag.snapshot.replay import Replayed, replay
from memdiag.snapshot.rollback import roll_back, settings_of

NOT_PYTORCHS = {"four_streams_synthetic.pickle"}
"""Made up: blocks begin at odd addresses, outside of all segments."""


def as_pytorch_has_them(events: list[Event]) -> list[dict[str, Any]]:
    return [{"action": event.action, "addr": event.address, "size": event.size, "stream": event.stream,
             "pool_id": (0, 1) if event.pool else (0, 0)} for event in events]


def recorded(about: tuple[str, int | None, int | None], script: list[Any]) -> tuple[Any, list[dict[str, Any]]]:
    """A model that has done what a script says, and its record."""
    events: list[Event] = []
    allocator, plain = both(about, events.append)
    live: list[int] = []
    for step in script:
        do(step, allocator, plain, live)
        if events and events[-1].action == "free_requested":
            # It waits for other streams. Were it completed next, it would look as though it had not.
            events.append(Event("snapshot", 0, 0, 0))
    return allocator, as_pytorch_has_them(events)


def blocks(allocator: Any) -> list[Any]:
    return [segment.blocks for segment in allocator.segments()]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(allocators.filter(lambda about: not all(word in about[0] for word in ("expandable", "max_split_size"))),
       st.lists(steps.filter(lambda step: step[0] != "release_pool"), min_size=15, max_size=80))
def test_what_the_model_recorded_it_does_again(about: tuple[str, int | None, int | None], script: list[Any]) -> None:
    # GIVEN a record of a model with little memory
    allocator, events = recorded(about, script)

    # WHEN it is replayed by one that knows of no limit, only what came of each request
    found = replay([], events, Settings.parse(about[0]))

    # THEN all is as it was
    assert found.disagreement is None
    assert found.allocations == sum(event["action"] == "alloc" for event in events)
    assert found.segments == sum(event["action"].startswith("segment") for event in events)
    assert found.failures == allocator.stats.num_ooms
    assert blocks(found.allocator) == blocks(allocator)


SCRIPT = [*(("malloc", size << 10, 0, None) for size in (3000, 40, 5000, 30000)), ("free", 0),
          ("malloc", 2 << 20, 0, None)]


@pytest.mark.parametrize(("change", "said"), [
    ({"addr": 512}, "it would serve it at"),
    ({"size": 20 << 20}, "it would need a new segment"),
    ({"action": "oom"}, "it would serve it at"),
    ({"action": "free_requested", "addr": 512}, "no block in use begins at 0x200"),
    ({"action": "segment_alloc"}, "there is no request for segment_alloc"),
    ({"action": "segment_free"}, "nothing that can be given back begins at"),
])
def test_a_record_that_is_not_what_the_allocator_does(change: dict[str, Any], said: str) -> None:
    # GIVEN a record whose last event was altered
    _, events = recorded(("", None, None), SCRIPT)
    assert replay([], events, Settings()).disagreement is None
    events[-1] |= change

    # WHEN it is replayed, THEN it is said where it is not as it should be
    found = replay([], events, Settings())
    assert found.disagreement is not None
    assert found.disagreement.startswith(f"event {len(events) - 1}, {events[-1]['action']} of ")
    assert said in found.disagreement
    assert found.allocations == 4


def test_a_segment_of_another_size() -> None:
    _, events = recorded(("", None, None), SCRIPT)
    number = next(number for number, event in enumerate(events) if event["action"] == "segment_alloc")
    events[number] |= {"size": 22 << 20}
    found = replay([], events, Settings())
    assert found.disagreement is not None
    assert "segment_alloc of 20971520 bytes" in found.disagreement
    assert found.allocations == 0


class NoGlobals(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} in a snapshot")


STATES = {"active_pending_free": "active_awaiting_free"}


def at_end(path: Path, device: int) -> list[SegmentState]:
    """What the file says of its end, read by the test itself."""
    with path.open("rb") as file:
        snapshot = NoGlobals(file).load()
    found = []
    for segment in snapshot["segments"]:
        if segment["device"] != device:
            continue
        blocks, address = [], segment["address"]
        for block in segment["blocks"]:
            state = STATES.get(block["state"], block["state"])
            requested = 0 if state == "inactive" else block.get("requested_size", 0)
            blocks.append(BlockState(address, block["size"], requested, state))
            address += block["size"]
        pool = tuple(segment.get("segment_pool_id", (0, 0)))
        found.append(SegmentState(segment["address"], segment["stream"], segment["segment_type"] == "small",
                                  bool(segment.get("is_expandable")), pool if any(pool) else None, tuple(blocks)))
    return sorted(found, key=lambda segment: segment.address)


def devices(path: Path) -> list[tuple[Replayed, list[SegmentState], list[dict[str, Any]]]]:
    snapshot = read_snapshot(path)
    found = []
    for device in snapshot.devices():
        events = snapshot.trace(device)
        if any(event["action"] == "alloc" for event in events):
            end = at_end(path, device)
            start = roll_back(snapshot, device).segments
            found.append((replay(start, events, settings_of(snapshot), end), end, events))
    return found


@pytest.mark.data
def test_each_real_request_lands_where_it_did(data_folder: Path) -> None:
    paths = [path for path in sorted((data_folder / "snapshots").glob("*.pickle")) if path.name not in NOT_PYTORCHS]
    replayed = 0
    for path in paths:
        # WHEN the record of a device is replayed from where it begins, with the driver's addresses
        for number, (found, end, events) in enumerate(devices(path)):
            where = f"{path.name}, device {number}"
            replayed += 1

            # THEN each request is served, or fails, as it was, and each segment is taken and given back as it was
            assert found.disagreement is None, where
            assert found.allocations == sum(event["action"] == "alloc" for event in events), where
            assert found.segments == sum(event["action"].startswith("segment") for event in events), where
            assert found.failures == sum(event["action"] == "oom" for event in events), where
            assert found.singly == 0, where

            # AND what there is in the end is what the snapshot has, block by block
            assert found.allocator.segments() == end, where
            stats = found.allocator.stats
            assert stats.reserved_bytes.current == sum(segment.size for segment in end), where
            assert stats.active_bytes.current == sum(segment.active for segment in end), where
            assert stats.segment.current == sum(not segment.expandable for segment in end), where
    assert replayed >= 10


@pytest.mark.data
def test_the_peaks_of_real_training_steps(data_folder: Path) -> None:
    peaks = {}
    for context in (128, 512):
        [(found, _, _)] = devices(data_folder / "snapshots" / f"lm_medium_train_ctx{context}.pickle")
        stats = found.allocator.stats
        peaks[context] = stats.allocated_bytes.peak, stats.reserved_bytes.peak
    assert peaks == {128: (7_026_606_592, 7_235_174_400), 512: (12_434_494_464, 12_660_506_624)}


@pytest.mark.data
def test_a_made_up_record_is_no_allocators(data_folder: Path) -> None:
    for name in NOT_PYTORCHS:
        [(found, _, events)] = devices(data_folder / "snapshots" / name)
        assert any(event["addr"] % MIN_BLOCK for event in events)
        assert found.disagreement is not None
        assert found.disagreement.startswith("event 0, alloc of ")
