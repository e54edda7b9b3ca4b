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


def test_a_full_disk_costs_the_recording_alone(script) -> None:
    # GIVEN room for some 8 KB of run file, and a script that makes more
    path = script("for i in range(4, 60):\n    step(i)")
    # WHEN it is recorded
    process = profiled(path, limit=8192)
    out, err = process.communicate()
    # THEN the script ran to its end, the one message says what happened, and what was written reads back
    assert process.returncode == 0
    assert out.splitlines() == [f"step {i}" for i in range(60)]
    assert err.count("memdiag") >= 1
    assert "cannot be written" in err
    assert "could not be written" in report(path.parent / "run.mdiag").stdout
    trace = load(path.parent / "run.mdiag")
    assert not trace.complete
    assert os.path.getsize(path.parent / "run.mdiag") <= 8192


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
