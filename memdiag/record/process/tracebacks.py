"""Tracebacks as they would be without the recording."""

from __future__ import annotations

import dis
import functools
import linecache
import os
from types import CodeType, TracebackType

from torch import nn
from torch.overrides import handle_torch_function

from memdiag.record.hooks.lines import TRAMPOLINE_NAME
from memdiag.record.hooks.modules import other_global_hooks

_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_HANDLE = handle_torch_function.__code__
_CALL_IMPL = nn.Module._call_impl.__code__
_OWN_HOOKS = ("_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks")


def clean(error: BaseException) -> None:
    """Takes the frames that the recording added out of an exception's traceback, and of those it is chained to."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = cleaned(one.__traceback__)
        waiting += [one.__cause__, one.__context__, *getattr(one, "exceptions", ())]


def cleaned(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames that the recording added.

    Those are: our own; the second call of a torch function written in Python, which had asked for overrides; and the
    long way through a module's call, which global hooks cause.
    """
    frames: list[TracebackType] = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    kept: list[TracebackType] = []
    overridden = False
    for entry in frames:
        code = entry.tb_frame.f_code
        if code.co_filename.startswith(_OWN) or code.co_name == TRAMPOLINE_NAME:
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
    result: TracebackType | None = None
    for entry in reversed(kept):
        result = TracebackType(result, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return result


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
