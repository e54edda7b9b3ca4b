"""When steps end, and nothing else of a run."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns
from types import TracebackType

from torch.optim import Optimizer

from memdiag.check.outermost import Outermost
from memdiag.check.spec import Spec
from memdiag.check.training import Training
from memdiag.record.clock import worked_ns


class Timed:
    """Notes the time of the day and that of work where each training step ends.

    Until the last of its models is known and has its checkpoints, hooks are around module calls; then they are taken
    off, so that what is timed is the script and the checkpoints alone.

    Args:
        path: of the file that goes to the comparison: for each end of a step the time of work and of the day, in
            nanoseconds; and examples and steps of optimizers in a training step.
        refused: called where checkpoints cannot be put in; ends the run.
        parent: id of the process that has started this one.
    """

    def __init__(self, spec: Spec, path: Path, refused: Callable[[str], None], parent: int) -> None:
        self._spec, self._path = spec, path
        self._outermost = Outermost(spec.regions, refused, parent)
        self._thread = threading.get_ident()
        self._training = Training(self._mine)
        self._training.optimizer_ended = self._updated
        self._training.step_may_end = self._step_may_end
        self._ends: list[tuple[int, int]] = []
        self._updates = self._closed = 0

    def __enter__(self) -> Timed:
        self._outermost.start()
        self._training.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._outermost.stop()
        self._training.stop()
        held = {"ends": self._ends, "examples": self._outermost.examples,
                "updates": round(self._updates / max(self._closed, 1))}
        self._path.write_text(json.dumps(held), encoding="utf-8")

    def _mine(self) -> bool:
        return threading.get_ident() == self._thread

    def _updated(self, optimizer: Optimizer, skipped: bool) -> None:
        self._updates += not skipped

    def _step_may_end(self) -> None:
        if self._training.steps.closed == self._closed:
            return
        self._closed = self._training.steps.closed
        self._ends.append((worked_ns(), perf_counter_ns()))
        self._outermost.alone()
        if self._closed == _KNOWN:
            self._outermost.stop()
        if self._closed >= self._spec.steps:
            raise SystemExit(0)


_KNOWN = 1
"""Steps after which a script has called all its models: those of a step are called in each."""

