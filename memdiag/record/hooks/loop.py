"""The training loop, watched from outside: backward calls, optimizer steps, batches from loaders."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from itertools import count
from types import FrameType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import dataloader

from memdiag.record import marks as m
from memdiag.record.facts import Claim, StepEnd, claim, plain
from memdiag.record.frames import step_is_torchs, user_line
from memdiag.record.hooks.lines import Lines
from memdiag.record.hooks.modules import tensors_in
from memdiag.record.hooks.standing import Standing
from memdiag.record.hooks.steps import Steps
from memdiag.record.marks import Marks
from memdiag.record.patch import replaced, uncounted
from memdiag.trace import Phase, Role
from memdiag.trace.model import GRAD, RETURNED, STATE, STEPPED


class _Known(NamedTuple):
    """Of an optimizer: its number among those that have stepped, and the claims of what it has."""

    number: int
    parameters: Standing
    state: Standing


class Loop:
    """Wraps the one way into backward, hooks every optimizer, and tells where steps end.

    Args:
        lines: are not asked for inside a step of torch's own optimizers.
        active: whether the calling thread is recorded.
        name_of: the name of a parameter, where a module of that name has been called.
        step_ended: called where a step may have ended; may cut the stream, or end the script.
        stepping: called where the step of an optimizer of torch's begins that calls nothing of the script's, with the
            number of its parameters, and with None where it is over; may cut the stream.

    Attributes:
        clock: where it is set, backwards and steps of optimizers are timed by it; nanoseconds.
        worked: called then with the phase that is over, and how long it took.
    """

    def __init__(
        self, marks: Marks, lines: Lines, active: Callable[[], bool], name_of: Callable[[torch.Tensor], str | None],
        step_ended: Callable[[StepEnd], None], stepping: Callable[[int | None], None],
    ) -> None:
        self._marks, self._lines, self._active = marks, lines, active
        self._name_of, self._step_ended, self._note_stepping = name_of, step_ended, stepping
        self.steps = Steps()
        self.backward_begins: Callable[[], None] = lambda: None
        self.clock: Callable[[], int] | None = None
        self.worked: Callable[[Phase, int], None] = lambda phase, took_ns: None
        self._began: int | None = None  # the outermost backward or step of an optimizer, by the clock
        self._backward = 0
        self._optimizer = 0
        self._closure = False  # the optimizer's step has called its closure
        self._stepped = False
        self._stepping: weakref.ref[Optimizer] | None = None
        self._undo: list[Callable[[], None]] = []
        self._parameters: dict[int, weakref.ref[torch.Tensor]] = {}
        self._gradients = Standing()
        self._known: WeakKeyDictionary[Optimizer, _Known] = WeakKeyDictionary()
        self._number = count(1).__next__

    def start(self) -> None:
        self._undo.append(replaced(torch.autograd, "_engine_run_backward", self._watch_backward))
        # A step that the scaler skips because of an infinite gradient calls no optimizer, and is a step all the same.
        self._undo.append(replaced(GradScaler, "step", self._watch_scaler))
        # What a checkpoint calls before it runs a region again, and what every torch.manual_seed comes to.
        for owner, name in ((torch, "set_rng_state"), (torch.random, "_seed_custom_device")):
            self._undo.append(replaced(owner, name, self._watch_random))
        for loader in (dataloader._SingleProcessDataLoaderIter, dataloader._MultiProcessingDataLoaderIter):
            self._undo.append(replaced(loader, "_next_data", self._watch_loader))
        for handle in (
            torch_optimizer.register_optimizer_step_pre_hook(self._before_step),
            torch_optimizer.register_optimizer_step_post_hook(self._after_step),
        ):
            self._undo.append(handle.remove)

    def stop(self) -> None:
        while self._undo:
            self._undo.pop()()

    @property
    def in_backward(self) -> bool:
        return self._backward > 0

    @property
    def busy(self) -> bool:
        """Inside a backward call, or an optimizer's step and not its closure."""
        return self._backward > 0 or (self._optimizer > 0 and not self._closure)

    def owns(self, parameters: list[torch.Tensor]) -> None:
        """Parameters whose gradients are to be looked for after each backward."""
        for p in parameters:
            if id(p) not in self._parameters or self._parameters[id(p)]() is not p:
                self._parameters[id(p)] = weakref.ref(p)

    # --- forward and backward -----------------------------------------------------------------------------------

    def forward_begins(self, grad: bool) -> None:
        """An outermost module call begins."""
        self._drop_stale(sys._getframe(1), entering=False)
        if grad and not self._backward and not self._optimizer and self.steps.forward_begins():
            self.mark_step_end(StepEnd())

    def _watch_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def run_backward(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or not self._active() or self._backward:
                return original(*args, **kwargs)
            if not self._optimizer and self.steps.forward_begins():
                self.mark_step_end(StepEnd())
            create_graph = bool(args[3]) if len(args) > 3 else bool(kwargs.get("create_graph"))
            self.backward_begins()
            self._marks.instant(m.BACKWARD_START, user_line(sys._getframe(1)), create_graph)
            timed = not self.busy
            self._backward += 1
            if timed:
                self._work_begins()
            switched = self._lines.on_inside()  # hooks, custom Functions and recomputation are Python code
            try:
                result = original(*args, **kwargs)
            finally:
                self._backward -= 1
                if timed:
                    self._work_ends(Phase.BACKWARD)
                if switched:
                    self._lines.off()
                self._marks.instant(m.BACKWARD_END)
            self._claim_gradients(result)
            if not self._optimizer:
                self.steps.backward_ended()
            return result

        return run_backward

    def _watch_random(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def set_state(*args: Any, **kwargs: Any) -> Any:
            if self._backward and not torch.compiler.is_compiling():
                self._marks.instant(m.RANDOM_SET)
            return original(*args, **kwargs)

        return set_state

    @plain
    def _claim_gradients(self, result: Any) -> None:
        returned = [
            claim(gradient, Role.GRADIENTS, None, RETURNED) for gradient in tensors_in(result)]
        if returned:
            self._marks.instant(m.CLAIM, [c for c in returned if c is not None])
        parameters = [p for reference in self._parameters.values() if (p := reference()) is not None]
        self._claim_grads(parameters)

    def _claim_grads(self, parameters: list[torch.Tensor]) -> None:
        pairs = [(p, gradient) for p in parameters if (gradient := p.grad) is not None]
        claims = self._gradients.of([p for p, _ in pairs], [gradient for _, gradient in pairs], lambda: (
            claim(gradient, Role.GRADIENTS, self._name_of(p), GRAD) for p, gradient in pairs))
        self._marks.instant(m.CLAIM, claims)

    # --- optimizers ---------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not self._active():
            return None
        self._drop_stale(sys._getframe(1), entering=True)
        if self._optimizer:  # super().step()
            self._optimizer += 1
            return None
        self.steps.optimizer_begins(optimizer)
        quiet = step_is_torchs(type(optimizer))
        if quiet and not callable(_closure(args, kwargs)) and self.steps.expects(optimizer):
            self._note_stepping(sum(len(group["params"]) for group in optimizer.param_groups))
        self._optimizer = 1
        self._stepped = True
        self._stepping = weakref.ref(optimizer)
        self._claim_parameters(optimizer)
        self._marks.instant(m.OPTIMIZER_START, user_line(sys._getframe(1)))
        self._lines.quiet = quiet
        self._work_begins()
        return self._with_own_closure(args, kwargs)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or not self._active() or not self._optimizer:
            return
        self._optimizer -= 1
        if self._optimizer == 0:
            self._work_ends(Phase.OPTIMIZER)
            self._lines.quiet = False
            self._claim_state(optimizer)
            self._stepping = None
            self._marks.instant(m.OPTIMIZER_END)
            self.mark_step_end(self.steps.optimizer_ended(optimizer))
            self._note_stepping(None)

    def _work_begins(self) -> None:
        self._began = None if self.clock is None else self.clock()

    def _work_ends(self, phase: Phase) -> None:
        if self.clock is not None and self._began is not None:
            self.worked(phase, self.clock() - self._began)
        self._began = None

    def _watch_scaler(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._active() or not scaler.is_enabled():
                return original(scaler, optimizer, *args, **kwargs)
            self._stepped = False
            result = original(scaler, optimizer, *args, **kwargs)
            if not self._stepped:
                self.steps.optimizer_begins(optimizer)
                self.mark_step_end(self.steps.optimizer_ended(optimizer))
            return result

        return step

    def mark_step_end(self, end: StepEnd) -> None:
        self._marks.instant(m.STEP_END, end)
        self._step_ended(end)

    def _with_own_closure(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The arguments of a step with its closure, a forward and backward of its own, in phases of its own."""
        closure = _closure(args, kwargs)
        if not callable(closure):
            return None

        @functools.wraps(closure, updated=())
        @uncounted
        def watched(*a: Any, **k: Any) -> Any:
            self._work_ends(Phase.OPTIMIZER)
            self._marks.instant(m.CLOSURE_START, None)
            quiet, self._lines.quiet = self._lines.quiet, False
            self._closure = True
            try:
                return closure(*a, **k)
            finally:
                self._closure = False
                self._lines.quiet = quiet
                self._marks.instant(m.CLOSURE_END)
                self._work_begins()

        if "closure" in kwargs:
            return args, {**kwargs, "closure": watched}
        return (args[0], watched, *args[2:]), kwargs

    def _drop_stale(self, frame: FrameType | None, entering: bool) -> None:
        """Forgets an optimizer's step that ended in an exception: no hook said so."""
        if not self._optimizer:
            return
        running = -1 if entering else 0
        while frame is not None:
            running += frame.f_code is _STEP_WRAPPER
            frame = frame.f_back
        while self._optimizer > running:
            self._optimizer -= 1
            if self._optimizer == 0:
                self.broken_off()

    def broken_off(self) -> None:
        """An optimizer's step, if one was going on, has ended in an exception: it may have made state before."""
        if self._stepping is None:
            return
        optimizer, self._stepping = self._stepping(), None
        self._lines.quiet = False
        if optimizer is not None:
            self._claim_state(optimizer)
        self._marks.instant(m.OPTIMIZER_END)
        self._note_stepping(None)

    @plain
    def _claim_parameters(self, optimizer: Optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.owns(parameters)
        self._marks.instant(m.CLAIM, self._known_of(optimizer).parameters.of(parameters, parameters, lambda: (
            claim(p, Role.PARAMETERS, self._name_of(p), STEPPED) for p in parameters)))
        # Those that the script has made itself have not been seen after a backward.
        self._claim_grads(parameters)

    @plain
    def _claim_state(self, optimizer: Optimizer) -> None:
        states = [
            (owner, key, value) for owner, state in list(optimizer.state.items())
            for key, value in (list(state.items()) if isinstance(state, dict) else [("", state)])
            if value is not None and not isinstance(value, (int, float))]
        values = [value for _, _, value in states]
        known = self._known_of(optimizer)
        self._marks.instant(m.CLAIM, known.state.of(
            values, values, lambda: self._claims_of(states, STATE.format(known.number))))

    def _claims_of(self, states: list[tuple[Any, str, Any]], proof: str) -> Iterator[Claim | None]:
        for owner, key, value in states:
            name = self._name_of(owner) if isinstance(owner, torch.Tensor) else None
            text = None if name is None else f"{name}.{key}"
            for tensor in tensors_in(value):
                yield claim(tensor, Role.OPTIMIZER_STATE, text, proof)

    def _known_of(self, optimizer: Optimizer) -> _Known:
        found = self._known.get(optimizer)
        if found is None:
            found = self._known[optimizer] = _Known(self._number(), Standing(), Standing())
        return found

    # --- batches ------------------------------------------------------------------------------------------------

    def _watch_loader(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def next_data(*args: Any, **kwargs: Any) -> Any:
            data = original(*args, **kwargs)
            if self._active():
                self._claim_batch(data)
            return data

        return next_data

    @plain
    def _claim_batch(self, data: Any) -> None:
        claims = [claim(t, Role.INPUTS, None, "yielded by a DataLoader") for t in tensors_in(data)]
        self._marks.instant(m.CLAIM, [c for c in claims if c is not None])


def _closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The closure that an optimizer's step was given, in the arguments as its hooks get them."""
    return kwargs.get("closure", args[1] if len(args) > 1 else None)


_STEP_WRAPPER = Optimizer.profile_hook_step(lambda self: None).__code__
