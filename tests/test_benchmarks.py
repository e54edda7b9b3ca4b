"""Each benchmark runs, in a small setting, and prints its table. How long anything takes is no test's business."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from memdiag.trace import load

ROOT = Path(__file__).parents[1]


def run(name: str, *arguments: str) -> str:
    """A benchmark's output.

    Raises:
        CalledProcessError: it failed.
    """
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *arguments], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": path}, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def row(output: str, start: str) -> list[str]:
    return next(line for line in output.splitlines() if line.lstrip().startswith(start)).split()


def test_overhead() -> None:
    # GIVEN a small model / WHEN every variant has its turn
    output = run("overhead", "--rounds", "1", "--steps", "1", "--layers", "1", "--width", "16", "--heads", "2",
                 "--batch", "1", "--tokens", "8", "--vocabulary", "20", "--tiny-batch", "2")
    # THEN each has a row in both tables, and the machine is named
    for variant in ("memdiag, full", "memdiag, light", "torch.profiler: memory, shapes", "torch.profiler: stacks too",
                    "MemTracker", "bare, again"):
        assert sum(line.startswith(variant) for line in output.splitlines()) == 2
    assert "torch 2." in output.splitlines()[0]
    assert "processor time" in output


def test_long_run() -> None:
    # GIVEN a few steps / WHEN they are run bare, and recorded with two budgets
    output = run("long_run", "--steps", "5", "--deep-steps", "0", "--small-budget", "500", "--batches", "4")
    # THEN each is a row, and the small budget leaves fewer events, since light recording sees memory alone
    full = int(row(output, "default budget")[2].replace(",", ""))
    small = int(row(output, "budget 500")[2].replace(",", ""))
    assert 500 < small < full
    assert len(row(output, "recorded")) == 4


def test_leak_walk() -> None:
    # GIVEN a process with some objects / WHEN who keeps what is looked for there
    output = run("leak_walk", "--objects", "300000")
    # THEN all is found
    assert row(output, "30")[3:6] == ["100", "of", "100"]


def test_gpu_check(tmp_path: Path) -> None:
    # GIVEN no device but the CPU / WHEN the check runs there
    output = run("gpu_check", "--device", "cpu", "--output", str(tmp_path), "--rounds", "1")
    # THEN nothing failed, what needs a device says that it was not run
    assert " 0 failed" in output
    assert " ".join(row(output, "out of memory")).startswith("out of memory all not run")
    assert "FAILED" not in output
    # and the run files and their reports are there, and agree
    assert sorted(file.stem for file in tmp_path.glob("*.mdiag")) == [
        "accumulation", "conv-bf16", "conv-scaled", "gpt", "light"]
    report = json.loads((tmp_path / "gpt.json").read_text(encoding="utf-8"))
    assert report["peak"]["allocated_bytes"] == sum(report["roles_at_peak"].values())
    assert len(report["steps"]) == load(tmp_path / "gpt.mdiag").rows("steps") == 4


def test_gpu_check_refuses_what_it_cannot_run() -> None:
    # GIVEN a device that is none / WHEN the check is asked for it
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "gpu_check.py"), "--device", "abacus"], capture_output=True,
        text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
    # THEN one line says so
    assert done.returncode == 2
    assert "--device abacus" in done.stderr
    assert "Traceback" not in done.stderr


def test_plans() -> None:
    # GIVEN one model / WHEN a plan is drawn for it, and one is looked for within a budget
    output = run("plans", "--plans", "1", "--budgets", "1", "--models", "lstm")
    # THEN both are run, and the peaks are what was said
    assert row(output, "lstm")[1:4] == ["1", "1", "0.000%"]
    assert "1 of 1 equal to the byte, at most 0.000% off; 0 of 1 budgets exceeded" in output


def test_allocator() -> None:
    # GIVEN few live blocks / WHEN a few requests are made to the model of the allocator
    output = run("allocator", "--requests", "200", "--blocks", "100")
    # THEN each of the settings has a row; how long it took hangs on the machine
    assert output.count(" 100 ") == 4
    assert "expandable_segments:True" in output


def test_plan_scale() -> None:
    # GIVEN a stack of a few blocks / WHEN plans are looked for
    output = run("plan_scale", "--blocks", "4", "--slack", "1e6")
    # THEN it has a row; how long it took hangs on the machine
    assert int(row(output, "4")[1]) > 40


def test_plan_times() -> None:
    # GIVEN one model / WHEN a few steps are timed
    output = run(
        "plan_times", "--sets", "1", "--rounds", "2", "--recordings", "1", "--models", "unet", "--points", "1000",
        "--only", "the way down")
    # THEN the plan that was asked for has a row; how near it is hangs on the machine
    assert sum("the way down" in line for line in output.splitlines()) == 1
    assert "every block" not in output
    assert "all within 1000 points" in output


def test_checks() -> None:
    # GIVEN one model and no pairs of scripts / WHEN plans are put onto it
    output = run("checks", "--cases", "", "--models", "unet")
    # THEN each is the same training
    assert sum(line.startswith("unet") for line in output.splitlines()) == 4
    assert "4 of 4 right" in output
