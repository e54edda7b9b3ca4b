"""Does a step under a plan take as much longer as was said? Plans for larger models, applied and timed.

    python benchmarks/plan_times.py [--sets 5] [--rounds 8] [--recordings 5] [--models gpt,resnet,unet]
        [--only "every block"] [--fresh-memory]

A GPT, a ResNet and a U-Net, of the kinds in ``tests/planned.py``, each with four plans: every block, every second one,
the one that is found for a budget half way between the smallest peak and the bare one, and a part (the MLPs of a GPT,
half the blocks of a ResNet, the way down of a U-Net). Predicted is what a recording of three steps says, as
``memdiag profile --plan`` makes it: the mean of several, each in a process of its own. Measured is the processor time
of whole steps on one thread, bare and under each plan, with equal seeds, each in a process of its own; one step of
each in turn, again and again. What a plan adds is the median over the turns of its step beside the bare one. Where a
process has its memory makes all its steps a little faster or slower, by chance; so there are several such sets of
processes, one after the other, and what is told is the mean of their medians.

The C library is told to keep the memory that is freed. Otherwise it gives some of it back to the system, and how much
has to be fetched anew in a step, page by page, hangs on sizes and the order of frees, in either step; with
``--fresh-memory`` it does so.

Prints one row for each plan, and exits with 1 where predicted and measured are more than 5 points (``--points``) apart,
and the error of their difference besides.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from planned import GPT, Batch, ResNet, UNet, tokens
from recording import record
from test_plan_replay import as_file

from memdiag.apply import apply_plan
from memdiag.plan.regions import Candidate, candidates
from memdiag.plan.search import Search
from memdiag.plan.step import planned_step
from memdiag.record.options import PLANNED_STEP
from memdiag.trace.view import View

KEEP = {"MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_MMAP_MAX_": "0"}
BLOCKS = {
    "gpt": [f"blocks.{number}" for number in range(6)], "resnet": [f"blocks.{number}" for number in range(6)],
    "unet": ["down.0", "down.1", "down.2", "middle", "up.0", "up.1", "up.2"]}
PARTS = {
    "gpt": [f"{block}.mlp" for block in BLOCKS["gpt"]], "resnet": BLOCKS["resnet"][:3], "unet": BLOCKS["unet"][:3]}
PARTLY = {"gpt": "the MLPs", "resnet": "first half", "unet": "the way down"}
Plan = Sequence[Sequence[str]]  # its regions: modules


def images(batch: int, side: int, classes: int) -> Batch:
    return (torch.randn(batch, 3, side, side),), torch.randint(classes, (batch,))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {
    "gpt": (lambda: GPT(192, 6), lambda: tokens(4, 192)), "resnet": (lambda: ResNet(32), lambda: images(8, 48, 10)),
    "unet": (lambda: UNet(24), lambda: images(4, 80, 2))}


class Training:
    """A model in training, under a plan."""

    def __init__(self, name: str, plan: dict[str, Any] | None = None) -> None:
        torch.manual_seed(0)
        make, self._batch = MODELS[name]
        self._model = make()
        if plan is not None:
            apply_plan(self._model, plan)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3)

    def step(self) -> float:
        """One step: processor time in seconds."""
        inputs, target = self._batch()
        start = time.process_time()
        F.cross_entropy(self._model(*inputs).flatten(0, -2), target).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return time.process_time() - start


# --- in a process of its own ----------------------------------------------------------------------------------------


def train(name: str, plan: dict[str, Any] | None) -> None:
    """A step for each line that comes in; a line with its time goes out."""
    training = Training(name, plan)
    for _ in sys.stdin:
        print(training.step(), flush=True)


def predict(name: str, found: dict[str, Any] | None) -> None:
    """A recording, and what it says of plans, as JSON: by name the regions, and the time they add, as a share.

    Args:
        found: the plan of an earlier recording for the budget, so that all speak of the same.
    """
    def loop() -> None:
        training = Training(name)
        for _ in range(PLANNED_STEP + 1):
            training.step()

    step = planned_step(View(record(loop, plan_step=PLANNED_STEP).trace))
    # Keeping operators costs time of Python's at each of them: that is measured elsewhere.
    among = [one for one in candidates(step) if not one.keep and not one.by_hand]
    search = Search(step, among)
    by_path = {one.modules: one for one in among}
    within: list[Candidate] = []
    if found is None:
        bare, smallest = search.plan([]).peak.bytes, search.smallest().peak.bytes
        plan = search.within((bare + smallest) // 2)
        assert plan is not None  # the smallest fits
        within = list(plan.chosen)
    else:
        within = [by_path[tuple(region["modules"])] for region in found["plans"][0]["regions"]]
    blocks = [_of(by_path, path) for path in BLOCKS[name]]
    plans = {"every block": blocks, "every 2nd": blocks[::2], "for a budget": within,
             PARTLY[name]: [_of(by_path, path) for path in PARTS[name]]}
    print(json.dumps({kind: [as_file(plan), sum(one.again_ns for one in plan) / step.work_ns]
                      for kind, plan in plans.items()}))


def _of(by_path: dict[tuple[str, ...], Candidate], path: str) -> Candidate:
    """The candidate of a module, or of the one inside it that stands for it."""
    return next(one for modules, one in by_path.items()
                if len(modules) == 1 and (modules[0] == path or modules[0].startswith(f"{path}.")))


# --- all together ---------------------------------------------------------------------------------------------------


def started(arguments: Sequence[str], fresh: bool) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, __file__, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **({} if fresh else KEEP)})


def mean(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and its standard error."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return statistics.fmean(values), error


def measure(
    name: str, recordings: int, sets: int, rounds: int, points: float, fresh: bool, only: str | None
) -> tuple[list[list[object]], bool]:
    """Rows of the table, and whether all are near enough."""
    said: dict[str, list[float]] = {}
    plans: dict[str, dict[str, Any]] = {}
    for _ in range(recordings):
        found = json.dumps(plans["for a budget"]) if plans else ""
        out, _ = started(["--predict", name, found], fresh).communicate()
        for kind, (plan, share) in json.loads(out).items():
            plans[kind] = plan
            said.setdefault(kind, []).append(100 * share)
    if only is not None:
        plans = {only: plans[only]}
    times: list[float] = []
    more: dict[str, list[float]] = {kind: [] for kind in plans}
    for _ in range(sets):
        took, its_more = turns(name, plans, rounds, fresh)
        times.append(took)
        for kind, percent in its_more.items():
            more[kind].append(percent)
    rows, near = [], True
    for kind in plans:
        (predicted, its_error), (measured, error) = mean(said[kind]), mean(more[kind])
        together = (its_error ** 2 + error ** 2) ** 0.5
        apart = predicted - measured
        near &= abs(apart) <= points + together
        rows.append([name, kind, f"{1000 * statistics.median(times):.0f}", f"{predicted:.1f} ± {its_error:.1f}",
                     f"{min(said[kind]):.1f} to {max(said[kind]):.1f}", f"{measured:.1f} ± {error:.1f}",
                     f"{apart:+.1f}", f"{together:.1f}"])
    return rows, near


def turns(name: str, plans: dict[str, dict[str, Any]], rounds: int, fresh: bool) -> tuple[float, dict[str, float]]:
    """Of one set of processes: the median time of a bare step, and what each plan adds to it, in per cent."""
    bare = started(["--train", name, ""], fresh)
    processes = {kind: started(["--train", name, json.dumps(plan)], fresh) for kind, plan in plans.items()}
    times: list[float] = []
    more: dict[str, list[float]] = {kind: [] for kind in plans}
    for number in range(rounds + PLANNED_STEP):
        before = _step(bare)
        taken = {kind: _step(process) for kind, process in processes.items()}
        if number >= PLANNED_STEP:  # warm
            times.append(before)
            for kind, seconds in taken.items():
                more[kind].append(100 * (seconds / before - 1))
    for process in (bare, *processes.values()):
        process.communicate()
    return statistics.median(times), {kind: statistics.median(percents) for kind, percents in more.items()}


def _step(process: subprocess.Popen[str]) -> float:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sets", type=int, default=5, help="of processes (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=8, help="steps of each process (default %(default)s)")
    parser.add_argument("--recordings", type=int, default=5, help="of each model (default %(default)s)")
    parser.add_argument("--only", help="a plan, by its name in the table (default: all)")
    parser.add_argument("--models", default=",".join(MODELS), help="by name (default: all)")
    parser.add_argument("--points", type=float, default=5, help="that they may be apart (default %(default)s)")
    parser.add_argument("--fresh-memory", action="store_true", help="the C library may give memory back to the system")
    parser.add_argument("--train", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--predict", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for work, given in ((train, arguments.train), (predict, arguments.predict)):
        if given:
            work(given[0], json.loads(given[1]) if given[1] else None)
            return 0
    rows, near = [], True
    for name in arguments.models.split(","):
        more, well = measure(
            name, arguments.recordings, arguments.sets, arguments.rounds, arguments.points, arguments.fresh_memory,
            arguments.only)
        rows += more
        near &= well
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {processor()}, 1 thread, processor time, "
          f"{arguments.sets} × {arguments.rounds} rounds, {arguments.recordings} recordings"
          f"{', memory given back to the system' if arguments.fresh_memory else ''}")
    print(tabulate(rows, ["model", "plan", "bare, ms", "predicted, %", "from", "measured, %", "points apart", "±"],
                   tablefmt="simple", disable_numparse=True))
    print(f"{'all' if near else 'not all'} within {arguments.points:.0f} points, errors taken off")
    return int(not near)


if __name__ == "__main__":
    sys.exit(main())
