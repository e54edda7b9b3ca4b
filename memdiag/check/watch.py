"""Takes digests of what a script's training comes to, while it runs: what two runs are compared by.

Values are read where the script reads none: that takes time and memory, so a run under this watch is no measure of
either. Nothing is drawn from a random generator, nothing is changed.
"""

from __future__ import annotations

import hashlib
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.modules import module as torch_module
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from memdiag.check import entries as e
from memdiag.check.entries import Entry, Failure, RunWriter, Segment, Stage
from memdiag.check.outermost import Outermost, rows_of
from memdiag.check.spec import Spec
from memdiag.check.training import Training
from memdiag.record.facts import innermost, plain
from memdiag.record.frames import locals_of, user_line
from memdiag.record.hooks.modules import tensors_in
from memdiag.record.process.machine import is_out_of_memory
from memdiag.record.regions.digests import Digests

_NO_DISPATCH: Any = torch._C._DisableTorchDispatch
_PLAIN = (type(None), bool, int, float, complex, str)
_MODULES_OWN = frozenset(vars(nn.Module())) | {"forward"}  # what every module has, and what a plan exchanges


class Watch:
    """A context manager around a run.

    Args:
        spec: what to do; see :class:`.Spec`.
        result: the file that digests go to.
        refused: called where checkpoints cannot be put in; ends the run.
        parent: id of the process that has started this one.
        values: called with the key of an entry and its tensor or number, where values are wanted.
    """

    def __init__(
        self, spec: Spec, result: Path, refused: Callable[[str], None], parent: int,
        values: Callable[..., None] | None = None,
    ) -> None:
        self._spec, self._refused, self._values = spec, refused, values
        self._wanted = {tuple(key) for key in spec.wanted}
        self._writer = RunWriter(result)
        self._outermost = Outermost(spec.regions, refused, parent)
        self._digests = Digests()
        self._thread = threading.get_ident()
        self._training = Training(self._mine)
        self._training.backward_begins = self._backward_begins
        self._training.backward_ended = self._backward_ended
        self._training.scaler_begins = self._scaler_begins
        self._training.optimizer_begins = self._gradients
        self._training.optimizer_ended = self._optimizer_ended
        self._training.step_may_end = self._end_segment
        self._segment = Segment()
        self._number = 0  # of the segment
        self._counts: Counter[tuple[str, str]] = Counter()
        self._open: list[nn.Module] = []
        self._backwards = self._forwards = self._examples = 0
        self._looked_after = 0  # how many backwards of the step
        self._optimizers: list[int] = []
        self._at_first: dict[tuple[int, str], str] = {}  # what modules kept before they were called
        self._unreadable: dict[str, None] = {}
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> Watch:
        self._outermost.found = self._meet
        self._outermost.start()
        self._undo.append(self._outermost.stop)
        self._training.start()
        self._undo.append(self._training.stop)
        for handle in (
            torch_module.register_module_forward_pre_hook(self._before),
            torch_module.register_module_forward_hook(self._after, always_call=True),
        ):
            self._undo.append(handle.remove)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._undo:
            self._undo.pop()()
        if self._segment.entries:
            whole = self._backwards > 0 and error is None and not self._steps_in_optimizers
            self._end_segment(whole)
        missing = self._outermost.missing()
        problem = missing[0] if missing and error is None else None
        self._writer.end(self._about(), _failure(error), problem, list(self._unreadable))

    def _about(self) -> dict[str, Any]:
        return {"torch": torch.__version__, "steps": self._training.steps.closed, "regions": self._outermost.put_in}

    # --- modules ------------------------------------------------------------------------------------------------

    def _mine(self) -> bool:
        """Whether the calling thread is the script's, or that of a backward."""
        mine = threading.get_ident() == self._thread or self._training.in_backward
        return mine and not torch.compiler.is_compiling()

    @plain
    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not self._mine():
            return
        kwargs = locals_of(sys._getframe(2)).get("kwargs") or {}
        outermost = not self._open and not self._training.in_backward
        if outermost:
            self._forward_begins(module, args, kwargs)
        name = self._outermost.names.of(module)
        given = " ".join(self._told(args, kwargs))
        grad = "" if torch.is_grad_enabled() or self._training.in_backward else " (gradients off)"
        self._note(e.RECOMPUTED if self._training.in_backward else e.CALL, name, given + grad, own=self._own(module))
        self._open.append(module)

    @plain
    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._mine() or module not in self._open:
            return
        while self._open.pop() is not module:
            pass
        stage = e.RECOMPUTED_RETURNED if self._training.in_backward else e.RETURNED
        name = self._outermost.names.of(module)
        if output is not None:  # nothing comes out of what a checkpoint stops once it has all that it needs
            self._note(stage, name, " ".join(self._digest(tensor) for tensor in tensors_in(output)))
        if not self._open and not self._training.in_backward:
            for number, tensor in enumerate(tensors_in(output)):
                self._tensor(Stage.OUTPUTS.value, f"{name} output {number}", tensor)
            self._state(e.BUFFERS_MIDWAY)

    def _forward_begins(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        grad = torch.is_grad_enabled()
        if grad:
            self._training.forward_begins()
        if grad and self._backwards > self._looked_after:  # the next micro-batch begins with what that backward left
            self._looked_after = self._backwards
            self._between()
        name = self._outermost.names.of(module)
        for label, tensor in _labelled(args, kwargs):
            self._tensor(Stage.INPUTS.value, f"{name} {label}", tensor)
        self._random(e.BEGAN_RANDOM)
        evaluating = [self._outermost.names.of(part) for part in module.modules() if not part.training]
        self._note(Stage.SCHEDULE.value, f"mode of {name}",
                   "training" if not evaluating else f"evaluating: {', '.join(evaluating)}")
        kind = next((tensor.device.type for tensor in module.parameters()), "cpu")
        casting = torch.is_autocast_enabled(kind)
        self._note(Stage.SCHEDULE.value, f"autocast of {name}",
                   str(torch.get_autocast_dtype(kind)) if casting else "off")
        if grad:
            self._forwards += 1
            self._examples += rows_of((args, kwargs))

    def _meet(self, root: nn.Module) -> None:
        """A model is called for the first time."""
        for name, parameter in self._parameters(root):
            self._tensor(e.BEGAN_PARAMETERS, name, parameter)
        for module, key, _, value in self._kept(root):
            if not isinstance(value, torch.Tensor):
                self._at_first[id(module), key] = repr(value)

    def _parameters(self, root: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in root.named_parameters():
            if not is_lazy(parameter):
                name = self._outermost.names.join(root, name)
                self._outermost.names.parameter(parameter, name)
                yield name, parameter

    def _attributes(self, root: nn.Module) -> Iterator[tuple[nn.Module, str, str, Any]]:
        """All that modules have: the module, the attribute, its name in the model, and its value."""
        for path, module in root.named_modules():
            for key, value in vars(module).items():
                yield module, key, self._outermost.names.join(root, f"{path}.{key}" if path else key), value

    def _kept(self, root: nn.Module) -> Iterator[tuple[nn.Module, str, str, Any]]:
        """Of that, what they keep beside parameters and buffers."""
        return (one for one in self._attributes(root) if one[1] not in _MODULES_OWN and (
            isinstance(one[3], (torch.Tensor, *_PLAIN)) or _is_flat(one[3])))

    def _models(self) -> Iterator[nn.Module]:
        return (root for reference in self._outermost.models if (root := reference()) is not None)

    def _own(self, module: nn.Module) -> str:
        return " ".join(self._digest(p) for p in module._parameters.values() if p is not None and not is_lazy(p))

    # --- backward and optimizers --------------------------------------------------------------------------------

    def _backward_begins(self, tensors: Any) -> None:
        for number, tensor in enumerate(tensors_in(tensors)):
            self._tensor(Stage.OUTPUTS.value, f"loss {number}" if number else "loss", tensor)

    def _backward_ended(self) -> None:
        self._backwards += 1

    def _scaler_begins(self, scaler: GradScaler) -> None:
        self._note(Stage.SCHEDULE.value, "scale of the gradient scaler", repr(scaler.get_scale()))

    def _optimizer_ended(self, optimizer: Optimizer, skipped: bool) -> None:
        if skipped:
            self._note(Stage.SCHEDULE.value, "steps that the gradient scaler skipped", "1")
        self._stepped_optimizer(optimizer)

    def _between(self) -> None:
        self._gradients()
        self._state(Stage.BUFFERS.value)
        self._random(Stage.RANDOM_STATE.value)
        self._note(e.NEXT, "", "")

    @plain
    def _gradients(self, optimizer: Optimizer | None = None) -> None:
        seen: set[int] = set()
        for name, parameter in () if optimizer is None else self._named(optimizer):
            seen.add(id(parameter))
            self._gradient(name, parameter)
        for root in self._models():
            for name, parameter in self._parameters(root):
                if id(parameter) not in seen and parameter.requires_grad:
                    seen.add(id(parameter))
                    self._gradient(name, parameter)

    def _gradient(self, name: str, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            self._note(Stage.GRADIENTS.value, name, e.NOTHING)
        else:
            self._tensor(Stage.GRADIENTS.value, name, gradient)

    @plain
    def _stepped_optimizer(self, optimizer: Optimizer) -> None:
        which = self._place(optimizer)
        for name, parameter in self._named(optimizer):
            self._tensor(Stage.PARAMETERS.value, name, parameter)
            state = optimizer.state.get(parameter, {}) if isinstance(parameter, torch.Tensor) else {}
            for key, value in state.items() if isinstance(state, dict) else ():
                self._value(Stage.PARAMETERS.value, f"{which}: {key} of {name}", value)
        for number, group in enumerate(optimizer.param_groups):
            names = [self._name(parameter, f"parameter {place}") for place, parameter in enumerate(group["params"])]
            self._note(Stage.SCHEDULE.value, f"{which}: parameters of group {number}", ", ".join(names))
            for key, value in group.items():
                if key not in ("params", "param_names"):
                    self._value(Stage.SCHEDULE.value, f"{which}: {key} of group {number}", value)

    def _named(self, optimizer: Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
        which = self._place(optimizer)
        place = 0
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield self._name(parameter, f"{which}: parameter {place}"), parameter
                place += 1

    def _place(self, optimizer: Optimizer) -> str:
        if id(optimizer) not in self._optimizers:
            self._optimizers.append(id(optimizer))
        number = self._optimizers.index(id(optimizer))
        return f"optimizer {number}" if number else "optimizer"

    def _name(self, parameter: torch.Tensor, otherwise: str) -> str:
        return self._outermost.names.of_parameter(parameter) or otherwise

    @property
    def _steps_in_optimizers(self) -> bool:
        return bool(self._optimizers)

    # --- ends of steps ------------------------------------------------------------------------------------------

    @plain
    def _end_segment(self, whole: bool = True) -> None:
        if whole:
            for name, count in (("backward calls", self._backwards), ("forward calls", self._forwards),
                                ("examples", self._examples)):
                self._note(Stage.SCHEDULE.value, name, str(count))
            if not self._steps_in_optimizers:
                self._without_optimizer()
            self._state(Stage.BUFFERS.value)
            self._random(Stage.RANDOM_STATE.value)
        self._segment.whole = whole
        self._writer.segment(self._segment)
        self._segment, self._number = Segment(), self._number + 1
        self._counts.clear()
        self._backwards = self._forwards = self._examples = self._looked_after = 0
        if whole and self._training.steps.closed >= self._spec.steps and self._undo:
            raise SystemExit(0)

    def _without_optimizer(self) -> None:
        """The script changes its parameters itself: gradients as they are when the next step begins."""
        for root in self._models():
            for name, parameter in self._parameters(root):
                if parameter.requires_grad:
                    self._gradient(name, parameter)
                self._tensor(Stage.PARAMETERS.value, name, parameter)

    def _state(self, stage: str) -> None:
        """Buffers, and what else modules keep."""
        for root in self._models():
            join = self._outermost.names.join
            for name, buffer in root.named_buffers():
                if not is_lazy(buffer):
                    self._tensor(stage, join(root, name), buffer)
            for module, key, name, value in self._kept(root):
                # What no step changes is how the module was made, and may be what makes it a checkpoint.
                if isinstance(value, torch.Tensor) or self._at_first.get((id(module), key)) != repr(value):
                    self._value(stage, name, value)

    def _random(self, stage: str) -> None:
        self._note(stage, "torch", self._digest(torch.get_rng_state()))
        cuda: Any = torch.cuda
        if cuda.is_initialized():
            for device in range(cuda.device_count()):
                self._note(stage, f"torch, cuda:{device}", self._digest(cuda.get_rng_state(device)))
        for root in self._models():
            for _, _, name, value in self._attributes(root):
                if isinstance(value, torch.Generator):
                    self._note(stage, f"{e.OWN_GENERATOR}{name}", self._digest(value.get_state()))
        kind, keys, *rest = cast("tuple[str, Any, int, int, float]", np.random.get_state(legacy=True))
        for name, state in (("Python", repr(random.getstate()).encode()),
                            ("NumPy", keys.tobytes() + repr((kind, rest)).encode())):
            self._note(stage, name, hashlib.blake2b(state, digest_size=8).hexdigest())

    # --- entries ------------------------------------------------------------------------------------------------

    def _told(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[str]:
        """What a call was given, in words that two runs can be compared by."""
        for label, value in [*((str(number), value) for number, value in enumerate(args)), *kwargs.items()]:
            tensors = list(tensors_in(value))
            if tensors:
                yield f"{label}={'+'.join(map(self._digest, tensors))}"
            else:
                yield f"{label}={value!r}" if isinstance(value, _PLAIN) else f"{label}={type(value).__name__}"

    def _value(self, stage: str, name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self._tensor(stage, name, value)
        elif isinstance(value, _PLAIN) or _is_flat(value):
            self._note(stage, name, repr(value), thing=value)

    def _tensor(self, stage: str, name: str, tensor: torch.Tensor) -> None:
        digest = self._digest(tensor)
        if digest == e.UNREADABLE:
            self._unreadable[name] = None
        elif tensor.numel() == 1:
            with self._aside():
                digest = repr(innermost(tensor).detach().item())
        self._note(
            stage, name, digest, str(list(tensor.shape)), str(tensor.dtype).removeprefix("torch."), thing=tensor)

    def _digest(self, tensor: torch.Tensor) -> str:
        with self._aside():
            try:
                found = self._digests.of(tensor)
            except (RuntimeError, NotImplementedError):  # a fake one, or one of a transform
                found = None
        return e.UNREADABLE if found is None else f"{found[0]:x}.{found[1]:x}"

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """No mode and no override sees what is done."""
        with torch.no_grad(), torch._C.DisableTorchFunction(), _NO_DISPATCH():
            yield

    def _note(
        self, stage: str, name: str, value: str, shape: str | None = None, dtype: str | None = None,
        own: str | None = None, thing: Any = None,
    ) -> None:
        nth = self._counts[stage, name]
        self._counts[stage, name] += 1
        self._segment.entries.append(Entry(stage, name, nth, value, shape, dtype, own))
        if self._values is not None and (self._number, stage, name, nth) in self._wanted:
            self._values((self._number, stage, name, nth), thing)


def _labelled(args: Any, kwargs: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors among arguments, and what to call them."""
    for label, value in [*((f"argument {number}", value) for number, value in enumerate(args)), *kwargs.items()]:
        tensors = list(tensors_in(value))
        for number, tensor in enumerate(tensors):
            yield (label if len(tensors) == 1 else f"{label}, tensor {number}"), tensor


def _is_flat(value: Any) -> bool:
    """A container of a few plain things, such as a counter for each kind."""
    if isinstance(value, dict):
        return len(value) <= _FEW and all(isinstance(part, _PLAIN) for item in value.items() for part in item)
    return isinstance(value, (list, tuple)) and len(value) <= _FEW and all(isinstance(item, _PLAIN) for item in value)


_FEW = 100


def _failure(error: BaseException | None) -> Failure | None:
    if error is None or isinstance(error, SystemExit) and error.code in (None, 0):
        return None
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    line = None if trace is None else user_line(trace.tb_frame)
    return Failure(type(error).__name__, str(error), line, is_out_of_memory(error) or isinstance(error, MemoryError))
