"""Markers that we push into the profiler's stream, and what each of them means.

A marker is a profiler range named ``memdiag:<n>``; entry ``n`` of the list kept here says what it stands for. So the
stream gives the order and the nesting, and Python objects never travel through it.
"""

from __future__ import annotations

from contextlib import nullcontext
from time import time_ns
from typing import Any

from torch._C._profiler import _RecordFunctionFast as Range

PREFIX = "memdiag:"

# What an entry is: its first field. The others are given with each.
LINE = 0  # (LINE, line, grad_enabled): a torch function called from this line
MODULE = 1  # (MODULE, ModuleCall)
SAVE = 2  # (SAVE, Saved)
CLAIM = 3  # (CLAIM, time_ns, [Claim, …])
BACKWARD_START = 4  # (…, time_ns, line, create_graph)
BACKWARD_END = 5  # (…, time_ns)
OPTIMIZER_START = 6  # (…, time_ns, line)
OPTIMIZER_END = 7  # (…, time_ns)
CLOSURE_START = 8  # (…, time_ns)
CLOSURE_END = 9  # (…, time_ns)
STEP_END = 10  # (STEP_END, time_ns, StepEnd)
CUT = 11  # (CUT,): the last thing in a chunk
OUTPUTS = 12  # (…, time_ns, [address, …]): results of an outermost module that have a history
RANDOM_SET = 13  # (…, time_ns): the random state was set inside backward
WATCHED = 14  # (…, time_ns, watched): from here on, what autograd keeps is noted or, in light recording, is not
AUTOCAST_END = 15  # (…, time_ns): autocast forgets the weights that it has cast

Entry = tuple[Any, ...]
_NOTHING = nullcontext()


class Marks:
    """The entries of the current chunk.

    While ``enabled`` is false nothing is marked: a profiler of the user's own may be running.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.enabled = False

    def take(self) -> list[Entry]:
        """The entries so far; the list starts anew."""
        entries, self.entries = self.entries, []
        return entries

    def range(self, entry: Entry) -> Any:
        """A range to enter and to leave, for something that lasts."""
        if not self.enabled:
            return _NOTHING
        name = f"{PREFIX}{len(self.entries)}"
        self.entries.append(entry)
        return Range(name)

    def instant(self, kind: int, *fields: Any) -> None:
        """A moment, with its time: light recording has no ranges and places it by the clock."""
        with self.range((kind, time_ns(), *fields)):
            pass
