"""What a long trace costs to read: loading, closing the ledger, the report and the picture.

    python benchmarks/trace_scale.py [--events 250000 500000 1000000]

Each size is a run file with as many spans as memory events and a save for every ten, made by repeating one training
step, and is read in a fresh process. Prints a table; the last two columns are the process's resident memory after
loading and at its highest.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

import numpy as np
from tabulate import tabulate

from memdiag.report import draw, render_text, summarize, to_json
from memdiag.trace import Phase, Role, Trace, load
from memdiag.trace.ledger import ledger, roles
from memdiag.trace.timeline import devices, timeline

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from traces import TraceBuilder, write  # the tests' own builder of traces

BLOCKS = 50
OPERATORS = 9  # in a block: every other one keeps its result to the end of forward, one is saved for backward


def one_step() -> tuple[TraceBuilder, int]:
    """A step of a model of equal blocks, and how many parameters were there before it."""
    run = TraceBuilder()
    weights = [run.existing(1 << 20) for _ in range(BLOCKS)]
    for block, weight in enumerate(weights):
        run.claim(weight, Role.PARAMETERS, f"blocks.{block}.weight")
    with run.step():
        kept: list[tuple[int, list[int], int, list[int]]] = []
        with run.phase(Phase.FORWARD), run.module("Net"):
            for block, weight in enumerate(weights):
                with run.module(f"blocks.{block}"):
                    alive, saves = [], []
                    for number in range(OPERATORS):
                        # One of them as in attention, for rules that follow what is made from what.
                        name = "aten::softmax" if number == 4 else "aten::linear"
                        part, line = f"blocks.{block}.part.{number}", f"/project/model.py:{number}"
                        with (run.module(part), run.module(f"{part}.a"), run.module(f"{part}.a.b"),
                              run.operator(name, line=line) as operator):
                            run.read(weight, *alive[-1:])
                            out = run.allocate((number + 1) << 14, line=line)
                            run.free(run.allocate(1 << 12))
                            if number in (0, 4, 6):
                                saves.append(run.save(out, shape=(number + 1, 4096)))
                            if number == 0:
                                run.save(weight, shape=(512, 512), leaf=True)
                            if number % 2:
                                run.free(out)
                            else:
                                alive.append(out)
                    kept.append((operator, alive, block, saves))
        with run.phase(Phase.BACKWARD):
            for operator, alive, block, saves in reversed(kept):
                for number, out in enumerate(alive):
                    with run.node("AddmmBackward0", forward=operator):
                        for _ in range(2):
                            with run.operator("aten::transpose"):
                                pass
                        with run.operator("aten::mm"):
                            gradient = run.allocate(1 << 16)
                        run.release(*saves[number:number + 1])
                        run.free(out)
                        if number == 0:
                            run.claim(gradient, Role.GRADIENTS, f"blocks.{block}.weight.grad")
                            gradients = gradient
                        else:
                            run.free(gradient)
                run.free(gradients)
        with run.phase(Phase.OPTIMIZER):
            for _ in range(BLOCKS):
                with run.operator("aten::sqrt"):
                    run.free(run.allocate(1 << 20))
    return run, BLOCKS


def repeated(events: int) -> Trace:
    """About ``events`` memory events of that step again and again."""
    builder, parameters = one_step()
    step = builder.build()
    times = max(events // builder.events, 1)
    text = [*step.text, *(str(number) for number in range(times))]
    size = {"event": builder.events, "span": step.rows("spans"), "save": step.rows("saves"),
            "allocation": step.rows("allocations") - parameters, "ns": builder.now - int(step["steps"]["start_ns"][0])}
    moves = {"event": "event", "start_event": "event", "end_event": "event", "packed_event": "event",
             "unpacked_event": "event", "released_event": "event", "time_ns": "ns", "start_ns": "ns", "end_ns": "ns",
             "span": "span", "parent": "span", "forward": "span", "save": "save", "allocation": "allocation"}
    tables = {}
    for name in step.tables:
        first = parameters if name in ("allocations", "claims") else 0
        table = {}
        for column, values in step[name].items():
            move = "span" if (name, column) == ("spans", "id") else "save" if (name, column) == ("saves", "id") else (
                moves.get(column))
            once, every = values[:first], np.tile(values[first:], (times, 1))
            if move is not None:
                fixed = every < (parameters if move == "allocation" else 0)
                every = every + np.where(fixed, 0, size[move] * np.arange(times)[:, None])
            table[column] = np.concatenate([once, every.reshape(-1)]).astype(values.dtype)
        tables[name] = table
    is_step = tables["spans"]["kind"] == 0
    tables["spans"]["name"][is_step] = len(step.text) + np.arange(times)
    tables["steps"]["step"] = np.arange(times)
    return Trace(dict(step.about), text, tables)


def measure(path: str) -> dict[str, float]:
    """Reads a run file, once, and says what each part took."""
    def rss() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    took: dict[str, float] = {}
    start = perf_counter()
    trace = load(path)
    took["load s"] = perf_counter() - start
    took["loaded MiB"] = rss()
    start = perf_counter()
    device = devices(trace)[0]
    sums = ledger(trace, roles(trace), device)
    assert np.array_equal(sums.sum(axis=0), timeline(trace, device).live), "the ledger does not close"
    took["ledger s"] = perf_counter() - start
    del sums
    start = perf_counter()
    summary = summarize(trace)
    took["report s"] = perf_counter() - start + _timed(lambda: render_text(summary))
    took["json s"] = _timed(lambda: to_json(summary))
    took["plot s"] = _timed(lambda: draw(trace, f"{path}.svg"))
    took["svg KiB"] = os.path.getsize(f"{path}.svg") / 2**10
    took["peak MiB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    return took


def _timed(work: object) -> float:
    start = perf_counter()
    work()  # type: ignore[operator]
    return perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--events", type=int, nargs="+", default=[250_000, 500_000, 1_000_000])
    parser.add_argument("--measure", metavar="RUN", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure)))
        return
    print(f"Python {platform.python_version()}, NumPy {np.__version__}, {os.cpu_count()} cores, {platform.machine()}")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for events in options.events:
            path = f"{folder}/{events}.mdiag"
            trace = repeated(events)
            write(trace, path)
            row = {"events": trace.rows("allocations") + trace.rows("frees") - BLOCKS, "spans": trace.rows("spans"),
                   "saves": trace.rows("saves")}
            del trace
            done = subprocess.run([sys.executable, __file__, "--measure", path], check=True, capture_output=True)
            rows.append({**row, **json.loads(done.stdout)})
    print(tabulate(rows, headers="keys", floatfmt=".2f"))


if __name__ == "__main__":
    main()
