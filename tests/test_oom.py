"""Requests for memory that fail: seen on real runs that die of one or go on, and told from traces by hand."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from recording import here, record, record_script
from traces import TraceBuilder

import memdiag
from memdiag.diagnose import Class, Diagnosis, Oom, Severity, diagnose
from memdiag.record.process.machine import ending
from memdiag.record.reading.failures import Failures
from memdiag.record.stream import Stream
from memdiag.report import render_text, summarize
from memdiag.report.json import as_dict
from memdiag.trace import NONE, Level, Phase, Role, Trace, load
from memdiag.trace.view import View

ROOT = Path(__file__).parents[1]
MIB = 1 << 20
HUGE = 1 << 46  # more than any machine lends

MODEL = """
    import gc, sys, torch
    from torch import nn

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            if FAIL == "backward":
                torch.empty(1 << 46, dtype=torch.uint8)  # in backward
            return g

    class Head(nn.Module):
        def forward(self, x):
            if FAIL == "forward":
                x.expand(1 << 36, *x.shape).contiguous()  # in forward
            if FAIL == "slice":
                x = x + torch.zeros(1, requires_grad=True).expand(1 << 44)[:1]  # undone
            return Fails.apply(x)

    class Careful(torch.optim.SGD):
        @torch.no_grad()
        def step(self):
            for p in self.param_groups[0]["params"]:
                if "sum" not in self.state[p]:
                    self.state[p]["sum"] = torch.zeros_like(p)
            if FAIL == "optimizer":
                torch.empty(1 << 46, dtype=torch.uint8)  # in optimizer
            super().step()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down, self.head = nn.Linear(256, 1024), nn.Linear(1024, 256), Head()

        def forward(self, x):
            return self.head(self.down(self.up(x).relu()))  # head

    FAIL = None
    model = Net()
"""
LOOP = """
    optimizer = Careful(model.parameters(), lr=0.1)
    for step in range(4):
        FAIL = WHERE if step == AT else None
        model(torch.randn(2048, 256)).sum().backward()  # call
        optimizer.step()  # step
        optimizer.zero_grad()
"""


def script(folder: Path, *parts: str, where: str | None = None, at: int = 2) -> Path:
    path = folder / "script.py"
    path.write_text("\n".join(textwrap.dedent(part) for part in parts).replace("WHERE", repr(where)).replace(
        "AT", str(at)))
    return path


def line_of(path: Path, comment: str) -> str:
    lines = path.read_text().splitlines()
    return f"script.py:{next(n for n, text in enumerate(lines, 1) if text.endswith(f'# {comment}'))}"


def run(path: Path, *options: str, code: int = 1) -> tuple[Trace, subprocess.CompletedProcess[str]]:
    """Profiles a script that ends with an exit status; its run, and what it printed."""
    out = path.parent / "run.mdiag"
    done = subprocess.run(
        [sys.executable, "-m", "memdiag", "profile", "-q", "--no-report", "-f", "-o", str(out), *options, str(path)],
        capture_output=True, text=True, cwd=path.parent, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
    assert done.returncode == code, done.stderr
    return load(out), done


Failing = Callable[..., tuple[Path, Trace, subprocess.CompletedProcess[str]]]


@pytest.fixture(scope="module")
def failing_run(tmp_path_factory: pytest.TempPathFactory) -> Failing:
    """Records the loop above, failing somewhere in some step: its script, its run, what it printed. Each once."""

    @functools.cache
    def record_one(where: str, at: int = 2) -> tuple[Path, Trace, subprocess.CompletedProcess[str]]:
        path = script(tmp_path_factory.mktemp("failing"), MODEL, LOOP, where=where, at=at)
        return path, *run(path)

    return record_one


@pytest.fixture(scope="module")
def mended(tmp_path_factory: pytest.TempPathFactory) -> Diagnosis:
    """Of the script that keeps an exception of its failed step, where it keeps the text alone."""
    source = TestRunsThatGoOn.CAUGHT.replace("WHAT", "last = str(error)").replace("AT", "(4,)")
    return diagnose(View(run(script(tmp_path_factory.mktemp("mended"), MODEL, source), code=0)[0]))


def oom_of(trace: Trace) -> Oom:
    found = diagnose(View(trace)).oom
    assert found is not None
    return found


class TestRunsThatDie:
    def test_in_forward(self, failing_run: Failing) -> None:
        # GIVEN a script whose third forward asks for more than there is WHEN it is recorded
        path, trace, _ = failing_run("forward")
        # THEN what was asked for is known to the byte, and where: 2**36 copies of 2048 × 256 floats
        oom = oom_of(trace)
        assert oom.requested_bytes == (2048 * 256 * 4) << 36
        assert (oom.device, oom.step, oom.phase, oom.module) == ("cpu", 2, "forward", "head")
        assert (oom.operator, oom.line) == ("aten::contiguous", line_of(path, "in forward"))
        assert (oom.forward_line, oom.reserved_bytes, oom.free_bytes) == (None, None, None)
        assert (oom.failures, oom.ended_run) == (1, True)
        # AND what was there: the parameters, the momentum, the input and what the ReLU saved
        parameters = (256 * 1024 + 1024 + 1024 * 256 + 256) * 4
        assert oom.roles is not None
        assert oom.roles["parameters"] == parameters
        assert oom.roles["optimizer_state"] == parameters
        assert oom.roles["saved_activations"] == 2048 * 1024 * 4
        assert oom.roles["inputs"] == 2048 * 256 * 4
        assert sum(oom.roles.values()) == oom.allocated_bytes
        assert oom.roles["unknown"] == 0

    def test_in_backward(self, failing_run: Failing) -> None:
        path, trace, _ = failing_run("backward")
        oom = oom_of(trace)
        # THEN the line that ran is told, and that from which the undone forward was called
        assert (oom.phase, oom.step, oom.module, oom.requested_bytes) == ("backward", 2, "head", HUGE)
        assert oom.line == line_of(path, "in backward")
        assert oom.forward_line == line_of(path, "head")
        assert oom.roles is not None
        assert oom.roles["unknown"] == 0

    def test_in_the_backward_of_an_operator(self, failing_run: Failing) -> None:
        # GIVEN a slice of a tensor that is huge only by its shape: its backward makes one that is huge
        path, trace, _ = failing_run("slice")
        oom = oom_of(trace)
        # THEN the line of the backward call is told, and that of the slice
        assert (oom.phase, oom.module, oom.operator, oom.requested_bytes) == (
            "backward", "head", "SliceBackward0", HUGE)
        assert oom.line == line_of(path, "call")
        assert oom.forward_line == line_of(path, "undone")

    @pytest.mark.parametrize("at", [0, 2])
    def test_in_the_optimizer(self, failing_run: Failing, at: int) -> None:
        # GIVEN an optimizer that fails in its step, once in the one that has just made its state
        path, trace, _ = failing_run("optimizer", at)
        oom = oom_of(trace)
        assert (oom.phase, oom.step, oom.line) == ("optimizer", at, line_of(path, "in optimizer"))
        # THEN that state is known as such, though the step never ended
        assert oom.roles is not None
        assert oom.roles["optimizer_state"] == (256 * 1024 + 1024 + 1024 * 256 + 256) * 4
        assert oom.roles["unknown"] == 0

    def test_in_light_recording(self, tmp_path: Path) -> None:
        # GIVEN a script that is recorded in light when it fails
        path = script(tmp_path, MODEL, LOOP, where="backward")
        oom = oom_of(run(path, "--steps", ":1")[0])
        # THEN the size, the step and the phase are known, and no place
        assert (oom.requested_bytes, oom.step, oom.phase) == (HUGE, 2, "backward")
        assert (oom.module, oom.operator, oom.line, oom.earlier) == (None, None, None, None)
        if oom.roles is not None:
            assert sum(oom.roles.values()) == oom.allocated_bytes

    def test_a_real_limit(self, tmp_path: Path) -> None:
        # GIVEN a process that may grow by 40 MiB more, and a batch four times as large
        limited = """
            import resource

            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(4):
                if step == 2:
                    now = int(open("/proc/self/statm").read().split()[0]) * 4096
                    resource.setrlimit(resource.RLIMIT_AS, (now + (40 << 20), -1))
                model(torch.randn(2048 * (8 if step == 2 else 1), 256)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        """
        path = script(tmp_path, MODEL, limited)
        trace, done = run(path)
        # THEN the script's own message says what ours does
        asked = re.search(r"tried to allocate (\d+) bytes", done.stderr)
        assert asked is not None
        oom = oom_of(trace)
        assert oom.requested_bytes == int(asked[1])
        assert oom.step == 2
        assert oom.ended_run

    def test_how_far_the_step_had_come(self, failing_run: Failing) -> None:
        # GIVEN a failure in the third step, at the very end of a forward that is like those before it
        _, trace, _ = failing_run("backward")
        earlier = oom_of(trace).earlier
        # THEN it is measured by the last whole step: the same bytes were alive there, at the same operator
        assert earlier is not None
        assert (earlier.step, earlier.warm_up) == (1, False)
        assert earlier.allocated_bytes == oom_of(trace).allocated_bytes
        # forward: randn, linear, relu, linear, clone (in a Function), sum; backward: ones_like, sum's and Fails' nodes
        assert earlier.operators in range(8, 11)
        assert earlier.of > 2 * earlier.operators

    @pytest.mark.parametrize("where", ["forward", "backward", "optimizer"])
    def test_the_exception_is_the_scripts_own(self, failing_run: Failing, where: str) -> None:
        # GIVEN the same script bare and recorded
        path, _, done = failing_run(where)
        bare = subprocess.run(
            [sys.executable, str(path)], capture_output=True, text=True, cwd=path.parent, check=False)
        # THEN exit status, traceback and message are equal
        assert (done.returncode, done.stderr, done.stdout) == (bare.returncode, bare.stderr, bare.stdout)


class TestRunsThatGoOn:
    RETRY = """
        optimizer = Careful(model.parameters(), lr=0.1)
        for step in range(4):
            FAIL = WHERE if step == AT else None
            size = 4096
            while True:
                try:
                    model(torch.randn(size, 256)).sum().backward()
                    break
                except RuntimeError:
                    FAIL, size = None, size // 2
            optimizer.step()
            optimizer.zero_grad()
            print(size)
    """

    def test_one_that_is_caught_is_told(self, tmp_path: Path) -> None:
        # GIVEN a script that catches the failure of its second step and tries half the batch
        path = script(tmp_path, MODEL, self.RETRY, where="backward", at=1)
        trace, done = run(path, code=0)
        assert done.stdout.split() == ["4096", "2048", "4096", "4096"]
        # THEN it is told, and that the script went on
        oom = oom_of(trace)
        assert (oom.requested_bytes, oom.step, oom.phase, oom.ended_run) == (HUGE, 1, "backward", False)
        assert trace.about["ended_by"] is None
        # AND the graph that the failed forward left is not taken for one that no backward was meant for
        findings = diagnose(View(trace)).findings
        assert "evaluation_graph" not in [finding.kind for finding in findings]

    CAUGHT = """
        def train(size):
            hidden = model.up(torch.randn(size, 256)).relu()
            if FAIL:
                torch.empty(1 << 46, dtype=torch.uint8)
            model.down(hidden).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        def run():
            global FAIL
            kept = []
            last = None
            for step in range(8):
                FAIL = step in AT
                again = FAIL
                try:
                    train(4096)
                except RuntimeError as error:  # except
                    FAIL = False
                    WHAT  # statement
                if again:
                    train(5000)

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run()
    """
    FAILED_BYTES = 4096 * (256 + 1024) * 4  # the input, saved for up's weight, and what relu made

    @pytest.mark.parametrize(("what", "comment"), [
        ("train(5000)", "except"),  # tried again while the exception is there
        ("last = error", "statement"),
    ])
    def test_the_exception_that_keeps_the_failed_step_is_found(
        self, tmp_path: Path, mended: Diagnosis, what: str, comment: str) -> None:
        # GIVEN a script that tries a step again, larger than all before, while the exception of the failure lives
        path = script(tmp_path, MODEL, self.CAUGHT.replace("WHAT", what).replace("AT", "(4,)"))
        found = diagnose(View(run(path, code=0)[0]))
        # THEN what the failed step made is told with its bytes, and the statement that keeps the exception
        (finding,) = [finding for finding in found.findings if finding.kind == "kept_failure"]
        assert finding.bytes == self.FAILED_BYTES
        assert finding.holder is not None
        assert finding.holder.line == line_of(path, comment)
        assert ".__traceback__ → locals of train()" in " → ".join(finding.holder.chain)
        # AND the advice, followed, lowers the peak by what it says
        assert "kept_failure" not in [finding.kind for finding in mended.findings]
        assert finding.advice[0].bytes == self.FAILED_BYTES

    def test_exceptions_that_are_collected_are_a_leak_with_its_line(self, tmp_path: Path) -> None:
        # GIVEN a script that notes each failure with its exception
        what = "kept.append((step, error))"
        path = script(tmp_path, MODEL, self.CAUGHT.replace("WHAT", what).replace("AT", "(1, 3, 5, 7)"))
        found = diagnose(View(run(path, code=0)[0]))
        # THEN it is a leak that the line keeps, with the advice to keep the text
        first = found.findings[0]
        assert (found.verdict.cls, first.cls) == (Class.LEAK, Class.LEAK)
        assert first.holder is not None
        assert first.holder.line == line_of(path, "statement")
        assert "str(error)" in first.advice[0].text

    def test_of_several_the_last_is_told(self, tmp_path: Path) -> None:
        several = """
            for size in (1 << 44, 1 << 45, 1 << 46):
                try:
                    torch.empty(size, dtype=torch.uint8)
                except RuntimeError:
                    pass
        """
        oom = oom_of(run(script(tmp_path, MODEL, several), code=0)[0])
        assert (oom.failures, oom.requested_bytes) == (3, HUGE)

    def test_sizes_are_read_in_the_order_of_the_failures(self) -> None:
        def fails() -> None:
            x = torch.ones(10, requires_grad=True)
            for size in (1 << 46, 1 << 44, 1 << 45):
                try:
                    (x * 2).expand(size, 10).contiguous()
                except RuntimeError:
                    (x * 2).sum().backward()

        trace = record(fails).trace
        assert trace["out_of_memory"]["bytes"].tolist() == [40 << 46, 40 << 44, 40 << 45]
        assert trace["out_of_memory"]["event"].tolist() == sorted(set(trace["out_of_memory"]["event"].tolist()))

    def test_nothing_of_it_is_kept(self) -> None:
        # GIVEN a failure inside a function whose variable only the exception's frames hold
        kept: list[weakref.ref[Any]] = []

        def fails() -> None:
            tensor = torch.ones(1000)
            kept.append(weakref.ref(tensor))
            torch.empty(HUGE, dtype=torch.uint8)

        def script() -> None:
            with contextlib.suppress(RuntimeError):
                fails()
            # THEN it is gone as soon as the exception is
            kept.append(kept[0]() is None)  # type: ignore[arg-type]

        record(script)
        assert kept[1] is True

    def test_recorded_from_code(self, tmp_path: Path) -> None:
        # GIVEN an exception that leaves the recording
        out = tmp_path / "run.mdiag"
        line = here() + 2
        with pytest.raises(RuntimeError, match="tried to allocate"), memdiag.profile(out):
            torch.empty(HUGE, dtype=torch.uint8)
        # THEN it is told as that of a script
        oom = oom_of(load(out))
        assert (oom.requested_bytes, oom.ended_run, oom.line) == (HUGE, True, f"{__file__}:{line}")


class TestEnding:
    """What an exception says of how the run ended."""

    def error(self) -> RuntimeError:
        try:
            torch.empty(HUGE, dtype=torch.uint8)
        except RuntimeError as error:
            return error
        raise AssertionError

    def test_of_the_cpus_allocator(self) -> None:
        assert ending(self.error()) == {"ended_by": "RuntimeError", "ended_out_of_memory": True}

    def test_of_a_devices_allocator(self) -> None:
        error = torch.OutOfMemoryError("CUDA out of memory.")
        assert ending(error) == {"ended_by": "OutOfMemoryError", "ended_out_of_memory": True}

    def test_one_that_came_of_it(self) -> None:
        error = ValueError("no batch fits")
        error.__cause__ = self.error()
        assert ending(error) == {"ended_by": "ValueError", "ended_out_of_memory": True}
        during = KeyError("x")
        during.__context__ = self.error()
        assert ending(during)["ended_out_of_memory"]

    @pytest.mark.parametrize("error", [None, RuntimeError(), RuntimeError("shapes differ"), KeyboardInterrupt()])
    def test_any_other(self, error: BaseException | None) -> None:
        assert not ending(error)["ended_out_of_memory"]

    def test_a_circle_of_causes_ends(self) -> None:
        first, second = ValueError("a"), ValueError("b")
        first.__cause__, second.__cause__ = second, first
        assert not ending(first)["ended_out_of_memory"]


class Result:
    """A chunk whose export cannot be written."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def save(self, path: str) -> None:
        raise self.error


class TestSizes:
    @pytest.mark.parametrize("error", [OSError(28, "No space left on device"), MemoryError(), RuntimeError("saved")])
    def test_a_full_disk_costs_the_size_alone(self, error: Exception) -> None:
        assert Failures().read(Result(error)) == []

    def test_not_every_chunk_of_a_run_that_fails_all_the_time_is_read(self) -> None:
        failures, reads = Failures(), 0

        class Counted:
            def save(self, path: str) -> None:
                nonlocal reads
                reads += 1
                Path(path).write_text("")

        for _ in range(100):
            failures.read(Counted())
        assert reads == 20

    def test_other_events_are_not_taken_for_one(self, tmp_path: Path) -> None:
        # GIVEN a chunk with allocations on both sides of a failure
        class Exported:
            def save(self, path: str) -> None:
                event = '{{\n  "ph": "i", "name": "[{0}]",\n  "ts": {1}.5,\n  "args": {{\n    "Total Reserved": {2}, ' \
                    '"Total Allocated": 0, "Bytes": {3}, "Device Id": 1, "Device Type": 1\n  }}\n}}'
                events = [event.format("memory", 1, 0, 64), event.format("OutOfMemory", 9, 4096, 1024),
                          event.format("OutOfMemory", 2, 2048, 512), event.format("memory", 3, 0, 128)]
                Path(path).write_text(",\n".join(events))

        found = Failures().read(Exported())
        # THEN the two failures are found, in order of time, with the device and what it had reserved
        assert found == [(512, 2048, "cuda:1"), (1024, 4096, "cuda:1")]

    def test_the_profilers_own_export(self) -> None:
        # GIVEN a real chunk with a failure between two allocations
        from memdiag.record.marks import Marks

        marks = Marks()
        stream = Stream(marks)
        marks.enabled = True
        stream.open(Level.FULL)
        torch.empty(100, dtype=torch.uint8)
        with pytest.raises(RuntimeError):
            torch.empty(HUGE, dtype=torch.uint8)
        stream.close()
        assert stream.failed_requests() == [(HUGE, NONE, "cpu")]
        stream.forget()


def failing(size: int = 64 * MIB, *, ended: bool = True, device: str = "cpu") -> TraceBuilder:
    """Two whole steps of two layers, then one that fails in its second layer's forward."""
    run = TraceBuilder((device,), ended_out_of_memory=ended)
    run.claim(run.existing(8 * MIB), Role.PARAMETERS, "weight")
    for number in range(3):
        kept = []
        last = number == 2
        with run.unfinished_step() if last else run.step(warm_up=number == 0):
            with run.phase(Phase.FORWARD):
                for layer in ("a", "b"):
                    with run.module(layer), run.operator("aten::linear", line="/project/train.py:5"):
                        if last and layer == "b":
                            run.out_of_memory(size, line="/project/train.py:5", reserved=NONE if device == "cpu" else
                                              96 * MIB)
                            continue
                        out = run.allocate(16 * MIB * (2 if last else 1), line="/project/train.py:5")
                        kept.append((out, run.save(out)))
            with run.phase(Phase.BACKWARD):
                for out, save in kept:
                    run.release(save)
                    run.free(out)
        if not last and device != "cpu":
            for name, value in (("outside_pytorch_bytes", 10 * MIB), ("device_total_bytes", 128 * MIB)):
                run.statistic(name, value, step=number)
    return run


class TestToldByHand:
    def test_what_was_there_and_how_far_it_had_come(self) -> None:
        oom = oom_of(failing().build())
        assert (oom.step, oom.phase, oom.module, oom.operator, oom.line) == (
            2, "forward", "b", "aten::linear", "train.py:5")
        assert oom.allocated_bytes == 8 * MIB + 32 * MIB
        assert oom.roles is not None
        assert {role: size for role, size in oom.roles.items() if size} == {
            "parameters": 8 * MIB, "saved_activations": 32 * MIB}
        # the second of two operators, where the step before had 8 + 16 MiB
        assert oom.earlier is not None
        assert (oom.earlier.step, oom.earlier.operators, oom.earlier.of) == (1, 2, 2)
        assert oom.earlier.allocated_bytes == 8 * MIB + 16 * MIB

    def test_remedies_with_what_each_frees_then(self) -> None:
        # GIVEN 64 MiB asked for while 40 are alive, of which 32 are activations inside modules
        oom = oom_of(failing().build())
        # THEN asking for less is the best, then checkpointing; each with its bytes at that moment
        assert [remedy.bytes for remedy in oom.remedies] == [64 * MIB, 32 * MIB]
        assert "train.py:5" in oom.remedies[0].text
        assert "checkpoint" in oom.remedies[1].text
        # AND where less is asked for than is alive, asking for less is no remedy
        assert [remedy.bytes for remedy in oom_of(failing(4 * MIB).build()).remedies] == [32 * MIB]

    def test_of_an_accelerator_with_what_others_use(self) -> None:
        oom = oom_of(failing(device="cuda:0").build())
        assert (oom.device, oom.reserved_bytes) == ("cuda:0", 96 * MIB)
        assert oom.outside_pytorch_bytes == 10 * MIB
        assert oom.free_bytes == (128 - 96 - 10) * MIB

    def test_of_a_device_that_the_report_is_not_about(self) -> None:
        # GIVEN a run on an accelerator whose host memory gives out
        run = TraceBuilder(("cuda:0", "cpu"))
        run.allocate(100 * MIB)
        run.claim(run.existing(3 * MIB, device="cpu"), Role.INPUTS)
        with run.step(), run.phase(Phase.FORWARD), run.operator("aten::empty"):
            run.out_of_memory(MIB, device="cpu")
        oom = oom_of(run.build())
        # THEN it is the host's memory that is looked at
        assert (oom.device, oom.allocated_bytes) == ("cpu", 3 * MIB)
        assert oom.roles is not None
        assert oom.roles["inputs"] == 3 * MIB

    def test_in_the_highest_light_step(self) -> None:
        # GIVEN a light step that fails, whose events were held back
        run = TraceBuilder()
        run.claim(run.existing(MIB), Role.PARAMETERS)
        with run.step():
            pass
        light = run.highest_light_step()
        light.claim(light.existing(MIB), Role.PARAMETERS)
        with light.unfinished_step(1), light.phase(Phase.FORWARD):
            light.allocate(5 * MIB)
            run.now = light.now
            run.out_of_memory(7 * MIB, light=(1, Phase.FORWARD))
            light.wait(100_000)
            light.allocate(9 * MIB)
        run.folded_rest({Phase.FORWARD: 15 * MIB})
        oom = oom_of(run.build())
        # THEN what was there then is known, and what came later is not counted
        assert (oom.step, oom.phase, oom.allocated_bytes) == (1, "forward", 6 * MIB)
        assert oom.roles is not None
        assert oom.roles["parameters"] == MIB
        # AND in one that was not the highest nothing is said of it
        run = TraceBuilder()
        run.out_of_memory(7, light=(4, Phase.BACKWARD))
        oom = oom_of(run.build())
        assert (oom.step, oom.phase, oom.roles, oom.places, oom.remedies) == (4, "backward", None, None, [])

    def test_without_one(self) -> None:
        assert diagnose(View(TraceBuilder().build())).oom is None

    def test_what_the_exception_keeps_is_what_it_was(self) -> None:
        # GIVEN a step that fails in its optimizer, whose frames the exception keeps to the end
        def told(ended: bool) -> dict[str, int]:
            run = TraceBuilder(ended_out_of_memory=ended)
            with run.unfinished_step():
                with run.phase(Phase.FORWARD), run.operator("aten::exp"):
                    run.allocate(MIB)
                with run.phase(Phase.BACKWARD), run.operator("aten::mul"):
                    run.allocate(2 * MIB)
                with run.phase(Phase.OPTIMIZER), run.operator("aten::sqrt"):
                    run.allocate(4 * MIB)
                    run.out_of_memory(HUGE)
            roles = oom_of(run.build()).roles
            assert roles is not None
            return {role: size for role, size in roles.items() if size}

        # THEN each is what it would have been had the step ended; without a failure there would be no telling
        assert told(True) == {
            "other_activations": MIB, "backward_temporaries": 2 * MIB, "optimizer_temporaries": 4 * MIB}
        assert told(False) == {"unknown": 7 * MIB}


class TestVerdict:
    """The verdict of a run in which a request failed is about that moment, and never that all is well."""

    def test_is_about_the_failure_and_not_the_peak(self) -> None:
        # GIVEN a run whose optimizer peaks at 108 MiB, and whose next forward dies with 40 MiB alive
        run = TraceBuilder(ended_out_of_memory=True)
        run.claim(run.existing(8 * MIB), Role.PARAMETERS, "weight")
        with run.step(warm_up=True), run.phase(Phase.OPTIMIZER), run.operator("aten::sqrt"):
            run.free(run.allocate(100 * MIB))
        with run.unfinished_step(), run.phase(Phase.FORWARD), run.module("a"), run.operator("aten::linear"):
            run.save(run.allocate(32 * MIB, line="/project/train.py:5"))
            run.out_of_memory(10 * MIB, line="/project/train.py:6")
        found = diagnose(View(run.build()))
        # THEN its classes are those of the 40 MiB
        verdict = found.verdict
        assert (verdict.cls, verdict.moment, verdict.phase) == (Class.ACTIVATION, "failure", "forward")
        assert {row.cls: row.bytes for row in verdict.classes} == {
            Class.ACTIVATION: 32 * MIB, Class.PARAMETERS: 8 * MIB}
        assert sum(row.share for row in verdict.classes) == pytest.approx(1)
        assert verdict.sentence == (
            "The run ended by a request of 10.0 MiB at train.py:6 that could not be met, while 40.0 MiB were "
            "allocated. Activations kept for backward: 80% of that.")
        # AND the first finding is the ending, the second what filled the memory; both end runs
        assert [(one.kind, one.severity, one.bytes) for one in found.findings] == [
            ("out_of_memory", Severity.HIGH, 0), ("activations", Severity.HIGH, 32 * MIB)]
        assert found.reachable_bytes == 32 * MIB
        assert found.runner_up is None

    def test_of_a_request_for_more_than_all_that_was_there(self) -> None:
        # GIVEN 64 MiB asked for with 40 alive: nobody knows what they would have become
        found = diagnose(View(failing().build()))
        assert found.verdict.cls is Class.UNDETERMINED
        assert "What was asked for is the shortage" in found.verdict.sentence
        assert "at the same point step 1 had 16.0 MiB less" in found.findings[0].evidence

    def test_of_one_that_little_was_alive_at(self) -> None:
        run = TraceBuilder(ended_out_of_memory=True)
        with run.unfinished_step(), run.phase(Phase.FORWARD), run.operator("aten::zeros"):
            run.allocate(100)
            run.out_of_memory(HUGE, line="/project/train.py:3")
        found = diagnose(View(run.build()))
        assert found.verdict.cls is Class.UNDETERMINED
        assert "64.00 TiB at train.py:3" in found.verdict.sentence
        # THEN the remedy is told where no other finding has one, and nothing small is found
        assert [one.kind for one in found.findings] == ["out_of_memory"]
        assert [advice.bytes for advice in found.findings[0].advice] == [HUGE]

    def test_of_a_small_request_that_little_was_alive_at(self) -> None:
        run = TraceBuilder(ended_out_of_memory=True)
        with run.unfinished_step(), run.phase(Phase.FORWARD), run.operator("aten::zeros"):
            run.allocate(100)
            run.out_of_memory(1000, line="/project/train.py:3")
        found = diagnose(View(run.build()))
        assert found.verdict.cls is Class.UNDETERMINED
        assert found.verdict.sentence.endswith("It is not PyTorch's tensors that fill the memory.")

    def test_after_an_event_that_is_a_free(self) -> None:
        run = TraceBuilder(ended_out_of_memory=True)
        with run.unfinished_step(), run.phase(Phase.BACKWARD), run.operator("aten::mm"):
            run.allocate(30 * MIB)
            run.free(run.allocate(MIB))
            run.out_of_memory(MIB)
        verdict = diagnose(View(run.build())).verdict
        assert (verdict.phase, verdict.moment, verdict.classes[0].bytes) == ("backward", "failure", 30 * MIB)

    def test_of_a_leak_is_a_leak(self) -> None:
        run = TraceBuilder(ended_out_of_memory=True)
        for number in range(8):
            last = number == 7
            with (run.unfinished_step() if last else run.step(warm_up=number == 0), run.phase(Phase.FORWARD),
                  run.module("a"), run.operator("aten::linear")):
                run.allocate(10 * MIB, line="/project/train.py:5")
                if last:
                    run.out_of_memory(10 * MIB, line="/project/train.py:5")
        found = diagnose(View(run.build()))
        assert found.verdict.cls is Class.LEAK
        assert found.findings[1].bytes == 70 * MIB
        assert "Memory grows by 10.0 MiB with every step" in found.verdict.sentence

    def test_of_which_the_events_were_not_kept(self) -> None:
        run = TraceBuilder(ended_out_of_memory=True)
        run.out_of_memory(7 * MIB, light=(4, Phase.BACKWARD))
        found = diagnose(View(run.build()))
        assert (found.verdict.cls, found.verdict.moment) == (Class.UNDETERMINED, "peak")
        assert "7.0 MiB in backward that could not be met; what was alive then was not kept" in found.verdict.sentence
        assert [one.kind for one in found.findings] == ["out_of_memory"]

    def test_where_the_script_went_on(self) -> None:
        # GIVEN one that the script survived: the verdict is that of the peak, and not that all is well
        found = diagnose(View(failing(ended=False).build()))
        assert (found.verdict.cls, found.verdict.moment) == (Class.ACTIVATION, "peak")
        assert "out_of_memory" not in [one.kind for one in found.findings]
        run = TraceBuilder()
        run.out_of_memory(HUGE, line="/project/train.py:3")
        verdict = diagnose(View(run.build())).verdict
        assert verdict.cls is Class.UNDETERMINED
        assert verdict.sentence.startswith("The script went on after a request of 64.00 TiB at train.py:3")

    @pytest.mark.parametrize(("where", "at"), [("forward", 2), ("backward", 2), ("optimizer", 0)])
    def test_of_a_script(self, failing_run: Failing, where: str, at: int) -> None:
        path, trace, _ = failing_run(where, at)
        found, oom = diagnose(View(trace)), oom_of(trace)
        assert (found.verdict.cls, found.verdict.phase, found.verdict.moment) == (
            Class.UNDETERMINED, where, "failure")
        assert line_of(path, f"in {where}") in found.verdict.sentence
        assert sum(row.bytes for row in found.verdict.classes) == oom.allocated_bytes

    def test_is_shown_as_that_moment(self) -> None:
        text = render_text(summarize(failing(4 * MIB).build()))
        assert "What was alive when the request failed" in text
        assert "What the peak is made of" not in text
        assert "(32.0 MiB less then at most)" in " ".join(text.split())
        assert "peak lower by" not in text
        assert as_dict(summarize(failing().build()))["verdict"]["moment"] == "failure"


class TestShown:
    def test_as_text_after_the_peak(self) -> None:
        text = render_text(summarize(failing().build()))
        titles = [line for line in text.splitlines() if line and not line.startswith(" ")]
        assert titles[1:3] == ["Peak: 40.0 MiB allocated", "Out of memory: 64.0 MiB asked for"]
        assert max(map(len, text.splitlines())) <= 80
        assert "step 2, forward" in text
        assert "24.0 MiB allocated at the same point: 16.0 MiB less than now" in " ".join(text.split())
        assert re.search(r"32\.0 MiB +a › aten::linear, train\.py:5", text)
        assert "(32.0 MiB less at most)" in " ".join(text.split())

    def test_nothing_where_there_was_none(self) -> None:
        assert "Out of memory" not in render_text(summarize(TraceBuilder().build()))

    def test_where_little_is_known(self) -> None:
        run = TraceBuilder()
        run.out_of_memory(NONE, light=(4, Phase.BACKWARD))
        text = render_text(summarize(run.build()))
        assert "Out of memory: a size that is not known asked for" in text
        assert "the script went on" in text

    def test_as_json(self) -> None:
        oom = as_dict(summarize(failing().build()))["oom"]
        assert oom["requested_bytes"] == 64 * MIB
        assert oom["remedies"][1]["bytes"] == 32 * MIB
        assert oom["places"][0] == {
            "module": "a", "operator": "aten::linear", "line": "train.py:5", "bytes": 32 * MIB}
        assert oom["earlier"] == {
            "step": 1, "warm_up": False, "operators": 2, "of": 2, "allocated_bytes": 24 * MIB}

    def test_a_script_says_so_on_the_terminal(self, tmp_path: Path) -> None:
        path = script(tmp_path, MODEL, LOOP, where="forward")
        done = subprocess.run(
            [sys.executable, "-m", "memdiag", "profile", "-q", "-o", "run.mdiag", str(path)], capture_output=True,
            text=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
        assert done.returncode == 1
        report = done.stderr[done.stderr.index("Memory of"):]
        assert "Out of memory: 131072.00 TiB asked for" in report
        assert "the run ended by it" in report


def test_a_run_without_a_failure_reads_no_sizes(tmp_path: Path) -> None:
    seen = record_script(tmp_path, "import torch\ntorch.ones(3)\n")
    assert seen.trace.rows("out_of_memory") == 0
