"""What of a budget a plan's peak must leave free: memory that is not in the allocator's live bytes."""

from __future__ import annotations

import numpy as np

from memdiag.trace.model import OUTSIDE_PYTORCH, RESERVED_PEAK
from memdiag.trace.view import View

ASKED_FOR = "asked_for"
UNUSED = "reserved_not_allocated"
OUTSIDE = "outside_pytorch"


def known_aside(run: View, step: int) -> dict[str, int] | None:
    """What the run itself tells, in bytes: of a device, what its own statistics said at the end of the step.

    What the allocator had reserved at most, less what was allocated at most, is what fragments and rounding took; what
    is in use outside PyTorch is the context, libraries and other processes. Empty on the CPU, whose allocator reserves
    nothing; None where the trace has no statistics of the device in that step.
    """
    if run.device == "cpu":
        return {}
    reserved, allocated, outside = (_statistic(run, step, name) for name in (
        RESERVED_PEAK, "allocated_bytes.all.peak", OUTSIDE_PYTORCH))
    found = {}
    if reserved is not None and allocated is not None:
        found[UNUSED] = reserved - allocated
    if outside is not None:
        found[OUTSIDE] = outside
    return found or None


def _statistic(run: View, step: int, name: str) -> int | None:
    trace, stats = run.trace, run.trace["device_stats"]
    mine = np.isin(stats["name"], trace.numbers(name)) & (stats["step"] == step)
    rows = np.flatnonzero(mine & (stats["device"] == trace.about["devices"].index(run.device)))
    return int(stats["value"][rows[-1]]) if len(rows) else None
