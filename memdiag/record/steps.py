"""Where a training step ends, as far as it can be told while the script runs."""

from __future__ import annotations

import gc
from weakref import WeakSet

import torch
from torch.optim import Optimizer

from memdiag.record.facts import StepEnd


class Steps:
    """Decides which optimizer step, or which backward, closes a training step.

    With one optimizer its step closes; with several the cycle is their repeating order, and the last of it closes;
    with none a backward does, when the next forward begins. Several backwards before the optimizer's step are one
    step (accumulation).

    Attributes:
        closed: steps that have ended.
    """

    def __init__(self) -> None:
        self.closed = 0
        self._optimizers: WeakSet[Optimizer] | None = None
        self._order: list[int] = []  # optimizers that have stepped since the last close
        self._closing: int | None = None
        self._undecided: StepEnd | None = None
        self._backward_seen = False
        self._ever_stepped = False  # an optimizer, at all

    def backward_ended(self) -> None:
        self._backward_seen = True

    def forward_begins(self) -> bool:
        """A forward, or a backward that had none, begins. Returns whether the step before it ends here."""
        if not self._backward_seen or self._ever_stepped or self._alive():
            return False
        self._backward_seen = False
        self.closed += 1
        return True

    def optimizer_begins(self, optimizer: Optimizer) -> None:
        """May decide that the step before this one closed the training step."""
        known = self._alive()
        if optimizer not in known:
            known.add(optimizer)
        key = id(optimizer)
        if self._undecided is not None and key in self._order:
            # This one again: the cycle was complete after the last one that stepped.
            self._closing = self._order[-1]
            self._undecided.closes = True
            self._undecided = None
            self._order = []
            self.closed += 1

    def optimizer_ended(self, optimizer: Optimizer) -> StepEnd:
        """The end of an optimizer's step: it closes, does not, or is decided when the next one begins."""
        self._backward_seen = False
        self._ever_stepped = True
        key = id(optimizer)
        end = StepEnd(closes=False)
        self._order.append(key)
        cycle_forgotten = self._closing is not None and len(self._order) > 4 * max(1, len(self._alive())) + 16
        if len(self._alive()) == 1 or key == self._closing:
            end.closes = True
            self._closing = key
            self._order = []
            self.closed += 1
        elif self._closing is None or cycle_forgotten:
            self._closing = None
            self._undecided = end
        return end

    def _alive(self) -> WeakSet[Optimizer]:
        """Optimizers in the process, looked for once; those that step later are added as they do.

        Wrappers that share their parameter groups with another count once.
        """
        if self._optimizers is None:
            self._optimizers = WeakSet()
            seen: set[int] = set()
            # type(), not isinstance(): some objects answer for what they stand for, and wake up when asked.
            for thing in gc.get_objects():
                if issubclass(type(thing), Optimizer):
                    groups = getattr(thing, "param_groups", None) or []
                    first = next((p for group in groups for p in group["params"]), None)
                    if isinstance(first, torch.Tensor) and id(first) not in seen:
                        seen.add(id(first))
                        self._optimizers.add(thing)
        return self._optimizers
