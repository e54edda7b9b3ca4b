"""Which planner is cheapest at equal budgets? Several of them, on the same measured stages.

    python benchmarks/planners.py [--models gpt,unet] [--budgets 4] [--applied 1] [--rows]

Of models in ``tests/planned.py`` one step is recorded. Its stages are the blocks: items of lists of modules. Each
planner is told what each stage saves, how long it takes to run again, and how far the peak is above the budget:

- none, every block, every second and third one: they ask for nothing;
- square root: runs of about the square root of the number of blocks, each one checkpoint, the last left bare;
- torch: the knapsacks of ``torch._functorch._activation_checkpointing``, which choose what to keep of what is saved;
- ckptplan, where it is installed: its planner by dynamic programming;
- ours: with the same stages and runs of them, and with all candidates.

Those of torch and ckptplan take it that the peak falls by what is dropped. Each plan's peak is replayed, and its time
is the sum of the same times. Budgets lie between the smallest peak of the stages and the bare one. Of some plans the
peak is measured too: they are put onto the model and run.

Prints for each model and budget how much longer the step would take, in per cent; with ``--rows`` a row for each plan.
Exits with 1 where a planner's plan that fits is cheaper than ours, or a measured peak is not the one that was replayed.
"""

from __future__ import annotations

import argparse
import importlib
import platform
import sys
from collections.abc import Callable, Iterable, Sequence
from math import isqrt
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from planned import MODELS
from test_plan_replay import applied_peak, as_file, recorded

from memdiag.plan.regions import Candidate, candidates
from memdiag.plan.search import Plan, Search
from memdiag.plan.step import Step

# One has a single block, which is called again and again. Experts of the mixture are given a function that reads a
# variable which is another one when backward comes: none of them may be a checkpoint.
NAMES = [name for name in MODELS if name not in ("shared", "mixture")]
CHAINS = {"resnet": ["blocks"], "encoder-decoder": ["encoder"]}
OURS, OURS_OF_ALL = "ours", "ours of all"


class Stages:
    """What planners are told.

    Attributes:
        one: the blocks, in their order.
        saved: bytes that each saves of what it makes.
        too_much: bytes by which the bare peak is above the budget.
        runs: candidates of several blocks, by their modules.
    """

    def __init__(self, step: Step, among: Sequence[Candidate], too_much: int) -> None:
        single = {one.modules[0]: one for one in among if len(one.modules) == 1 and not one.keep}
        called = list(dict.fromkeys(call.path for call in step.calls if not call.outermost))
        blocks = [path for path in called if path.rpartition(".")[2].isdecimal() or path == "middle"]
        blocks = [path for path in blocks if not any(path.startswith(f"{other}.") for other in blocks)]
        stands = {path: next((one for name, one in single.items() if f"{name}.".startswith(f"{path}.")), None)
                  for path in blocks}
        self.one = [one for one in stands.values() if one is not None and _saved(step, one)]
        self.saved = [_saved(step, one) for one in self.one]
        self.runs = {one.modules: one for one in among if len(one.modules) > 1 and not one.keep and all(
            stands.get(path) is not None for path in one.modules)}
        self.too_much = too_much

    @property
    def times(self) -> list[int]:
        return [one.again_ns for one in self.one]


def _saved(step: Step, one: Candidate) -> int:
    found: set[int] = set()
    for region in one.regions:
        call = region.calls[0]
        mine = (step.saves.span >= call.first) & (step.saves.span <= call.last) & (step.saves.allocation >= 0)
        found |= {number for number in step.saves.allocation[mine].tolist() if step.born[number] >= call.start}
    return int(step.size[list(found)].sum())


# --- planners: from stages to candidates; None where they have no plan ------------------------------------------------

Planner = Callable[[Stages], Iterable[Candidate] | None]


def square_root(stages: Stages) -> list[Candidate] | None:
    length = isqrt(len(stages.one) - 1) + 1
    plan = []
    for start in range(0, len(stages.one) - length, length):
        run = stages.one[start:start + length]
        one = run[0] if length == 1 else stages.runs.get(tuple(one.modules[0] for one in run))
        if one is None:
            return None  # something else runs between them
        plan.append(one)
    return plan


def knapsack(name: str) -> Planner:
    def planner(stages: Stages) -> list[Candidate] | None:
        solve = getattr(importlib.import_module("torch._functorch._activation_checkpointing.knapsack"), name)
        all_saved = sum(stages.saved)
        room = all_saved - stages.too_much
        if room < 0:
            return None
        _, _, again = solve([size / all_saved for size in stages.saved], list(map(float, stages.times)),
                            room / all_saved)
        return [stages.one[number] for number in again]

    return planner


def ckptplan(stages: Stages) -> list[Candidate] | None:
    theirs: Any = importlib.import_module("ckptplan")
    profiles = [theirs.BlockProfile(
        block_id=one.modules[0], order=order, device="cpu", dtype="float32", input_shape_signature="",
        output_shape_signature="", param_count=0, trainable_param_count=0, timing_only=False,
        activation_bytes_estimate=saved, activation_bytes_method="isolated_forward_delta",
        forward_time_ms_mean=one.again_ns / 1e6, forward_time_ms_std=0.0,
        recompute_time_upper_bound_ms_mean=one.again_ns / 1e6, recompute_time_upper_bound_ms_std=0.0,
        recompute_time_source="measured_full_recompute_early_stop_disabled", num_warmup=0, num_trials=1,
        is_stochastic=None, is_stateful=None, stochastic_submodules=(), stateful_submodules=(),
        eligible_for_checkpoint=True, exclusion_reason=None, warnings=(), pytorch_version=torch.__version__,
        profiler_version="") for order, (one, saved) in enumerate(zip(stages.one, stages.saved, strict=True))]
    blocks = [theirs.CheckpointableBlock(one.modules[0], order, nn.Module()) for order, one in enumerate(stages.one)]
    try:
        plan = theirs.plan_checkpoints(
            profiles, blocks, target_kind="activation_budget_bytes",
            target_value=max(sum(stages.saved) - stages.too_much, 0), activation_bucket_bytes=1024)
    except theirs.InfeasibleTargetError:
        return None
    return [one for one, decision in zip(stages.one, plan.decisions, strict=True) if decision.checkpointed]


PLANNERS: dict[str, Planner] = {
    "none": lambda stages: [], "every": lambda stages: stages.one, "2nd": lambda stages: stages.one[::2],
    "3rd": lambda stages: stages.one[::3], "√": square_root, "greedy": knapsack("greedy_knapsack"),
    "ilp": knapsack("ilp_knapsack"), "dp": knapsack("dp_knapsack"), "ckptplan": ckptplan}
NEEDS = {"ilp": "scipy", "ckptplan": "ckptplan"}


def missing() -> dict[str, str]:
    """Planners that cannot run here, and what they need."""
    found = {}
    for name, module in NEEDS.items():
        try:
            importlib.import_module(module)
        except ImportError:
            found[name] = module
    return found


# --- side by side -----------------------------------------------------------------------------------------------------


def compare(name: str, budgets: int) -> list[tuple[int, dict[str, Plan | None]]]:
    """Of a model, budgets and what each planner chooses for them."""
    step, _ = recorded(name, False)
    everything = candidates(step, CHAINS.get(name, ()))
    whole = Search(step, everything)
    bare = whole.plan([]).peak.bytes
    stages = Stages(step, everything, 0)
    same = Search(step, [*stages.one, *stages.runs.values()])
    smallest = same.smallest().peak.bytes
    found = []
    for number in range(budgets):
        budget = smallest + (bare - smallest) * (number + 1) // (budgets + 1)
        told = Stages(step, everything, bare - budget)
        plans: dict[str, Plan | None] = {}
        for kind, planner in PLANNERS.items():
            chosen = None if kind in missing() else planner(told)
            plans[kind] = None if chosen is None else whole.plan(chosen)
        plans[OURS], plans[OURS_OF_ALL] = same.within(budget), whole.within(budget)
        found.append((budget, plans))
    return found


def check(budget: int, plans: dict[str, Plan | None]) -> list[str]:
    """What is against the claim: that none that fits is cheaper than ours."""
    wrong = []
    for ours in (OURS, OURS_OF_ALL):
        mine = plans[ours]
        if mine is None or mine.peak.bytes > budget:
            wrong.append(f"{ours} does not fit")
            continue
        wrong += [f"{kind} fits and takes {plan.again_ns} ns, {ours} {mine.again_ns}"
                  for kind, plan in plans.items() if kind in PLANNERS or ours == OURS_OF_ALL
                  if plan is not None and plan.peak.bytes <= budget and plan.again_ns < mine.again_ns]
    return wrong


def measured(name: str, plans: dict[str, Plan | None], number: int) -> list[tuple[str, int, int]]:
    """Of some plans that can be applied, the replayed and the measured peak, both above what was there before."""
    _, before = recorded(name, False)
    can = {tuple((one.modules, one.keep) for one in plan.chosen): (kind, plan) for kind, plan in plans.items()
           if plan is not None and plan.chosen and not any(one.by_hand for one in plan.chosen)}
    return [(kind, plan.peak.bytes - before, applied_peak(name, as_file(plan.chosen), False))
            for kind, plan in list(can.values())[::-1][:number]]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=",".join(NAMES), help="by name (default: %(default)s)")
    parser.add_argument("--budgets", type=int, default=4, help="of each model (default %(default)s)")
    parser.add_argument("--applied", type=int, default=2, help="plans of each budget to run (default %(default)s)")
    parser.add_argument("--rows", action="store_true", help="a row for each plan")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lines, rows, wrong, ran = [], [], [], 0
    over = dict.fromkeys((*PLANNERS, OURS, OURS_OF_ALL), 0)
    for name in arguments.models.split(","):
        step, before = recorded(name, False)
        for budget, plans in compare(name, arguments.budgets):
            told = [name, f"{(budget - before) / 2**20:.2f}"]
            for kind, plan in plans.items():
                exceeds = plan is not None and plan.peak.bytes > budget
                over[kind] += exceeds
                told.append("-" if plan is None else f"{100 * plan.again_ns / step.work_ns:.1f}{' !' * exceeds}")
                if plan is not None:
                    rows.append([name, told[1], kind, f"{(plan.peak.bytes - before) / 2**20:.2f}",
                                 "exceeds" if exceeds else "", f"{plan.again_ns / 1e6:.3f}",
                                 ", ".join("+".join(one.modules) for one in plan.chosen)])
            lines.append(told)
            wrong += [f"{name}, {told[1]} MiB: {text}" for text in check(budget, plans)]
            for kind, said, came in measured(name, plans, arguments.applied):
                ran += 1
                if said != came:
                    wrong.append(f"{name}, {told[1]} MiB: the peak under {kind} is {came} bytes, replayed {said}")
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, 1 thread; peaks are "
          "above what was there before")
    for kind, module in missing().items():
        print(f"{kind} is left out: {module} is not installed")
    if arguments.rows:
        print(tabulate(rows, ["model", "budget, MiB", "planner", "peak, MiB", "", "again, ms", "checkpoints"],
                       tablefmt="simple", disable_numparse=True))
    print("How much longer a step takes, in %; !: its peak exceeds the budget; -: no plan")
    print(tabulate(lines, ["model", "budget, MiB", *over], tablefmt="simple", disable_numparse=True))
    print(f"exceeded, of {len(lines)} budgets: " + ", ".join(f"{kind} {count}" for kind, count in over.items()))
    print(f"{ran} plans applied and measured")
    for text in wrong:
        print(f"WRONG: {text}")
    if not wrong:
        print("none that fits is cheaper than ours")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
