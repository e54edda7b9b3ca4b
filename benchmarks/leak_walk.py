"""What it costs to look for who keeps memory, in a process with many Python objects.

    python benchmarks/leak_walk.py [--objects 300000 1000000 3000000 10000000]

Each size is a process of its own that has so many objects of the script's (dictionaries with a list each), a list of
losses with their graphs, and a dictionary of detached results: what is looked for is saved by the graphs, and the
results. Prints how long one walk takes, what memory it takes beside, and whether both were found; fails where one was
not, or where a walk takes longer than ten seconds.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import resource
import subprocess
import sys
from time import perf_counter

import torch
from tabulate import tabulate

from memdiag.record.hooks.saves import Saves
from memdiag.record.keepers.holders import walk
from memdiag.record.marks import Marks

MOST_SECONDS = 10
KEPT = 50  # losses, and results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objects", type=int, nargs="+", default=[300_000, 1_000_000, 3_000_000, 10_000_000])
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(one(options.one)))
        return 0
    results = []
    for number in options.objects:
        done = subprocess.run(
            [sys.executable, os.path.abspath(__file__), "--one", str(number)], capture_output=True, text=True,
            check=True)
        results.append(json.loads(done.stdout))
    print(f"one walk, on {platform.processor() or platform.machine()}, torch {torch.__version__}, "
          f"Python {platform.python_version()}\n")
    print(tabulate(
        [[f"{r['objects']:,}", f"{r['seconds']:.2f}", f"{r['bytes'] / 2**20:.0f}", r["found"], r["stopped"] or ""]
         for r in results],
        headers=["objects", "seconds", "more resident memory, MiB", "found", "stopped"], disable_numparse=True))
    return int(any(r["found"] != f"{2 * KEPT} of {2 * KEPT}" or r["seconds"] > MOST_SECONDS for r in results))


def one(number: int) -> dict[str, object]:
    """Makes the objects, keeps some memory, and walks once.

    Args:
        number: of objects that the garbage collector shall know.
    """
    gc.disable()
    # A dictionary with a list in it is two objects; both in a list of all.
    script = [{"row": [index]} for index in range(max(number - len(gc.get_objects()), 0) // 2)]
    saves = Saves(Marks(), lambda: True, lambda: None)
    saves.start()
    weight = torch.ones(1, requires_grad=True)
    losses, results = [], {}
    wanted: dict[int, str] = {}
    for step in range(KEPT):
        data = torch.ones(1000 + step)
        wanted[data.data_ptr()] = "saved"
        losses.append((data * weight).sum())
        results[f"step {step}"] = torch.ones(2000 + step)
        wanted[results[f"step {step}"].data_ptr()] = "result"
    del data
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = perf_counter()
    walked = walk(wanted)
    seconds = perf_counter() - start
    saves.stop()
    right = {
        "saved": "losses[*] → its graph (SumBackward0 …) → saved tensor", "result": "results[*]"}
    # Counted after the walk: the count takes a list of all objects itself.
    objects = len(gc.get_objects())
    found = sum(right[wanted[holder.address]] == holder.chain for holder in walked.holders)
    assert len(script) < objects
    return {
        "objects": objects, "seconds": seconds, "found": f"{found} of {2 * KEPT}", "stopped": walked.stopped,
        "bytes": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024}


if __name__ == "__main__":
    sys.exit(main())
