"""Memory of the process that is not tensors."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from memdiag.diagnose.evidence import Evidence
from memdiag.diagnose.model import Advice, Class, Finding, Holder, Severity
from memdiag.policy import HOST_GROWTH_BYTES, HOST_GROWTH_STEPS, RECORDING_ADDS
from memdiag.trace import NONE
from memdiag.trace.places import relative
from memdiag.units import format_bytes


def host_growth(found: Evidence) -> tuple[float, int] | None:
    """Bytes per step by which the process grows beside its tensors, and by how much over the steps.

    None where too few steps were seen. The growth must go on in the later half, and not in one leap: the median step
    of that half must take part in it. The first step is warm-up. The rate is that of the median step: the C library
    takes and gives memory back in leaps, and so does the reading of the recording.
    """
    steps = found.run.trace["steps"]
    known = steps["host_rss"] > 0
    if known.sum() < HOST_GROWTH_STEPS:
        return None
    beside = steps["host_rss"][known].astype(np.int64)
    if found.run.device == "cpu":
        beside = beside - steps["end_bytes"][known]
    later = np.diff(beside[len(beside) // 2 :])
    if int(later.sum()) < HOST_GROWTH_BYTES or float(np.median(later)) < 0.5 * float(later.mean()):
        return 0.0, 0
    total = int(beside[-1] - beside[1])
    return float(np.median(np.diff(beside[1:]))), total


def host_memory(found: Evidence) -> Iterable[Finding]:
    growth = host_growth(found)
    if growth is None or not growth[0] or growth[1] < found.peak_bytes:
        return
    rate, total = growth
    holder, kept = _holder(found)
    if holder is None and total < RECORDING_ADDS:
        return
    evidence = [
        f"resident memory grew by {format_bytes(total)} over the steps, tensors not counted",
        f"PyTorch's own peak is {format_bytes(found.peak_bytes)}: its tensors are not what grows",
    ]
    advice: list[Advice] = []
    if holder is not None:
        evidence.append(f"{holder.sentence}: {format_bytes(kept)} of arrays when last looked at")
        advice.append(Advice("bound the cache, or store it smaller (uint8, a memory map)", None))
    yield Finding(
        Class.HOST_MEMORY, "host_growth", f"The process grows by {format_bytes(round(rate))} with every step",
        Severity.HIGH, total, total / found.peak_bytes if found.peak_bytes else 1.0, evidence, advice, holder=holder)


def _holder(found: Evidence) -> tuple[Holder | None, int]:
    """Who held the most arrays beside the tensors at the last look that found somebody, and their bytes."""
    trace = found.run.trace
    holders = trace["holders"]
    beside = np.flatnonzero(holders["allocation"] == NONE)
    if not len(beside):
        return None, 0
    last = beside[holders["step"][beside] == holders["step"][beside[-1]]]
    row = int(last[np.argmax(holders["bytes"][last])])
    chain = trace.string(int(holders["chain"][row])) or ""
    return Holder(relative(trace, trace.string(int(holders["line"][row]))), chain.split(" → ")), int(
        holders["bytes"][row])
