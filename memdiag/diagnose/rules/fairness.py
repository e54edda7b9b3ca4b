"""Whether the peak of a run says what its steps need: what another run may be compared with."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from memdiag.diagnose.evidence import Evidence
from memdiag.diagnose.model import Advice, Finding, Severity
from memdiag.policy import FINDING_SHARE, SHORTAGE_BYTES
from memdiag.trace import Phase
from memdiag.units import format_bytes


def fairness(found: Evidence) -> Iterable[Finding]:
    """A run that never left its warm-up, or whose highest step is not like the others."""
    trace = found.run.trace
    peaks = found.run.phase_peaks
    if found.peak_bytes < SHORTAGE_BYTES or trace.about.get("ended_out_of_memory"):
        return  # of a run that stopped at a failure its peak is where it stopped
    if not (peaks.phase == Phase.BACKWARD).any():
        return
    steps = trace["steps"]
    later = steps["step"][steps["warm_up"] == 0]
    if not len(later):
        yield _finding(
            "Only the warm-up was seen",
            ["no step ended after the first, in which an optimizer makes its state and libraries choose their ways",
             "the peak of later steps may be another: it is no measure for a comparison"],
            "record at least two steps more")
        return
    shapes = dict(zip(
        steps["step"].tolist(), [trace.string(int(text)) for text in steps["input_shapes"]], strict=True))
    highest = {int(step): int(peaks.bytes[peaks.step == step].max(initial=0)) for step in later}
    median = float(np.median(list(highest.values())))
    if found.peak_bytes - median < FINDING_SHARE * found.peak_bytes:
        return
    usual = {shapes[step] for step, size in highest.items() if size <= median}
    mine = shapes.get(found.step)
    # Steps that end with a backward, for want of an optimizer, may be parts of one: they need not be alike.
    whole = bool(np.isin(later, peaks.step[peaks.phase == Phase.OPTIMIZER]).all())
    cold = found.step in steps["step"][steps["warm_up"] != 0]
    if cold and found.peak_bytes - max(highest.values()) >= FINDING_SHARE * found.peak_bytes:
        yield _finding(
            "The peak is that of the warm-up",
            [f"the first step, or what was before it, reaches {format_bytes(found.peak_bytes)}, and no later step more "
             f"than {format_bytes(max(highest.values()))}"],
            "compare with another run's warm-up, or compare the later steps")
    elif whole and found.step in highest and mine is not None and None not in usual and mine not in usual:
        yield _finding(
            "The step of the peak has other inputs than most",
            [f"its inputs are {mine}, and it reaches {format_bytes(found.peak_bytes)}",
             f"the median step reaches {format_bytes(round(median))}, with inputs such as {min(map(str, usual))}"],
            "compare with a run of the same inputs in the same order")


def _finding(title: str, evidence: list[str], advice: str) -> Finding:
    return Finding(None, "unfair_comparison", title, Severity.LOW, 0, 0.0, evidence, [Advice(advice, None)])
