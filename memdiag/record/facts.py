"""What the hooks hand to the consumer: small values, no live objects."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from memdiag.trace import Role

P = ParamSpec("P")
R = TypeVar("R")
_STRIDED = torch.strided  # looked up once: this is asked for every tensor that autograd saves


def plain(hook: Callable[P, R]) -> Callable[P, R]:
    """Runs a hook of ours outside every torch function override, our own line marks included."""

    @functools.wraps(hook)
    def without_overrides(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch._C.DisableTorchFunction():
            return hook(*args, **kwargs)

    return without_overrides


class Claim(NamedTuple):  # hundreds are made in every step: a frozen dataclass takes thrice as long
    """A live object says what a storage is.

    Attributes:
        address: of the storage, or of any byte in it.
        bytes: of the storage.
        device: "cpu", "cuda:0"…
        foreign: the storage is not PyTorch's own (NumPy's, or mapped from a file).
        from_birth: the claim holds for the whole life of the allocation, not from now on.
    """

    role: Role
    address: int
    bytes: int
    device: str
    name: str | None
    proof: str
    foreign: bool = False
    from_birth: bool = True


def claim(tensor: torch.Tensor, role: Role, name: str | None, proof: str, from_birth: bool = True) -> Claim | None:
    """The claim that a tensor's storage makes; None where it has no storage of its own to speak of."""
    found = storage_of(tensor)
    if found is None:
        return None
    address, size, foreign = found
    return Claim(role, address, size, device_name(tensor.device), name, proof, foreign, from_birth)


@functools.cache
def device_name(device: torch.device) -> str:
    """"cpu", "cuda:0"…"""
    return str(device)


def innermost(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor whose memory it is: for a wrapper what it wraps, such as a sharded tensor's own part; else itself."""
    while type(tensor) is not torch.Tensor and is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        if not names:
            break
        tensor = getattr(tensor, names[0])
    return tensor


def storage_of(tensor: torch.Tensor) -> tuple[int, int, bool] | None:
    """Address, bytes and whether it is foreign; None for tensors without a storage (meta, sparse, wrappers)."""
    if type(tensor) is not torch.Tensor:
        tensor = innermost(tensor)
    try:
        if tensor.layout is not _STRIDED or tensor.is_meta:
            return None
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
    except (NotImplementedError, RuntimeError):  # wrapper subclasses, fake tensors, those of transforms that have ended
        return None
    size = storage.nbytes()
    return (address, size, not storage.resizable()) if address and size else None


def all_tensors() -> list[torch.Tensor]:
    """Every tensor that Python's garbage collector knows."""
    things = gc.get_objects()
    # type(), not isinstance(): some objects answer for what they stand for, and wake up when asked.
    types = {kind for kind in set(map(type, things)) if issubclass(kind, torch.Tensor)}
    return [thing for thing in things if type(thing) in types]


@dataclass(slots=True)
class ModuleCall:
    """One call of a module.

    Attributes:
        path: qualified name, as a report prints it.
        call: number of this call among those of the module, from 0.
        grad: autograd was recording.
        recompute: the call came from inside backward.
        line: of the user's code that led to the call.
        outermost: no other module call encloses it.
        start_ns, end_ns: set for outermost calls, which light recording sees too.
        row: the consumer's row of the call, once it has begun.
        cut: the chunk ends and the call goes on.
        arguments: addresses of the storages that it is given, where they are asked for.
    """

    path: str
    call: int
    grad: bool
    recompute: bool
    line: str | None
    outermost: bool
    start_ns: int = 0
    end_ns: int = 0
    row: list[Any] | None = None
    cut: bool = False
    arguments: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor that autograd packed."""

    id: int
    address: int
    storage_bytes: int
    foreign: bool
    device: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    bytes: int
    requires_grad: bool
    leaf: bool
    line: str | None


@dataclass(slots=True)
class StepEnd:
    """A step that may close here: whether it does may be known only some optimizer steps later.

    Attributes:
        read: the stream was read past it, and it had not closed: it never will.
    """

    closes: bool = True
    read: bool = False
    host_rss: int = -1
    input_shapes: str | None = None
    device_stats: list[tuple[str, str, int]] = field(default_factory=list)


@dataclass(slots=True)
class SaveTimes:
    """When the tensors that autograd keeps came and went, in one chunk.

    Attributes:
        packed: (time, address, whether it has a history), in light recording; full recording marks each in the stream.
        unpacked, released: (save, time).
    """

    packed: list[tuple[int, int, bool]] = field(default_factory=list)
    unpacked: list[tuple[int, int]] = field(default_factory=list)
    released: list[tuple[int, int]] = field(default_factory=list)
