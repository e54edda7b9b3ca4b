"""Where chains of references end: variables of running functions, of modules, of classes, of waiting generators."""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Container
from dataclasses import dataclass
from types import AsyncGeneratorType, CodeType, CoroutineType, FrameType, GeneratorType, ModuleType
from typing import Any

import torch

from memdiag.record.frames import in_torch, is_ours, locals_of
from memdiag.record.hooks.lines import TRAMPOLINE_NAME

LOCAL, GLOBAL, CLASS, GENERATOR = "local", "global", "class", "generator"
_WAITING = (GeneratorType, CoroutineType, AsyncGeneratorType)


@dataclass(frozen=True)
class Root:
    """A place that lives as long as what it belongs to, whatever else goes.

    Attributes:
        kind: LOCAL, GLOBAL, CLASS or GENERATOR.
        name: of the variable, for a local one; of the module, the class or the generator's function.
        code: of the function, where there is one.
        file: of the code.
        line: that runs now, where something runs; 0 where nothing does.
        argument: the variable is an argument: the caller has it too.
        value: the variable refers to a tensor, or a tuple: it was bound to it and not changed since.
    """

    kind: str
    name: str
    code: CodeType | None = None
    file: str | None = None
    line: int = 0
    argument: bool = False
    value: bool = False

    @property
    def text(self) -> str:
        if self.kind == LOCAL:
            return f"{self.name} in {self.code.co_name if self.code else '?'}()"
        if self.kind == GLOBAL:
            return f"a global of {self.name}"
        return f"class {self.name}" if self.kind == CLASS else f"the generator {self.name}()"


class Roots:
    """The roots of this moment. It keeps no reference to what they hold.

    Args:
        wanted: ids of objects that variables are looked for, whether the collector knows them or not.
    """

    def __init__(self, wanted: Container[int] = ()) -> None:
        self._wanted = wanted
        self._local: dict[int, list[Root]] = {}
        self._shared: dict[int, Root] = {}
        self.running: set[int] = set()  # frames
        for name, module in list(sys.modules.items()):
            if isinstance(module, ModuleType) and not name.startswith("memdiag."):
                # The script's own is there under two names.
                self._shared.setdefault(
                    id(vars(module)), Root(GLOBAL, name, file=getattr(module, "__file__", None)))
        for frame in sys._current_frames().values():
            running: FrameType | None = frame
            while running is not None:
                self._look_at(running)
                running = running.f_back
        # A frame that refers to itself, and all that its callers' frames hold, would live until the next collection.
        del frame

    def _look_at(self, frame: FrameType) -> None:
        self.running.add(id(frame))
        code = frame.f_code
        if is_ours(code) or in_torch(code) or code.co_name == TRAMPOLINE_NAME:
            return
        if not code.co_flags & inspect.CO_OPTIMIZED:
            if code.co_name == "<module>":
                name = str(frame.f_globals.get("__name__"))
                self._shared[id(frame.f_globals)] = Root(GLOBAL, name, file=code.co_filename, line=frame.f_lineno)
            return
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        for name, value in locals_of(frame).items():
            if gc.is_tracked(value) or id(value) in self._wanted:
                self._local.setdefault(id(value), []).append(Root(
                    LOCAL, name, code, code.co_filename, frame.f_lineno, name in arguments,
                    isinstance(value, (torch.Tensor, tuple))))

    def bound_to(self, thing: Any) -> list[Root]:
        """Variables of running functions that refer to a thing: the innermost function's first."""
        return self._local.get(id(thing), [])

    def that_is(self, thing: Any) -> Root | None:
        """The root that a thing is: a module's variables, a class, a generator."""
        if isinstance(thing, dict):
            return self._shared.get(id(thing))
        if isinstance(thing, type):
            return Root(CLASS, thing.__qualname__)
        code = code_of(thing) if isinstance(thing, _WAITING) else None
        return None if code is None else Root(GENERATOR, code.co_name, code, code.co_filename)

    def ends(self, thing: Any) -> bool:
        """Whether what refers to a thing is no further news: it lives as long as the program, or its class."""
        return isinstance(thing, (type, ModuleType)) or isinstance(thing, dict) and id(thing) in self._shared


def code_of(generator: Any) -> CodeType | None:
    """The code of a generator, a coroutine or an asynchronous generator."""
    found: CodeType | None = _attribute(generator, "code")
    return found


def frame_of(generator: Any) -> FrameType | None:
    """The frame in which a generator, a coroutine or an asynchronous generator waits; None where it has ended."""
    found: FrameType | None = _attribute(generator, "frame")
    return found


def _attribute(generator: Any, name: str) -> Any:
    return next((found for kind in ("gi", "cr", "ag") if (found := getattr(generator, f"{kind}_{name}", None))), None)
