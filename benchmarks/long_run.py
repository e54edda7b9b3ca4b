"""What recording adds to a long run: memory of the process, size of the run file, time; and to a loader's workers.

    python benchmarks/long_run.py [--steps 500 2000 10000] [--deep-steps 1500] [--small-budget 20000]

The loop is a perceptron of three layers, trained with Adam on random batches: steps of about a millisecond, so that a
number of them comes about quickly. A second one, for the small budget alone, has a hundred layers: steps of many
events with few marks of ours among them, which is what fills the stream in light recording. Every row is a process of
its own, beside one that runs the same loop without memdiag; "added" is the difference of their largest resident
memories. The second table is a loop whose batches come from two forked workers that run 300 operators for each of
them: resident memory of the workers at their first and at their last batch.

Exit code 1 where more than 400 MiB are added, a run file is larger than 200 MB, or a worker grows by more than 16 MiB.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

from tabulate import tabulate

MOST_ADDED = 400 << 20
MOST_FILE = 200 * 10**6
MOST_WORKER_GROWTH = 16 << 20
OPERATORS_IN_A_BATCH = 300
DEEP = 100  # layers


# --- in a process of its own ---------------------------------------------------------------------------------------


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def child(what: str, steps: int, budget: int, path: str) -> dict[str, Any]:
    """Runs a loop, recorded to ``path`` unless that is empty; a budget of 0 is the default one."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    recorder: Any = nullcontext()
    if path:
        from memdiag.record import Options, Recorder

        recorder = Recorder(path, Options(max_events=budget) if budget else Options())
    with recorder:
        start = perf_counter()
        found: dict[str, Any] = load_batches(steps) if what == "loader" else train(what, steps)
        found["seconds"] = perf_counter() - start
    if path:
        if recorder.problem:
            raise RuntimeError(recorder.problem)
        found["events"] = recorder._consumer.events_read
        found["file"] = os.path.getsize(path)
    found["most"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return found


def train(what: str, steps: int) -> dict[str, Any]:
    import torch
    from torch import nn

    widths = [64] + [128] * (2 if what == "loop" else DEEP)
    layers = [part for pair in pairwise(widths) for part in (nn.Linear(*pair), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(steps):
        x, y = torch.randn(32, 64), torch.randint(10, (32,))
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {}


def load_batches(steps: int) -> dict[str, Any]:
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, IterableDataset, get_worker_info

    class Made(IterableDataset[torch.Tensor]):
        """Batches made by many operators, with the worker's number and resident bytes in front."""

        def __iter__(self) -> Iterator[torch.Tensor]:
            worker = get_worker_info()
            for _ in range(steps // 2):
                x = torch.ones(30)
                for _ in range(OPERATORS_IN_A_BATCH):
                    x = x * 1.0
                yield torch.cat([torch.tensor([float(worker.id), float(resident())], dtype=torch.float64), x])

    model = nn.Linear(30, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for batch in DataLoader(Made(), batch_size=None, num_workers=2, multiprocessing_context="fork"):
        worker, bytes_ = int(batch[0]), int(batch[1])
        first.setdefault(worker, bytes_)
        last[worker] = bytes_
        model(batch[2:].float()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"first": max(first.values()), "last": max(last.values()),
            "grown": max(last[worker] - first[worker] for worker in first)}


# --- the tables --------------------------------------------------------------------------------------------------


def in_process(what: str, steps: int, budget: int, path: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", what, str(steps), str(budget), path]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True,
                          env={"KINETO_LOG_LEVEL": "99", **os.environ})
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def mib(count: int) -> str:
    return f"{count / 2**20:,.1f}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, nargs="+", default=[500, 2000, 10_000])
    parser.add_argument("--deep-steps", type=int, default=1500, metavar="STEPS", help="of the deep loop; 0: without")
    parser.add_argument("--small-budget", type=int, default=20_000, metavar="EVENTS",
                        help="of a second recording, most of which is light (default %(default)s)")
    parser.add_argument("--batches", type=int, default=2000, help="from the workers (default %(default)s)")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.child:
        what, steps, budget, path = args.child
        print(json.dumps(child(what, int(steps), int(budget), path)))
        return 0
    if min(args.steps) < 1 or args.deep_steps < 0 or args.batches < 4 or args.small_budget < 1:
        parser.error("--steps and --small-budget must be 1 or more, --deep-steps 0 or more, --batches 4 or more")
    from overhead import machine

    print(f"{machine()}\n1 thread; wall-clock time", flush=True)
    wrong: list[str] = []
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory(prefix="memdiag-long-") as folder:
        path = str(Path(folder, "run.mdiag"))
        small = f"budget {args.small_budget:,}", args.small_budget
        runs = [("loop", steps, [("default budget", 0), small]) for steps in args.steps]
        for what, steps, budgets in [*runs, *([("deep", args.deep_steps, [small])] if args.deep_steps else [])]:
            plain = in_process(what, steps, 0, "")
            name, rate = f"{steps:,}{' deep' if what == 'deep' else ''}", f"{steps / plain['seconds']:,.0f}"
            rows.append([name, "bare", "", mib(plain["most"]), "", "", "", rate, ""])
            for label, budget in budgets:
                found = in_process(what, steps, budget, path)
                added, size = found["most"] - plain["most"], found["file"]
                if added > MOST_ADDED:
                    wrong.append(f"{name} steps, {label}: {mib(added)} MiB added")
                if size > MOST_FILE:
                    wrong.append(f"{name} steps, {label}: a run file of {size:,} B")
                rows.append([
                    "", label, f"{found['events']:,}", mib(found["most"]), mib(added), f"{size / 1e6:.2f}",
                    f"{size / found['events'] * 1000 / 1e3:.1f}", f"{steps / found['seconds']:,.0f}",
                    f"{plain['seconds'] / found['seconds']:.2f}",
                ])
        head = ["steps", "recording", "events", "most MiB", "added MiB", "file MB", "kB / 1000 events", "steps / s",
                "of bare"]
        print(tabulate(rows, head, disable_numparse=True, colalign=("right", "left", *["right"] * 7)), flush=True)
        workers = []
        for label, where in (("bare", ""), ("recorded", path)):
            found = in_process("loader", args.batches, 0, where)
            workers.append([label, mib(found["first"]), mib(found["last"]), mib(found["grown"])])
            if where and found["grown"] > MOST_WORKER_GROWTH:
                wrong.append(f"a worker grew by {mib(found['grown'])} MiB")
    print(f"\nworkers, {args.batches:,} batches, {args.batches // 2 * OPERATORS_IN_A_BATCH:,} operators each")
    print(tabulate(workers, ["recording", "first MiB", "last MiB", "grown MiB"], disable_numparse=True,
                   colalign=("left", "right", "right", "right")))
    print("\n".join(["", *wrong]) if wrong else f"\nall within {mib(MOST_ADDED)} MiB, {MOST_FILE / 1e6:.0f} MB")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
