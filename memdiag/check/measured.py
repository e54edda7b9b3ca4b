"""What runs took: memory by phase from a recording, and time from the ends of steps."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memdiag.errors import MemdiagError
from memdiag.trace import Phase, Trace
from memdiag.trace.model import RESERVED_PEAK
from memdiag.trace.view import View

WARM = 2
"""Steps after which caches are filled and the optimizer has its state: the first two are not measured."""


@dataclass(frozen=True)
class Memory:
    """Peaks of a run's warm steps, in bytes.

    Attributes:
        device: whose memory it is.
        phases: peak in each phase.
        reserved: most that the allocator had from the device, of the whole run; None on the CPU.
        about: facts of the run.
        shapes: what went into the model.
    """

    device: str
    peak: int
    phase: str
    phases: dict[str, int]
    reserved: int | None
    about: dict[str, Any]
    shapes: str | None


def memory(trace: Trace) -> Memory:
    """The peaks of a recording.

    Raises:
        MemdiagError: no step ended.
    """
    view = View(trace)
    steps = trace["steps"]["step"].tolist()
    if not steps:
        raise MemdiagError("no training step ended in the script, so there is no peak to compare")
    warm = [step for step in steps if step >= WARM] or steps[-1:]
    peaks = view.phase_peaks
    phases: dict[str, int] = {}
    for step, phase, size in zip(peaks.step.tolist(), peaks.phase.tolist(), peaks.bytes.tolist(), strict=True):
        if step in warm:
            label = Phase(phase).label
            phases[label] = max(phases.get(label, 0), int(size))
    highest = max(phases, key=lambda label: phases[label])
    shapes = trace.string(int(trace["steps"]["input_shapes"][-1]))
    return Memory(view.device, phases[highest], highest, phases, view.highest(RESERVED_PEAK), trace.about, shapes)


@dataclass(frozen=True)
class Times:
    """How long warm steps took.

    Attributes:
        work_ns: of each: processor time on the CPU, time of the day with the device waited for on CUDA.
        wall_ns: of each, time of the day.
        examples, updates: of a step; examples are rows of what the models are first given with gradients on.
    """

    work_ns: list[int]
    wall_ns: list[int]
    examples: int
    updates: int

    @property
    def step_ns(self) -> int:
        """The median."""
        return int(statistics.median(self.work_ns))

    @property
    def spread_ns(self) -> int:
        """Between the quartiles."""
        if len(self.work_ns) < 2:
            return 0
        low, _, high = statistics.quantiles(self.work_ns, n=4, method="inclusive")
        return int(high - low)

    @property
    def wall_step_ns(self) -> int:
        return int(statistics.median(self.wall_ns))


def times(paths: Sequence[Path]) -> Times:
    """Of several runs of one script.

    Raises:
        MemdiagError: too few steps ended.
    """
    work: list[int] = []
    wall: list[int] = []
    examples = updates = 1
    for path in paths:
        held = json.loads(path.read_text(encoding="utf-8"))
        ends = held["ends"]
        first = min(WARM, max(len(ends) - 2, 0))
        for before, after in zip(ends[first:], ends[first + 1:], strict=False):
            work.append(after[0] - before[0])
            wall.append(after[1] - before[1])
        examples, updates = held["examples"], held["updates"]
    if not work:
        raise MemdiagError("fewer than two training steps ended in the script, so there is no step to time")
    return Times(work, wall, examples, updates)
