"""Snapshots as traces, and ``memdiag snapshot``. Oracles: the allocator's own counter, followed apart from the trace;
the sizes that a model's shapes give; and small records written by hand, of which every role is known."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memdiag.errors import MemdiagError
from memdiag.snapshot.data import Block, Segment, Snapshot
from memdiag.snapshot.holes import largest_hole
from memdiag.snapshot.peaks import follow
from memdiag.snapshot.read import read_snapshot
from memdiag.snapshot.to_trace import trace_of
from memdiag.trace import Trace, load
from memdiag.trace.ledger import ledger
from memdiag.trace.view import View

MIB = 1 << 20
LIB = "/env/lib/python3.12/site-packages/torch/"
CALL = {"name": "_call_impl", "filename": LIB + "nn/modules/module.py", "line": 1}
ENGINE = {"name": "torch::autograd::Engine::evaluate_function(int)", "filename": "??", "line": 0}
FORWARD = [{"name": "at::_ops::mul_Tensor::call(int)", "filename": "??", "line": 0},
           {"name": "forward", "filename": "/home/me/model.py", "line": 7}, CALL]
BACKWARD = [{"name": "at::_ops::mul_Tensor::call(int)", "filename": "??", "line": 0}, ENGINE]
BACKWARD_SUM = [{"name": "at::_ops::sum::call(int)", "filename": "??", "line": 0}, ENGINE]
STEP = [{"name": "at::_ops::add_Tensor::call(int)", "filename": "??", "line": 0},
        {"name": "step", "filename": "/home/me/optimizer.py", "line": 9}]
STEP_PYTHON = STEP[1:]  # a name that is bound anew: no operator runs
CUBLAS = [{"name": "at::cuda::getNewWorkspace()", "filename": "??", "line": 0}, *BACKWARD]


class Record:
    """A device's record, written event by event: blocks of whole MiB in segments of their own."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._live: dict[int, int] = {}
        self._next = 1
        self._segments: list[tuple[int, int]] = []

    def before(self, mib: int) -> int:
        address = self._place(mib)
        self._live[address] = mib
        return address

    def alloc(self, mib: int, frames: list[dict[str, Any]]) -> int:
        address = self._place(mib)
        self._event("alloc", address, mib, frames)
        self._live[address] = mib
        return address

    def free(self, address: int, frames: list[dict[str, Any]]) -> None:
        mib = self._live.pop(address)
        self._event("free_requested", address, mib, frames)
        self._event("free_completed", address, mib, frames)

    def oom(self, mib: int, free: int, frames: list[dict[str, Any]]) -> None:
        self.events.append({"action": "oom", "size": mib * MIB, "stream": 0, "device_free": free, "frames": frames,
                            "time_us": len(self.events)})

    def _place(self, mib: int) -> int:
        address = self._next << 30
        self._next += 1
        self._segments.append((address, mib))
        return address

    def _event(self, action: str, address: int, mib: int, frames: list[dict[str, Any]]) -> None:
        self.events.append({"action": action, "addr": address, "size": mib * MIB, "stream": 0, "frames": frames,
                            "time_us": len(self.events)})

    def snapshot(self) -> Snapshot:
        segments = tuple(
            Segment(0, address, mib * MIB, 0, False, (0, 0), False,
                    (Block(address, mib * MIB, mib * MIB if address in self._live else 0,
                           "active_allocated" if address in self._live else "inactive", []),), [])
            for address, mib in self._segments)
        return Snapshot("made up", segments, [self.events], None, [], ())

    def pickled(self, path: Path) -> Path:
        segments = [{
            "device": 0, "address": one.address, "total_size": one.size, "stream": 0, "segment_type": "large",
            "blocks": [{"address": block.address, "size": block.size, "requested_size": block.requested_size,
                        "state": block.state} for block in one.blocks]} for one in self.snapshot().segments]
        path.write_bytes(pickle.dumps({"segments": segments, "device_traces": [self.events]}))
        return path


def training() -> Record:
    """One step: 3 and 5 MiB of parameters, each with two of state that the optimizer replaces."""
    record = Record()
    state = [record.before(mib) for mib in (3, 5) for _ in range(2)]
    for mib in (3, 5):
        record.before(mib)
    record.before(11)  # nothing tells what it is
    saved = record.alloc(40, FORWARD)
    loss = record.alloc(2, FORWARD)
    record.alloc(9, CUBLAS)
    temporary = record.alloc(7, BACKWARD_SUM)
    gradients = [record.alloc(mib, BACKWARD) for mib in (3, 5)]
    record.free(temporary, BACKWARD)
    record.free(saved, BACKWARD)
    for number, mib in enumerate((3, 5)):
        scratch = record.alloc(mib, STEP)
        for one in range(2):
            record.alloc(mib, STEP)
            record.free(state[2 * number + one], STEP_PYTHON)
        record.free(scratch, STEP_PYTHON)
    assert len({loss, *gradients}) == 3  # they stay
    return record


def sums(trace: Trace, event: int) -> dict[str, int]:
    return {role.label: size // MIB for role, size in View(trace).by_role(event).items() if size}


def test_roles_are_told_by_births_deaths_and_sizes() -> None:
    # GIVEN the record of a whole step
    trace = trace_of(training().snapshot())
    view = View(trace)

    # THEN after the first event of the optimizer every MiB is what it is
    first = int(trace["spans"]["start_event"][trace["spans"]["name"] == trace.text.index("optimizer")][0])
    assert sums(trace, first) == {
        "parameters": 8, "optimizer_state": 16, "gradients": 8, "optimizer_temporaries": 3, "other_activations": 2,
        "workspace": 9, "unknown": 11}
    # AND what was kept for backward, and what backward made for itself, was so at the peak
    assert sums(trace, view.worst.event)["saved_activations"] == 40
    assert sums(trace, view.worst.event)["backward_temporaries"] == 7
    assert view.where(view.worst.event)[:2] == (0, "backward")


def test_a_record_that_ends_in_backward_proves_no_gradients() -> None:
    # GIVEN a record that ends while backward runs
    record = Record()
    record.before(3)
    record.alloc(4, FORWARD)
    record.alloc(3, BACKWARD)

    # THEN what backward made is not taken for a gradient, and nothing for a parameter
    assert sums(trace_of(record.snapshot()), 1) == {"other_activations": 4, "unknown": 6}


def test_an_unmet_request_has_its_free_bytes_and_the_largest_hole(tmp_path: Path) -> None:
    # GIVEN a request of 100 MiB that failed with a hole of 40 MiB
    record = Record()
    record.before(60)
    hole = record.alloc(40, FORWARD)
    record.free(hole, FORWARD)
    record.oom(100, 5 * MIB, FORWARD)
    file = record.pickled(tmp_path / "oom.pickle")

    # WHEN its report is asked for
    done = cli(file, "--json", "-")

    # THEN it has all that
    oom = json.loads(done.stdout)["oom"]
    assert (oom["requested_bytes"], oom["free_bytes"], oom["largest_hole_bytes"]) == (100 * MIB, 5 * MIB, 40 * MIB)
    assert (oom["allocated_bytes"], oom["reserved_bytes"]) == (60 * MIB, 100 * MIB)
    assert oom["ended_run"] is True
    assert "none was large enough" in cli(file).stdout


def test_the_run_file_reads_as_the_snapshot_does(tmp_path: Path) -> None:
    # GIVEN a snapshot that is written as a run file
    file = training().pickled(tmp_path / "step.pickle")
    done = cli(file, "-o", str(tmp_path / "run.mdiag"), "--json", str(tmp_path / "a.json"))
    assert done.returncode == 0, done.stderr

    # THEN the other verbs say of it what this one says
    again = subprocess.run(
        [sys.executable, "-m", "memdiag", "report", str(tmp_path / "run.mdiag"), "--json", "-"], capture_output=True,
        text=True, check=True)
    assert json.loads(again.stdout) == json.loads((tmp_path / "a.json").read_text())
    assert load(tmp_path / "run.mdiag").about["source"] == "snapshot"

    # AND a file that exists is not replaced
    refused = cli(file, "-o", str(tmp_path / "run.mdiag"))
    assert refused.returncode == 2
    assert "--force" in refused.stderr


@pytest.mark.parametrize(("content", "said"), [
    (b"not a pickle", "snapshot"), (pickle.dumps(os.getcwd), "snapshot"), (pickle.dumps({"a": 1}), "segments"),
])
def test_what_is_no_snapshot_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "x.pickle"
    file.write_bytes(content)
    done = cli(file)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(MemdiagError, match=r"no memory of device 3.*it has 0"):
        trace_of(training().snapshot(), 3)


def cli(file: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "memdiag", "snapshot", str(file), *options], capture_output=True,
                          text=True, check=False)


def test_a_range_of_events_has_what_was_there_when_it_began() -> None:
    # GIVEN the record of a step
    snapshot = training().snapshot()
    whole = View(trace_of(snapshot))
    course = follow(snapshot, 0)

    # WHEN only some of its events are asked for
    part = View(trace_of(snapshot, events=(2, 9)))

    # THEN the bytes are those of the allocator there, and what everything is is the same
    assert part.line.start_bytes == course.allocated[2]
    changes = course.allocated[2:10][1:][np.diff(course.allocated[2:10]) != 0]
    assert np.array_equal(part.line.live, changes)
    after = int(np.count_nonzero(np.diff(course.allocated[:3])))
    for event in range(len(part.line.live)):
        assert part.by_role(event) == whole.by_role(event + after)
    with pytest.raises(MemdiagError, match=r"no events 5:999; it has 0:\d+"):
        trace_of(snapshot, events=(5, 999))


def test_an_empty_snapshot_is_refused() -> None:
    with pytest.raises(MemdiagError, match="the snapshot is empty"):
        trace_of(Snapshot("made up", (), [], None, [], ()))


# --- files of real GPUs ------------------------------------------------------------------------------------------

DATA = os.environ.get("MEMDIAG_DATA")
FILES = sorted((Path(DATA) / "snapshots").glob("*.pickle")) if DATA else []
real = pytest.mark.skipif(not FILES, reason="MEMDIAG_DATA names no folder with snapshots of real GPUs")


@real
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_trace_has_the_bytes_that_the_allocator_counted(file: Path) -> None:
    # GIVEN a snapshot, and the allocator's counts as its events lead to them
    snapshot = read_snapshot(file)
    for device in snapshot.devices():
        course = follow(snapshot, device)

        # WHEN it is a trace
        trace = trace_of(snapshot, device)
        view = View(trace)

        # THEN its live bytes are those counts, and roles sum to them at every event
        assert view.line.start_bytes == course.allocated[0]
        changes = course.allocated[1:][np.diff(course.allocated) != 0]
        assert np.array_equal(view.line.live, changes)
        assert np.array_equal(ledger(trace, view.roles, view.device).sum(axis=0), view.line.live)
        assert view.highest("reserved_bytes.all.peak") == course.peak("reserved").bytes

        # AND the largest hole at the end is that of the file
        free = [block.size for one in snapshot.segments if one.device == device for block in one.blocks
                if block.state == "inactive"]
        if snapshot.trace(device) and not course.differs and not course.start.outside:
            assert largest_hole(snapshot, device, course, len(snapshot.trace(device)) - 1) == max(free, default=0)


LAYERS, MODEL, FEEDFORWARD, WORDS = 24, 1024, 4096, 10_000
PARAMETERS = 4 * (LAYERS * (4 * MODEL * MODEL + 3 * MODEL * FEEDFORWARD + 2 * MODEL) + MODEL + 2 * WORDS * MODEL)


@real
@pytest.mark.parametrize(("name", "peak", "phase"), [
    ("lm_medium_train_ctx128", 7_026_606_592, "optimizer"), ("lm_medium_train_ctx512", 12_434_494_464, "backward")])
def test_a_step_of_a_language_model_is_told_apart(name: str, peak: int, phase: str) -> None:
    # GIVEN a step of training whose shapes are known
    assert DATA is not None
    report = json.loads(cli(Path(DATA) / "snapshots" / f"{name}.pickle", "--json", "-").stdout)

    # THEN its peak is PyTorch's own, in the phase where it was
    assert (report["peak"]["allocated_bytes"], report["peak"]["phase"]) == (peak, phase)

    # AND parameters and state are what the shapes give
    roles = report["roles_at_peak"]
    assert roles["parameters"] == pytest.approx(PARAMETERS, rel=0.01)
    if phase == "optimizer":
        assert roles["optimizer_state"] == pytest.approx(2 * PARAMETERS, rel=0.01)
        assert roles["gradients"] == pytest.approx(PARAMETERS, rel=0.01)
        assert report["verdict"]["class"] == "optimizer_state"
    else:
        assert roles["optimizer_state"] == pytest.approx(2 * PARAMETERS, rel=0.01)
        # AND what the softmax over the scores keeps is the largest of what is kept for backward
        assert report["verdict"]["class"] == "activation"
        assert report["saved"][0]["operator"] == "aten::exp"
        assert report["saved"][0]["bytes"] == LAYERS * 4 * 16 * 512 * 512 * 4
        assert any("aten::exp" in text for finding in report["findings"] for text in finding["evidence"])
    assert roles["unknown"] < peak / 1000


@real
def test_an_out_of_memory_error_on_one_of_three_gpus_is_explained() -> None:
    # GIVEN a snapshot of three GPUs, one of which ran out of memory
    assert DATA is not None
    report = json.loads(cli(Path(DATA) / "snapshots" / "oom_expandable_three_gpus.pickle", "--json", "-").stdout)

    # THEN the report is about that one, with its request, and says that no hole would have done
    oom = report["oom"]
    assert (oom["device"], oom["requested_bytes"], oom["free_bytes"]) == ("cuda:1", 5_308_694_528, 95_682_560)
    assert oom["largest_hole_bytes"] < oom["requested_bytes"]
    assert oom["allocated_bytes"] == report["peak"]["allocated_bytes"]
