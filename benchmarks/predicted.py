"""Does a check measure what a plan has predicted? Plans for larger models, by the commands that a person would give.

    python benchmarks/predicted.py [--models gpt,resnet,unet] [--plans every_2nd_block,--minimum] [--rounds 3]
        [--slack 1]

The models are those of ``plan_times.py``. For each and each plan, ``memdiag plan --json`` makes a plan file and
``memdiag check --plan`` runs it. Prints what was predicted and what was measured, and exits with 1 where the peak is
more than 0.1 % off, or the time of a step more than 10 % times the slack, or a stage differs that a plan leaves as it
is: of the ResNet the statistics of its batch norms do, as the plan says; its blocks are allowed all the same.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from plan_times import KEEP, MODELS
from tabulate import tabulate

HERE = Path(__file__).resolve().parent
PEAK, TIME = 0.001, 0.10
HEAD = ["model", "plan", "verdict", "peak, MiB", "predicted", "off, B", "step, ms", "predicted", "off"]
SCRIPT = """
import sys
sys.path.insert(0, {here!r})
import torch
from plan_times import Training

training = Training({name!r})
for step in range(20):
    training.step()
"""


def memdiag(folder: Path, *arguments: str) -> None:
    """Runs a command, on one thread.

    Raises:
        SystemExit: it could not be run.
    """
    done = subprocess.run(
        [sys.executable, "-m", "memdiag", *arguments], cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", **KEEP})
    if done.returncode not in (0, 3, 4):  # the verdict is in the JSON
        raise SystemExit(f"{' '.join(arguments)}: {done.returncode}\n{done.stdout}{done.stderr}")


def measure(name: str, option: str, rounds: int, slack: float, folder: Path) -> tuple[list[object], bool]:
    """A row of the table, and whether all is as it was predicted."""
    (folder / "train.py").write_text(SCRIPT.format(here=str(HERE), name=name), encoding="utf-8")
    chosen = [option] if option.startswith("-") else ["--choose", option]
    allowed = ["--allow", "blocks.*", "--allow", "blocks.*.*"] if name == "resnet" else []
    memdiag(folder, "plan", "-f", "-q", *chosen, *allowed, "--json", "plan.json", "-o", "run.mdiag", "train.py")
    memdiag(folder, "check", "-f", "-q", "--plan", "plan.json", "--rounds", str(rounds), "--json", "check.json",
            *allowed, "train.py")
    found: dict[str, Any] = json.loads((folder / "check.json").read_text(encoding="utf-8"))
    memory, time = found["memory"], found["time"]
    peak, said = memory["plan_peak_bytes"], memory["predicted_peak_bytes"]
    step, step_said = time["plan_step_ns"], time["predicted_step_ns"]
    differs = {stage for stage, outcome in found["stages"].items() if outcome != "equal"}
    well = differs <= ({"buffers"} if name == "resnet" else set())
    well &= abs(said - peak) <= PEAK * peak and abs(step_said - step) <= slack * TIME * step
    row = [name, option, found["verdict"], f"{peak / 2**20:.1f}", f"{said / 2**20:.1f}", said - peak,
           f"{step / 1e6:.0f}", f"{step_said / 1e6:.0f}", f"{100 * (step_said / step - 1):+.1f} %"]
    return row, well


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS), help="by name (default: all)")
    parser.add_argument("--plans", default="every_2nd_block,--minimum",
                        help="by their names in the table, or options that choose one (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind that are timed (default %(default)s)")
    parser.add_argument("--slack", type=float, default=1.0, help="times that the time may be further off")
    arguments = parser.parse_args()
    rows, well = [], True
    with tempfile.TemporaryDirectory(prefix="memdiag-predicted-") as folder:
        for name in arguments.models.split(","):
            for option in arguments.plans.split(","):
                row, as_said = measure(name, option, arguments.rounds, arguments.slack, Path(folder))
                rows.append(row)
                well &= as_said
    print(f"torch {torch.__version__}, 1 thread, processor time")
    print(tabulate(rows, HEAD, tablefmt="simple", disable_numparse=True))
    print("all as predicted" if well else "NOT all as predicted")
    return int(not well)


if __name__ == "__main__":
    sys.exit(main())
