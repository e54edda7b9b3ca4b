"""The statement that keeps something: found in the source of what holds it, by its syntax tree."""

from __future__ import annotations

import ast
import functools
import linecache
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import CodeType, ModuleType

from memdiag.record.frames import is_users
from memdiag.record.keepers import chains
from memdiag.record.keepers.chains import Link
from memdiag.record.keepers.roots import GLOBAL, LOCAL, Root

_MOST_FILES = 300  # of the script's own, read in search of a statement
_MOST_PASSED_ON = 3  # calls that an object is followed through
_LOOKS_INTO = frozenset({"get", "setdefault", "__getitem__", "values", "items"})  # what they return is in there
_PUTS = frozenset({
    "append", "appendleft", "extend", "extendleft", "insert", "add", "update", "setdefault", "__setitem__", "put",
    "put_nowait", "push", "register_buffer", "__setattr__"})
_PUTS_INTO_FIRST = frozenset({"heappush", "heappushpop", "insort", "insort_left", "insort_right", "setattr", "setitem"})
_NUMBERS = frozenset({"float", "int", "bool", "str", "len", "repr", "round", "id", "type", "range"})
_BECOMES_NUMBERS = frozenset({"item", "tolist", "numpy", "size", "dim", "numel", "format", "__len__"})
_WITHOUT_HISTORY = frozenset({"detach", "detach_"})

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Keeper:
    """What holds something, as far as a statement can be looked for.

    Attributes:
        named: links with a name, from the container outwards.
        aliases: variables of running functions that refer to the same object as the chain's first.
        bound: the name is bound to the thing itself; else it is put into what the name refers to.
        graph: it is kept through its graph: a statement that detaches it is not meant.
        birth: line where it was allocated, where that is known.
    """

    named: tuple[Link, ...]
    aliases: tuple[Root, ...]
    bound: bool
    graph: bool
    birth: str | None


@dataclass(frozen=True)
class _Name:
    """How the holder is written: a variable of a function or of a module, or an attribute of whatever it may be."""

    name: str
    attribute: bool


@dataclass(frozen=True)
class _Found:
    file: str
    node: ast.stmt | ast.excepthandler
    region: ast.AST  # that the name belongs to: what runs once in it is no repetition
    binds: bool  # the name itself, not what it refers to
    distance: int  # 0: in the holder's own code; then through calls, and in other files
    plausible: bool


class _Source:
    """A file's syntax tree."""

    def __init__(self, file: str, text: str) -> None:
        self.file = file
        self.text = text
        self.tree = ast.parse(text)
        self.parents: dict[ast.AST, ast.AST] = {}
        self._functions: dict[str, list[Function]] = defaultdict(list)
        self._lambdas: list[ast.Lambda] = []
        self._classes: dict[str, ast.ClassDef] = {}
        for node in ast.walk(self.tree):
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                self._functions[node.name].append(node)
            elif isinstance(node, ast.Lambda):
                self._lambdas.append(node)
            elif isinstance(node, ast.ClassDef):
                self._classes.setdefault(node.name, node)

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """What encloses a node, innermost first."""
        above = self.parents.get(node)
        while above is not None:
            yield above
            above = self.parents.get(above)

    def functions(self, name: str) -> list[Function]:
        return list(self._functions.get(name, ()))

    def function(self, code: CodeType) -> ast.AST | None:
        """The definition that a code object was compiled from."""
        for node in self.functions(code.co_name):
            if min([node.lineno, *(d.lineno for d in node.decorator_list)]) == code.co_firstlineno:
                return node
        lines = {line for _, _, line in code.co_lines() if line is not None}
        return next((node for node in self._lambdas if node.lineno in lines), None)

    def class_of(self, qualname: str) -> ast.ClassDef | None:
        """The definition of a class, by the last part of its name."""
        return self._classes.get(qualname.rpartition(".")[2])

    def block(self, node: ast.AST) -> list[ast.stmt]:
        """The statements among which a node stands: they run together, or not at all."""
        above = self.parents.get(node)
        for part in ("body", "orelse", "finalbody", "handlers"):
            listed = getattr(above, part, None)
            if isinstance(listed, list) and node in listed:
                return listed
        return []


_sources: dict[str, _Source | None] = {}


def _source(file: str | None) -> _Source | None:
    """The syntax tree of a file; None where there is none, as for code that was typed in."""
    if file is None:
        return None
    if file not in _sources:
        text = "".join(linecache.getlines(file))
        try:
            _sources[file] = _Source(file, text) if text else None
        except (SyntaxError, ValueError, RecursionError):  # not Python: a notebook's magic, a template
            _sources[file] = None
    return _sources[file]


class Statements:
    """Looks for statements.

    Args:
        ran: whether a line, ``file.py:12``, was seen to run.
    """

    def __init__(self, ran: Callable[[str], bool]) -> None:
        self._ran = ran
        self._passing: dict[tuple[Root, str, bool], bool] = {}

    def find(self, keeper: Keeper) -> str | None:
        """The line, ``file.py:12``, of the statement by which the holder came to hold it; None where none is found.

        Looked for are assignments, stores and calls that put something into a container, written with the name of the
        holder: first in its own code (the function, the class, the module), then in functions that it is passed to,
        then anywhere in the script's own files. Where there are several, those that put it where it is come first,
        then those in a loop or a function, then those of which there is a sign that they ran, then the nearest to where
        the memory was allocated.
        """
        calls = False
        for link in keeper.named:
            if link.kind == chains.RECORD:
                return link.name
            if link.kind == chains.CACHE:
                return self._decorator(link)
            found = self._of_name(link, keeper, calls)
            if found is not None or _is_the_scripts(link):
                return found
            calls = True  # a library's own statement put it there: the script's is the call that made it do so
        return None

    # --- where to look ----------------------------------------------------------------------------------------------

    def _decorator(self, link: Link) -> str | None:
        source = _source(link.file)
        node = source.function(link.code) if source is not None and link.code is not None else None
        if source is None or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return None
        decorators = [d for d in node.decorator_list if "cache" in ast.unparse(d)]
        return _line(source.file, decorators[0] if decorators else node)

    def _of_name(self, link: Link, keeper: Keeper, calls: bool) -> str | None:
        """Args:
        calls: look for calls of methods of what the name refers to.
        """
        found: list[_Found] = []
        if link.kind == chains.ATTRIBUTE:
            name = _Name(link.name, attribute=True)
            for source, node in _classes_of(link.owner):
                found += _in(source, node, name, 0, calls=calls)
            if not _good(found, keeper):
                for source in _users_files(link.name):
                    found += _in(source, source.tree, name, 4, calls=calls)
        elif link.kind == chains.MODULE_VARIABLE:
            own = _source(link.file)
            if own is not None:
                found += _in(own, own.tree, _Name(link.name, attribute=False), 0, module=True, calls=calls)
            if not _good(found, keeper):
                for other in _users_files(link.name):
                    if other is not own:
                        found += _in(other, other.tree, _Name(link.name, attribute=True), 4, calls=calls)
                        found += _in(other, other.tree, _Name(link.name, attribute=False), 5, module=True, calls=calls)
        else:
            found += _in_function(link.code, link.name, 0, calls)
            if link is keeper.named[-1]:
                for root in keeper.aliases:
                    found += _in_function(root.code, root.name, 0, calls)
        if not keeper.bound and all(one.binds for one in _good(found, keeper)):
            # Nothing is put into it by this name: ``curve = journal.rows`` is another name for an attribute.
            for attribute in {one.node.value.attr for one in found if one.binds and isinstance(
                    one.node, ast.Assign) and isinstance(one.node.value, ast.Attribute)}:
                for other in _users_files(attribute):
                    found += _in(other, other.tree, _Name(attribute, attribute=True), 4, calls=calls)
        found = [one for one in _good(found, keeper) if is_users(one.file) and not (calls and one.binds)]
        if not found:
            return None
        best = min(found, key=lambda one: self._rank(one, keeper))
        return _line(best.file, best.node)

    def _rank(self, one: _Found, keeper: Keeper) -> tuple[bool, int, bool, bool, bool, int]:
        source = _source(one.file)
        assert source is not None
        file, _, number = (keeper.birth or "").rpartition(":")
        near = abs(one.node.lineno - int(number)) if file == os.path.abspath(one.file) else sys.maxsize
        again = False
        function: ast.AST = source.tree
        for function in source.around(one.node):
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                again = again or function is not one.region and function.name != "__init__"
                break
            again = again or isinstance(function, (ast.For, ast.AsyncFor, ast.While))
        born_here = near < sys.maxsize and (not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)) or (
            function.lineno <= int(number) <= (function.end_lineno or function.lineno)))
        return one.binds != keeper.bound, one.distance, not again, not self._seen(source, one.node), not born_here, near

    def _seen(self, source: _Source, node: ast.stmt | ast.excepthandler) -> bool:
        """Whether there is a sign that a statement ran: a torch function was called in it, or in one beside it."""
        def ran(part: ast.AST) -> bool:
            first, last = getattr(part, "lineno", 0), getattr(part, "end_lineno", 0) or 0
            return any(self._ran(_line(source.file, None, line)) for line in range(first, last + 1))

        return ran(node) or any(ran(part) for part in source.block(node))

    # --- variables that only pass -----------------------------------------------------------------------------------

    def passing(self, root: Root, name: str, value: bool) -> bool:
        """Whether a variable is bound anew in each turn of the loop that runs, before it is read: whatever it refers to
        now, it does not keep it from step to step.

        Args:
            root: the function's or the module's.
            value: the variable refers to a tensor or a tuple. In a function without a loop around what runs, which was
                called for this step, such a variable passes too.
        """
        key = root, name, value
        if key not in self._passing:
            self._passing[key] = _passes(root, name, value)
        return self._passing[key]


def _line(file: str, node: ast.AST | None, line: int = 0) -> str:
    return f"{os.path.abspath(file)}:{getattr(node, 'lineno', line)}"


def _classes_of(owner: type | None) -> Iterator[tuple[_Source, ast.AST]]:
    """The definitions of a class and of those that it inherits from."""
    for kind in () if owner is None else owner.__mro__:
        source = _source(getattr(sys.modules.get(kind.__module__), "__file__", None))
        node = None if source is None else source.class_of(kind.__qualname__)
        if source is not None and node is not None:
            yield source, node


_users: tuple[int, list[str]] = (0, [])  # the script's own files, as of so many modules


def _users_files(word: str) -> Iterator[_Source]:
    """The script's own files in which a word stands."""
    global _users
    if _users[0] != len(sys.modules):
        files: dict[str, None] = {}
        for module in list(sys.modules.values()):
            file = getattr(module, "__file__", None) if isinstance(module, ModuleType) else None
            if isinstance(file, str) and file.endswith(".py") and is_users(file):
                files[file] = None
        _users = len(sys.modules), list(files)[:_MOST_FILES]
    for file in _users[1]:
        source = _source(file)
        if source is not None and word in source.text:
            yield source


def _is_the_scripts(link: Link) -> bool:
    """Whether what has a name is defined in the script's own code."""
    file = link.file
    if link.kind == chains.ATTRIBUTE:
        module = sys.modules.get(link.owner.__module__) if link.owner is not None else None
        file = getattr(module, "__file__", None)
    elif link.code is not None:
        file = link.code.co_filename
    return file is not None and is_users(file)


def _in_function(code: CodeType | None, name: str, distance: int, calls: bool) -> list[_Found]:
    """Statements with a function's variable: in the outermost function around, since inner ones share it."""
    source = None if code is None else _source(code.co_filename)
    node = source.function(code) if source is not None and code is not None else None
    if source is None or node is None:
        return []
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    if code is not None and name in code.co_freevars:
        node = [node, *(n for n in source.around(node) if isinstance(n, functions))][-1]
    return _in(source, node, _Name(name, attribute=False), distance, calls=calls)


def _good(found: list[_Found], keeper: Keeper) -> list[_Found]:
    """Those that can be meant."""
    return [one for one in found if one.plausible and not (keeper.graph and _detaches(one.node))]


# --- statements that keep -------------------------------------------------------------------------------------------


def _in(
    source: _Source, region: ast.AST, name: _Name, distance: int, module: bool = False, passed_on: int = 0,
    calls: bool = False,
) -> list[_Found]:
    """Statements in a part of a file that bind a name, or put something into what it refers to.

    Args:
        module: the name is a variable of the module: functions that have one of their own by that name do not count.
        calls: any call of a method of what the name refers to is such a statement.
    """
    # Each look asks the same of the same holders. What is found changes with the files, which come with modules.
    return list(_searched(len(sys.modules), source, region, name, distance, module, passed_on, calls))


@functools.lru_cache(maxsize=1000)
def _searched(
    modules: int, source: _Source, region: ast.AST, name: _Name, distance: int, module: bool, passed_on: int,
    calls: bool,
) -> tuple[_Found, ...]:
    names = {name} | _aliases(region, name)
    found: list[_Found] = []
    for node in ast.walk(region):
        if not isinstance(node, (ast.stmt, ast.excepthandler)):
            continue
        if module and not name.attribute and _shadowed(source, node, name.name):
            continue
        if calls and any(
                _is(call.func, names) or isinstance(call.func, ast.Attribute) and _is(_base(call.func.value), names)
                for call in _own(node, ast.Call)):
            found.append(_Found(source.file, node, region, False, distance, True))
        for binds, values in _effects(node, names):
            plausible = any(map(_may_keep, values)) or not values
            found.append(_Found(source.file, node, region, binds, distance, plausible))
        if passed_on < _MOST_PASSED_ON:
            for call in _own(node, ast.Call):
                for other, function, argument in _passed(source, call, names):
                    found += _in(
                        other, function, _Name(argument, attribute=False), distance + 1, passed_on=passed_on + 1)
                    owner = other.parents.get(function)
                    for attribute in _stored(function, argument) if isinstance(owner, ast.ClassDef) else ():
                        found += _in(other, other.parents[function], attribute, distance + 1, passed_on=passed_on + 1)
    return tuple(found)


def _own(node: ast.AST, kind: type[ast.Call]) -> Iterator[ast.Call]:
    """Parts of a statement that are not statements themselves."""
    todo = [node]
    while todo:
        for child in ast.iter_child_nodes(todo.pop()):
            if not isinstance(child, (ast.stmt, ast.excepthandler)):
                if isinstance(child, kind):
                    yield child
                todo.append(child)


def _is(expression: ast.AST, names: Iterable[_Name]) -> bool:
    """Whether an expression is one of the names."""
    if isinstance(expression, ast.Name):
        return _Name(expression.id, attribute=False) in names
    return isinstance(expression, ast.Attribute) and _Name(expression.attr, attribute=True) in names


def _base(expression: ast.AST) -> ast.AST:
    """``a.b`` of ``a.b[0]["x"].setdefault(k, [])``: what it is found in."""
    while True:
        if isinstance(expression, (ast.Subscript, ast.Starred)):
            expression = expression.value
        elif isinstance(expression, ast.Call) and isinstance(expression.func, ast.Attribute) and (
                expression.func.attr in _LOOKS_INTO):
            expression = expression.func.value
        else:
            return expression


def _effects(node: ast.stmt | ast.excepthandler, names: set[_Name]) -> Iterator[tuple[bool, list[ast.AST]]]:
    """What a statement does to one of the names: whether it binds it, and the expressions that are then kept."""
    if isinstance(node, ast.excepthandler):
        if isinstance(node, ast.ExceptHandler) and node.name and _Name(node.name, attribute=False) in names:
            yield True, []
        return
    targets: list[ast.AST] = []
    value: ast.AST | None = None
    if isinstance(node, ast.Assign):
        targets, value = list(node.targets), node.value
    elif isinstance(node, (ast.AnnAssign, ast.AugAssign)):
        targets, value = [node.target], node.value
    elif isinstance(node, (ast.For, ast.AsyncFor)):
        targets, value = [node.target], node.iter
    elif isinstance(node, (ast.With, ast.AsyncWith)):
        for item in node.items:
            if item.optional_vars is not None:
                yield from _stores(item.optional_vars, item.context_expr, names)
    if value is not None and not _is(_base(value), names):  # else it only takes something out
        for target in targets:
            for binds, kept in _stores(target, value, names):
                yield binds, kept
                # What is made of itself and more is put into, whichever way it is looked at.
                if binds and (isinstance(node, ast.AugAssign) or any(
                        _is(part, names) for part in ast.walk(value))):
                    yield False, kept
    for call in _own(node, ast.Call):
        function = call.func
        arguments: list[ast.AST] = [*call.args, *(keyword.value for keyword in call.keywords)]
        if isinstance(function, ast.Attribute) and function.attr in _PUTS:
            if _is(_base(function.value), names):
                yield False, arguments
            elif arguments and _is(_base(arguments[0]), names):  # list.append(kept, item)
                yield False, arguments[1:]
        called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        if called in _PUTS_INTO_FIRST and arguments:
            text = arguments[1] if len(arguments) > 2 else None
            if called == "setattr" and isinstance(text, ast.Constant) and _Name(str(text.value), True) in names:
                yield True, arguments[2:]
            elif _is(_base(arguments[0]), names):
                yield False, arguments[1:]
    for walrus in [n for n in ast.walk(node) if isinstance(n, ast.NamedExpr)] if isinstance(node, ast.Expr) else []:
        yield from _stores(walrus.target, walrus.value, names)


def _stores(target: ast.AST, value: ast.AST, names: set[_Name]) -> Iterator[tuple[bool, list[ast.AST]]]:
    if isinstance(target, (ast.Tuple, ast.List)):
        parts = value.elts if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts) else None
        for at, inner in enumerate(target.elts):
            yield from _stores(inner, value if parts is None else parts[at], names)
    elif isinstance(target, ast.Starred):
        yield from _stores(target.value, value, names)
    elif _is(target, names):
        yield True, [value]
    elif isinstance(target, ast.Subscript) and _is(_base(target), names):
        yield False, [value]


def _may_keep(value: ast.AST) -> bool:
    """Whether an expression may be something with memory: not a number, a text, or an empty container."""
    if isinstance(value, (ast.Constant, ast.JoinedStr, ast.Compare, ast.Lambda)):
        return False
    if isinstance(value, (ast.List, ast.Tuple, ast.Set)):
        return any(map(_may_keep, value.elts))
    if isinstance(value, ast.Dict):
        return any(map(_may_keep, value.values))
    if isinstance(value, (ast.UnaryOp, ast.Starred)):
        return _may_keep(value.operand if isinstance(value, ast.UnaryOp) else value.value)
    if isinstance(value, ast.BinOp):
        return _may_keep(value.left) or _may_keep(value.right)
    if isinstance(value, ast.Call):
        called = value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", "")
        if called in (_BECOMES_NUMBERS if isinstance(value.func, ast.Attribute) else _NUMBERS):
            return False
        if called in ("list", "dict", "set", "tuple", "deque", "defaultdict", "OrderedDict"):
            return any(map(_may_keep, value.args[:1])) and called != "defaultdict"
    return True


def _detaches(node: ast.AST) -> bool:
    """Whether what a statement keeps is all without history."""
    value = getattr(node, "value", None)
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in _PUTS:
        value = value.args[-1] if value.args else None
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and (
        value.func.attr in _WITHOUT_HISTORY)


def _aliases(region: ast.AST, name: _Name) -> set[_Name]:
    """Variables that are made to refer to the same object, or to something found in it."""
    names = {name}
    for _ in range(2):
        for node in ast.walk(region):
            value, targets = None, []
            if isinstance(node, ast.Assign):
                value, targets = node.value, node.targets
            elif isinstance(node, (ast.For, ast.AsyncFor)):
                value, targets = node.iter, [node.target]
            if value is None or not _is(_base(value), names):
                continue
            # A name bound to what was in there before may be a tensor taken out of it: only containers are put into.
            names |= {_Name(target.id, attribute=False) for target in targets if isinstance(target, ast.Name)}
    return names - {name}


def _passed(source: _Source, call: ast.Call, names: set[_Name]) -> Iterator[tuple[_Source, Function, str]]:
    """Functions of the script that a call may mean, with the argument by which they get one of the names."""
    at = [(i, None) for i, argument in enumerate(call.args) if _is(_base(argument), names)]
    by = [(0, k.arg) for k in call.keywords if k.arg is not None and _is(_base(k.value), names)]
    if not at and not by:
        return
    method = isinstance(call.func, ast.Attribute)
    called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    for other in [source, *(s for s in _users_files(called) if s is not source)]:
        for function in _called(other, called):
            arguments = [a.arg for a in [*function.args.posonlyargs, *function.args.args]]
            in_class = isinstance(other.parents.get(function), ast.ClassDef)
            skip = 1 if in_class and (method or function.name == "__init__") and not any(
                getattr(d, "id", "") == "staticmethod" for d in function.decorator_list) else 0
            for index, keyword in [*at, *by]:
                if keyword is not None:
                    yield other, function, keyword
                elif index + skip < len(arguments):
                    yield other, function, arguments[index + skip]


def _called(source: _Source, name: str) -> list[Function]:
    """Functions by that name; of a class by that name, its ``__init__``."""
    functions = source.functions(name)
    kind = source.class_of(name)
    if kind is not None:
        functions += [node for node in kind.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    return functions


def _stored(function: Function, argument: str) -> list[_Name]:
    """Attributes of its own object that a function stores an argument in."""
    return [_Name(target.attr, attribute=True)
            for node in ast.walk(function) if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name)
            and node.value.id == argument for target in node.targets if isinstance(target, ast.Attribute)]


def _shadowed(source: _Source, node: ast.AST, name: str) -> bool:
    """Whether the function around a statement has a variable of its own by the name of the module's."""
    for function in source.around(node):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            arguments = function.args
            own = {a.arg for a in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]}
            if name in own:
                return True
            inside = list(ast.walk(function))
            if any(isinstance(n, ast.Global) and name in n.names for n in inside):
                return False
            if any(isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Store) for n in inside):
                return True
    return False


# --- variables that only pass ---------------------------------------------------------------------------------------


def _passes(root: Root, name: str, value: bool) -> bool:
    if root.kind not in (LOCAL, GLOBAL) or not root.line or not name:
        return False
    source = _source(root.file)
    if source is None:
        return False
    region: ast.AST | None = source.tree
    if root.kind == LOCAL:
        region = source.function(root.code) if root.code is not None else None
    if region is None:
        return False
    loops = [node for node in ast.walk(region) if isinstance(node, (ast.For, ast.AsyncFor, ast.While))
             and node.lineno <= root.line <= (node.end_lineno or node.lineno)
             and not any(isinstance(n, (ast.FunctionDef, ast.Lambda)) and n is not region and n in _below(region, n)
                         for n in source.around(node))]
    for loop in sorted(loops, key=lambda node: -node.lineno):
        if any(isinstance(n, ast.Name) and n.id == name and not isinstance(n.ctx, ast.Load) for n in ast.walk(loop)):
            return not _read_first(_turn(loop), name)[0]
    return root.kind == LOCAL and value and not root.argument and not loops


def _below(region: ast.AST, node: ast.AST) -> list[ast.AST]:
    return [inner for inner in ast.walk(region) if inner is node]


def _turn(loop: ast.For | ast.AsyncFor | ast.While) -> list[ast.AST]:
    """What runs in one turn of a loop."""
    return [loop.test, *loop.body] if isinstance(loop, ast.While) else [loop.target, *loop.body]


def _read_first(nodes: Iterable[ast.AST], name: str) -> tuple[bool, bool]:
    """Whether a variable may be read in a sequence before it is bound; if not, whether it is surely bound in it."""
    for node in nodes:
        read, bound = _reads(node, name)
        if read or bound:
            return read, bound
    return False, False


def _reads(node: ast.AST, name: str) -> tuple[bool, bool]:
    if isinstance(node, ast.If):
        first = _read_first([node.test], name)
        if first[0]:
            return first
        then, other = _read_first(node.body, name), _read_first(node.orelse, name)
        return then[0] or other[0], then[1] and other[1]
    if isinstance(node, (ast.For, ast.AsyncFor, ast.While)):
        head = [node.test] if isinstance(node, ast.While) else [node.iter]
        return _read_first(head, name)[0] or _read_first([*_turn(node), *node.orelse], name)[0], False
    if isinstance(node, (ast.With, ast.AsyncWith)):
        return _read_first([*node.items, *node.body], name)
    if isinstance(node, ast.Try):
        return _read_first([*node.body, *node.orelse, *node.finalbody], name)
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return False, False
    if isinstance(node, (ast.Continue, ast.Break, ast.Return, ast.Raise)):
        return _loads(node, name), True
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name) and node.target.id == name:
        return True, True
    if isinstance(node, ast.stmt):
        # Names that are read come first in every statement without a body.
        return _loads(node, name), any(
            isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Store) for n in ast.walk(node))
    if isinstance(node, ast.withitem) and node.optional_vars is not None:
        return _loads(node.context_expr, name), _reads(node.optional_vars, name)[1]
    return _loads(node, name), any(
        isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Store) for n in ast.walk(node))


def _loads(node: ast.AST, name: str) -> bool:
    return any(isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load) for n in ast.walk(node))
