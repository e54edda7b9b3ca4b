"""Where a training step ends, as far as it can be told while the script runs."""

from __future__ import annotations

import gc
from weakref import WeakSet

import torch
from torch.optim import Optimizer

from memdiag.record.facts import StepEnd

# Optimizer steps to wait for an optimizer that has not stepped yet, before the others count as the cycle.
_PATIENCE = 8


class Steps:
    """Decides which optimizer step, or which backward, closes a training step.

    With one optimizer its step closes; with several the cycle is their repeating order (a critic three times, then a
    generator), and the last of it closes; with none a backward does, when the next forward begins. Several backwards
    before the optimizer's step are one step (accumulation).

    Attributes:
        closed: steps that have ended.
    """

    def __init__(self) -> None:
        self.closed = 0
        self._optimizers: WeakSet[Optimizer] | None = None
        self._order: list[int] = []  # optimizers that have stepped since the last close
        self._cycle: list[int] = []  # their order in a whole training step, once known
        self._undecided: list[StepEnd] = []  # ends that may turn out to close
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
            for other in [o for o in known if _first(o) is _first(optimizer)]:
                known.discard(other)  # a wrapper around this one
            known.add(optimizer)
        if self._cycle or not self._order:
            return
        stepped = set(self._order)
        if len(stepped) >= len(known) and self._order[0] == id(optimizer):
            self._cycle = self._order
            self._restart(self._undecided[-1:])
        elif len(self._order) >= _PATIENCE * len(stepped):
            # The others may never step, and do not count until they do. Where only one has stepped, each of its
            # steps was a training step.
            for other in [o for o in known if id(o) not in stepped]:
                known.discard(other)
            self._restart(self._undecided if len(stepped) == 1 else [])

    def expects(self, optimizer: Optimizer) -> bool:
        """Whether it is known already what the end of this optimizer's step, which begins, will be."""
        order = [*self._order, id(optimizer)]
        return len(self._alive()) == 1 or self._cycle[: len(order)] == order

    def settle(self) -> None:
        """The run ends before a cycle was seen twice: each optimizer's step was a training step, as far as is known."""
        if not self._cycle:
            self._restart(self._undecided)

    def _restart(self, closing: list[StepEnd]) -> None:
        self._order, self._undecided = [], []
        for end in closing:
            if not end.read:
                end.closes = True
                self.closed += 1

    def optimizer_ended(self, optimizer: Optimizer) -> StepEnd:
        """The end of an optimizer's step: it closes, does not, or is decided when a later one begins."""
        self._backward_seen = False
        self._ever_stepped = True
        end = StepEnd(closes=False)
        self._order.append(id(optimizer))
        if self._order != self._cycle[: len(self._order)]:
            if self._cycle:  # the order has changed
                self._cycle, self._order = [], [id(optimizer)]
            self._undecided.append(end)
        if len(self._alive()) == 1 or self._order == self._cycle:
            self._restart([end])
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
                    first = _first(thing)
                    if first is not None and id(first) not in seen:
                        seen.add(id(first))
                        self._optimizers.add(thing)
        return self._optimizers


def _first(optimizer: Optimizer) -> torch.Tensor | None:
    """The first parameter of an optimizer, which it shares with its wrappers."""
    groups = getattr(optimizer, "param_groups", None) or []
    first = next((p for group in groups for p in group["params"]), None)
    return first if isinstance(first, torch.Tensor) else None
