"""``--emit code``: calls of ``checkpoint()``, to be put into the script by hand."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence

from memdiag.emit.edits import Edits, checkpoint_name, edits
from memdiag.emit.pieces import (
    CHECKPOINT,
    METHOD,
    NEEDS,
    ONE_MODEL,
    PARTIAL,
    Region,
    Roots,
    Run,
    are_indices,
    arguments,
    chain,
    imports,
    runs_in,
    sequential_forward,
)
from memdiag.emit.sites import Sites, shown


def code(
    where: Sites, regions: Sequence[Region], folder: str, head: str, chains: Collection[str] = (),
    roots: Roots = ONE_MODEL,
) -> str:
    """What to write, and in place of what.

    Where a line of the script calls a module, and can be rewritten for what is in the plan alone, it is. Modules that
    are called otherwise get a ``forward`` of their own once the model is built, and so does an ``nn.Sequential`` that
    has runs of them. Other runs are written as a function of one variable.

    Args:
        folder: that files are named relative to.
        head: what the plan is, in a line.
        chains: paths of modules that run what is in them one after the other, and do nothing else.
        roots: the models of the script.
    """
    found = edits(where, regions)
    left = [(region, found.refused[number].replace(os.path.join(folder, ""), ""))
            for number, region in enumerate(regions) if number in found.refused]
    alone = [(region, why) for region, why in left if len(region.modules) == 1]
    runs = runs_in([region for region, _ in left], chains)
    more = [*([PARTIAL] if alone else []), *([METHOD] if runs else [])]
    lines = [f"# {head}", f"# Needs {NEEDS}.", "", *imports(regions, CHECKPOINT, *more), *_statements(found, folder)]
    for keep in dict.fromkeys(region.keep for region, _ in alone):
        mine = [(region.modules[0], why) for region, why in alone if region.keep == keep]
        lines += ["", f"# {roots.built(path for path, _ in mine)}. No line can be rewritten for these:"]
        lines += _reasons(f"{path}: {why}" for path, why in mine)
        lines += ["for module in (", *(f"    {roots.expression(path)}," for path, _ in mine), "):",
                  f"    module.forward = partial(checkpoint, module.forward, {arguments(keep)})"]
    alike: dict[tuple[Run, ...], list[str]] = {}
    for container, those in runs.items():
        alike.setdefault(tuple(those), []).append(container)
    for same, containers in alike.items():
        what = (containers[0] or "the model") if len(containers) == 1 else f"each of {len(containers)} that are alike"
        lines += ["", f"# {roots.built(containers)}. PyTorch runs the modules of {what}:",
                  *sequential_forward("forward", same), "",
                  *_set_forward([roots.expression(container) for container in containers])]
    for region, why in left:
        if len(region.modules) > 1 and not runs_in([region], chains):
            lines += ["", f"# In place of what calls {', '.join(region.modules)}, with the arguments that they take:",
                      *_reasons([why]), *chain(region, are_indices(region.modules), roots)]
    return "\n".join(lines) + "\n"


def _set_forward(names: Sequence[str]) -> list[str]:
    if len(names) == 1:
        return [f"{names[0]}.forward = MethodType(forward, {names[0]})"]
    return ["for module in (", *(f"    {name}," for name in names), "):",
            "    module.forward = MethodType(forward, module)"]


def _statements(found: Edits, folder: str) -> Iterator[str]:
    for path, file in found.files.items():
        name = checkpoint_name(file.source)
        if name != "checkpoint":
            yield from ("", f"from torch.utils.checkpoint import checkpoint as {name}  # in {shown(path, folder)}")
        for _, statement in sorted(file.statements.items()):
            before = _dedented(file.source.text_of(statement), statement.col_offset)
            after = file.part(file.source.start(statement), file.source.end(statement))
            yield from ("", f"# {shown(path, folder)}:{statement.lineno}, in place of",
                        *(f"#     {line}".rstrip() for line in before),
                        *_dedented(after, statement.col_offset))


def _dedented(text: str, column: int) -> list[str]:
    """Lines of a statement, as if it stood at the left."""
    return textwrap.dedent(" " * column + text).splitlines()


def _reasons(reasons: Iterable[str]) -> list[str]:
    return [line for why in reasons for line in textwrap.wrap(
        why, 112, initial_indent="# - ", subsequent_indent="#   ", break_long_words=False, break_on_hyphens=False)]
