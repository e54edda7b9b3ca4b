"""When steps end, and nothing else of a run."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns
from types import TracebackType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from memdiag.check.outermost import Outermost
from memdiag.check.spec import Spec
from memdiag.record.clock import worked_ns
from memdiag.record.hooks.steps import Steps
from memdiag.record.patch import replaced


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
        self._steps = Steps()
        self._thread = threading.get_ident()
        self._ends: list[tuple[int, int]] = []
        self._undo: list[Callable[[], None]] = []
        self._depth = self._updates = 0

    def __enter__(self) -> Timed:
        self._outermost.start()
        self._undo += [
            torch_optimizer.register_optimizer_step_pre_hook(self._before_step).remove,
            torch_optimizer.register_optimizer_step_post_hook(self._after_step).remove,
            replaced(torch.autograd, "_engine_run_backward", self._watch_backward),
            self._outermost.stop]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._undo:
            self._undo.pop()()
        held = {"ends": self._ends, "examples": self._outermost.examples,
                "updates": round(self._updates / max(self._steps.closed, 1))}
        self._path.write_text(json.dumps(held), encoding="utf-8")

    def _watch_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def run_backward(*args: Any, **kwargs: Any) -> Any:
            mine = not self._depth and threading.get_ident() == self._thread
            if mine and self._steps.forward_begins():
                self._step_ends()
            result = original(*args, **kwargs)
            if mine:
                self._steps.backward_ended()
            return result

        return run_backward

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._depth += 1
        if self._depth == 1:
            self._steps.optimizer_begins(optimizer)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._depth -= 1
        if not self._depth:
            self._updates += 1
            before = self._steps.closed
            self._steps.optimizer_ended(optimizer)
            if self._steps.closed > before:
                self._step_ends()

    def _step_ends(self) -> None:
        self._ends.append((worked_ns(), perf_counter_ns()))
        self._outermost.alone()
        if self._steps.closed == _KNOWN:
            self._outermost.stop()
        if self._steps.closed >= self._spec.steps:
            raise SystemExit(0)


_KNOWN = 1
"""Steps after which a script has called all its models: those of a step are called in each."""

