"""Where a script's backwards, its optimizers' steps and its training steps begin and end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from memdiag.record.hooks.steps import Steps
from memdiag.record.patch import replaced


class Training:
    """Tells what a run under check comes to, and nothing else of it. Each of the attributes that are called is set by
    who listens.

    Args:
        mine: whether the calling thread is looked at, which may be one of a backward.

    Attributes:
        steps: training steps that have ended.
        in_backward, in_optimizer: whether one is going on.
        backward_begins: called with what backward is called on.
        backward_ended: called after each outermost backward.
        scaler_begins: called with a gradient scaler that is about to step.
        optimizer_begins: called with the optimizer.
        optimizer_ended: called with the optimizer, and whether the gradient scaler has skipped its step; ``steps`` do
            not count it yet.
        step_may_end: called where an optimizer's step is counted, and in a script without one where the training step
            before it has ended.
    """

    def __init__(self, mine: Callable[[], bool]) -> None:
        self.steps = Steps()
        self.in_backward = False
        self._mine = mine
        self._optimizer = 0
        self._stepped = False
        self._undo: list[Callable[[], None]] = []
        self.backward_begins: Callable[[Any], None] = lambda tensors: None
        self.backward_ended: Callable[[], None] = lambda: None
        self.scaler_begins: Callable[[GradScaler], None] = lambda scaler: None
        self.optimizer_begins: Callable[[Optimizer], None] = lambda optimizer: None
        self.optimizer_ended: Callable[[Optimizer, bool], None] = lambda optimizer, skipped: None
        self.step_may_end: Callable[[], None] = lambda: None

    @property
    def in_optimizer(self) -> bool:
        return self._optimizer > 0

    def start(self) -> None:
        self._undo += [
            replaced(torch.autograd, "_engine_run_backward", self._watch_backward),
            replaced(GradScaler, "step", self._watch_scaler),
            torch_optimizer.register_optimizer_step_pre_hook(self._before_step).remove,
            torch_optimizer.register_optimizer_step_post_hook(self._after_step).remove]

    def stop(self) -> None:
        while self._undo:
            self._undo.pop()()

    def forward_begins(self) -> None:
        """A forward with gradients on, or a backward that had none, begins."""
        if not self.in_optimizer and self.steps.forward_begins():
            self.step_may_end()

    def _watch_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def run_backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if self.in_backward or not self._mine():
                return original(tensors, *args, **kwargs)
            self.forward_begins()
            self.backward_begins(tensors)
            self.in_backward = True
            try:
                return original(tensors, *args, **kwargs)
            finally:
                self.in_backward = False
                self.backward_ended()
                if not self.in_optimizer:
                    self.steps.backward_ended()

        return run_backward

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._mine():
            return
        self._optimizer += 1
        if self._optimizer == 1:  # and not super().step()
            self._stepped = True
            self._begin(optimizer)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._mine() or not self._optimizer:
            return
        self._optimizer -= 1
        if not self._optimizer:
            self._end(optimizer, skipped=False)

    def _watch_scaler(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._mine() or not scaler.is_enabled():
                return original(scaler, optimizer, *args, **kwargs)
            self.scaler_begins(scaler)
            self._stepped = False
            result = original(scaler, optimizer, *args, **kwargs)
            if not self._stepped:  # it skips a step whose gradients are not finite
                self._begin(optimizer)
                self._end(optimizer, skipped=True)
            return result

        return step

    def _begin(self, optimizer: Optimizer) -> None:
        self.steps.optimizer_begins(optimizer)
        self.optimizer_begins(optimizer)

    def _end(self, optimizer: Optimizer, skipped: bool) -> None:
        self.optimizer_ended(optimizer, skipped)
        self.steps.optimizer_ended(optimizer)
        self.step_may_end()
