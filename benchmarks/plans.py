"""Is the peak under a plan the one that comes? Plans drawn at random for models of many shapes, replayed and run.

    python benchmarks/plans.py [--plans 12] [--models gpt,unet]

For each model of ``tests/planned.py``, in float32 and under autocast to bfloat16, one step is recorded for plans. Each
plan is replayed on it, and put onto the model in a recording of its own; both peaks are of the same step, above what
was there before the recording. Prints one row for each model, and exits with 1 where a peak is more than 0.1 % off or
fewer than 95 % of them are equal to the byte.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from planned import MODELS, random_plan
from test_plan_replay import KINDS, applied_peak, inside, recorded, regions

from memdiag.plan.replay import peak_under

HEAD = ["model", "", "plans", "equal", "largest error", "lowest peak, of bare", "ms a replay", "allocations"]
FAR, EQUAL = 0.001, 0.95


def measure(name: str, autocast: bool, plans: int) -> tuple[list[object], int, float]:
    """A row of the table, how many peaks were equal, and the largest error, of the peak."""
    step, before = recorded(name, autocast)
    bare = applied_peak(name, [], autocast)
    errors, peaks, took = [], [], []
    for seed in range(plans):
        plan = random_plan(inside(step), seed)
        chosen = regions(step, plan)
        start = time.perf_counter()
        said = peak_under(step, chosen).bytes - before
        took.append(time.perf_counter() - start)
        came = applied_peak(name, plan, autocast)
        errors.append(abs(said - came) / came)
        peaks.append(came / bare)
    equal = sum(error == 0 for error in errors)
    inside_step = int(((step.born >= step.first) & (step.born < step.last)).sum())
    row = [name, "bf16" if autocast else "", plans, equal, f"{max(errors):.3%}", f"{min(peaks):.2f}",
           f"{1000 * statistics.median(took):.1f}", inside_step]
    return row, equal, max(errors)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--plans", type=int, default=12, help="of each model (default %(default)s)")
    parser.add_argument("--models", default=",".join(MODELS), help="by name (default: all)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows, equal, far, number = [], 0, 0.0, 0
    for name, autocast in KINDS:
        if name in arguments.models.split(","):
            row, same, error = measure(name, autocast, arguments.plans)
            rows.append(row)
            equal, far, number = equal + same, max(far, error), number + arguments.plans
    print(f"torch {torch.__version__}, 1 thread")
    print(tabulate(rows, HEAD, tablefmt="simple"))
    print(f"{equal} of {number} equal to the byte, at most {far:.3%} off")
    return int(not rows or far > FAR or equal < EQUAL * number)


if __name__ == "__main__":
    sys.exit(main())
