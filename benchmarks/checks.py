"""Is a check right? Pairs of scripts with a known answer, and correct plans that must be the same training.

    python benchmarks/checks.py [--cases FOLDER] [--models gpt,unet] [--seeds 2]

FOLDER holds ``cases.json`` and its scripts; without the option it is what MEMDIAG_CASES names, and without either there
are no pairs. Of each pair, the verdict and each stage must be the known ones. For models of ``tests/planned.py``, in
float32 and under autocast to bfloat16, with one micro-batch and with three, plans are drawn at random, of single
modules at any depth; each must come out as the same training, all stages equal. The ResNet is put into evaluation mode,
since checkpoints do move the statistics of a batch norm twice, and LSTMs have dropout inside and stay in float32.
Memory and time are not measured. Prints one row for each, and exits with 1 where a verdict is wrong.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from pathlib import Path

from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import same_run
from forked import Forked, forked
from planned import MODELS, random_plan
from test_check_cases import OUTCOMES, SAID, checked
from torch import nn

from memdiag.check.check import Check, Request, Verdict, compare_values
from memdiag.check.compare import Outcome
from memdiag.check.spec import Regions
from memdiag.record.process.launch import Target

TESTS = Path(__file__).resolve().parent.parent / "tests"
HEAD = ["script", "", "expected", "verdict", "first difference", "result"]
NAMES = ("gpt", "bert", "resnet", "unet", "lstm")
SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import torch
import torch.nn.functional as F
from torch import nn
from planned import MODELS

torch.manual_seed({seed})
make, batch = MODELS[{name!r}]
model = make()
if {name!r} == "resnet":
    model.eval()
if {name!r} == "lstm":
    model.layers = nn.ModuleList(nn.LSTM(32, 32, 2, batch_first=True, dropout=0.2) for _ in range(3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(3):
    for _ in range({batches}):
        inputs, target = batch()
        with torch.autocast("cpu", torch.bfloat16, enabled={autocast}):
            loss = F.cross_entropy(model(*inputs).flatten(0, -2), target) / {batches}
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def paths(name: str) -> list[str]:
    """Modules that may be checkpoints, by their names."""
    return [path for path, part in MODELS[name][0]().named_modules()
            if path and not isinstance(part, (nn.ModuleList, nn.Identity))]


def planned(name: str, seed: int, autocast: bool, batches: int, folder: Path, runs: Forked) -> tuple[int, Check]:
    """A check of a plan drawn at random, and its number of checkpoints."""
    plan: list[str] = []
    draw = random.Random(f"{name} {seed} {autocast} {batches}")
    while not plan:
        plan = random_plan(paths(name), draw.randrange(10**6))
    train = folder / f"{name}.py"
    train.write_text(SCRIPT.format(tests=str(TESTS), name=name, seed=seed, autocast=autocast, batches=batches),
                     encoding="utf-8")
    regions = Regions(tuple(((path,), ()) for path in plan))
    return len(plan), compare_values(Request(Target(str(train), None, ()), None, regions, None, 3, 0, 4), runs)


def where(found: Check) -> str:
    if found.difference is None:
        return found.why_not or ""
    stage = found.difference.stage
    return f"{'' if stage is None else stage.value}: {', '.join(found.difference.cause.names[:2])}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", default=os.environ.get("MEMDIAG_CASES"), help="folder (default: MEMDIAG_CASES)")
    parser.add_argument("--models", default=",".join(NAMES), help="by name (default %(default)s)")
    parser.add_argument("--seeds", type=int, default=1, help="plans of each kind of each model (default %(default)s)")
    arguments = parser.parse_args()
    rows: list[list[object]] = []
    wrong = 0
    with forked() as runs, tempfile.TemporaryDirectory(prefix="memdiag-checks-") as folder:
        for case in same_run.load_cases(Path(arguments.cases)) if arguments.cases else ():
            if case["kind"] != "verify":
                continue
            found = checked(case, Path(arguments.cases), runs)
            stages = {stage.value: outcome for stage, outcome in found.stages.items()}
            bad = found.verdict not in SAID[case["expected_check"]] or any(
                stages[stage] not in OUTCOMES[word] for stage, word in case["expected_stages"].items())
            wrong += bad
            rows.append(
                [case["id"], "", case["expected_check"], found.verdict.value, where(found), "WRONG" * bad or "ok"])
        for name in filter(None, arguments.models.split(",")):
            # PyTorch on the CPU has no LSTM in bfloat16 on every machine.
            kinds = [(autocast, batches) for autocast in (False, True) for batches in (1, 3)] if name != "lstm" else [
                (False, batches) for batches in (1, 2, 3, 4)]
            for seed in range(arguments.seeds):
                for autocast, batches in kinds:
                    count, found = planned(name, seed, autocast, batches, Path(folder), runs)
                    bad = found.verdict is not Verdict.SAME or set(found.stages.values()) != {Outcome.EQUAL}
                    wrong += bad
                    told = f"{count} checkpoints, {'bf16' if autocast else 'fp32'}, {batches} micro-batches"
                    rows.append([name, told, "same", found.verdict.value, where(found), "WRONG" * bad or "ok"])
    print(tabulate(rows, HEAD, tablefmt="simple"))
    print(f"{len(rows) - wrong} of {len(rows)} right")
    return int(not rows or wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
