"""What recording costs a training step, beside the profilers that come with PyTorch.

    python benchmarks/overhead.py [--rounds 9] [--steps 4] [--only "memdiag, light" …]

Two workloads: a 12-layer GPT, and a perceptron so small that fixed costs are all there is. Every variant takes its
turn in one process, on the same model, in an order that moves on by one each round: it is opened, runs one step that
is not timed, then the timed ones, and is closed. Light recording has more steps before the timed ones, since it has
to see that they all do the same before it notes the saved tensors of one in four alone: the timed ones are a multiple
of four, or that one would count too much or too little. What is timed is the processor time of the process, with one
thread and a garbage collection before each turn. A round gives each variant's step over the mean of the two bare
turns of that same round; the table has the median of the rounds, so that a slow moment of the machine hits both
sides.

Columns:

- inside: processor time of a step, as a multiple of the bare step, with the standard error of this median. memdiag
  reads its stream now and then, between two steps; that is not in here. A difference of a percent takes some fifty
  rounds to see: ``--only`` leaves out the variants that are not asked for.
- in rounds: the least and the most of any round; best: the fastest turn over the fastest bare one, which other work
  on the machine disturbs least.
- reading: what a step costs to read afterwards, also as a multiple of the bare step. For torch.profiler it is the
  closing of the profiler. memdiag also looks, at the first twenty steps and then ever more rarely, for who holds
  what nothing else explains: that is not in the table, but in the line of text below it. The timed steps come after
  those of the looks, or they would pay for the caches that a look has emptied.
- events: memory events, operators and marks that the step leaves in the stream.
- bare, again: the second bare turn over the first. How far it is from 1 is how far the others can be trusted.

Figures above their target are marked; the exit code is 0, since a time is no proof of an error.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, process_time
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # before torch is imported: the profiler's library prints lines
import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker

from memdiag.record import Options, Recorder

Step = Callable[[], None]

# Variant: (inside, reading) that it is meant to stay below, where the workload is the GPT.
TARGETS = {"memdiag, full": (1.15, 0.4), "memdiag, light": (1.02, None)}

_LIGHT_UNTIMED = 8  # one in full, and what it takes to read two that are alike


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, tokens: int, vocabulary: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.place(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def stepper(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[Step, torch.optim.Optimizer]:
    """A training step that leaves no gradient behind, so that no turn frees what another one allocated."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        logits = model(inputs)
        F.cross_entropy(logits.flatten(0, -2), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, optimizer


# --- variants: each is open around a turn and says how to read what it has --------------------------------------


@dataclass
class Reading:
    """What reading took in a turn, and what a variant needs done after each step.

    Attributes:
        seconds: of the processor, ``looking`` included.
        looking: for who holds what nothing else explains, ``looks`` times.
        untimed: steps before the timed ones.
        between: what is to be done after each step, and ``settle`` before the first that is timed.
    """

    seconds: float = 0.0
    looking: float = 0.0
    looks: int = 0
    events: int = 0
    untimed: int = 1
    between: Step = lambda: None
    settle: Step = lambda: None


@contextmanager
def bare() -> Iterator[Reading]:
    yield Reading()


@contextmanager
def recorded(path: Path, full: bool) -> Iterator[Reading]:
    """memdiag from code. In light, after a first step in full, as in a run whose budget is spent."""
    reading = Reading(untimed=1 if full else _LIGHT_UNTIMED)
    # The steps of a turn are fewer than a thousand.
    recorder = Recorder(path, Options(steps=(0, 1000 if full else 1)))
    read, explain = recorder._read_chunk, recorder._explain

    def timed_explain() -> None:
        start = process_time()
        explain()
        reading.looking += process_time() - start
        reading.looks += 1

    def timed(*args: Any) -> None:
        before, start = recorder._consumer.events_read, process_time()
        read(*args)
        reading.seconds += process_time() - start
        reading.events += recorder._consumer.events_read - before

    def no_looks() -> None:
        recorder._next_look = sys.maxsize

    recorder._read_chunk, recorder._explain = timed, timed_explain  # type: ignore[method-assign]
    reading.between = no_looks
    if not full:
        reading.settle = lambda: recorder._cut(reopen=True)  # what was not timed is read
    with recorder:
        yield reading
    if recorder.problem:
        raise RuntimeError(recorder.problem)


@contextmanager
def profiled(stacks: bool) -> Iterator[Reading]:
    reading = Reading()
    profiler = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, record_shapes=True, with_stack=stacks)
    profiler.start()
    yield reading
    start = process_time()
    profiler.stop()
    reading.seconds += process_time() - start


@contextmanager
def tracked(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Reading]:
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    with tracker:
        yield Reading(between=tracker.reset_mod_stats)  # it refuses a second step without


# --- measuring ----------------------------------------------------------------------------------------------------


@dataclass
class Measured:
    """Of one variant, for every round: seconds of a step, to read it, and of a look; and its events."""

    inside: list[float] = field(default_factory=list)
    reading: list[float] = field(default_factory=list)
    looking: list[float] = field(default_factory=list)
    events: list[float] = field(default_factory=list)


def turn(variant: Callable[[], Any], step: Step, steps: int, found: Measured) -> None:
    """One turn, whose figures, each for one step, are added to what was found of the variant."""
    gc.collect()
    with variant() as reading:
        for _ in range(reading.untimed):
            step()
            reading.between()
        reading.settle()
        # What was read of the step that is not timed is not counted; torch.profiler is read at the end, whole.
        seconds, looking, events, inside = reading.seconds, reading.looking, reading.events, 0.0
        for _ in range(steps):
            start, read = process_time(), reading.seconds
            step()
            inside += process_time() - start - (reading.seconds - read)
            reading.between()
    looked = reading.looking - looking
    counted = steps if reading.events else steps + 1
    found.inside.append(inside / steps)
    found.reading.append((reading.seconds - seconds - looked) / counted)
    found.looking.append(reading.looking / max(reading.looks, 1))
    found.events.append((reading.events - events) / steps)


def measure(variants: dict[str, Callable[[], Any]], step: Step, rounds: int, steps: int) -> dict[str, Measured]:
    """Every variant in turn, each round in another order; the first round warms up and is dropped."""
    measured = {name: Measured() for name in variants}
    names = list(variants)
    for number in range(rounds + 1):
        for place in range(len(names)):
            name = names[(place + number) % len(names)]
            turn(variants[name], step, steps, measured[name] if number else Measured())
    return measured


def over(values: Sequence[float], bare: Sequence[float]) -> list[float]:
    return [value / base for value, base in zip(values, bare, strict=True)]


def error_of_median(values: Sequence[float]) -> float:
    """Standard error of a median, from the quartiles, as for values that are distributed normally."""
    if len(values) < 4:
        return float("nan")
    low, _, high = statistics.quantiles(values, n=4)
    return 1.2533 * (high - low) / 1.349 / len(values) ** 0.5


def table(measured: dict[str, Measured], targets: dict[str, tuple[float, float | None]]) -> str:
    first, again = measured["bare"].inside, measured["bare, again"].inside
    base = [(a + b) / 2 for a, b in zip(first, again, strict=True)]
    rows = []
    for name, found in measured.items():
        ratios = over(found.inside, first if name == "bare, again" else base)
        ratio = statistics.median(ratios)
        reading = statistics.median(over(found.reading, base))
        most, most_reading = targets.get(name, (None, None))
        said = [] if most is None else [f"inside ≤ {most}"]
        said += [] if most_reading is None else [f"reading ≤ {most_reading}"]
        missed = (most is not None and ratio > most) or (most_reading is not None and reading > most_reading)
        rows.append([
            name, f"{statistics.median(found.inside) * 1e3:.2f}",
            "" if name == "bare" else f"{ratio:.3f} ± {error_of_median(ratios):.3f}",
            "" if name == "bare" else f"{min(ratios):.2f} to {max(ratios):.2f}",
            "" if name == "bare" else f"{min(found.inside) / min(first + again):.3f}",
            f"{reading:.3f}" if reading else "",
            f"{statistics.median(found.events):,.0f}" if any(found.events) else "",
            f"{', '.join(said)}: {'missed' if missed else 'met'}" if said else "",
        ])
    looks = [
        f"{statistics.median(found.looking) * 1e3:.1f} ms in {name.removeprefix('memdiag, ')}"
        for name, found in measured.items() if name.startswith("memdiag")]
    head = ["variant", "ms a step", "inside", "in rounds", "best", "reading", "events", "target"]
    text = tabulate(rows, head, disable_numparse=True, colalign=("left", *["right"] * 6, "left"))
    return f"{text}\na look of memdiag's: {', '.join(looks)}" if looks else text


def machine() -> str:
    """Versions and the processor, as far as the system tells."""
    processor = platform.processor() or platform.machine()
    if sys.platform == "linux":
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next((line.split(": ")[1] for line in lines if line.startswith("model name")), processor)
    return f"{processor}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}"


def compare(
    title: str, model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, args: argparse.Namespace,
    goals: dict[str, tuple[float, float | None]],
) -> None:
    """Measures every variant on a workload, and prints the table."""
    step, optimizer = stepper(model, inputs, targets)
    step()  # makes the optimizer's state
    with tempfile.TemporaryDirectory(prefix="memdiag-overhead-") as folder:
        path = Path(folder, "run.mdiag")
        variants: dict[str, Callable[[], Any]] = {
            "bare": bare,
            "memdiag, full": lambda: recorded(path, full=True),
            "memdiag, light": lambda: recorded(path, full=False),
            "bare, again": bare,
            "torch.profiler: memory, shapes": lambda: profiled(stacks=False),
            "torch.profiler: stacks too": lambda: profiled(stacks=True),
            "MemTracker": lambda: tracked(model, optimizer),
        }
        if args.only:
            wanted = {"bare", "bare, again", *args.only}
            if not wanted <= variants.keys():
                sys.exit(f"--only: {', '.join(sorted(wanted - variants.keys()))}: one of {'; '.join(variants)}")
            variants = {name: variant for name, variant in variants.items() if name in wanted}
        start = monotonic()
        measured = measure(variants, step, args.rounds, args.steps)
    print(f"\n{title} ({monotonic() - start:.0f} s)\n{table(measured, goals)}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="rounds after the first (default %(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="timed steps in a turn (default %(default)s)")
    parser.add_argument(
        "--only", nargs="+", metavar="VARIANT", help="measure these alone, and the bare step, by the table's names")
    for name, default in (
        ("layers", 12), ("width", 256), ("heads", 4), ("batch", 4), ("tokens", 128), ("vocabulary", 1000),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help="of the GPT (default %(default)s)")
    parser.add_argument("--tiny-batch", type=int, default=16, help="of the perceptron (default %(default)s)")
    args = parser.parse_args(arguments)
    if not 1 <= args.steps < 999 or args.rounds < 1:
        parser.error("--rounds must be 1 or more, and --steps 1 to 998")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"{machine()}\n1 thread; processor time; {args.rounds} rounds, in each every variant in turn in this one "
          f"process:\nopened, 1 step that is not timed (light: {_LIGHT_UNTIMED}), {args.steps} timed, closed")
    ids = torch.randint(args.vocabulary, (args.batch, args.tokens))
    compare(
        f"GPT, {args.layers} layers, width {args.width}, {args.batch} × {args.tokens} tokens",
        GPT(args.layers, args.width, args.heads, args.tokens, args.vocabulary), ids, ids, args, TARGETS)
    tiny = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    compare(
        f"perceptron, 32-64-10, batch {args.tiny_batch}", tiny, torch.randn(args.tiny_batch, 32),
        torch.randint(10, (args.tiny_batch,)), args, {})
    torch.set_num_threads(threads)


if __name__ == "__main__":
    main()
