"""The longer ways that calls into torch take under recording, as frames of a traceback."""

from __future__ import annotations

import dis
import functools
import linecache
from types import CodeType, TracebackType

from torch import nn
from torch.overrides import handle_torch_function

from memdiag.record.frames import is_ours
from memdiag.record.hooks.lines import TRAMPOLINE_NAME
from memdiag.record.hooks.modules import other_global_hooks

_HANDLE = handle_torch_function.__code__
_CALL_IMPL = nn.Module._call_impl.__code__
_OWN_HOOKS = ("_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks")


def without_detours(frames: list[TracebackType]) -> list[TracebackType]:
    """The frames without the second call of a torch function written in Python, which had asked for overrides, and
    without the long way through a module's call, which global hooks cause."""
    kept: list[TracebackType] = []
    overridden = False
    for entry in frames:
        code = entry.tb_frame.f_code
        if is_ours(code) or code.co_name == TRAMPOLINE_NAME:
            overridden = overridden or code.co_name == TRAMPOLINE_NAME
            continue
        if overridden:
            overridden = False
            if len(kept) >= 2 and kept[-1].tb_frame.f_code is _HANDLE and kept[-2].tb_frame.f_code is code:
                del kept[-2:]
        if kept and kept[-1].tb_frame.f_code is _CALL_IMPL and code.co_filename == _CALL_IMPL.co_filename:
            if code.co_name == "inner" and _only_ours(kept[-1]):
                kept[-1] = _short_way(kept[-1])
                continue
        kept.append(entry)
    return kept


def _only_ours(entry: TracebackType) -> bool:
    """Whether the module of a ``_call_impl`` frame has no hooks of its own, nor the script global ones."""
    module = entry.tb_frame.f_locals.get("self")
    return not any(getattr(module, name, None) for name in _OWN_HOOKS) and not other_global_hooks()


def _short_way(entry: TracebackType) -> TracebackType:
    place = _call_of_forward(entry.tb_frame.f_code)
    if place is None:
        return entry
    return TracebackType(None, entry.tb_frame, *place)


@functools.cache
def _call_of_forward(code: CodeType) -> tuple[int, int] | None:
    """Instruction and line where ``_call_impl`` calls forward when there are no hooks; None if it looks different."""
    line = None
    for instruction in dis.get_instructions(code):
        if instruction.starts_line is not None:
            line = instruction.starts_line if not isinstance(instruction.starts_line, bool) else _line(instruction)
        if line is not None and instruction.opname.startswith("CALL") and "return forward_call(" in linecache.getline(
            code.co_filename, line
        ):
            return instruction.offset, line
    return None


def _line(instruction: dis.Instruction) -> int | None:
    # From Python 3.13 on `starts_line` only says whether, and `line_number` which.
    number: int | None = getattr(instruction, "line_number", None)
    return number
