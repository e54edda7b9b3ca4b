"""The line of the user's code behind each call of a torch function."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, handle_torch_function

from memdiag.record.frames import user_line
from memdiag.record.marks import LINE, Marks

_overrides: Any = torch.overrides
TRAMPOLINE_NAME = "<memdiag>"
"""Name of the frames that stand in for the user's line; a traceback is better without them."""


class Lines(TorchFunctionMode):
    """Marks each torch function called from Python with its line.

    Known limitations: torch's own modules ask whether any override is active and then leave their fast path, so the
    mode must be off while a forward of torch's runs (:meth:`off`, :meth:`on`).
    """

    def __init__(self, marks: Marks) -> None:
        super().__init__()
        self._marks = marks
        self._recording = False
        self._installed = False
        self.depth = 0

    def start(self) -> None:
        self._recording = True
        if not self._installed:
            self._installed = True
            self.on()

    def pause(self) -> None:
        self._recording = False

    def stop(self) -> None:
        self._recording = False
        if self._installed and self.off():
            self._installed = False

    def off(self) -> bool:
        """Takes the mode off the stack if it is on top. Returns whether it was."""
        if self._installed and _overrides._get_current_function_mode() is self:
            _overrides._pop_mode()
            return True
        return False

    def on(self) -> None:
        if self._installed:
            _overrides._push_mode(self)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if kwargs is None:
            kwargs = {}
        if torch.compiler.is_compiling() or not self._recording or func.__name__ == "__get__":
            return func(*args, **kwargs)
        frame = sys._getframe(1)
        if frame.f_code is _HANDLE and frame.f_back is not None and frame.f_back.f_back is not None:
            # A torch function written in Python asked for overrides: the call is one frame further out.
            frame = frame.f_back.f_back
        self.depth += 1
        try:
            with self._marks.range((LINE, user_line(frame), torch.is_grad_enabled())):
                return _called_from(frame)(func, args, kwargs)
        finally:
            self.depth -= 1


_HANDLE = handle_torch_function.__code__
_TRAMPOLINE = (lambda func, args, kwargs: func(*args, **kwargs)).__code__
_trampolines: dict[tuple[CodeType, int], FunctionType] = {}


def _called_from(frame: FrameType) -> FunctionType:
    """A function that calls another, and looks like the line of ``frame``.

    A warning names the frame that was running, and is shown once for each such line: with a frame of ours in between,
    every line would be the same one.
    """
    site = frame.f_code, frame.f_lineno
    found = _trampolines.get(site)
    if found is None:
        code = _TRAMPOLINE.replace(
            co_filename=site[0].co_filename, co_firstlineno=site[1], co_name=TRAMPOLINE_NAME)
        found = _trampolines[site] = FunctionType(code, frame.f_globals)
    return found
