"""A second forward of a module, to see when Python lets go of what it makes, and how long it takes.

The forward runs as the script would call it, save that autograd keeps nothing: what it makes then lives as long as
Python needs it, which is how long it lives inside a checkpointed region. Of operators nothing is recorded, so it takes
about as long as in a run without memdiag.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import time_ns
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from memdiag.record.clock import worked_ns
from memdiag.record.hooks.saves import not_the_scripts
from memdiag.record.marks import Marks
from memdiag.record.regions.before import as_before
from memdiag.record.stream import Stream
from memdiag.trace import NONE, Level
from memdiag.trace.model import CACHED

_GONE = "memdiag ran this forward a second time without keeping its graph: nothing can go backward through it"


class Made(NamedTuple):
    """An allocation of the second forward.

    Attributes:
        device: "cpu", "cuda:0"…
        died: how many allocations of the forward came before it went; NONE where it was there at the end, CACHED where
            autocast kept it.
    """

    device: str
    bytes: int
    died: int


class Timed(NamedTuple):
    """A module call of the second forward, with gradients on; times are those of :func:`worked_ns`."""

    path: str
    start_ns: int
    end_ns: int


def second_forward(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], name_of: Callable[[nn.Module], str],
    disturbed: Sequence[Any] = (),
) -> tuple[list[Made], list[Timed]]:
    """Runs a module again on the same inputs, and puts back what that has changed, as far as
    :func:`memdiag.record.regions.before.as_before` can.

    Args:
        args, kwargs: of the call that the script makes.
        name_of: the path of a module.
        disturbed: tensors and random generators that the forward is known to change.

    Returns:
        Its allocations, in their order, and its module calls, in the order in which they began.
    """
    stream, timer = Stream(Marks()), _Timer(name_of)
    with as_before(module, (args, kwargs), disturbed):
        stream.open(Level.LIGHT)
        try:
            with timer, torch.autograd.graph.saved_tensors_hooks(_forget, refuse):
                made = module(*args, **kwargs)
            end = time_ns()
            del made
            cached = time_ns()
            torch.clear_autocast_cache()  # what is there has a graph that nothing can go backward through
        finally:
            roots = stream.close()
        return _read(roots, end, cached), timer.calls


class _Timer:
    """Times module calls while it is entered."""

    def __init__(self, name_of: Callable[[nn.Module], str]) -> None:
        self._name_of = name_of
        self.calls: list[Timed] = []
        self._open: list[tuple[nn.Module, int]] = []

    def __enter__(self) -> None:
        self._handles = [torch_module.register_module_forward_pre_hook(self._before),
                         torch_module.register_module_forward_hook(self._after, always_call=True)]

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._open.append((module, len(self.calls)))
            self.calls.append(Timed(self._name_of(module), worked_ns(), NONE))

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not any(one is module for one, _ in self._open):
            return
        now, ended = worked_ns(), None
        while ended is not module:  # those inside it whose hook never ran, too
            ended, number = self._open.pop()
            self.calls[number] = self.calls[number]._replace(end_ns=now)


@not_the_scripts
def _forget(_: torch.Tensor) -> None:
    """What autograd keeps of a tensor: nothing."""


def refuse(_: Any) -> torch.Tensor:
    """Says why there is no backward through a forward that memdiag ran."""
    raise RuntimeError(_GONE)


def _read(roots: list[Any], end: int, cached: int) -> list[Made]:
    found: list[Made] = []
    at: dict[tuple[str, int], int] = {}
    for event in sorted(roots, key=lambda event: event.start_time_ns):
        fields: Any = getattr(event, "extra_fields", None)
        size = getattr(fields, "alloc_size", None)
        if size is None:
            continue  # a request that failed
        place = str(fields.device), fields.ptr
        if size > 0:
            at[place] = len(found)
            found.append(Made(place[0], size, NONE))
        elif place in at:
            row, time = at.pop(place), event.start_time_ns
            died = len(found) if time < end else NONE if time < cached else CACHED
            found[row] = found[row]._replace(died=died)
    return found
