"""Pieces of Python that the forms have in common."""

from __future__ import annotations

import keyword
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from memdiag.trace.models import Model, model_of

CHECKPOINT = "from torch.utils.checkpoint import checkpoint"
PARTIAL = "from functools import partial"
METHOD = "from types import MethodType"
SELECTIVE = "from torch.utils.checkpoint import create_selective_checkpoint_contexts"
NEEDS = "PyTorch 2.6 or later"
"""Older ones were not looked at, for memdiag needs it too."""

OVERLOADS = """\
def overloads(operator):
    return [getattr(operator, name) for name in operator.overloads()]"""
"""What :func:`keeping` calls."""


class Region(Protocol):
    """Modules that run as one checkpoint, whoever says so: what a search has found, or a plan file.

    Attributes:
        modules: their qualified names; several follow each other.
        keep: operators whose results are kept instead of computed again, such as ``aten::mm``.
    """

    @property
    def modules(self) -> tuple[str, ...]: ...

    @property
    def keep(self) -> tuple[str, ...]: ...


def expression(path: str, root: str = "model") -> str:
    """A module as it is written in code.

    >>> expression("blocks.0.mlp")
    'model.blocks[0].mlp'
    >>> expression("heads.is-it")
    'model.get_submodule("heads.is-it")'
    """
    names = path.split(".") if path else []
    if any(keyword.iskeyword(name) or not (name.isidentifier() or name.isdecimal()) for name in names):
        return f'{root}.get_submodule("{path}")'
    return root + "".join(f"[{name}]" if name.isdecimal() else f".{name}" for name in names)


@dataclass(frozen=True)
class Roots:
    """The models of a script, as code that is written names them.

    One goes by its variable; where that is not known, by ``model`` if its names stand bare, else by its own name in
    small letters. Of a script of which no models are known there is one, ``model``.
    """

    models: Sequence[Model] = ()

    @cached_property
    def variables(self) -> dict[str, str]:
        """By the names of the models."""
        found = {one.name: one.name for one in self.models if one.variable}
        for one in self.models:
            if one.name not in found:
                name = re.sub(r"\W", "_", one.name).lower() if one.prefix else "model"
                while name in found.values() or keyword.iskeyword(name):
                    name += "_"
                found[one.name] = name
        return found

    def of(self, path: str) -> tuple[str, str]:
        """What the model of a module goes by, and the module below it."""
        one = model_of(path, self.models)
        return ("model", path) if one is None else (self.variables[one.name], one.relative(path))

    def expression(self, path: str) -> str:
        """A module as it is written in code."""
        root, below = self.of(path)
        return expression(below, root)

    def built(self, paths: Iterable[str]) -> str:
        """When modules are there, and what code calls the models that they are of."""
        names = [f"`{name}`" for name in dict.fromkeys(self.of(path)[0] for path in paths)]
        return f"Once the model{'s are' if len(names) > 1 else ' is'} built, as {', '.join(names)}"

    def given(self, names: Collection[str | None]) -> str:
        """What ``apply_plan`` is given for regions of these models: the one, or each by its name.

        >>> g, d = Model("g", "Net", "", True, 8), Model("d", "Net", "d", True, 8)
        >>> Roots([g, d]).given(["g", "g"]), Roots([g, d]).given(["g", "d"]), Roots().given([None])
        ('g', '{"g": g, "d": d}', 'model')
        """
        one = next(iter(names), None)
        return self.mapping(names) if len(set(names)) > 1 else self.variables.get(one or "", "model")

    def mapping(self, names: Iterable[str | None]) -> str:
        """Models by their names, as code."""
        mine = [name for name in dict.fromkeys(names) if name is not None]
        return "{" + ", ".join(f'"{name}": {self.variables.get(name, name)}' for name in mine) + "}"


ONE_MODEL = Roots()


def keeping(keep: Sequence[str]) -> str:
    """What ``checkpoint()`` takes as ``context_fn`` to keep the results of operators. It needs :func:`imports`.

    >>> keeping(["aten::mm", "aten::add.Tensor"])
    'partial(create_selective_checkpoint_contexts, [*overloads(torch.ops.aten.mm), torch.ops.aten.add.Tensor])'
    """
    operators = []
    for name in keep:
        parts = name.removeprefix("torch.ops.").replace("::", ".").split(".")
        operator = f"torch.ops.{'.'.join(parts)}"
        operators.append(operator if len(parts) > 2 else f"*overloads({operator})")
    return f"partial(create_selective_checkpoint_contexts, [{', '.join(operators)}])"


def arguments(keep: Sequence[str]) -> str:
    """What ``checkpoint()`` is told besides a module and its arguments."""
    return "use_reentrant=False" + (f", context_fn={keeping(keep)}" if keep else "")


def imports(regions: Iterable[Region], *more: str) -> list[str]:
    """Lines that code which keeps what these regions keep begins with.

    Args:
        more: imports that it needs in any case.
    """
    wanted, helper = set(more), []
    if any(region.keep for region in regions):
        wanted |= {PARTIAL, "import torch", SELECTIVE}
        helper = ["", "", *OVERLOADS.splitlines()]
    if {CHECKPOINT, SELECTIVE} <= wanted:
        wanted = wanted - {CHECKPOINT, SELECTIVE} | {f"{CHECKPOINT}, create_selective_checkpoint_contexts"}
    theirs = sorted((line for line in wanted if "torch" in line or "transformers" in line),
                    key=lambda line: (not line.startswith("import"), line))
    own = sorted(wanted - set(theirs))
    return [*own, *([""] if own and theirs else []), *theirs, *helper]


def chain(region: Region, indices: bool, roots: Roots = ONE_MODEL) -> list[str]:
    """Modules that run one after the other, each given what the one before it returns, as one checkpoint.

    Args:
        indices: whether they lie in a list in the order of their names, so that a slice of it has them.
    """
    modules = f"({', '.join(roots.expression(path) for path in region.modules)})"
    container, _, first = region.modules[0].rpartition(".")
    if indices:
        modules = f"{roots.expression(container)}[{first}:{int(first) + len(region.modules)}]"
    return ["def run(x):", f"    for module in {modules}:", "        x = module(x)", "    return x", "",
            f"x = checkpoint(run, x, {arguments(region.keep)})"]


Run = tuple[int, int, tuple[str, ...]]
"""In an ``nn.Sequential``: position of the first module, that after the last, and operators to keep."""


def runs_in(regions: Iterable[Region], chains: Collection[str]) -> dict[str, list[Run]]:
    """The regions of several modules that PyTorch runs one after the other, by the path of their ``nn.Sequential``.

    Args:
        chains: paths of modules that run what is in them one after the other, and do nothing else.
    """
    found: dict[str, list[Run]] = {}
    for region in regions:
        container, _, first = region.modules[0].rpartition(".")
        if len(region.modules) > 1 and container in chains and are_indices(region.modules):
            found.setdefault(container, []).append((int(first), int(first) + len(region.modules), region.keep))
    return {container: sorted(runs) for container, runs in found.items()}


def sequential_forward(name: str, runs: Sequence[Run], checkpoint: str = "checkpoint") -> list[str]:
    """The forward of an ``nn.Sequential`` in which runs of modules are one checkpoint each."""
    lines, at = [f"def {name}(chain, x):"], 0
    for start, stop, keep in runs:
        if start > at:
            lines.append(f"    x = chain[{at}:{start}](x)")
        lines.append(f"    x = {checkpoint}(chain[{start}:{stop}], x, {arguments(keep)})")
        at = stop
    return [*lines, f"    return chain[{at}:](x)"]


def are_indices(paths: Sequence[str]) -> bool:
    """Whether paths are those of neighbours in one list.

    >>> are_indices(["blocks.1", "blocks.2"]), are_indices(["blocks.1", "blocks.3"]), are_indices(["a", "b"])
    (True, False, False)
    """
    container, _, first = paths[0].rpartition(".")
    return first.isdecimal() and list(paths) == [
        f"{container}.{number}".lstrip(".") for number in range(int(first), int(first) + len(paths))]
