"""Modules that get a ``forward`` of their own where the script builds them, as no call of theirs can be rewritten."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from memdiag.emit.edits import Edit, Edits, File, checkpoint_name
from memdiag.emit.pieces import Region, Run, arguments, runs_in, sequential_forward
from memdiag.emit.sites import Called, Sites, Source
from memdiag.errors import MemdiagError


@dataclass(frozen=True)
class _Place:
    """The end of a class's ``__init__``, and what the module goes by there."""

    file: str
    function: ast.FunctionDef
    expression: str


def add_forwards(
    found: Edits, where: Sites, regions: Sequence[Region], chains: Collection[str]
) -> tuple[set[str], set[str]]:
    """Sets a ``forward`` for regions that were refused; what has one is refused no more.

    A module is built by the class in whose code it is called, or the module that it is in. That class may be built
    several times: then the plan must say the same of all of these. Of an ``nn.Sequential`` that has several modules as
    one region, it is the forward that is set.

    Returns:
        The files in which a module's forward is set, and those in which an ``nn.Sequential``'s is.
    """
    kept = {region.modules[0]: region.keep for region in regions if len(region.modules) == 1}
    runs = runs_in((regions[number] for number in found.refused), chains)
    sources = {path: file.source for path, file in found.files.items()}
    modules: dict[tuple[str, ast.FunctionDef, tuple[str, ...]], dict[str, None]] = defaultdict(dict)
    sequentials: dict[tuple[str, ast.FunctionDef, tuple[Run, ...]], dict[str, None]] = defaultdict(dict)
    for number in list(found.refused):
        region = regions[number]
        if len(region.modules) == 1:
            path = region.modules[0]
            place = next(_places(path, where, sources, _same(kept, path)), None)
            if place is not None:
                modules[place.file, place.function, region.keep][place.expression] = None
        else:
            path = region.modules[0].rpartition(".")[0]
            place = next(_places(path, where, sources, _same(runs, path)), None) if runs_in([region], runs) else None
            if place is not None:
                sequentials[place.file, place.function, tuple(runs[path])][place.expression] = None
        if place is not None:
            del found.refused[number]
    for (path, function, keep), names in modules.items():
        file = found.files.setdefault(path, File(sources[path]))
        file.edits.append(_edit(file.source, function, list(names), keep))
    for number, ((path, function, those), names) in enumerate(sequentials.items(), start=1):
        file = found.files.setdefault(path, File(sources[path]))
        file.edits.append(_edit_of_chain(file.source, function, list(names), those, number))
    return {path for path, _, _ in modules}, {path for path, _, _ in sequentials}


def _same(said: Mapping[str, object], of: str) -> Callable[[str], bool]:
    """Whether the plan says the same of a module as of one that is given."""
    return lambda path: said.get(path) == said.get(of)


def _places(path: str, where: Sites, sources: dict[str, Source], same: Callable[[str], bool]) -> Iterator[_Place]:
    names = path.split(".") if path else []
    for length in range(len(names), 0, -1):
        around, below = ".".join(names[:length]), tuple(names[length:])
        for file, line in where.of(around):
            try:
                source = sources.setdefault(file, Source(file))
                calls = source.calls(line, where.by_line[file, line])
            except MemdiagError:
                continue  # where that leaves none, the region stays refused, with its reason
            for call in calls:
                owner = next((node for node in source.above(call.node) if isinstance(node, ast.ClassDef)), None)
                for called in call.modules:
                    if called.path != around or called.relative is None or call.way is None or owner is None:
                        continue
                    relative = (*called.relative, *below)
                    function = _builder(owner, relative[0])
                    at = call.way.names.index(None) if call.way.keyed else None
                    if function is not None and _alike(where, file, owner, relative, same):
                        yield _Place(file, function, _expression(function, relative, at))


def _builder(owner: ast.ClassDef, attribute: str) -> ast.FunctionDef | None:
    """The ``__init__`` of a class, where it sets an attribute and runs to its end."""
    for node in owner.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__" and node.args.args:
            inside = list(ast.walk(node))
            sets = any(isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store) and one.attr == attribute
                       and isinstance(one.value, ast.Name) and one.value.id == node.args.args[0].arg for one in inside)
            if sets and node.body[-1].lineno > node.lineno and not any(isinstance(one, ast.Return) for one in inside):
                return node
    return None


def _alike(
    where: Sites, path: str, owner: ast.ClassDef, relative: tuple[str, ...], same: Callable[[str], bool]
) -> bool:
    """Whether the plan says the same of each module that the class has in that place."""
    for (file, line), called in where.by_line.items():
        if file == path and owner.lineno <= line <= (owner.end_lineno or line):
            for one in called:
                there = _sibling(one, relative)
                if there is not None and there in where.paths and not same(there):
                    return False
    return True


def _sibling(called: Called, relative: tuple[str, ...]) -> str | None:
    """The module in a place below the module that has called another."""
    if called.relative is None:
        return None
    above = called.path.split(".")[:-len(called.relative)]
    return ".".join((*above, *relative))


def _expression(function: ast.FunctionDef, relative: tuple[str, ...], keyed: int | None) -> str:
    parts = [function.args.args[0].arg]
    for number, name in enumerate(relative):
        parts.append(f"[{name!r}]" if number == keyed else f"[{name}]" if name.isdecimal() else f".{name}")
    return "".join(parts)


def _edit(source: Source, function: ast.FunctionDef, expressions: list[str], keep: tuple[str, ...]) -> Edit:
    checkpoint = checkpoint_name(source)
    return _at_the_end(source, function, _for_each(source, expressions, lambda module: (
        f"partial({checkpoint}, {module}.forward, {arguments(keep)})")))


def _edit_of_chain(
    source: Source, function: ast.FunctionDef, expressions: list[str], runs: Sequence[Run], number: int
) -> Edit:
    name = source.free(f"run_{number}")
    return _at_the_end(source, function, [
        "", *sequential_forward(name, runs, checkpoint_name(source)), "",
        *_for_each(source, expressions, lambda module: f"MethodType({name}, {module})")])


def _for_each(source: Source, expressions: list[str], forward: Callable[[str], str]) -> list[str]:
    """Sets the forward of modules."""
    if len(expressions) == 1:
        return [f"{expressions[0]}.forward = {forward(expressions[0])}"]
    module = source.free("module")
    head = [f"for {module} in ({', '.join(expressions)}):"]
    if len(head[0]) > 100:
        head = [f"for {module} in (", *(f"    {one}," for one in expressions), "):"]
    return [*head, f"    {module}.forward = {forward(module)}"]


def _at_the_end(source: Source, function: ast.FunctionDef, lines: list[str]) -> Edit:
    last, indent = function.body[-1], " " * function.body[0].col_offset
    text = "".join(f"{source.end_of_line}{indent}{line}".rstrip(" ") for line in lines)
    return Edit(source.end(last), source.end(last), text)
