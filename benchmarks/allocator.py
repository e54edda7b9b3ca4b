"""How long does the allocator's model take for a million requests, and for one with ever more blocks?

    python benchmarks/allocator.py [--requests 1000000] [--blocks 1000,10000,100000,1000000] [--seed 0]

Each case first makes so many live blocks, then as many requests as were asked for, half of them allocations and half
frees of a block picked by chance. Sizes are of three kinds alike often: up to 4 KiB, up to 1 MiB, up to 64 MiB. What is
timed is the requests alone, in processor time. Prints microseconds a request, which are seconds a million. It exits
with 1 where a million takes more than 20 s.
"""

from __future__ import annotations

import argparse
import platform
import random
import sys
import time

from tabulate import tabulate

from memdiag.allocator import Allocator, Settings
from memdiag.allocator.rules import MIB

MILLION_S = 20.0
SIZES = 10_000
CONFS = ("", "expandable_segments:True", "max_split_size_mb:32", "roundup_power2_divisions:8")
HEAD = ["settings", "blocks", "segments", "µs a request (s a million)", "of what it may"]


def some_sizes(rng: random.Random) -> list[int]:
    return [rng.randint(1, rng.choice([4 << 10, MIB, 64 * MIB])) for _ in range(SIZES)]


def measure(conf: str, blocks: int, requests: int, seed: int) -> tuple[float, int]:
    """Seconds of processor time for so many requests, and how many segments there are then."""
    rng = random.Random(seed)
    sizes, allocator = some_sizes(rng), Allocator(Settings.parse(conf))
    live = [allocator.malloc(rng.choice(sizes)) for _ in range(blocks)]
    # What is asked is drawn before it is timed: None for an allocation, else which part of the live blocks to free.
    asked = [(sizes[rng.randrange(SIZES)], None if number % 2 else rng.random()) for number in range(requests)]
    malloc, free = allocator.malloc, allocator.free
    start = time.process_time()
    for size, at in asked:
        if at is None:
            live.append(malloc(size))
        else:
            number = int(at * len(live))
            live[number], live[-1] = live[-1], live[number]
            free(live.pop())
    return time.process_time() - start, len(allocator.segments())


def main() -> int:
    parser = argparse.ArgumentParser(description="Time for requests to the allocator's model.")
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--blocks", default="1000,10000,100000,1000000")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(f"Python {platform.python_version()}, {platform.machine()}, {platform.processor() or platform.system()}, "
          f"one core; {options.requests:,} requests a case")
    rows, slow = [], False
    for blocks in map(int, options.blocks.split(",")):
        for conf in CONFS:
            seconds, segments = measure(conf, blocks, options.requests, options.seed)
            million = seconds / options.requests * 1e6
            slow |= million > MILLION_S
            rows.append([conf or "as they come", f"{blocks:,}", f"{segments:,}", f"{million:.1f}",
                         f"{million / MILLION_S:.0%}"])
    print(tabulate(rows, HEAD, disable_numparse=True, colalign=["left"] + ["right"] * 4))
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
