"""Module calls: when they begin and end, what they are called, whose parameters are whose."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import chain, count
from time import time_ns
from types import CellType, FrameType, FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.parameter import is_lazy

from memdiag.record.facts import ModuleCall, claim, plain, storage_of
from memdiag.record.frames import forward_is_torchs, in_torch, locals_of, user_line
from memdiag.record.hooks.lines import Lines
from memdiag.record.marks import CLAIM, MODULE, OUTPUTS, Marks
from memdiag.record.patch import replaced
from memdiag.record.regions.state import CONTAINERS, items_of
from memdiag.trace import Role
from memdiag.trace.models import Model


class Modules:
    """Global forward hooks around every module call on the recording thread.

    Attributes:
        step_inputs: dtypes and shapes that went into the first outermost call of this step.
        rehearse: called with each outermost module that is called with gradients, and its arguments, before it runs;
            where it is set, the arguments of all calls are noted.
        given: called then with the path of each module that is called, and the tensors that it is given.
    """

    def __init__(
        self, marks: Marks, lines: Lines, active: Callable[[], bool], in_backward: Callable[[], bool],
        outermost: Callable[[bool], None], owns: Callable[[list[torch.Tensor]], None],
        elsewhere: Callable[[bool], None],
    ) -> None:
        self._marks, self._lines = marks, lines
        self._active, self._in_backward, self._outermost = active, in_backward, outermost
        self._owns, self._elsewhere = owns, elsewhere
        self.light = False
        self._handles: list[Any] = []
        self._open: list[tuple[nn.Module, ModuleCall, Any, bool]] = []
        self.names = Names()
        self._calls: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
        self._claimed: dict[int, int] = {}
        self.step_inputs: str | None = None
        self.given: Callable[[str, Iterator[torch.Tensor]], None] | None = None
        self.rehearse: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None] | None = None

    def start(self) -> None:
        self._handles = [
            torch_module.register_module_forward_pre_hook(self._before),
            torch_module.register_module_forward_hook(self._after, always_call=True),
        ]
        # Calling a compiled module warns when there are global hooks. Ours do not fire inside it: no warning is due.
        self._undo = replaced(torch_module, "_has_any_global_hook", lambda original: lambda: other_global_hooks())

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._undo()
        self.unwind()

    @property
    def depth(self) -> int:
        return len(self._open)

    def unwind(self, keep: int = 0) -> None:
        """Closes calls whose post hook never ran: KeyboardInterrupt and SystemExit skip it."""
        while len(self._open) > keep:
            _, call, mark, switched = self._open.pop()
            mark.__exit__(None, None, None)
            call.end_ns = time_ns()
            if switched:
                self._lines.on()

    def suspend(self) -> None:
        """Closes the marks of the open calls, for a cut of the stream in their midst."""
        suspended = []
        for module, call, mark, switched in reversed(self._open):
            call.cut = True
            mark.__exit__(None, None, None)
            suspended.append((module, call, nullcontext(), switched))
        self._open = suspended[::-1]

    def resume(self) -> None:
        """Opens them again, in the next chunk."""
        reopened = []
        for module, call, _, switched in self._open:
            mark = self._marks.range((MODULE, call))
            mark.__enter__()
            reopened.append((module, call, mark, switched))
        self._open = reopened

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():
            return
        if not self._active():
            self._elsewhere(torch.is_grad_enabled())
            if not self._active():
                return
        if self.light and self._open:
            return
        grad = torch.is_grad_enabled()
        recompute = self._in_backward()
        frame = sys._getframe(1)
        outermost = not self._open and not recompute
        if outermost:
            self._outermost(grad)
            self._learn(module, args, frame)
        arguments: tuple[int, ...] = ()
        if self.rehearse is not None and not recompute:
            kwargs = locals_of(frame).get("kwargs") or {}
            if outermost and grad:
                self.rehearse(module, args, kwargs)
            arguments = _addresses((args, kwargs))
            if self.given is not None:
                self.given(self.names.of(module), tensors_in((args, kwargs)))
            del kwargs
        number = self._calls.get(module, 0)
        self._calls[module] = number + 1
        call = ModuleCall(
            self.names.of(module), number, grad, recompute, user_line(frame), outermost, time_ns() if outermost else 0,
            arguments=arguments)
        mark = self._marks.range((MODULE, call))
        mark.__enter__()
        # Torch's own modules leave their fast path when an override is active.
        switched = forward_is_torchs(type(module)) and self._lines.off()
        self._open.append((module, call, mark, switched))

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not self._open or not self._active():
            return
        if len(self._open) == 1 and self._open[0][0] is not module:
            return  # in light recording, all but the outermost
        depth = next((i for i in range(len(self._open) - 1, -1, -1) if self._open[i][0] is module), None)
        if depth is None:
            return
        call = self._open[depth][1]
        self.unwind(keep=depth)
        if depth == 0 and call.call == 0:
            self._claim_owned(module, again=True)  # lazy modules have their parameters only now
        if call.outermost and call.grad:
            self._note_outputs(output)

    @plain
    def _learn(self, module: nn.Module, args: tuple[Any, ...], frame: FrameType) -> None:
        self._claim_inputs(args, frame)
        self.names.learn(module, frame)
        self._claim_owned(module)

    # --- whose is it --------------------------------------------------------------------------------------------

    @plain
    def _claim_owned(self, root: nn.Module, again: bool = False) -> None:
        """Parameters and buffers below an outermost module, when any of them has moved since we last looked."""
        root = unwrapped(root)
        owned = list(_owned(root))
        seen = hash(tuple(tensor.data_ptr() if tensor.layout is torch.strided else 0 for _, tensor, _ in owned))
        if self._claimed.get(id(root)) == seen and not again:
            return
        self._claimed[id(root)] = seen
        claims = [
            claim(tensor, role, self.names.join(root, name), f"{'parameter' if role is Role.PARAMETERS else 'buffer'} "
                  f"of a module that was called")
            for name, tensor, role in owned
        ]
        self._marks.instant(CLAIM, [c for c in claims if c is not None])
        for name, tensor, role in owned:
            if role is Role.PARAMETERS:
                self.names.parameter(tensor, self.names.join(root, name))
        self._owns([tensor for _, tensor, role in owned if role is Role.PARAMETERS])

    def _claim_inputs(self, args: tuple[Any, ...], frame: FrameType) -> None:
        # Global hooks are not given keyword arguments; the caller's frame has them.
        kwargs = locals_of(frame).get("kwargs") or {}
        tensors = [t for t in tensors_in((args, kwargs)) if t.grad_fn is None and not isinstance(t, nn.Parameter)]
        claims = [claim(t, Role.INPUTS, None, "an argument of the outermost module") for t in tensors]
        self._marks.instant(CLAIM, [c for c in claims if c is not None])
        if self.step_inputs is None and tensors:
            self.step_inputs = ", ".join(
                f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors)

    @plain
    def _note_outputs(self, output: Any) -> None:
        """What a model has made is no input of the next one, though its alias without a history (``z.detach()``) may
        be an argument there."""
        found = [storage_of(t) for t in tensors_in(output) if t.grad_fn is not None]
        self._marks.instant(OUTPUTS, [storage[0] for storage in found if storage is not None])


_OURS = __name__.partition(".")[0] + "."


def other_global_hooks() -> bool:
    """Whether there are hooks on all modules besides ours."""
    return any(
        not type(getattr(hook, "__self__", None)).__module__.startswith(_OURS)
        for hooks in (
            torch_module._global_backward_pre_hooks, torch_module._global_backward_hooks,
            torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)
        for hook in hooks.values())


_DEEP = 4  # steps from an argument to a tensor: an object, its list, a function in that, what the function captured


@plain
def _addresses(things: Any) -> tuple[int, ...]:
    """Storages that live as long as arguments are kept."""
    found = [storage_of(tensor) for tensor in _kept_with(things, _DEEP, set())]
    return tuple(storage[0] for storage in found if storage is not None)


def _kept_with(thing: Any, deep: int, seen: set[int]) -> Iterator[torch.Tensor]:
    """Tensors in a thing, in what functions have captured, and in attributes of objects; not those of modules."""
    if isinstance(thing, torch.Tensor):
        yield thing
    if deep < 0 or id(thing) in seen or isinstance(thing, (torch.Tensor, nn.Module, str, bytes, int, float, type)):
        return
    seen.add(id(thing))
    inside: list[Any] = []
    if isinstance(thing, FunctionType):
        inside += [cell.cell_contents for cell in thing.__closure__ or () if cell != CellType()]
        inside += thing.__defaults__ or ()
        inside += (thing.__kwdefaults__ or {}).values()
    elif isinstance(thing, MethodType):
        inside += (thing.__self__, thing.__func__)
    elif isinstance(thing, partial):
        inside += (thing.func, thing.args, thing.keywords)
    else:
        inside += thing if isinstance(thing, frozenset) else items_of(thing) or ()
        deep += isinstance(thing, (*CONTAINERS, frozenset))  # a container is no step of its own
    for one in inside:
        yield from _kept_with(one, deep - 1, seen)


def _owned(root: nn.Module) -> Iterator[tuple[str, torch.Tensor, Role]]:
    for name, parameter in root.named_parameters():
        # Functional calls put other tensors in a parameter's place for a while.
        if isinstance(parameter, nn.Parameter) and not is_lazy(parameter):
            yield name, parameter, Role.PARAMETERS
    for name, buffer in root.named_buffers():
        if not is_lazy(buffer):
            yield name, buffer, Role.BUFFERS


def tensors_in(value: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """Tensors in nested lists, tuples, mappings and simple objects (a batch class), a few levels deep."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth:
        if isinstance(value, dict) or (hasattr(value, "keys") and hasattr(value, "values")):
            for item in list(value.values()):
                yield from tensors_in(item, depth - 1)
        elif isinstance(value, (list, tuple)):
            for item in value:
                yield from tensors_in(item, depth - 1)


class Names:
    """Qualified names of modules, as ``named_modules`` of the model gives them.

    A model is found by what is called outermost; where that is a part of something bigger that is never called
    itself (``model["head"](x)``), by the variables in sight. The first model's names stand bare, of those
    that have a parameter to train; those of another begin with its variable's name or its class.

    Attributes:
        models: those that were named, in their order.
    """

    def __init__(self) -> None:
        self._names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self._prefix: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self._root: WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = WeakKeyDictionary()
        self._labels: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()  # of models that exist
        self.models: dict[str, Model] = {}
        self.model_seen = False
        self._bare: Model | None = None  # the model whose names stand bare
        self._children: set[str] = set()  # of that one
        self._parameters: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}

    def parameter(self, tensor: torch.Tensor, name: str) -> None:
        self._parameters.setdefault(id(tensor), (weakref.ref(tensor), name))

    def of_parameter(self, tensor: torch.Tensor) -> str | None:
        """The name of a parameter of a module that has been called."""
        reference, name = self._parameters.get(id(tensor), (None, None))
        return name if reference is not None and reference() is tensor else None

    def of(self, module: nn.Module) -> str:
        """The name; for a module that no model contains, its class."""
        return self._names.get(module) or type(module).__name__

    def root_of(self, module: nn.Module) -> nn.Module | None:
        """The model that a module was found in, torch's own wrappers taken off."""
        found = self._root.get(module)
        return None if found is None else found()

    def __contains__(self, module: nn.Module) -> bool:
        return module in self._names

    def join(self, root: nn.Module, name: str) -> str:
        """The name of something owned by a module below ``root``, ``name`` being relative to it."""
        prefix = self._prefix.get(root, "")
        return f"{prefix}.{name}" if prefix else name

    def learn(self, module: nn.Module, frame: FrameType | None) -> None:
        """Names a module that is called outermost, and all below it."""
        if module in self._names:
            return
        variables = list(_modules_in_sight(frame))
        around = next((candidate for _, candidate in variables if candidate is not module and any(
            part is module for part in candidate.modules())), module)
        root = unwrapped(around)
        self.model_seen = self.model_seen or any(True for _ in root.parameters())
        prefix = self._prefix.get(root)
        if prefix is None:
            prefix = self._prefix_of(root, [name for name, found in variables if found is around or found is root])
        self._names.setdefault(module, type(module).__name__)
        self._root.setdefault(module, weakref.ref(root))
        for path, part in root.named_modules():
            name = ".".join(p for p in (prefix, path) if p)
            self._names.setdefault(part, name or type(root).__name__)
            self._prefix.setdefault(part, name)
            self._root.setdefault(part, weakref.ref(root))

    def _prefix_of(self, root: nn.Module, variables: list[str]) -> str:
        """What the names of a model begin with; the model is noted, unless it is but a function such as a loss."""
        variables = [name for name in variables if name not in ("self", "cls", *self._children)]
        label = next(iter(variables), type(root).__name__)
        children = {name for name, _ in root.named_children()}
        parameters = list(root.parameters())
        if not parameters and not children:
            return label
        taken = {*self._labels.values(), *([self._bare.name] if self._bare is not None else [])}
        label = next(name for name in chain(variables, [label], (f"{label}.{number}" for number in count(1)))
                     if name not in taken)
        bare = self._bare is None and taken.isdisjoint(children) and any(one.requires_grad for one in parameters)
        # While torch.jit traces, sizes are tensors, and to ask for them is traced.
        known = torch._C._get_tracing_state() is None and not any(map(is_lazy, parameters))
        model = Model(label, type(root).__name__, "" if bare else label, label in variables,
                      sum(one.numel() for one in parameters) if known else None)
        self._labels[root] = label
        self.models[label] = model
        if bare:
            self._bare, self._children = model, children
        return model.prefix


def unwrapped(root: nn.Module) -> nn.Module:
    """The model inside torch's own wrappers (data parallel, compiled): its names are the ones a user knows."""
    while forward_is_torchs(type(root)):
        children = dict(root.named_children())
        inner = children.get("module", children.get("_orig_mod"))
        if inner is None or len(children) != 1:
            break
        root = inner
    return root


def _modules_in_sight(frame: FrameType | None) -> Iterator[tuple[str, nn.Module]]:
    """Module variables of the user's frames, innermost first, then of their modules."""
    seen_globals: set[int] = set()
    while frame is not None:
        if not in_torch(frame.f_code):
            scopes = [locals_of(frame)]
            if id(frame.f_globals) not in seen_globals:
                seen_globals.add(id(frame.f_globals))
                scopes.append(frame.f_globals)
            for scope in scopes:
                for name, value in list(scope.items()):
                    if isinstance(value, nn.Module):
                        yield name, value
        frame = frame.f_back
