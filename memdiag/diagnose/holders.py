"""What the recorder's looks at who keeps what have found, as rules ask for it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from memdiag.diagnose.model import Holder, Mask
from memdiag.trace import NONE, Trace
from memdiag.trace.model import BOUNDED_ITEM, GARBAGE, ITS_GRAPH
from memdiag.trace.places import relative

_BOUNDED = re.compile(re.escape(BOUNDED_ITEM).replace(r"\{\}", r"(\d+)") + f"(?!.*{re.escape(ITS_GRAPH)})")


class Look(NamedTuple):
    """Chain and statement that one look found, as numbers of text."""

    chain: int
    line: int


def last_looks(trace: Trace) -> dict[int, Look]:
    """The last look at each allocation that was looked at: it is the one that counts."""
    table = trace["holders"]
    return {
        allocation: Look(chain, line) for allocation, chain, line in zip(
            *(table[name].tolist() for name in ("allocation", "chain", "line")), strict=True)
        if allocation != NONE}


def last_looks_at(trace: Trace, chosen: Mask) -> dict[int, Look]:
    """Those at chosen allocations that more than a reference cycle was found to keep."""
    return {allocation: look for allocation, look in last_looks(trace).items()
            if chosen[allocation] and trace.string(look.chain) != GARBAGE}


def is_variable(chain: str | None) -> bool:
    """Whether a chain is a plain variable: it refers to one thing at a time, and is not what grows."""
    return (chain or "").isidentifier()


def who_holds_most(trace: Trace, looks: Mapping[int, Look]) -> Holder | None:
    """The holder of the most bytes of the allocations that were looked at; None where none was."""
    total: dict[Look, int] = defaultdict(int)
    size = trace["allocations"]["bytes"]
    for allocation, look in looks.items():
        total[look] += int(size[allocation])
    if not total:
        return None
    most = max(total, key=lambda look: total[look])
    return Holder(relative(trace, trace.string(most.line)), (trace.string(most.chain) or "").split(" → "))


def capacity(chain: str | None) -> int | None:
    """How many items the container may have that a chain leads through; None where there is no limit, and where it
    leads on through a graph: nobody means to keep those, however few."""
    found = _BOUNDED.search(chain or "")
    return int(found[1]) if found else None
