"""How long are plans looked for? Models of many blocks, recorded and searched.

    python benchmarks/plan_scale.py [--blocks 100,1000] [--slack 1]

Each model is a stack of equal blocks, each with two parts of two or three layers. One step is recorded for plans.
Prints how long one replay takes, how long it takes to find the candidates, to get ready for a search, and to find the
cheapest plan within a budget: the slowest of three budgets. All in processor time. It exits with 1 where a replay takes
more than 20 ms for 5,000 storages, or a search with all that comes before it more than a second for a hundred blocks;
more for more, in proportion.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path

import torch
from tabulate import tabulate
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from planned import PLANNED_STEP
from recording import record

from memdiag.plan.planning import uncollected
from memdiag.plan.regions import candidates
from memdiag.plan.replay import Replay
from memdiag.plan.safety import chains
from memdiag.plan.search import Search
from memdiag.plan.step import Step, planned_step
from memdiag.trace.view import View

WIDTH, ROWS, REPLAYS = 16, 64, 20
BUDGETS = (0.9, 0.7, 0.5)
REPLAY_S, STORAGES = 0.020, 5_000
SEARCH_S, BLOCKS = 1.0, 100
HEAD = ["blocks", "storages", "candidates", "ms a replay", "s for candidates", "s to get ready", "s a search",
        "of what it may"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH))
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mix(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Stack(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks, self.head = nn.Sequential(*(Block() for _ in range(blocks))), nn.Linear(WIDTH, 4 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))


def train(blocks: int) -> None:
    model = Stack(blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(PLANNED_STEP + 1):
        x, target = torch.randn(ROWS, WIDTH), torch.randint(4 * WIDTH, (ROWS,))
        nn.functional.cross_entropy(model(x), target).backward()
        optimizer.step()
        optimizer.zero_grad()


def timed(work: Callable[[], object]) -> tuple[float, object]:
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


def measure(blocks: int, slack: float) -> tuple[list[object], bool]:
    """A row of the table, and whether it is as fast as it has to be, times the slack."""
    seen = record(lambda: train(blocks), plan_step=PLANNED_STEP)
    step, chained = planned_step(View(seen.trace)), chains(seen.trace)
    with uncollected():
        return _measured(blocks, slack, step, chained)


def _measured(blocks: int, slack: float, step: Step, chained: Collection[str]) -> tuple[list[object], bool]:
    storages = len(step.made_between(step.first, step.last))
    found = candidates(step, chained)
    finding = timed(lambda: candidates(step, chained))[0]
    ready, search = timed(lambda: Search(step, found))
    assert isinstance(search, Search)
    bare = search.plan([]).peak.bytes
    searching = max(timed(lambda budget=budget: search.within(int(bare * budget)))[0] for budget in BUDGETS)
    replay, draw = Replay(step), random.Random(blocks)
    single = [one for one in found if one.modules[0].count(".") == 1 and len(one.modules) == 1 and not one.keep]
    plans = [[region for one in single if draw.random() < 0.5 for region in one.regions] for _ in range(REPLAYS)]
    replaying = timed(lambda: [replay.under(plan).peak for plan in plans])[0] / REPLAYS
    share = (finding + ready + searching) / (SEARCH_S * blocks / BLOCKS)
    row = [blocks, storages, len(found), f"{1000 * replaying:.1f}",
           *(f"{figure:.2f}" for figure in (finding, ready, searching, share))]
    return row, replaying <= slack * REPLAY_S * max(storages / STORAGES, 1) and share <= slack


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", default="100,1000", help="how many, of each model (default %(default)s)")
    parser.add_argument("--slack", type=float, default=1.0, help="times that all may take longer (default %(default)s)")
    torch.set_num_threads(1)
    arguments = parser.parse_args()
    rows = [measure(int(blocks), arguments.slack) for blocks in arguments.blocks.split(",")]
    print(f"torch {torch.__version__}, 1 thread, processor time")
    print(tabulate([row for row, _ in rows], HEAD, tablefmt="simple"))
    return int(not all(fast for _, fast in rows))


if __name__ == "__main__":
    sys.exit(main())
