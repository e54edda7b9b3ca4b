"""Forwards that run as checkpoints, in place of a module's own.

Each is the attribute ``forward`` of its module: hooks on the module, its name and its keys in the state dict stay. It
is copied and pickled with the module, and refers to it weakly, for a cycle would keep a model that is dropped until
the garbage collector comes; so, other than a bound method, it does not keep the module by itself.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memdiag.apply.operators import Keep, processor_ns


def is_chain(module: nn.Module) -> bool:
    """Whether a module runs the modules in it one after the other, and nothing else."""
    return isinstance(module, nn.Sequential) and "forward" not in vars(module) and (
        type(module).forward, type(module).__iter__) == (nn.Sequential.forward, nn.Sequential.__iter__)


class Checkpointed:
    """A module's forward, as a checkpoint where gradients are on.

    Args:
        module: whose forward it is.
        before: the attribute ``forward`` that the module had; None where it has but that of its class.
        keep: operators whose results are kept.
    """

    def __init__(
        self, module: nn.Module, before: Callable[..., Any] | None = None, keep: tuple[str, ...] = ()
    ) -> None:
        self.before = before
        self._module, self._keep = weakref.ref(module), _kept(keep)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return _run(self._bare(), self._keep, args, kwargs)

    def _bare(self) -> Callable[..., Any]:
        if self.before is not None:
            return self.before
        module = _alive(self._module)
        return partial(type(module).forward, module)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._bare())

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (_alive(self._module), self.before, _names(self._keep))


class Chained:
    """The forward of an ``nn.Sequential`` in which runs of modules are one checkpoint each.

    Args:
        container: whose forward it is.
        runs: (start, stop, keep) of each, in their order: positions in the container, and operators to keep.
    """

    before = None

    def __init__(self, container: nn.Sequential, runs: Sequence[tuple[int, int, tuple[str, ...]]]) -> None:
        self._module = weakref.ref(container)
        self._runs = [(start, stop, _kept(keep)) for start, stop, keep in sorted(runs, reverse=True)]

    def __call__(self, input: Any) -> Any:
        steps: list[Callable[[Any], Any]] = list(_alive(self._module)._modules.values())
        for start, stop, keep in self._runs:  # the last first: what is before it keeps its place
            steps[start:stop] = [partial(_run_chain, steps[start:stop], keep)]
        for step in steps:
            input = step(input)
        return input

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (_alive(self._module), [(start, stop, _names(keep)) for start, stop, keep in self._runs])


def _kept(names: tuple[str, ...]) -> Keep | None:
    return Keep(names) if names else None


def _names(keep: Keep | None) -> tuple[str, ...]:
    return keep.names if keep else ()


def _alive(module: weakref.ref[Any]) -> Any:
    found = module()
    if found is None:
        raise RuntimeError("the module whose forward this is does not exist any more")
    return found


def _run(forward: Callable[..., Any], keep: Keep | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if kwargs:  # not handed to checkpoint(), some of whose arguments could be named alike
        forward = partial(forward, **kwargs)
    if keep is None:
        return checkpoint(forward, *args, use_reentrant=False)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=keep.contexts)


def _run_chain(steps: Sequence[Callable[[Any], Any]], keep: Keep | None, x: Any) -> Any:
    return _run(partial(_chain, steps), keep, (x,), {})


def _chain(steps: Sequence[Callable[[Any], Any]], x: Any) -> Any:
    for step in steps:
        x = step(x)
    return x


def checkpoint_ns() -> tuple[int, int]:
    """Processor time that a checkpoint takes beside what runs in it and runs again, forward and backward together.

    It is measured now, with regions around next to nothing: of a few that save one tensor each, and of one that saves
    as many as they all.

    Returns:
        of each checkpoint, and of each tensor that is saved in it.
    """
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.ones(8, device="cpu", requires_grad=True)
        sine: Callable[[Any], Any] = torch.sin

        def more(regions: Sequence[Callable[[Any], Any]]) -> int:
            """Of these as checkpoints than twice their forwards and once their backwards."""
            checkpoints = [partial(checkpoint, region, use_reentrant=False) for region in regions]
            bare, again, under = (processor_ns(work) for work in (
                lambda: torch.autograd.backward(_chain(regions, x).sum()), lambda: _chain(regions, x),
                lambda: torch.autograd.backward(_chain(checkpoints, x).sum())))
            return max(under - bare - again, 0)

        one, many = more([partial(_chain, [sine] * _SAVES)]), more([sine] * _SAVES)
    each = max(many - one, 0) // (_SAVES - 1)  # as many saves, in more checkpoints
    return each, max(one - each, 0) // _SAVES


_SAVES = 20
