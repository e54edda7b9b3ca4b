"""Runs a forward twice from the same state, aside from the script's own, to see what checkpoints may be put around."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd import Function
from torch.nn.modules import module as torch_module
from torch.utils import checkpoint

from memdiag.garbage import uncollected
from memdiag.record.facts import plain, storage_of
from memdiag.record.frames import in_torch, locals_of, user_line
from memdiag.record.hooks.modules import tensors_in
from memdiag.record.patch import replaced
from memdiag.record.regions.before import as_before
from memdiag.record.regions.calls import Calls, Fact, Key
from memdiag.record.regions.course import Course, Watch
from memdiag.record.regions.second import refuse
from memdiag.record.regions.statements import how_often
from memdiag.trace import model as m


class Probed(NamedTuple):
    """What two forwards have shown.

    Attributes:
        read: tensors that were there before the forward, parameters and buffers apart, and the module calls that would
            need them again; by the address of their storage.
        disturbed: what has to be put back after another forward: generators that it draws from, and bytes of storages
            that it writes to.
        making, not_keepable: names of operators that make something, and of those whose results a checkpoint cannot
            keep.
    """

    facts: list[Fact]
    read: dict[int, tuple[weakref.ref[torch.Tensor], frozenset[Key]]]
    disturbed: list[Any]
    making: set[str]
    not_keepable: set[str]


def probe(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name_of: Callable[[nn.Module], str]
) -> Probed:
    """Runs a module twice on the same inputs from the same state, and puts back what that changes.

    Args:
        args, kwargs: of the call that the script makes.
        name_of: the path of a module.
    """
    constant = {
        storage[0]: (name, buffer) for named, buffer in (
            (module.named_parameters(), False), (module.named_buffers(), True))
        for name, tensor in named if (storage := storage_of(tensor)) is not None}
    with uncollected():  # the script's garbage would be freed unseen
        first = _run(module, args, kwargs, name_of, constant, None)
        second = _run(module, args, kwargs, name_of, constant, first.watch.course)
    facts = dict.fromkeys((*first.calls.facts, *second.calls.facts))
    read = {address: (tensor, frozenset(keys)) for address, (tensor, keys) in second.watch.read.items()
            if address not in constant}
    disturbed = [generator for generator, _ in second.watch.generators.values()]
    return Probed(
        list(facts), read, [*disturbed, *(flat for flat, _ in second.watch.written.values())],
        first.watch.making | second.watch.making, first.watch.not_keepable | second.watch.not_keepable)


def uncompiled() -> AbstractContextManager[object]:
    """Compiled code runs as it was written.

    Under a dispatch mode it would anyway; but the compiler would remember that, and pass over it in the script's own
    forward, where it would then compile the functions that our hooks call.
    """
    used = "torch._dynamo" in sys.modules  # to ask it would load it
    return torch.compiler.set_stance("force_eager") if used else nullcontext()


class _Run(NamedTuple):
    calls: Calls
    watch: Watch


def _run(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name_of: Callable[[nn.Module], str],
    constant: dict[int, tuple[str, bool]], first: Course | None,
) -> _Run:
    calls = Calls(name_of)
    watch = Watch(calls, constant, first)
    torch.clear_autocast_cache()  # both runs cast for themselves
    hooks = _Hooks(calls, watch, name_of)
    with as_before(module, (args, kwargs)):
        try:
            with hooks.on(), uncompiled(), watch, torch.autograd.graph.saved_tensors_hooks(watch.saves, refuse):
                made = module(*args, **kwargs)
            del made
            torch.clear_autocast_cache()  # what is there has a graph that nothing can go backward through
        finally:
            watch.put_back()
    return _Run(calls, watch)


class _Hooks:
    """Around every module call, every checkpoint and every custom Function of a forward."""

    def __init__(self, calls: Calls, watch: Watch, name_of: Callable[[nn.Module], str]) -> None:
        self._calls, self._watch, self._name_of = calls, watch, name_of

    @contextmanager
    def on(self) -> Iterator[None]:
        with ExitStack() as undo:
            undo.callback(torch_module.register_module_forward_pre_hook(self._before).remove)
            undo.callback(torch_module.register_module_forward_hook(self._after).remove)
            undo.callback(replaced(checkpoint._checkpoint_hook, "__init__", self._checkpoint))
            undo.callback(replaced(checkpoint, "check_backward_validity", self._checkpoint))
            # A class method of Python's or, from PyTorch 2.14 on, one of C: what both can is to be bound to a class.
            apply = Function.__dict__["apply"]
            undo.callback(setattr, Function, "apply", apply)
            Function.apply = classmethod(self._function(apply.__get__))  # type: ignore[method-assign,assignment]
            yield

    @plain
    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():
            return
        given = args, locals_of(sys._getframe(2)).get("kwargs") or {}
        self._watch.busy = True
        try:
            self._watch.calls(self._name_of(module))
            # A checkpoint keeps the random states of the devices of these alone.
            self._calls.begins(module, given, {tensor.device for tensor in tensors_in(args)}, self._watch.number)
            self._watch.begins(tensors_in(given))
        finally:
            self._watch.busy = False

    @plain
    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        self._watch.busy = True
        try:
            self._calls.unwind(module)
            self._watch.ends()
            self._watch.over(*self._calls.ends(module))
        finally:
            self._watch.busy = False

    def _checkpoint(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            self._calls.note(m.CHECKPOINT, None, user_line(sys._getframe(1)))
            return original(*args, **kwargs)

        return watched

    def _function(self, bound: Callable[[None, type[Function]], Callable[..., Any]]) -> Callable[..., Any]:
        def apply(kind: type[Function], *args: Any, **kwargs: Any) -> Any:
            backward = getattr(kind.backward, "__code__", None)
            if backward is not None and not in_torch(backward):
                self._calls.note(m.FUNCTION, kind.__name__, user_line(sys._getframe(1)))
                asked = how_often("saved_tensors", kind.backward)  # type: ignore[arg-type]
                if len(asked) > 1:
                    self._calls.note(m.UNPACKS_TWICE, kind.__name__, asked[1])
            return bound(None, kind)(*args, **kwargs)

        return apply
