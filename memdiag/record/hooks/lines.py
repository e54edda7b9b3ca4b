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
from memdiag.record.patch import uncounted

_overrides: Any = torch.overrides
TRAMPOLINE_NAME = "<memdiag>"
"""Name of the frames that stand in for the user's line; a traceback is better without them."""


class Lines(TorchFunctionMode):
    """Marks each torch function called from Python with its line.

    Inside a step of torch's own optimizers every line is that of the step, which its mark tells: ``quiet`` then.

    Known limitations: torch's own modules ask whether any override is active and then leave their fast path, so the
    mode must be off while a forward of torch's runs (:meth:`off`, :meth:`on`).
    """

    def __init__(self, marks: Marks) -> None:
        super().__init__()
        self._marks = marks
        self._recording = False
        self._installed = False
        self._open: list[list[Any]] = []  # of each call that goes on: its mark, and what the mark says
        self.quiet = False
        self.called: Callable[[Any, tuple[Any, ...], dict[str, Any], FrameType], None] | None = None  # before each

    @property
    def depth(self) -> int:
        return len(self._open)

    def suspend(self) -> None:
        """Closes the marks of the calls that go on, for a cut of the stream in their midst."""
        for call in reversed(self._open):
            call[0].__exit__(None, None, None)

    def resume(self) -> None:
        """Opens them again, in the next chunk."""
        for call in self._open:
            call[0] = self._marks.range(call[1])
            call[0].__enter__()

    def start(self) -> None:
        self.pause()
        self._recording = True

    def pause(self) -> None:
        """Marks nothing, but has its place: a later start must not come on top of a mode that the script is inside of,
        whose exit would take ours off the stack."""
        self._recording = False
        if not self._installed:
            self._installed = True
            self.on()

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

    def on_inside(self) -> bool:
        """Puts the mode on for Python code that a torch function calls: the call had taken it off.

        Returns:
            Whether it was off; then :meth:`off` is due at the end.
        """
        if not self._installed or self in _overrides._get_current_function_mode_stack():
            return False
        self.on()
        return True

    @uncounted
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if kwargs is None:
            kwargs = {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        frame = sys._getframe(1)
        if frame.f_code is _HANDLE and frame.f_back is not None and frame.f_back.f_back is not None:
            # A torch function written in Python asked for overrides: the call is one frame further out.
            frame = frame.f_back.f_back
        if not self._recording or self.quiet or func.__name__ in _NO_WORK:
            return _called_from(frame)(func, args, kwargs)
        if self.called is not None:
            self.called(func, args, kwargs, frame)
        entry = LINE, user_line(frame), torch.is_grad_enabled()
        call = [self._marks.range(entry), entry]
        self._open.append(call)
        call[0].__enter__()
        try:
            return _called_from(frame)(func, args, kwargs)
        finally:
            self._open.pop()[0].__exit__(None, None, None)


# Attributes, and what says how the next functions run: nothing is made by these, and no phase begins with them.
_NO_WORK = frozenset((
    "__get__", "_set_grad_enabled", "_record_function_enter_new", "_record_function_exit._RecordFunction"))

_HANDLE = handle_torch_function.__code__
_TRAMPOLINE = (lambda func, args, kwargs: func(*args, **kwargs)).__code__
_trampolines: dict[tuple[int, int], tuple[CodeType, CodeType]] = {}  # by id of the code, kept with it, and line
_MOST_TRAMPOLINES = 50_000


def _called_from(frame: FrameType) -> FunctionType:
    """A function that calls another, and looks like the line of ``frame``.

    A warning names the frame that was running, and is shown once for each such line: with a frame of ours in between,
    every line would be the same one.
    """
    code, line = frame.f_code, frame.f_lineno
    found = _trampolines.get((id(code), line))
    if found is None:
        if len(_trampolines) >= _MOST_TRAMPOLINES:
            _trampolines.clear()
        looks_like = _TRAMPOLINE.replace(
            co_filename=code.co_filename, co_firstlineno=line, co_name=TRAMPOLINE_NAME)
        found = _trampolines[id(code), line] = looks_like, code
    # The function is not kept: it would keep the globals, and all that the script has there, alive.
    return FunctionType(found[0], frame.f_globals)
