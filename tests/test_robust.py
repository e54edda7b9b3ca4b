"""Whatever ends the run, its output is the script's own and the run file holds what was recorded."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from memdiag.trace import load
from memdiag.trace.timeline import timeline

TRAIN = """
import sys, time, torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(100, 1000), nn.ReLU(), nn.Linear(1000, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def step(i):
    loss = model(torch.randn(64, 100)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("step", i, flush=True)


for i in range(4):
    step(i)
"""
PEAK = 64 * 1000 * 4  # what one activation alone comes to: any peak of a step is above it


@pytest.fixture
def script(tmp_path: Path):
    def write(ending: str) -> Path:
        path = tmp_path / "train.py"
        path.write_text(TRAIN + ending)
        return path

    return write


def profiled(script: Path, *options: str, limit: int | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "memdiag", "profile", "-q", "--no-report", "-o", "run.mdiag", *options]

    def limited() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    return subprocess.Popen(
        [*command, script.name], cwd=script.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=limited)


def bare(script: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, script.name], cwd=script.parent, capture_output=True, text=True, timeout=120)


def report(run: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "memdiag", "report", str(run)], capture_output=True, text=True)


@pytest.mark.parametrize(
    "ending", ["sys.exit(3)", "raise ValueError('no')", "model(torch.randn(2, 3))", "torch.empty(2**50)"],
    ids=["exit", "raises", "fails-in-a-module", "out-of-memory"])
def test_an_ending_is_the_scripts_own(script, ending: str) -> None:
    # GIVEN a script that ends badly after four steps
    path = script(ending)
    # WHEN it runs alone and recorded
    alone = bare(path)
    process = profiled(path)
    out, err = process.communicate()
    # THEN exit code, output and traceback are the same, and all its steps are in the file
    assert (process.returncode, out, err) == (alone.returncode, alone.stdout, alone.stderr)
    trace = load(path.parent / "run.mdiag")
    assert trace.complete
    assert list(trace["steps"]["step"]) == [0, 1, 2, 3]


def test_a_run_that_fails_in_its_first_step_keeps_that_step(script) -> None:
    # GIVEN a script that runs out of memory inside the first backward
    path = script("")
    path.write_text(TRAIN.replace("    loss.backward()", "    torch.empty(2**50)"))
    # WHEN it is recorded
    process = profiled(path)
    _, err = process.communicate()
    # THEN it fails as it would, and the unfinished step is in the file
    assert process.returncode == 1
    assert "RuntimeError" in err
    trace = load(path.parent / "run.mdiag")
    assert trace.rows("steps") == 0
    assert timeline(trace, "cpu").peak_bytes > PEAK
    assert report(path.parent / "run.mdiag").returncode == 0


def interrupted(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Sends what Ctrl-C sends, once the script waits; its exit code and standard error."""
    assert process.stdout is not None
    for line in process.stdout:
        if line == "waiting\n":
            break
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    return process.returncode, err


def test_interrupted(script) -> None:
    # GIVEN a script that waits after four steps
    path = script("print('waiting', flush=True)\nfor _ in range(6000):\n    time.sleep(0.1)")
    alone = subprocess.Popen(
        [sys.executable, path.name], cwd=path.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    # WHEN it is interrupted as Ctrl-C does, alone and recorded
    expected = interrupted(alone)
    found = interrupted(profiled(path))
    # THEN it dies as alone, with its own traceback alone, and the file is whole
    assert found[0] == expected[0]
    assert found[1].startswith("Traceback")
    assert found[1].rstrip().endswith("KeyboardInterrupt")
    assert "memdiag" not in found[1]
    assert load(path.parent / "run.mdiag").complete


def test_killed_outright(script) -> None:
    # GIVEN a script that goes on for a long time
    path = script("while True:\n    i += 1\n    step(i)")
    process = profiled(path)
    assert process.stdout is not None
    for line in process.stdout:
        if line == "step 40\n":
            break
    # WHEN it is killed
    process.kill()
    process.communicate()
    # THEN what was recorded so far can be read, and the report says that the end is missing
    trace = load(path.parent / "run.mdiag")
    assert not trace.complete
    assert trace.rows("steps") >= 10
    done = report(path.parent / "run.mdiag")
    assert done.returncode == 0
    assert "killed" in done.stdout


def test_a_forked_child_ends_as_it_would(script) -> None:
    # GIVEN a script whose forked child leaves by the script's own end
    path = script(
        "import atexit, os\natexit.register(lambda: print('bye', os.getpid() == parent, flush=True))\n"
        "parent = os.getpid()\nif os.fork() == 0:\n    sys.exit(3)\n"
        "print('child', os.waitstatus_to_exitcode(os.wait()[1]), flush=True)")
    # WHEN it runs alone and recorded
    alone = bare(path)
    process = profiled(path)
    out, err = process.communicate(timeout=120)
    # THEN parent and child say and return the same, and the child is not in the file
    assert (process.returncode, out, err) == (alone.returncode, alone.stdout, alone.stderr)
    assert "child 3" in out
    assert list(load(path.parent / "run.mdiag")["steps"]["step"]) == [0, 1, 2, 3]


@pytest.mark.parametrize("limit", [8192, 20_000])
def test_a_full_disk_costs_the_recording_alone(script, limit: int) -> None:
    # GIVEN room for some KB of run file, and a script that makes more
    path = script("for i in range(4, 120):\n    step(i)")
    # WHEN it is recorded
    process = profiled(path, limit=limit)
    out, err = process.communicate()
    # THEN the script ran to its end, the one message says what happened, and what was written reads back
    assert process.returncode == 0
    assert out.splitlines() == [f"step {i}" for i in range(120)]
    assert "cannot be written" in err
    assert "could not be written" in report(path.parent / "run.mdiag").stdout
    trace = load(path.parent / "run.mdiag")
    assert not trace.complete
    assert os.path.getsize(path.parent / "run.mdiag") <= limit
    # AND the steps that are told are those in the file
    assert f"the first {trace.rows('steps')} steps" in err


def test_stop_after(script) -> None:
    # GIVEN a script of four steps whose exit handler speaks
    path = script("print('not reached')")
    path.write_text("import atexit\natexit.register(print, 'bye')\n" + path.read_text())
    # WHEN it is to stop after two
    process = profiled(path, "--stop-after", "2")
    out, err = process.communicate()
    # THEN it ends as sys.exit(0) would: the step's own last line was not reached, the handler ran
    assert (process.returncode, err) == (0, "")
    assert out.splitlines() == ["step 0", "bye"]
    assert list(load(path.parent / "run.mdiag")["steps"]["step"]) == [0, 1]


FREES_IN_BACKWARD = """
import torch
from torch import nn

model = nn.Sequential(*[layer for _ in range(60) for layer in (nn.Linear(300, 300), nn.Tanh())])
x = torch.randn(400, 300)
print("ready", flush=True)
while True:
    model(x).mean().backward()
"""


def test_one_interrupt_is_enough_while_graphs_are_freed(tmp_path: Path) -> None:
    # GIVEN a script that spends its time in backward, whose graph goes as it runs
    path = tmp_path / "train.py"
    path.write_text(FREES_IN_BACKWARD)
    for attempt in range(4):
        process = profiled(path, "-f")
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(1 + 0.037 * attempt)
        # WHEN it is interrupted once THEN it ends
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert "KeyboardInterrupt" in err
        assert "ignored" not in err


INTERRUPTED_AGAIN = """
import os, signal, sys, torch
from torch import nn

nn.Linear(100, 100)(torch.randn(64, 100)).sum().backward()
if "memdiag" in sys.modules:
    import memdiag.record.process.tracebacks as tracebacks
    from memdiag.record.recorder import Recorder
    from memdiag.trace.file import Writer

    def interrupt_in(owner, name):
        original = getattr(owner, name)

        def interrupted(*args, **kwargs):
            setattr(owner, name, original)
            os.kill(os.getpid(), signal.SIGINT)
            return original(*args, **kwargs)

        setattr(owner, name, interrupted)

    interrupt_in(*{"traceback": (tracebacks, "clean"), "last-chunk": (Recorder, "_end_here"),
                   "facts": (Recorder, "_not_seen"), "file": (Writer, "close")}[PLACE])
"""


@pytest.mark.parametrize("place", ["traceback", "last-chunk", "facts", "file"])
@pytest.mark.parametrize(
    "ending", ["os.kill(os.getpid(), signal.SIGINT)", "raise ValueError('no')", "sys.exit(3)"],
    ids=["interrupted", "raises", "exits"])
def test_an_interrupt_while_the_recording_is_ended(tmp_path: Path, place: str, ending: str) -> None:
    if place == "traceback" and "exit" in ending:
        pytest.skip("an exit has no traceback")
    # GIVEN a script that ends in some way, and Ctrl-C in the midst of what memdiag then does
    path = tmp_path / "train.py"
    path.write_text(f"PLACE = {place!r}\n{INTERRUPTED_AGAIN}\n{ending}\n")
    # WHEN it runs alone and recorded
    alone = bare(path)
    process = profiled(path)
    out, err = process.communicate(timeout=120)
    # THEN it ends as alone, with its own traceback first; what is said after that is no frame of ours
    assert (process.returncode, out) == (alone.returncode, alone.stdout)
    assert err.startswith(alone.stderr)
    assert "memdiag/" not in err
    if place != "traceback":  # that early, python says so itself, and goes on to the end
        assert err[len(alone.stderr):] == "memdiag: interrupted; the run is kept in run.mdiag\n"
    # AND the file was closed first
    assert load(tmp_path / "run.mdiag").complete


def test_two_interrupts_in_a_row(script) -> None:
    # GIVEN a script that waits
    path = script("print('waiting', flush=True)\nfor _ in range(6000):\n    time.sleep(0.1)")
    for between in (0.0, 0.001, 0.01, 0.05):
        process = profiled(path, "-f")
        assert process.stdout is not None
        for line in process.stdout:
            if line == "waiting\n":
                break
        # WHEN Ctrl-C comes twice
        process.send_signal(signal.SIGINT)
        time.sleep(between)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
        # THEN it ends, by the signal or as torch's exit handlers have it, no frame of ours is shown, the file is whole
        assert process.returncode in (-signal.SIGINT, 1)
        assert "KeyboardInterrupt" in err
        assert "memdiag/" not in err
        assert load(path.parent / "run.mdiag").complete


WARNS = """
import sys, warnings
import torch
from torch import nn


def warns(gradient):
    for level in range(2, 6):
        warnings.warn(f"hook {level}", stacklevel=level)
    return gradient


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        for level in range(1, 7):
            warnings.warn(f"Function {level}", stacklevel=level)
        return gradient * 2


class SGD(torch.optim.SGD):
    def step(self, closure=None):
        for level in range(1, 4):
            warnings.warn(f"step {level}", stacklevel=level)
        return closure and closure()


def closure():
    for level in range(1, 4):
        warnings.warn(f"closure {level}", stacklevel=level)


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, number):
        for level in range(1, 8):
            warnings.warn(f"item {level}", stacklevel=level)
        return number


def main():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    x = torch.randn(2, 3)
    model(x).sum().backward(create_graph=True)
    y = model(x)
    y.register_hook(warns)
    y.sum().backward()
    Twice.apply(model(x)).sum().backward()
    model[0].register_full_backward_hook(lambda module, inputs, outputs: None)
    model(x).sum().backward()
    SGD(model.parameters(), 0.1).step()
    SGD(model.parameters(), 0.1).step(closure)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(x).sum()).backward()
    scaler.step(SGD(model.parameters(), 0.1))
    list(torch.utils.data.DataLoader(Data()))


main()
"""


def test_warnings_name_the_lines_that_they_name_alone(tmp_path: Path) -> None:
    # GIVEN warnings in backward, optimizers and loaders, that count their way out over frames of others
    path = tmp_path / "train.py"
    path.write_text(WARNS)
    # WHEN the script runs alone and recorded
    alone = bare(path)
    _, err = profiled(path).communicate()
    # THEN they are the same, line for line
    assert alone.stderr.count("Warning: ") > 25
    assert err == alone.stderr


CHILDREN = """
import torch
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def work(rank, width):
    nn.Linear(width, width)(torch.randn(8, width)).sum().backward()
    print("trained", rank, flush=True)


if __name__ == "__main__":
    for batch in DataLoader(TensorDataset(torch.randn(8, 5)), num_workers=1):
        nn.Linear(5, 5)(batch[0]).sum().backward()
    if STARTS:
        mp.spawn(work, (20,), nprocs=2)
        child = mp.get_context("fork").Process(target=work, args=(2, 20))
        child.start()
        child.join()
"""


@pytest.mark.parametrize("starts", [True, False])
def test_processes_that_the_script_starts_are_said_to_be_missing(tmp_path: Path, starts: bool) -> None:
    # GIVEN a script with a loader's worker, and perhaps with processes that train
    path = tmp_path / "train.py"
    path.write_text(CHILDREN.replace("STARTS", str(starts)))
    # WHEN it is recorded
    out, err = profiled(path).communicate(timeout=120)
    # THEN those that train, do so unseen, and their number is told
    assert (sorted(out.splitlines()), err) == ([f"trained {rank}" for rank in range(3)] if starts else [], "")
    said = [text for text in load(tmp_path / "run.mdiag").about["not_seen"] if "processes" in text]
    assert said == (["processes that the script started through multiprocessing (3)"] if starts else [])


def test_a_step_that_only_the_end_closes_may_be_the_last_that_is_wanted(tmp_path: Path) -> None:
    # GIVEN a script without an optimizer: the end of it closes its second step
    path = tmp_path / "train.py"
    path.write_text("import sys, torch\nmodel = torch.nn.Linear(3, 3)\nfor _ in range(2):\n"
                    "    model(torch.randn(2, 3)).sum().backward()\nsys.exit(3)\n")
    # WHEN two are wanted
    process = profiled(path, "--stop-after", "2")
    process.communicate()
    # THEN the script ends as alone, and the file is whole
    assert process.returncode == 3
    trace = load(tmp_path / "run.mdiag")
    assert trace.complete
    assert list(trace["steps"]["step"]) == [0, 1]
