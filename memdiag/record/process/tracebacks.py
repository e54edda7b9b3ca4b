"""Tracebacks as they would be without the recording."""

from __future__ import annotations

import os
import sys
from types import CodeType, TracebackType

from memdiag.record.patch import UNCOUNTED

_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_IMPORTING = "<frozen importlib."
_AROUND_TORCH = "execute_and_start"  # in late.py: around the code of torch as it is imported


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
    """A traceback without the frames that the recording added."""
    frames: list[TracebackType] = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    frames = _without_importing(frames)
    if {"torch", "memdiag.record.recorder"} <= sys.modules.keys():  # torch is not there where its import was broken off
        from memdiag.record.process.detours import without_detours

        frames = without_detours(frames)
    result: TracebackType | None = None
    for entry in reversed(frames):
        if not _is_ours(entry.tb_frame.f_code):
            result = TracebackType(result, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return result


def _is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(_OWN) or code.co_filename == UNCOUNTED


def _without_importing(frames: list[TracebackType]) -> list[TracebackType]:
    """Without the import system's frames that lead to ours, which stands around the code of torch.

    Python leaves the import system's own out where what is imported fails, but looks no further than that frame.
    """
    kept: list[TracebackType] = []
    for at, entry in enumerate(frames):
        code = entry.tb_frame.f_code
        following = frames[at + 1].tb_frame.f_code.co_filename if at + 1 < len(frames) else ""
        if code.co_name == _AROUND_TORCH and _is_ours(code) and not following.startswith(_IMPORTING):
            while kept and kept[-1].tb_frame.f_code.co_filename.startswith(_IMPORTING):
                kept.pop()
        kept.append(entry)
    return kept
