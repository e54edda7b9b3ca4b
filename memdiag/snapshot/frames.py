"""What the stack of an event tells: the operator, the line, and whether it is backward, an optimizer, or workspace.

Stacks are as PyTorch writes them: C++ and Python frames, innermost first, of which either may not have been recorded.
Backward on CUDA runs on threads of autograd's own, so its stacks have no Python frame of the script; without C++ frames
they are empty, and nothing can be told from them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from memdiag.snapshot.data import Frame

_CALL = re.compile(r"at::_ops::(\w+)::call\(")
_UPPER = re.compile(r"_(?=[A-Z][A-Za-z]+)")
_LOWER = ("grad_input", "memory_format", "out", "int", "dim", "vec", "self", "correction", "stable", "dims",
          "tensor_lr", "x_scalar", "n_scalar", "self_scalar", "other_scalar", "periodic", "dtype")
_WHOLE = frozenset(("_add_batch_dim", "_remove_batch_dim", "sparse_dim", "dense_dim", "take_along_dim", "unique_dim",
                    "norm_except_dim", "_sparse_coo_tensor_with_dims", "_sparse_compressed_tensor_with_dims"))
"""Operators whose own names end as names of overloads do."""
_CUBLAS = re.compile(r"at::cuda::(\(anonymous namespace\)::)?(getNewWorkspace|getCUDABlasLtWorkspace|"
                     r"getCurrentCUDABlasHandle|getNewCUDABlasLtWorkspace)\b|CublasLtWorkspace")
_CUDNN = re.compile(r"at::native::(\(anonymous namespace\)::)?(Workspace::Workspace|run_conv_plan|run_fused_conv_plan|"
                    r"raw_cudnn_\w+)\(")
_LIBRARY = re.compile(r"(^|/)(site-packages|dist-packages|lib/python3\.\d+)/|^<frozen |"
                      r"(^|/)torch/(nn|optim|autograd|utils|_\w+|cuda|distributed|fx|func|amp|functional)[/.]")
_OPTIMIZER = re.compile(r"(^|/)torch/optim/(?!lr_scheduler|swa_utils)")
_NOT_STEP = frozenset(("__init__", "add_param_group", "zero_grad", "state_dict", "load_state_dict", "__setstate__"))
_ENGINE = re.compile(r"torch::autograd::(python::Python)?Engine::")
_BACKWARD_FILES = re.compile(r"(^|/)torch/(_tensor|autograd/__init__|autograd/graph)\.py$")
_BACKWARD_NAMES = frozenset(("backward", "grad", "_engine_run_backward"))


@dataclass(frozen=True)
class Place:
    """What a stack tells.

    Attributes:
        operator: the outermost ATen operator, as ``aten::name``: what the script or autograd called; None without one.
        inner: the innermost one, which asked for the memory.
        backward: whether autograd's engine ran it.
        optimizer: whether it is in the step of an optimizer, and in no module that a closure calls there.
        line: file, number and function of the innermost Python frame outside of torch and installed packages.
        workspace: ``cuBLAS`` or ``cuDNN`` where these asked for room to work in.
    """

    operator: str | None
    inner: str | None
    backward: bool
    optimizer: bool
    line: tuple[str, int, str] | None
    workspace: str | None


def place(frames: Sequence[Frame]) -> Place:
    """What a stack tells; of an empty one, nothing."""
    operators = [found for found in (_operator(frame["name"]) for frame in frames) if found]
    python = [frame for frame in frames if is_python(frame)]
    script = (frame for frame in python if not _LIBRARY.search(frame["filename"]))
    first = next(script, None)
    return Place(operators[-1] if operators else None, operators[0] if operators else None, _in_backward(frames),
                 _in_optimizer(python), (first["filename"], first["line"], first["name"]) if first else None,
                 _workspace(frames))


def is_python(frame: Frame) -> bool:
    """Whether a frame is one of Python's: of a file of its, or of code that was made at run time (``<string>``)."""
    name: str = frame["filename"]
    return name.endswith((".py", ".pyx")) or name.startswith("<")


@lru_cache(maxsize=1 << 14)
def _operator(name: str) -> str | None:
    found = _CALL.search(name)
    return "aten::" + without_overload(found[1]) if found else None


def without_overload(name: str) -> str:
    """An operator's name from that of its class in C++, which has the overload's behind it (``add_Tensor``).

    Names of overloads cannot be told from the rest with certainty; one that is not known stays where it is.

    >>> [without_overload(name) for name in ("add_Tensor", "add__Tensor", "sum_dim_IntList", "max_dim", "empty_like")]
    ['add', 'add_', 'sum', 'max', 'empty_like']
    """
    upper = _UPPER.search(name)
    if upper is not None and upper.start() and not name.startswith("_cast_"):
        name = name[:upper.start()]
    ending = next((ending for ending in _LOWER if name.endswith("_" + ending) and name not in _WHOLE), None)
    return name if ending is None else without_overload(name[:-len(ending) - 1])


def _in_backward(frames: Iterable[Frame]) -> bool:
    return any(_ENGINE.match(frame["name"]) or (frame["name"] in _BACKWARD_NAMES
                                                and _BACKWARD_FILES.search(frame["filename"])) for frame in frames)


def _in_optimizer(python: Sequence[Frame]) -> bool:
    for number, frame in enumerate(python):
        if frame["name"] == "_call_impl" or frame["name"] in _BACKWARD_NAMES:
            return False  # a forward or backward, be it in a closure
        if _OPTIMIZER.search(frame["filename"]):
            return frame["name"] not in _NOT_STEP
        # A hand-written optimizer that is no torch.optim.Optimizer. A loop's own step calls modules or a backward.
        if frame["name"] == "step" and number == 0 and not _LIBRARY.search(frame["filename"]):
            return True
    return False


def _workspace(frames: Iterable[Frame]) -> str | None:
    for frame in frames:
        name = frame["name"]
        if name.startswith("at::detail::empty"):
            return None  # a tensor
        if _CUBLAS.search(name):
            return "cuBLAS"
        if _CUDNN.search(name):
            return "cuDNN"
    return None
