"""``--emit diff``: a plan as a change of the script's files, for ``git apply`` or ``patch -p1``."""

from __future__ import annotations

import ast
import difflib
import os
from collections.abc import Collection, Sequence

from memdiag.emit.edits import Edit, checkpoint_name, edits
from memdiag.emit.forwards import add_forwards
from memdiag.emit.pieces import CHECKPOINT, METHOD, NEEDS, OVERLOADS, PARTIAL, SELECTIVE, Region
from memdiag.emit.sites import Sites, Source, shown
from memdiag.errors import MemdiagError


def diff(where: Sites, regions: Sequence[Region], folder: str, head: str, chains: Collection[str] = ()) -> str:
    """A unified diff: the calls that are checkpoints, and the imports that these need.

    Its names begin with ``a/`` and ``b/``, and are relative to the outermost folder of the repository that the script
    lies in; where it lies in none, to the script's folder.

    Args:
        folder: of the script.
        head: what the plan is, in a line.
        chains: paths of modules that run what is in them one after the other, and do nothing else.

    Raises:
        MemdiagError: part of the plan cannot be written so. Nothing is, then.
    """
    found = edits(where, regions)
    forwards, methods = add_forwards(found, where, regions, chains)
    if found.refused:
        number, why = next(iter(found.refused.items()))
        more = len(found.refused) - 1
        raise MemdiagError(
            f"{', '.join(regions[number].modules)}: no line of the script can be rewritten for it: {why}"
            + (f" (nor for {more} more regions of the plan)" if more else "")
            + ". `--emit code` writes what to put elsewhere, and memdiag.apply_plan applies the plan as it is")
    root = _root(folder)
    outside = [path for path in found.files if shown(path, root) == path]
    if outside:
        raise MemdiagError(f"{outside[0]}: lies outside {root}, so that no diff for that folder can change it; "
                           "`--emit code` says what to write there")
    lines = [f"# {head}\n", f"# Needs {NEEDS}. In {root}: git apply FILE, or patch -p1 < FILE\n"]
    for path, file in sorted(found.files.items()):
        selective = any(region.keep for region in regions)
        file.edits += _imports(file.source, path in forwards, path in methods, selective)
        after = file.part(0, len(file.source.text.encode()))
        ast.parse(after)  # every edit stands between whole tokens, so it is Python as before
        name = shown(path, root).replace(os.sep, "/")
        lines += _unified(file.source.text, after, name)
    return "".join(lines)


def _unified(before: str, after: str, name: str) -> list[str]:
    found = []
    for line in difflib.unified_diff(
            before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{name}", f"b/{name}"):
        found.append(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n")
    return found


def _root(folder: str) -> str:
    """The outermost folder of the repository around a folder, as ``git apply`` takes names to be relative to it."""
    at = folder
    while True:
        if os.path.exists(os.path.join(at, ".git")):
            return at
        above = os.path.dirname(at)
        if above == at:
            return folder
        at = above


def _imports(source: Source, partial: bool, method: bool, selective: bool) -> list[Edit]:
    """What the edited calls of a file need, after the imports that it begins with."""
    name = checkpoint_name(source)
    lines = []
    if (partial or selective) and not _has(source, "functools", "partial"):
        lines.append(PARTIAL)
    if method and not _has(source, "types", "MethodType"):
        lines.append(METHOD)
    if selective and not _has(source, "torch", "torch"):
        lines.append("import torch")
    if source.imported("torch.utils.checkpoint", "checkpoint") is None:
        lines.append(CHECKPOINT + ("" if name == "checkpoint" else f" as {name}"))
    if selective and not _has(source, "torch.utils.checkpoint", "create_selective_checkpoint_contexts"):
        lines.append(SELECTIVE)
    if selective:
        if "overloads" in source.names:
            raise _taken(source, "overloads")
        lines += ["", "", *OVERLOADS.splitlines()]
    if not lines:
        return []
    end = source.end_of_line
    last: ast.stmt | None = None
    for number, node in enumerate(source.tree.body):
        is_text = number == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not is_text and not isinstance(node, (ast.Import, ast.ImportFrom)):
            break
        last = node
    if last is None:
        at = source.start(source.tree.body[0])
        return [Edit(at, at, "".join(line + end for line in lines))]
    return [Edit(source.end(last), source.end(last), "".join(end + line for line in lines))]


def _has(source: Source, module: str, name: str) -> bool:
    """Whether a file imports something by its own name.

    Raises:
        MemdiagError: the name is taken there.
    """
    if source.imported(module, name) == name:
        return True
    if name in source.names:
        raise _taken(source, name)
    return False


def _taken(source: Source, name: str) -> MemdiagError:
    return MemdiagError(f"{source.path}: {name} is the name of something else there, which a diff would need; `--emit "
                        "code` has what to write")
