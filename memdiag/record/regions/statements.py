"""The line in the script's own code that uses a name."""

from __future__ import annotations

import dis
import os
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType

from torch import nn

from memdiag.record.regions.state import code_of

_STORES = ("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF")
_LOADS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_NAME")


def stores(name: str, functions: Iterable[FunctionType]) -> list[str]:
    """``file.py:12`` of the statements that store to an attribute or a variable.

    ``__init__`` is passed over: it runs before all forwards.
    """
    return [line for operation, used, line in _in(functions) if used == name and operation in _STORES]


def uses(name: str, functions: Iterable[FunctionType]) -> list[str]:
    """``file.py:12`` of the statements that use an attribute or a variable outside the function."""
    return [line for operation, used, line in _in(functions) if used == name and operation in _LOADS]


def uses_of_local(name: str, functions: Iterable[FunctionType]) -> list[str]:
    """``file.py:12`` of the statements that use an argument or a variable of the function."""
    return [line for operation, used, line in _in(functions)
            if used == name and operation.startswith(("LOAD_FAST", "LOAD_DEREF"))]


def _in(functions: Iterable[FunctionType]) -> Iterator[tuple[str, str, str]]:
    for function in functions:
        if function.__name__ != "__init__":
            yield from _uses(function.__code__)


def _uses(code: CodeType) -> Iterator[tuple[str, str, str]]:
    """Operations of the bytecode on names, with their lines."""
    file, number = os.path.abspath(code.co_filename), code.co_firstlineno
    for instruction in dis.get_instructions(code):
        starts = instruction.starts_line
        # From Python 3.13 on `starts_line` is whether one starts here.
        at = getattr(instruction, "line_number", None) if isinstance(starts, bool) else starts
        number = at or number
        # Several at once have a tuple of names.
        for name in instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,):
            if isinstance(name, str):
                yield instruction.opname, name, f"{file}:{number}"
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _uses(const)


def how_often(name: str, function: FunctionType) -> list[str]:
    """The lines on which a function asks for an attribute, one for each time."""
    return [line for operation, used, line in _uses(function.__code__) if used == name and operation == "LOAD_ATTR"]


def definition(function: FunctionType) -> str:
    return f"{os.path.abspath(function.__code__.co_filename)}:{function.__code__.co_firstlineno}"


def forward_line(module: nn.Module) -> str | None:
    """The line where the forward of a module is defined, where that is in the script."""
    return next((definition(f) for f in code_of(type(module)) if f.__name__ == "forward"), None)
