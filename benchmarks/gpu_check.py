"""The CUDA path, end to end: does a recording agree with the allocator's own figures?

    python benchmarks/gpu_check.py [--device cuda] [--output FOLDER]

Runs small trainings under the recorder (a GPT; a convolution net with bf16 autocast, and with a GradScaler; gradient
accumulation; a model on two devices; one that runs out of memory on purpose; light recording) and holds each against a
count of its own:

- on CUDA `torch.cuda.memory_allocated()` at each step's end and `torch.cuda.max_memory_allocated()` over the run;
- on the CPU, where the allocator keeps no count, a second run of the same training under `torch.profiler`, whose
  memory events are summed here.

Prints a row for every check: ok, FAILED, "measured" where no value is the right one, or "not run" with the reason.
What was not run is no success: read the rows. The run files and their reports in JSON go to FOLDER. Exit code 1 where a
check failed. Nothing in a recorded part synchronises with the device beyond what the training itself does.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # before torch is imported: the profiler's library prints lines
import numpy as np
import torch
import torch.nn.functional as F
from overhead import GPT, machine
from tabulate import tabulate
from torch import nn

from memdiag.record import Options, Recorder
from memdiag.report import render_text, summarize, to_json
from memdiag.trace import NONE, Kind, Level, Phase, Role, Trace
from memdiag.trace.ledger import ledger, roles
from memdiag.trace.timeline import timeline

UNKNOWN_AT_MOST = 0.01

AtStepEnd = Callable[[], None]
Training = Callable[[torch.device, AtStepEnd], None]


# --- trainings: each calls what it is given at the end of every step, where the recorder ends it too ------------


def watched(optimizer: torch.optim.Optimizer, at_step_end: AtStepEnd) -> torch.optim.Optimizer:
    """Calls back when the step is over: an optimizer's own hooks run just before the recorder's, which is global."""
    optimizer.register_step_post_hook(lambda *_: at_step_end())
    return optimizer


def gpt(device: torch.device, at_step_end: AtStepEnd, steps: int = 4) -> None:
    model = GPT(layers=3, width=128, heads=4, tokens=64, vocabulary=500).to(device)
    optimizer = watched(torch.optim.AdamW(model.parameters(), lr=1e-3), at_step_end)
    for _ in range(steps):
        ids = torch.randint(500, (4, 64)).to(device)
        optimizer.zero_grad()
        F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        optimizer.step()


def convolutions() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(),
        nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10))


def conv_bf16(device: torch.device, at_step_end: AtStepEnd) -> None:
    model = convolutions().to(device)
    optimizer = watched(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), at_step_end)
    for _ in range(4):
        x, y = torch.randn(16, 3, 32, 32).to(device), torch.randint(10, (16,)).to(device)
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()


def conv_scaled(device: torch.device, at_step_end: AtStepEnd) -> None:
    model = convolutions().to(device)
    optimizer = watched(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), at_step_end)
    scaler = torch.amp.GradScaler(device.type)
    for _ in range(4):
        x, y = torch.randn(16, 3, 32, 32).to(device), torch.randint(10, (16,)).to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def accumulation(device: torch.device, at_step_end: AtStepEnd) -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10)).to(device)
    optimizer = watched(torch.optim.Adam(model.parameters()), at_step_end)
    for _ in range(4):
        for _ in range(3):
            x, y = torch.randn(32, 64).to(device), torch.randint(10, (32,)).to(device)
            (F.cross_entropy(model(x), y) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()


def two_devices(device: torch.device, at_step_end: AtStepEnd) -> None:
    first, second = torch.device("cuda:0"), torch.device("cuda:1")
    front, back = nn.Linear(64, 512).to(first), nn.Linear(512, 10).to(second)
    optimizer = watched(torch.optim.SGD([*front.parameters(), *back.parameters()], lr=0.01), at_step_end)
    for _ in range(4):
        x, y = torch.randn(32, 64).to(first), torch.randint(10, (32,)).to(second)
        optimizer.zero_grad()
        F.cross_entropy(back(front(x).relu().to(second)), y).backward()
        optimizer.step()


def out_of_memory(device: torch.device, at_step_end: AtStepEnd) -> None:
    model = nn.Linear(1024, 1024).to(device)
    optimizer = watched(torch.optim.SGD(model.parameters(), lr=0.01), at_step_end)
    kept = []
    while True:
        x = torch.randn(64, 1024).to(device)
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        kept.append(torch.empty(1 << 30, dtype=torch.uint8, device=device))


# --- counts of our own -------------------------------------------------------------------------------------------


@dataclass
class Count:
    """What was counted apart from the recording: bytes at each step's end and at the highest, by device."""

    ends: dict[str, list[int]] = field(default_factory=dict)
    peak: dict[str, int] = field(default_factory=dict)


def names(device: torch.device) -> list[str]:
    """The devices to be counted: all, as the allocator names them."""
    return [f"cuda:{i}" for i in range(torch.cuda.device_count())] if device.type == "cuda" else ["cpu"]


def count_on_cpu(training: Training, device: torch.device) -> Count:
    """The same training under torch's profiler, its memory events summed in the order of time."""
    ends_ns: list[str] = []

    def note() -> None:
        with torch.profiler.record_function(f"gpu_check end {len(ends_ns)}"):
            ends_ns.append("")

    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        training(device, note)
    results = profiler.profiler.kineto_results if profiler.profiler is not None else None
    assert results is not None
    moments: list[tuple[int, int, bool]] = []
    waiting = list(results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.name == "[memory]" and event.extra_fields.total_allocated:
            moments.append((event.start_time_ns, event.extra_fields.alloc_size, False))
        elif event.name.startswith("gpu_check end"):
            moments.append((event.start_time_ns, 0, True))
    live = peak = 0
    ends = []
    for _, size, is_end in sorted(moments):
        live += size
        peak = max(peak, live)
        if is_end:
            ends.append(live)
    return Count({"cpu": ends}, {"cpu": peak})


# --- checks ------------------------------------------------------------------------------------------------------


class Checks:
    """The rows of the table."""

    def __init__(self) -> None:
        self.rows: list[list[str]] = []
        self.failed = 0

    def that(self, training: str, what: str, true: bool, said: str) -> None:
        self.failed += not true
        self.rows.append([training, what, "ok" if true else "FAILED", said])

    def figure(self, training: str, what: str, said: str) -> None:
        """Something measured that has no right value."""
        self.rows.append([training, what, "measured", said])

    def not_run(self, training: str, what: str, why: str) -> None:
        self.rows.append([training, what, "not run", why])


def record(
    training: Training, device: torch.device, path: Path, options: Options | None = None, expect_oom: bool = False
) -> tuple[Trace, Count]:
    """Records a training. On CUDA the allocator's own figures are read on the way; they wait for nothing."""
    count = Count({name: [] for name in names(device)}, {})

    def note() -> None:
        if device.type == "cuda":
            for index, name in enumerate(count.ends):
                count.ends[name].append(torch.cuda.memory_allocated(index))

    torch.manual_seed(0)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        for index in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(index)
    recorder = Recorder(path, options or Options(), argv=["gpu_check"])
    with recorder:
        try:
            training(device, note)
        except torch.OutOfMemoryError:
            if not expect_oom:
                raise
    if recorder.problem:
        raise RuntimeError(recorder.problem)
    if device.type == "cuda":
        count.peak = {
            name: torch.cuda.max_memory_allocated(index) for index, name in enumerate(count.ends)}
    else:
        torch.manual_seed(0)
        gc.collect()
        count = count_on_cpu(training, device)
    return recorder.trace(), count


def live_at_ends(trace: Trace, device: str) -> list[int]:
    line = timeline(trace, device)
    before = np.concatenate([[line.start_bytes], line.live])
    return [int(before[event]) for event in trace["steps"]["end_event"]]


def check(checks: Checks, name: str, trace: Trace, count: Count, device: torch.device) -> None:
    """What must hold of a training that was recorded in full."""
    for where in [d for d in count.peak if count.peak[d]]:
        label = f"{name}, {where}" if len(names(device)) > 1 else name
        line = timeline(trace, where)
        checks.that(label, "peak", line.peak_bytes == count.peak[where],
                    f"{line.peak_bytes:,} of {count.peak[where]:,} B")
        ends = live_at_ends(trace, where)
        checks.that(label, "live at step ends", len(ends) > 0 and ends == count.ends[where],
                    f"{ends[-1:]} of {count.ends[where][-1:]} B, {len(ends)} steps")
        assigned = roles(trace)
        sums = ledger(trace, assigned, where)
        checks.that(label, "roles sum to live", bool(np.array_equal(sums.sum(axis=0), line.live)),
                    f"at {len(line.live):,} events")
        at_peak = sums[:, max(line.peak_event, 0)]
        unknown = int(at_peak[Role.UNKNOWN]) / max(line.peak_bytes, 1)
        checks.that(label, "unknown at the peak", unknown <= UNKNOWN_AT_MOST, f"{unknown:.2%}")
    seen = [text for text in trace.not_seen if "total changed" in text]
    checks.that(name, "no change without an event", not seen, "; ".join(seen))
    check_backward(checks, name, trace)
    check_statistics(checks, name, trace, device)


def check_backward(checks: Checks, name: str, trace: Trace) -> None:
    """Every node of the graph ran in a backward phase, on whatever thread, and knows its forward operator."""
    spans = trace["spans"]
    nodes = np.flatnonzero(spans["kind"] == Kind.NODE)
    phases = set()
    for row in nodes:
        above = [r for r in trace.ancestors(int(spans["id"][row])) if spans["kind"][r] == Kind.PHASE]
        phases.add(trace.text[spans["name"][above[0]]] if above else "none")
    checks.that(name, "nodes are in backward", phases == {Phase.BACKWARD.label}, f"{len(nodes)} nodes in {phases}")
    known = float((spans["forward"][nodes] != NONE).mean()) if len(nodes) else 0.0
    # AccumulateGrad undoes no operator.
    names_ = [trace.text[i] for i in spans["name"][nodes]]
    due = sum("AccumulateGrad" not in text for text in names_) / max(len(nodes), 1)
    checks.that(name, "nodes know their forward", known >= due, f"{known:.0%} of nodes, {due:.0%} have one")


def check_statistics(checks: Checks, name: str, trace: Trace, device: torch.device) -> None:
    if device.type != "cuda":
        checks.not_run(name, "reserved bytes", "the CPU's allocator reserves nothing")
        checks.not_run(name, "memory outside PyTorch", "a figure of CUDA's driver")
        return
    stats = trace["device_stats"]
    by_name = {text: stats["value"][stats["name"] == i] for i, text in enumerate(trace.text)}
    steps = trace.rows("steps")
    reserved = by_name.get("reserved_bytes.all.current", np.empty(0))
    checks.that(name, "reserved bytes", len(reserved) >= steps > 0 and bool((reserved > 0).all()),
                f"{len(reserved)} figures for {steps} steps")
    outside = by_name.get("outside_pytorch_bytes", np.empty(0))
    checks.that(name, "memory outside PyTorch", len(outside) >= steps > 0 and bool((outside > 0).all()),
                f"{int(outside.max()) if len(outside) else 0:,} B at most")


def check_light(checks: Checks, device: torch.device, path: Path) -> Trace:
    trace, count = record(gpt, device, path, Options(steps=(0, 1)))
    where = next(name for name in count.peak if count.peak[name])
    checks.that("light", "steps are light", bool((trace["steps"]["level"][1:] == Level.LIGHT).all()),
                f"{trace.rows('steps')} steps")
    ends = trace["steps"]["end_bytes"].tolist()
    checks.that("light", "live at step ends", len(ends) > 0 and ends == count.ends[where],
                f"{ends[-1:]} of {count.ends[where][-1:]} B")
    peak = summarize(trace).peak.allocated_bytes
    checks.that("light", "peak", peak == count.peak[where], f"{peak:,} of {count.peak[where]:,} B")
    return trace


def check_out_of_memory(checks: Checks, device: torch.device, path: Path) -> Trace | None:
    name = "out of memory"
    if device.type != "cuda":
        checks.not_run(name, "all", "the host's memory is not to be filled: needs a CUDA device")
        return None
    trace, count = record(out_of_memory, device, path, expect_oom=True)
    where = f"cuda:{torch.cuda.current_device() if device.index is None else device.index}"
    failed = summarize(trace).diagnosis.oom
    checks.that(name, "noticed", failed is not None, "no request failed in the stream")
    if failed is not None:
        checks.that(name, "device", failed.device == where, f"{failed.device}, not {where}")
        checks.that(name, "asked for", failed.requested_bytes == 1 << 30, f"{failed.requested_bytes} of {1 << 30} B")
        checks.that(name, "reserved", (failed.reserved_bytes or 0) >= (failed.allocated_bytes or 0) > 0,
                    f"{failed.reserved_bytes} reserved, {failed.allocated_bytes} allocated")
    peak = timeline(trace, where).peak_bytes
    checks.that(name, "peak", peak == count.peak[where], f"{peak:,} of {count.peak[where]:,} B")
    return trace


def check_overhead(checks: Checks, device: torch.device, path: Path, rounds: int) -> None:
    """Wall-clock time of a training, after one that warms up; the device is waited for outside the recorded part."""
    def seconds(recorder: Any) -> float:
        gc.collect()
        start = perf_counter()
        with recorder:
            gpt(device, lambda: None)
        if device.type == "cuda":
            for index in range(torch.cuda.device_count()):
                torch.cuda.synchronize(index)
        return perf_counter() - start

    seconds(contextlib.nullcontext())
    ratios = []
    for _ in range(rounds):
        plain = seconds(contextlib.nullcontext())
        ratios.append(seconds(Recorder(path)) / plain)
    ratio = statistics.median(ratios)
    checks.figure("overhead", "a whole training, reading included",
                  f"{ratio:.2f} of bare, {min(ratios):.2f} to {max(ratios):.2f} in {rounds} rounds of 4 small steps")


def save_report(trace: Trace, path: Path) -> None:
    summary = summarize(trace)
    render_text(summary)
    path.with_suffix(".json").write_text(to_json(summary), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="keep run files and reports here")
    parser.add_argument("--rounds", type=int, default=3, help="of the overhead (default %(default)s)")
    args = parser.parse_args(arguments)
    try:
        device = torch.device(args.device)
    except RuntimeError as error:
        parser.error(f"--device {args.device}: {str(error).splitlines()[0]}")
    if device.type not in ("cuda", "cpu"):
        parser.error("--device must be cuda or cpu")
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device is available here; --device cpu runs all but the device's own checks")
    print(machine(), end="\n" if device.type == "cpu" else f", {torch.cuda.get_device_name(device)}, "
          f"CUDA {torch.version.cuda}\n", flush=True)
    checks = Checks()
    with tempfile.TemporaryDirectory(prefix="memdiag-gpu-check-") as scratch:
        folder = args.output or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        trainings: dict[str, Training] = {
            "gpt": gpt, "conv-bf16": conv_bf16, "conv-scaled": conv_scaled, "accumulation": accumulation}
        if device.type == "cuda" and torch.cuda.device_count() > 1:
            trainings["two-devices"] = two_devices
        else:
            checks.not_run("two-devices", "all", "needs two CUDA devices")
        for name, training in trainings.items():
            trace, count = record(training, device, folder / f"{name}.mdiag")
            check(checks, name, trace, count, device)
            save_report(trace, folder / f"{name}.mdiag")
        save_report(check_light(checks, device, folder / "light.mdiag"), folder / "light.mdiag")
        oom = check_out_of_memory(checks, device, folder / "out-of-memory.mdiag")
        if oom is not None:
            save_report(oom, folder / "out-of-memory.mdiag")
        check_overhead(checks, device, Path(scratch, "overhead.mdiag"), args.rounds)
        sizes = sum(file.stat().st_size for file in folder.glob("*.mdiag"))
    print(tabulate(checks.rows, ["training", "check", "result", "figures"], disable_numparse=True))
    missing = sum(row[2] == "not run" for row in checks.rows)
    print(f"\n{sum(row[2] == 'ok' for row in checks.rows)} ok, {checks.failed} failed, {missing} not run; "
          f"run files: {sizes / 1e6:.1f} MB")
    return 1 if checks.failed else 0


if __name__ == "__main__":
    sys.exit(main())
