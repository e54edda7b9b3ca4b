"""Where the script calls modules: lines of the trace, and the call expressions that stand there."""

from __future__ import annotations

import ast
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from memdiag.errors import MemdiagError
from memdiag.trace import NONE, Kind
from memdiag.trace.model import GRAD_ON, RECOMPUTE
from memdiag.trace.models import Model, model_of, models
from memdiag.trace.places import at
from memdiag.trace.view import View


@dataclass(frozen=True)
class Called:
    """A module that is called from a line of the script.

    Attributes:
        path: of the module.
        relative: its names below the module whose forward has the line; None where it is not below that.
        owner: path of the module whose forward has the line.
    """

    path: str
    relative: tuple[str, ...] | None
    owner: str | None


@dataclass(frozen=True)
class Sites:
    """Calls of modules, with gradients on, in a run.

    Attributes:
        by_line: what code of the script calls, by ``(file, line)``, in the order of the first calls.
        elsewhere: modules that code of PyTorch or of a library calls, as an ``nn.Sequential`` does.
        paths: of all modules, in the order of their first calls.
    """

    by_line: dict[tuple[str, int], list[Called]]
    elsewhere: frozenset[str]
    paths: list[str]

    def of(self, path: str) -> list[tuple[str, int]]:
        """The lines that call a module."""
        return [line for line, called in self.by_line.items() if any(one.path == path for one in called)]


def sites(run: View) -> Sites:
    """Read off a recording in full."""
    trace, nest = run.trace, run.nest
    spans, known = trace["spans"], models(trace.about)
    mine = (spans["kind"] == Kind.MODULE) & (spans["flags"] & GRAD_ON != 0) & (spans["flags"] & RECOMPUTE == 0)
    rows = np.flatnonzero(mine)
    parents = np.array([trace.span_row(int(parent)) for parent in spans["parent"][rows]], dtype=np.int64)
    around = nest.of(nest.module, parents)
    owners, outermost = at(spans["name"], around), at(nest.outer_module, around) == around
    lines, around_lines = spans["line"][rows], at(spans["line"], around)
    by_line: dict[tuple[str, int], dict[Called, None]] = defaultdict(dict)
    elsewhere = set()
    for name, line, owner, outer, around_line in dict.fromkeys(zip(
            spans["name"][rows].tolist(), lines.tolist(), owners.tolist(), outermost.tolist(), around_lines.tolist(),
            strict=True)):
        path, text = trace.text[name], trace.string(line)
        if text is None or (owner != NONE and line == around_line):
            elsewhere.add(path)  # the line is that of a call further out
            continue
        file, _, number = text.rpartition(":")
        by_line[file, int(number)][_called(path, trace.string(owner), bool(outer), known)] = None
    paths = [trace.text[name] for name in dict.fromkeys(spans["name"][rows].tolist())]
    return Sites({line: list(called) for line, called in by_line.items()}, frozenset(elsewhere), paths)


def _called(path: str, owner: str | None, outermost: bool, known: list[Model]) -> Called:
    relative: str | None = None
    if owner is not None and path.startswith(f"{owner}."):
        relative = path[len(owner) + 1:]
    elif owner is not None and outermost:  # a model goes by the name of its class; what is in it, without that
        model = model_of(path, known)
        relative = path if model is None else model.relative(path)
    return Called(path, None if relative is None else tuple(relative.split(".")), owner)


@dataclass(frozen=True)
class Way:
    """How a called expression comes to a module.

    Attributes:
        names: below ``self``; None for one that an index or a loop chooses.
        choice: the container of what is chosen, as an expression; None where nothing is.
        keyed: whether that is a dictionary.
    """

    names: tuple[str | None, ...]
    choice: ast.expr | None = None
    keyed: bool = False

    def leads_to(self, called: Called) -> bool:
        return called.relative is not None and len(called.relative) == len(self.names) and all(
            name in (None, there) for name, there in zip(self.names, called.relative, strict=True))


@dataclass(frozen=True)
class Call:
    """A call expression.

    Attributes:
        way: None where it is not known what it calls.
        modules: that it was seen to call.
    """

    node: ast.Call
    way: Way | None
    modules: list[Called]


class Source:
    """A file of the script's, as it is now.

    Attributes:
        text: of the file, with its own ends of lines.
    """

    def __init__(self, path: str) -> None:
        """
        Raises:
            MemdiagError: it cannot be read, or is no Python.
        """
        self.path = path
        try:
            with open(path, encoding="utf-8", newline="") as file:
                self.text = file.read()
            self.tree = ast.parse(self.text)
        except OSError as error:
            raise MemdiagError(f"{path}: {error.strerror}; the run was recorded with it") from error
        except (SyntaxError, ValueError) as error:
            raise MemdiagError(f"{path}: is not Python that can be read ({error})") from error

    @cached_property
    def lines(self) -> list[bytes]:
        return self.text.encode().splitlines(keepends=True)

    @cached_property
    def end_of_line(self) -> str:
        return "\r\n" if "\r\n" in self.text else "\n"

    def free(self, name: str) -> str:
        """A name that nothing in the file has."""
        while name in self.names:
            name += "_"
        return name

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        return {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    @cached_property
    def names(self) -> set[str]:
        """All names that are used or bound in the file."""
        found = set()
        for node in ast.walk(self.tree):
            for part in ("id", "arg", "name", "asname"):
                found.add(getattr(node, part, None))
        return {name for name in found if isinstance(name, str)}

    def imported(self, module: str, name: str) -> str | None:
        """What something goes by that the file imports at its outermost level; None where it does not."""
        for node in self.tree.body:
            if isinstance(node, ast.ImportFrom) and node.module == module and not node.level:
                for alias in node.names:
                    if alias.name == name:
                        return alias.asname or alias.name
            elif isinstance(node, ast.Import) and module == name and any(
                    alias.name == name and alias.asname is None for alias in node.names):
                return name
        return None

    def position(self, line: int, column: int) -> int:
        """The place in the encoded text of a line, from 1, and a column of the syntax tree."""
        return sum(len(one) for one in self.lines[:line - 1]) + column

    def start(self, node: ast.expr | ast.stmt) -> int:
        return self.position(node.lineno, node.col_offset)

    def end(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.position(node.end_lineno, node.end_col_offset)

    def text_of(self, node: ast.expr | ast.stmt) -> str:
        return self.text.encode()[self.start(node):self.end(node)].decode()

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """What encloses a node, innermost first."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def calls(self, line: int, called: list[Called]) -> list[Call]:
        """The calls of modules on a line: each call expression that is known, by its names, to lead to one of them; or
        the only one there is.

        Raises:
            MemdiagError: there is none, or none that must be it.
        """
        there = [node for node in ast.walk(self.tree) if isinstance(node, ast.Call) and line in _lines(node)]
        found = []
        for node in there:
            way = self._way(node.func)
            modules = [one for one in called if way is not None and way.leads_to(one)]
            if modules:
                found.append(Call(node, way, modules))
        left = [one for one in called if not any(one in call.modules for call in found)]
        if not left:
            return found
        if not found and len(there) == 1 and self._way(there[0].func) is None:
            return [Call(there[0], None, called)]
        where = f"{self.path}:{line}"
        paths = ", ".join(dict.fromkeys(one.path for one in left))
        if not there:
            raise MemdiagError(f"{where}: nothing is called there now, and {paths} was; the file has changed since")
        raise MemdiagError(f"{where}: it cannot be told from the line which call is that of {paths}")

    def _way(self, node: ast.expr) -> Way | None:
        """How an expression comes to a module below ``self``."""
        if isinstance(node, ast.Name):
            return Way(()) if node.id == self._self(node) else self._item(node)
        if isinstance(node, ast.Attribute):
            way = self._way(node.value)
            return None if way is None else Way((*way.names, node.attr), way.choice, way.keyed)
        if isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Slice):
            way, index = self._way(node.value), node.slice
            if way is None:
                return None
            if isinstance(index, ast.Constant) and isinstance(index.value, (int, str)) and str(
                    index.value).isidentifier() | str(index.value).isdecimal():
                return Way((*way.names, str(index.value)), way.choice, way.keyed)
            return _chosen(way, node.value, keyed=False)
        return None

    def _self(self, node: ast.AST) -> str | None:
        """What the module goes by in the method around a node."""
        for function, owner in pairwise(self.above(node)):
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)) and isinstance(owner, ast.ClassDef):
                arguments = [*function.args.posonlyargs, *function.args.args]
                return arguments[0].arg if arguments else None
        return None

    def _item(self, name: ast.Name) -> Way | None:
        """How the variable of a loop comes to a module."""
        for loop in self.above(name):
            if isinstance(loop, (ast.For, ast.AsyncFor)) and self._is_inside(name, loop.body):
                found = _part(loop.target, loop.iter, name.id)
                if found is not None:
                    container, keyed = found
                    way = self._way(container)
                    return None if way is None else _chosen(way, container, keyed)
            elif isinstance(loop, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                return None
        return None

    def _is_inside(self, node: ast.AST, body: list[ast.stmt]) -> bool:
        return any(one in body for one in (node, *self.above(node)))


def _chosen(way: Way, container: ast.expr, keyed: bool) -> Way | None:
    """One of the items of a container; of several choices, one in the other, nothing can be told."""
    return None if way.choice is not None else Way((*way.names, None), container, keyed)


def _part(target: ast.expr, iterated: ast.expr, name: str) -> tuple[ast.expr, bool] | None:
    """The container whose items a loop's variable stands for, and whether that is a dictionary."""
    function = iterated.func if isinstance(iterated, ast.Call) else None
    given = iterated.args if isinstance(iterated, ast.Call) else []
    called = function.id if isinstance(function, ast.Name) else None
    method = function.attr if isinstance(function, ast.Attribute) else None
    if isinstance(target, ast.Tuple):
        places = [place for place, one in enumerate(target.elts) if isinstance(one, ast.Name) and one.id == name]
        if len(places) != 1 or any(isinstance(one, ast.Starred) for one in (*target.elts, *given)):
            return None
        if called == "enumerate" and len(given) >= 1 and places == [1]:
            return _part(target.elts[1], given[0], name)
        if called == "zip" and places[0] < len(given):
            return _part(target.elts[places[0]], given[places[0]], name)
        if method == "items" and places == [1] and isinstance(function, ast.Attribute):
            return function.value, True
        return None
    if not isinstance(target, ast.Name) or target.id != name:
        return None
    if called in ("reversed", "list", "tuple") and len(given) == 1:
        return _part(target, given[0], name)
    if method == "values" and isinstance(function, ast.Attribute):
        return function.value, True
    if isinstance(iterated, ast.Subscript) and isinstance(iterated.slice, ast.Slice):
        return iterated.value, False
    return None if isinstance(iterated, ast.Call) else (iterated, False)


def _lines(node: ast.Call) -> tuple[int, int | None]:
    """The lines that a call may be noted under: where it begins, or where the name of a method stands."""
    return node.lineno, node.func.end_lineno if isinstance(node.func, ast.Attribute) else node.lineno


def shown(path: str, folder: str) -> str:
    """A file as it is named in what is written: relative to a folder that it lies in."""
    return os.path.relpath(path, folder) if path.startswith(os.path.join(folder, "")) else path
