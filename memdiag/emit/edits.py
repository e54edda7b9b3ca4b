"""Calls of modules in the script, rewritten so that they are checkpoints."""

from __future__ import annotations

import ast
import io
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from memdiag.emit.pieces import Region, arguments
from memdiag.emit.sites import Call, Called, Sites, Source
from memdiag.errors import MemdiagError

CHECKPOINTS_OWN = frozenset((
    "function", "use_reentrant", "context_fn", "determinism_check", "debug", "early_stop", "preserve_rng_state"))
"""Names of arguments that ``checkpoint()`` does not hand on."""


@dataclass(frozen=True)
class Edit:
    """A part of a file's encoded text, and what stands in its place."""

    start: int
    end: int
    text: str


@dataclass
class File:
    """A file of the script's, and what becomes of it.

    Attributes:
        statements: those that change, by where they begin.
    """

    source: Source
    edits: list[Edit] = field(default_factory=list)
    statements: dict[int, ast.stmt] = field(default_factory=dict)

    def part(self, start: int, end: int) -> str:
        """A part of the text, changed."""
        text = self.source.text.encode()
        for edit in sorted(self.edits, key=lambda edit: edit.start, reverse=True):
            if start <= edit.start and edit.end <= end:
                text = text[:edit.start] + edit.text.encode() + text[edit.end:]
                end += len(edit.text.encode()) - (edit.end - edit.start)
        return text[start:end].decode()


@dataclass(frozen=True)
class Edits:
    """A plan in the script.

    Attributes:
        files: by path.
        refused: regions for which there is no call to rewrite that would be right; and why.
    """

    files: dict[str, File]
    refused: dict[int, str]


def edits(where: Sites, regions: Sequence[Region]) -> Edits:
    """The smallest change of the script that makes regions of it checkpoints; what it needs is not imported yet."""
    refused: dict[int, str] = {}
    while True:
        writer = _Writer(where, {number: region for number, region in enumerate(regions) if number not in refused})
        writer.write()
        if not writer.refused:
            return Edits({path: file for path, file in writer.files.items() if file.edits}, refused)
        refused.update(writer.refused)  # the others are looked at anew, for they may have shared a line


class _Refused(Exception):
    """There is no right way to rewrite a call."""


class _Writer:
    def __init__(self, where: Sites, regions: dict[int, Region]) -> None:
        self._where, self._regions = where, regions
        self._number = {path: number for number, region in regions.items() for path in region.modules}
        self.files: dict[str, File] = {}
        self.refused: dict[int, str] = {}

    def write(self) -> None:
        for number, region in self._regions.items():
            for path in region.modules:
                if path in self._where.elsewhere:
                    self.refused[number] = f"{path} is called by code that is not the script's own"
                elif not self._where.of(path):
                    self.refused[number] = f"no line is known that calls {path}"
        for (path, line), called in self._where.by_line.items():
            numbers = self._numbers(called)
            if not numbers:
                continue
            try:
                file = self.files.setdefault(path, File(Source(path)))
                calls = file.source.calls(line, called)
            except MemdiagError as error:
                self.refused.update(dict.fromkeys(numbers, str(error)))
                continue
            for call in calls:
                self._rewrite(file, call, f"{path}:{line}")
        for file in self.files.values():
            self._refuse_overlaps(file)

    def _numbers(self, called: Iterable[Called]) -> list[int]:
        """The regions that modules are in, in their order."""
        return sorted({self._number[one.path] for one in called if one.path in self._number})

    def _rewrite(self, file: File, call: Call, line: str) -> None:
        numbers = self._numbers(call.modules)
        if not numbers:
            return
        try:
            if any(len(self._regions[number].modules) > 1 for number in numbers):
                found, statement = self._loop(file.source, call)
            else:
                found, statement = self._call(file.source, call, numbers), _statement(file.source, call.node)
        except _Refused as reason:
            self.refused.update(dict.fromkeys(numbers, f"{line}: {reason}"))
            return
        file.edits += [edit for edit in found if edit not in file.edits]
        file.statements[file.source.start(statement)] = statement

    # --- one call ---------------------------------------------------------------------------------------------------

    def _call(self, source: Source, call: Call, numbers: list[int]) -> list[Edit]:
        kept = {self._regions[number].keep for number in numbers}
        if len(kept) > 1:
            raise _Refused("its modules keep results of different operators")
        pieces = _Pieces(source, call.node)
        name, tail = checkpoint_name(source), arguments(kept.pop())
        inside = [one for one in call.modules if one.path in self._number]
        if len(inside) == len(call.modules):
            return pieces.wrapped(name, tail)
        condition = _condition(source, call, inside)
        text = f"{pieces.whole(name, tail)} if {condition} else {source.text_of(call.node)}"
        around = source.parents[call.node]
        alone = isinstance(around, (ast.Assign, ast.Return, ast.Expr)) and around.value is call.node
        return [Edit(pieces.start, pieces.end, text if alone else f"({text})")]

    # --- a loop -----------------------------------------------------------------------------------------------------

    def _loop(self, source: Source, call: Call) -> tuple[list[Edit], ast.stmt]:
        """A loop over modules, as stretches: those of one region in a checkpoint, those of none as they were."""
        loop = next((node for node in source.above(call.node) if isinstance(node, ast.For)), None)
        if loop is None or call.way is None or call.way.choice is not loop.iter or call.way.keyed or (
                call.way.names[-1] is not None):
            raise _Refused("several modules can be one checkpoint where a loop runs over the list of them alone")
        carried = _carried(loop, call.node)
        free = _free(source, loop, carried)
        stretches = self._stretches(call.modules)
        indent = " " * loop.col_offset
        modules = source.text_of(loop.iter)
        run, held = source.free("run"), source.free("modules")
        given = "".join(f", {name}" for name in free)
        (statement,) = loop.body
        body = source.text_of(statement).replace("\n", "\n    ")
        lines = [f"def {run}({carried}, {held}{given}):", f"    for {source.text_of(loop.target)} in {held}:",
                 f"        {body}", f"    return {carried}", ""]
        for first, last, number in stretches:
            part = f"{modules}[{first or ''}:{'' if last is None else last}]"
            lines.append(f"{carried} = " + (
                f"{run}({carried}, {part}{given})" if number is None else
                f"{checkpoint_name(source)}({run}, {carried}, {part}{given}, {arguments(self._regions[number].keep)})"))
        text = f"\n{indent}".join(lines).replace(f"\n{indent}\n", "\n\n").replace("\r", "")
        text = text.replace("\n", source.end_of_line)
        return [Edit(source.start(loop), source.end(loop), text)], loop

    def _stretches(self, called: Sequence[Called]) -> list[tuple[int, int | None, int | None]]:
        """First index, the one after the last (None: to the end), and the region."""
        owners: dict[str | None, list[Called]] = defaultdict(list)
        for one in called:
            owners[one.owner].append(one)
        found = [self._of_one(members) for members in owners.values()]
        if any(one != found[0] for one in found):
            raise _Refused("the loop runs over several lists, which differ in the plan")
        return found[0]

    def _of_one(self, members: list[Called]) -> list[tuple[int, int | None, int | None]]:
        names = [one.relative[-1] if one.relative else "" for one in members]
        if names != [str(index) for index in range(len(names))]:
            raise _Refused("the loop does not run over all of the list in its order")
        stretches: list[tuple[int, int | None, int | None]] = []
        for index, one in enumerate(members):
            number = self._number.get(one.path)
            if stretches and stretches[-1][2] == number:
                stretches[-1] = (stretches[-1][0], index + 1, number)
            else:
                stretches.append((index, index + 1, number))
        for first, last, number in stretches:
            if number is not None and last is not None:
                if tuple(one.path for one in members[first:last]) != self._regions[number].modules:
                    raise _Refused("its modules do not follow each other there")
        first, _, number = stretches[-1]
        return [*stretches[:-1], (first, None, number)]

    def _refuse_overlaps(self, file: File) -> None:
        """One call inside another that is written twice, or in a loop that is written anew."""
        ordered = sorted(file.edits, key=lambda edit: (edit.start, -edit.end))
        for before, after in pairwise(ordered):
            if after.start < before.end:
                for (path, line), called in self._where.by_line.items():
                    if path == file.source.path and any(
                            one.lineno <= line <= (one.end_lineno or line) for one in file.statements.values()
                            if file.source.start(one) <= before.start and after.end <= file.source.end(one)):
                        self.refused.update(dict.fromkeys(
                            self._numbers(called), f"{path}:{line}: one call of the plan stands inside another"))


class _Pieces:
    """Where the parts of a call expression lie."""

    def __init__(self, source: Source, node: ast.Call) -> None:
        if any(isinstance(one, ast.GeneratorExp) for one in node.args):
            raise _Refused("it is given a generator")
        if taken := sorted(CHECKPOINTS_OWN & {one.arg for one in node.keywords if one.arg}):
            raise _Refused(f"it has an argument {taken[0]}, as checkpoint() has")
        self.start, self.end = source.start(node), source.end(node)
        self._text = source.text_of(node)
        self._opens, self._last, comma = _parentheses(self._text)
        self._function = self._text[:self._opens].rstrip()
        self._given = bool(node.args or node.keywords)
        self._separator = "" if comma else ","

    def wrapped(self, name: str, tail: str) -> list[Edit]:
        """The call as a checkpoint; what stands between its parentheses stays."""
        opens = self.start + len(self._text[:self._opens].encode())
        head = f"{name}({self._function}"
        if not self._given:
            return [Edit(self.start, self.end, f"{head}, {tail})")]
        last = self.start + len(self._text[:self._last].encode())
        return [Edit(self.start, opens + 1, f"{head}, "), Edit(last, last, f"{self._separator} {tail}")]

    def whole(self, name: str, tail: str) -> str:
        if not self._given:
            return f"{name}({self._function}, {tail})"
        return (f"{name}({self._function}, {self._text[self._opens + 1:self._last]}{self._separator} {tail}"
                f"{self._text[self._last:]}")


def _parentheses(text: str) -> tuple[int, int, bool]:
    """Of a call expression: where its parenthesis opens, where the last thing in it ends, and whether that is a comma.

    Comments are no things.
    """
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    opened: list[int] = []
    opens, ends, comma, previous, was_comma = 0, 0, False, 0, False
    # In parentheses of its own, the lines of an expression may be indented in any way.
    for token in tokenize.generate_tokens(io.StringIO(f"({text})").readline):
        if token.type in (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENDMARKER):
            continue
        begins = starts[token.start[0] - 1] + token.start[1] - (token.start[0] == 1)
        over = starts[token.end[0] - 1] + token.end[1] - (token.end[0] == 1)
        if token.string in "([{" and token.type == tokenize.OP:
            opened.append(begins)
        elif token.string in ")]}" and token.type == tokenize.OP:
            at = opened.pop()
            if len(opened) == 1:  # the last of these is the call's own
                opens, ends, comma = at, previous, was_comma
        previous, was_comma = over, token.string == ","
    return opens, ends, comma


def _condition(source: Source, call: Call, inside: list[Called]) -> str:
    """What is true of those modules of a call that are in the plan."""
    others = {one.relative for one in call.modules if one not in inside}
    way = call.way
    chosen = {one.relative for one in inside}
    if way is None or way.choice is None or chosen & others:
        out = next(one.path for one in call.modules if one not in inside)
        raise _Refused(f"the same code calls {inside[0].path}, which is in the plan, and {out}, which is not")
    if any(isinstance(node, (ast.Call, ast.NamedExpr, ast.Await)) for node in ast.walk(call.node.func)):
        raise _Refused("which module it calls would be asked twice")
    at = way.names.index(None)
    items = sorted({one.relative[at] for one in inside if one.relative}, key=lambda item: (len(item), item))
    container = source.text_of(way.choice)
    if not way.keyed and not all(item.isdecimal() for item in items):
        raise _Refused("its modules have no numbers")
    below = "".join(f"[{name}]" if name.isdecimal() else f".{name}" for name in way.names[at + 1:] if name)
    function = source.text_of(call.node.func)
    stretch = None if way.keyed or below else _slice([int(item) for item in items], _count(call, at))
    if stretch is not None:
        return f"{function} in {container}[{stretch}]"
    if way.keyed:
        items = [repr(item) for item in items]
    one_by_one = [f"{container}[{item}]{below}" for item in items]
    return f"{function} is {one_by_one[0]}" if len(items) == 1 else f"{function} in ({', '.join(one_by_one)})"


def _count(call: Call, at: int) -> int:
    return 1 + max(int(one.relative[at]) for one in call.modules if one.relative and one.relative[at].isdecimal())


def _slice(numbers: list[int], count: int) -> str | None:
    """
    >>> _slice([0, 1, 2], 6), _slice([0, 2, 4], 6), _slice([3, 4, 5], 6), _slice([0, 1, 5], 6)
    (':3', '::2', '3:', None)
    """
    if len(numbers) < 3:
        return None
    by = numbers[1] - numbers[0]
    if numbers != list(range(numbers[0], numbers[-1] + 1, by)):
        return None
    stop = "" if numbers[-1] + by >= count else numbers[-1] + 1
    return f"{numbers[0] or ''}:{stop}" + (f":{by}" if by > 1 else "")


def _statement(source: Source, node: ast.AST) -> ast.stmt:
    return next(one for one in source.above(node) if isinstance(one, ast.stmt))


def _carried(loop: ast.For, call: ast.Call) -> str:
    """The variable that a loop hands from one module to the next."""
    statement = loop.body[0]
    if len(loop.body) > 1 or loop.orelse or not isinstance(statement, ast.Assign) or len(statement.targets) > 1 or (
            not isinstance(statement.targets[0], ast.Name)) or not isinstance(loop.target, ast.Name):
        raise _Refused("the loop does more than to hand one variable from module to module")
    if any(isinstance(node, (ast.Yield, ast.YieldFrom, ast.Await, ast.NamedExpr)) for node in ast.walk(statement)):
        raise _Refused("the loop has an expression that cannot be moved into a function")
    name = statement.targets[0].id
    if name == loop.target.id:
        raise _Refused("the loop does more than to hand one variable from module to module")
    return name


def _free(source: Source, loop: ast.For, carried: str) -> list[str]:
    """Other variables of the function that a loop reads: given to it, for they may change before it runs again."""
    function = next((node for node in source.above(loop) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))),
                    None)
    if function is None or not isinstance(loop.target, ast.Name):
        raise _Refused("the loop is in no function")
    mine = list(ast.walk(function))
    if any(isinstance(node, (ast.Global, ast.Nonlocal)) for node in mine):
        raise _Refused("the function around the loop writes to variables outside it")
    inside = set(ast.walk(loop))
    if any(isinstance(node, ast.Name) and node.id == loop.target.id and node not in inside for node in mine):
        raise _Refused(f"{loop.target.id} is used beside the loop")
    taken = function.args
    own = {one.arg for one in (*taken.posonlyargs, *taken.args, *taken.kwonlyargs, taken.vararg, taken.kwarg) if one}
    stored = {node.id for node in mine if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    first = next(iter((*taken.posonlyargs, *taken.args)), None)
    constant = {first.arg} - stored if first is not None else set()  # self stays what it is
    read = [node.id for node in ast.walk(loop.body[0]) if isinstance(node, ast.Name)]
    return [name for name in dict.fromkeys(read)
            if name in (own | stored) - constant - {carried, loop.target.id}]


def checkpoint_name(source: Source) -> str:
    """What ``torch.utils.checkpoint.checkpoint`` goes by in a file, or may go by."""
    return source.imported("torch.utils.checkpoint", "checkpoint") or source.free("checkpoint")
