"""Putting back what a forward that runs aside from the script's own has changed."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from memdiag.record.facts import plain
from memdiag.record.regions.state import Reached, code_of, forget, keep, reached
from memdiag.record.stream import has_accelerator

_cuda: Any = torch.cuda


@contextmanager
def as_before(module: nn.Module, given: Any, disturbed: Sequence[Any] = ()) -> Iterator[None]:
    """Puts back what a forward may change: values of buffers and attributes of modules, containers and objects among
    these, among its arguments and among the variables that its code uses, and random states.

    Known limitations: what lies deeper, in attributes of classes, in files or outside Python, is not put back.

    Args:
        given: the arguments of the call.
        disturbed: tensors and random generators that it is known to change.
    """
    undo = [_random_states(), _values([*module.buffers(), *(one for one in disturbed if torch.is_tensor(one))])]
    seen: set[int] = set()
    keep((given, disturbed), undo, seen)
    for part in module.modules():
        undo.append(_attributes(part))
        for value in part.__dict__.values():
            keep(value, undo, seen)
    for variable in variables(module):
        undo.append(variable.way_back())
        keep(variable.value(), undo, seen)
    try:
        yield
    finally:
        for back in reversed(undo):
            back()
        forget()


def variables(module: nn.Module) -> list[Reached]:
    """What the code of a module, of those below it and of their hooks uses beside arguments and attributes."""
    functions: dict[Any, None] = {}
    for part in module.modules():
        functions.update(dict.fromkeys(code_of(type(part))))
        functions.update(dict.fromkeys(hooks_of(part)))
    return reached(functions)


def hooks_of(module: nn.Module) -> list[Any]:
    """The hooks that are run around a module's forward."""
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


@plain
def _values(tensors: list[torch.Tensor]) -> Callable[[], None]:
    kept = [(tensor, tensor.detach().clone()) for tensor in tensors]

    @plain
    def back() -> None:
        for tensor, value in kept:
            tensor.data.copy_(value)  # not a change in autograd's eyes: what it saved is what it was

    return back


def _attributes(module: nn.Module) -> Callable[[], None]:
    kept = dict(module.__dict__)

    def back() -> None:
        module.__dict__.clear()
        module.__dict__.update(kept)

    return back


def _random_states() -> Callable[[], None]:
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if has_accelerator() and _cuda.is_initialized() else None
    python = random.getstate()
    numpy = sys.modules.get("numpy.random")
    of_numpy = None if numpy is None else numpy.get_state()

    def back() -> None:
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
        random.setstate(python)
        if numpy is not None:
            numpy.set_state(of_numpy)

    return back
