"""Operators whose results a selective checkpoint keeps."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from statistics import median_low
from time import process_time_ns
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from memdiag.errors import MemdiagError


class Keep:
    """What is kept of a region.

    Args:
        names: of operators, with an overload or without: ``aten::mm``, ``aten::add.Tensor``, ``aten.mm.default``.

    Attributes:
        operators: their overloads.
        contexts: what ``checkpoint()`` takes as ``context_fn``.

    Raises:
        MemdiagError: PyTorch has no such operator, or its result cannot be kept.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.operators = [operator for name in names for operator in _resolved(name)]
        self.contexts = partial(create_selective_checkpoint_contexts, _policy(self.operators))


def _policy(operators: list[Any]) -> Callable[..., CheckpointPolicy]:
    """Keeps these; a plain function, for that is what torch.compile can read."""
    dropout = {operator: _position(operator, "dropout_p") for operator in operators}

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator not in dropout:
            return CheckpointPolicy.PREFER_RECOMPUTE
        if _drops_out(dropout[operator], args, kwargs):
            raise MemdiagError(f"{operator.name()}: cannot be kept with dropout: {_SHIFTS}")
        return CheckpointPolicy.MUST_SAVE

    return policy


_SHIFTS = "random numbers that are not drawn again would shift those of the operators that are run again"


def _resolved(name: str) -> list[Any]:
    """The overloads of an operator whose results can be kept."""
    parts = name.removeprefix("torch.ops.").replace("::", ".").split(".")
    found: Any = torch.ops
    try:
        if len(parts) not in (2, 3) or not all(part.isidentifier() for part in parts):
            raise AttributeError(name)
        for part in parts:
            found = getattr(found, part)
    except AttributeError as error:
        raise MemdiagError(f"{name}: PyTorch has no such operator; operators to keep are named as aten::mm or "
                           "aten.mm.default") from error
    overloads = [found] if len(parts) == 3 else [getattr(found, overload) for overload in found.overloads()]
    # Some are TorchScript's alone.
    overloads = [overload for overload in overloads if torch._C._dispatch_has_kernel(overload.name())]
    pure = [overload for overload in overloads if not overload._schema.is_mutable]
    if not pure:
        raise MemdiagError(f"{name}: writes to its arguments, so its result cannot be kept")
    kept = [overload for overload in pure if not _is_made_of_others(overload)]
    if not kept:
        raise MemdiagError(f"{name}: is made of other operators, and only these can be kept; name them (such as "
                           "aten::addmm and aten::mm for aten::linear)")
    if any(_is_random(one) for one in kept):
        raise MemdiagError(f"{name}: cannot be kept, for it is random: {_SHIFTS}")
    return kept


def can_be_kept(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the result of a call of an overload can be kept, and by the operator's name."""
    return _by_name(str(operator._schema.name)) and not _drops_out(_position(operator, "dropout_p"), args, kwargs)


@cache
def _by_name(name: str) -> bool:
    try:
        return bool(_resolved(name))
    except MemdiagError:
        return False


def _drops_out(position: int | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return position is not None and bool(args[position] if len(args) > position else kwargs.get("dropout_p", 0.0))


def _is_random(operator: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in operator.tags and _position(operator, "dropout_p") is None


def _is_made_of_others(operator: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CompositeImplicitAutograd")


def _position(operator: Any, argument: str) -> int | None:
    names = [one.name for one in operator._schema.arguments]
    return names.index(argument) if argument in names else None


def keeping_ns() -> int:
    """Time that an operator of a region takes longer where the region keeps others, forward and backward together.

    PyTorch then calls each operator by way of Python. It is processor time, measured now.
    """
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.ones(8, device="cpu", requires_grad=True)

        def run(**options: Any) -> None:
            checkpoint(_chain, x, use_reentrant=False, preserve_rng_state=False, **options).sum().backward()

        contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
        more = processor_ns(partial(run, context_fn=contexts)) - processor_ns(run)
    return max(more, 0) // _OPERATORS


def processor_ns(work: Callable[[], None]) -> int:
    """Processor time of the process that some work takes: the median of a few times."""

    def took() -> int:
        start = process_time_ns()
        work()
        return process_time_ns() - start

    return median_low(took() for _ in range(_TIMES))


_OPERATORS, _TIMES = 50, 9


def _chain(x: torch.Tensor) -> torch.Tensor:
    for _ in range(_OPERATORS):
        x = x.sin()
    return x
