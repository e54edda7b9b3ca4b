"""Which line of the user's own code is running."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import sysconfig
from collections.abc import Hashable
from types import CodeType, FrameType
from typing import Any

import torch

from memdiag.record.patch import UNCOUNTED

_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_STDLIB = tuple({os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib")})
_PACKAGES = tuple({os.path.join(sysconfig.get_path(name), "") for name in ("purelib", "platlib")})

_USER, _LIBRARY, _HIDDEN = 2, 1, 0
# By id, since hashing a code object takes microseconds: its code is kept with it, so that the id stays its own.
_seen: dict[int, tuple[int, CodeType]] = {}
_texts: dict[tuple[int, int], str] = {}
_CELL = "<ipython-input"  # of a notebook: the user's own
_MOST_CODES = 50_000  # scripts may make code as they go


def _rank(code: CodeType) -> int:
    """How much a line of this code tells a user: their own code most, a library's some, the machinery nothing."""
    rank = _rank_of(code.co_filename)
    if len(_seen) >= _MOST_CODES:
        _seen.clear()
        _texts.clear()
    _seen[id(code)] = rank, code
    return rank


def _rank_of(file: str) -> int:
    if file.startswith("<") and not file.startswith(_CELL):
        return _HIDDEN  # code that was generated, or typed: there is no file to look into
    if file.startswith((_OWN, _TORCH)) or _is_compiled(file):
        return _HIDDEN
    if file.startswith(_PACKAGES):
        return _LIBRARY
    if file.startswith(_STDLIB):
        return _HIDDEN
    return _USER


def _is_compiled(file: str) -> bool:
    """Whether a file is one that torch.compile wrote, in the place of the user's code."""
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")  # torch sets it, where nobody has, before it writes any
    return folder is not None and file.startswith(os.path.join(os.path.abspath(folder), ""))


def is_users(file: str) -> bool:
    """Whether a file is neither torch's, nor the standard library's, nor an installed package's, nor ours."""
    return _rank_of(file) == _USER


@functools.cache
def holds_state(kind: Hashable) -> bool:
    """Whether objects of a class may be looked into: it is the script's, or an installed package's."""
    module = str(kind.__module__)
    file = getattr(sys.modules.get(module), "__file__", None)
    return module == "__main__" or (file is not None and _rank_of(file) != _HIDDEN)


def user_line(frame: FrameType | None) -> str | None:
    """``file.py:12`` of the nearest frame outside torch, the standard library and installed packages.

    Where every frame is in installed packages (``-m package.train`` of an installed one), the nearest of those;
    None where there is neither.
    """
    library: FrameType | None = None
    while frame is not None:
        code = frame.f_code
        seen = _seen.get(id(code))
        rank = _rank(code) if seen is None else seen[0]
        if rank == _USER:
            return _text(code, frame.f_lineno)
        if rank == _LIBRARY and library is None:
            library = frame
        frame = frame.f_back
    return None if library is None else _text(library.f_code, library.f_lineno)


def _text(code: CodeType, line: int) -> str:
    """``file.py:12``; the code must be one that ``_seen`` keeps."""
    text = _texts.get((id(code), line))
    if text is None:
        text = _texts[id(code), line] = f"{os.path.abspath(code.co_filename)}:{line}"
    return text


def in_torch(code: CodeType) -> bool:
    """Whether code belongs to torch itself."""
    return code.co_filename.startswith(_TORCH)


def is_ours(code: CodeType) -> bool:
    """Whether code belongs to this package."""
    return code.co_filename.startswith(_OWN) or code.co_filename == UNCOUNTED


_torchs: dict[type, bool] = {}


def forward_is_torchs(module: type) -> bool:
    """Whether a module class takes its forward from torch."""
    found = _torchs.get(module)
    if found is None:
        # Statically: scripted modules have descriptors that do not like to be looked at.
        code = getattr(inspect.getattr_static(module, "forward", None), "__code__", None)
        found = _torchs[module] = isinstance(code, CodeType) and in_torch(code)
    return found


def step_is_torchs(optimizer: type) -> bool:
    """Whether an optimizer class takes its step from torch."""
    step = inspect.getattr_static(optimizer, "step", None)
    code = getattr(inspect.unwrap(step) if callable(step) else step, "__code__", None)
    return isinstance(code, CodeType) and in_torch(code)


def inside_torch_call(frame: FrameType | None) -> bool:
    """Whether torch code that may hold an operator open called us: a custom Function, a custom operator, jit.

    Module calls, optimizers and context managers keep no operator open.
    """
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_TORCH) and name[len(_TORCH) :].startswith(_HOLDING) and not name.endswith(_NOT_HOLDING):
            return True
        frame = frame.f_back
    return False


_NOT_HOLDING = os.sep + "functional_call.py"  # a module call with other parameters
_HOLDING = tuple(
    part.replace("/", os.sep)
    for part in (
        "autograd/function.py", "_ops.py", "_library/", "library.py", "jit/", "_functorch/", "_higher_order_ops/")
)


def defines(owner: type, line: str) -> bool:
    """Whether a line of code, ``file.py:12``, is inside a method of a class."""
    file, _, number = line.rpartition(":")
    for method in vars(owner).values():
        code = getattr(inspect.unwrap(method) if callable(method) else method, "__code__", None)
        if code is not None and os.path.abspath(code.co_filename) == file:
            lines = [at for _, _, at in code.co_lines() if at is not None]
            if min(lines) <= int(number) <= max(lines):
                return True
    return False


def locals_of(frame: FrameType) -> dict[str, Any]:
    """A copy of a frame's variables, leaving nothing behind that would keep them alive.

    Before Python 3.13 a function's frame keeps the dictionary it shows, and with it every tensor in it, until the
    function returns. It is emptied here, unless somebody else has asked for it too (``locals()``).
    """
    shown = frame.f_locals
    copied = dict(shown)
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED and sys.getrefcount(shown) <= 3:
        shown.clear()
    return copied
