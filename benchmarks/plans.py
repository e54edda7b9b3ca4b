"""Is the peak under a plan the one that comes? Plans for models of many shapes, replayed and run.

    python benchmarks/plans.py [--plans 12] [--budgets 12] [--models gpt,unet]

For each model of ``tests/planned.py``, in float32 and under autocast to bfloat16, one step is recorded for plans. Plans
are drawn at random: of single modules, of modules that keep operators, of runs of modules. Each is replayed on the
step, and put onto the model in a recording of its own; both peaks are of the same step, above what was there before the
recording. Then plans are looked for within budgets drawn at random between the smallest peak and the bare one, and run
as well. Prints one row for each model, and exits with 1 where a peak is more than 0.1 % off, fewer than 95 % of them
are equal to the byte, or one is above its budget.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from planned import MODELS, random_choice, random_plan
from test_plan_replay import KINDS, applied_peak, as_file, choice_of, inside, recorded_with_choice, regions

from memdiag.plan.replay import peak_under
from memdiag.plan.search import Search

HEAD = ["model", "", "plans", "equal", "largest error", "ms a replay", "allocations", "budgets", "exceeded",
        "smallest, of bare", "takes", "s a search"]
FAR, EQUAL = 0.001, 0.95


def measure(name: str, autocast: bool, plans: int, budgets: int) -> tuple[list[object], int, float, int]:
    """A row of the table, how many peaks were equal, the largest error, of the peak, and budgets that were exceeded."""
    step, before, among = recorded_with_choice(name, autocast)
    errors, took = [], []
    for seed in range(plans):
        plan: list[str] | dict[str, Any] = random_plan(inside(step), seed)
        chosen = regions(step, plan)
        if seed % 3:
            drawn = random_choice(among, ("keeps", "run")[seed % 3 - 1], seed)
            plan, chosen = as_file(drawn), choice_of(drawn)
        start = time.perf_counter()
        said = peak_under(step, chosen).bytes - before
        took.append(time.perf_counter() - start)
        came = applied_peak(name, plan, autocast)
        errors.append(abs(said - came) / came)
    equal = sum(error == 0 for error in errors)
    inside_step = int(((step.born >= step.first) & (step.born < step.last)).sum())
    search = Search(step, among)
    bare, smallest = search.plan([]).peak.bytes, search.smallest()
    searched, exceeded, draw = [], 0, random.Random(name)
    for _ in range(budgets):
        budget = draw.randint(smallest.peak.bytes, bare)
        start = time.perf_counter()
        found = search.within(budget)
        searched.append(time.perf_counter() - start)
        assert found is not None  # the smallest fits
        exceeded += applied_peak(name, as_file(found.chosen), autocast) > budget - before
    row = [name, "bf16" if autocast else "", plans, equal, f"{max(errors, default=0):.3%}",
           f"{1000 * statistics.median(took):.1f}" if took else "", inside_step, budgets, exceeded,
           f"{(smallest.peak.bytes - before) / (bare - before):.2f}", f"{smallest.again_ns / step.work_ns:+.0%}",
           f"{statistics.median(searched):.2f}" if searched else ""]
    return row, equal, max(errors, default=0), exceeded


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--plans", type=int, default=12, help="of each model (default %(default)s)")
    parser.add_argument("--budgets", type=int, default=12, help="of each model (default %(default)s)")
    parser.add_argument("--models", default=",".join(MODELS), help="by name (default: all)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows, equal, far, number, exceeded, budgets = [], 0, 0.0, 0, 0, 0
    for name, autocast in KINDS:
        if name in arguments.models.split(","):
            row, same, error, over = measure(name, autocast, arguments.plans, arguments.budgets)
            rows.append(row)
            equal, far, number = equal + same, max(far, error), number + arguments.plans
            exceeded, budgets = exceeded + over, budgets + arguments.budgets
    print(f"torch {torch.__version__}, 1 thread")
    print(tabulate(rows, HEAD, tablefmt="simple"))
    print(f"{equal} of {number} equal to the byte, at most {far:.3%} off; {exceeded} of {budgets} budgets exceeded")
    return int(not rows or far > FAR or equal < EQUAL * number or exceeded > 0)


if __name__ == "__main__":
    sys.exit(main())
