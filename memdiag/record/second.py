"""A second forward of a module, to see when Python lets go of what it makes.

The forward runs as the script would call it, save that autograd keeps nothing: what it makes then lives as long as
Python needs it, which is how long it lives inside a checkpointed region.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import time_ns
from typing import Any, NamedTuple

import torch
from torch import nn

from memdiag.record.facts import plain
from memdiag.record.marks import Marks
from memdiag.record.stream import Stream, has_accelerator
from memdiag.trace import NONE, Level
from memdiag.trace.model import CACHED

_cuda: Any = torch.cuda
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


def second_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Made]:
    """Runs a module again on the same inputs, and puts back what that has changed: buffers, attributes of modules and
    the items of those that are containers, random states.

    Known limitations: what lies deeper, in objects of other classes or in files, is not put back, nor are parameters
    that a forward writes to.

    Args:
        args, kwargs: of the call that the script makes.

    Returns:
        Its allocations, in their order.
    """
    stream = Stream(Marks())
    with _as_before(module):
        stream.open(Level.LIGHT)
        try:
            with torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, _refuse):
                made = module(*args, **kwargs)
            end = time_ns()
            del made
            cached = time_ns()
            torch.clear_autocast_cache()  # what is there has a graph that nothing can go backward through
        finally:
            roots = stream.close()
        return _read(roots, end, cached)


def _refuse(_: Any) -> torch.Tensor:
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


@contextmanager
def _as_before(module: nn.Module) -> Iterator[None]:
    """Puts back what a forward may change: values of buffers and attributes of modules, random states."""
    undo = [_random_states(), _buffers(module), *(_attributes(part) for part in module.modules())]
    try:
        yield
    finally:
        for back in reversed(undo):
            back()


@plain
def _buffers(module: nn.Module) -> Callable[[], None]:
    kept = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]

    @plain
    def back() -> None:
        for buffer, value in kept:
            buffer.data.copy_(value)  # not a change in autograd's eyes: what it saved is what it was

    return back


def _attributes(module: nn.Module) -> Callable[[], None]:
    kept = dict(module.__dict__)
    # A counter may be a number, and a log a list: what such a one holds is put back too.
    ordered = [(value, list(value)) for value in kept.values() if isinstance(value, (list, deque))]
    other: list[tuple[Any, Any]] = [(value, dict(value)) for value in kept.values() if isinstance(value, dict)]
    other += [(value, set(value)) for value in kept.values() if isinstance(value, set)]

    def back() -> None:
        module.__dict__.clear()
        module.__dict__.update(kept)
        for sequence, items in ordered:
            sequence.clear()
            sequence.extend(items)
        for holder, contents in other:
            holder.clear()
            holder.update(contents)

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
