"""Applies a plan: finds its modules, refuses what would not do as planned, and exchanges their forwards."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches

import torch
from torch import nn

from memdiag.apply.operators import Keep
from memdiag.apply.place import place
from memdiag.apply.read import Plan, Region, read
from memdiag.apply.regions import Chained, Checkpointed, is_chain
from memdiag.emit.pieces import CHECKPOINT, are_indices, chain, imports
from memdiag.errors import MemdiagError
from memdiag.modulenames import matching

Forward = Checkpointed | Chained


@dataclass(frozen=True)
class Applied:
    """A plan on a model, or on several.

    Attributes:
        regions: what runs as checkpoints, by names of the model that each is of.
    """

    regions: list[Region]
    _forwards: list[tuple[nn.Module, Forward]] = field(repr=False)

    def undo(self) -> None:
        """Puts the model back. A second time it does nothing.

        Raises:
            MemdiagError: a module's forward was exchanged again since; nothing is undone.
        """
        for module, forward in self._forwards:
            if vars(module).get("forward") is not forward:
                raise MemdiagError(f"the forward of a {type(module).__name__} was exchanged after the plan was applied;"
                                   " undo that first")
        for module, forward in self._forwards:
            if forward.before is None:
                del module.forward
            else:
                module.forward = forward.before
        self._forwards.clear()


def apply_plan(
    model: nn.Module | Mapping[str, nn.Module], plan: Plan, *, allow_unsafe: Collection[str] = ()
) -> Applied:
    """As ``memdiag.apply_plan``."""
    placed = [(region, root) for one, root in place(model, *read(plan, allow_unsafe)) for region in _spelled(root, one)]
    models = list(model.values()) if isinstance(model, Mapping) else [model]
    if any(isinstance(vars(module).get("forward"), Forward) for one in models for module in one.modules()):
        raise MemdiagError("the model has a plan already; undo() that one first")
    if not isinstance(plan, Sequence) or isinstance(plan, str):
        for one in models:
            _refuse_of_another(one, [region for region, root in placed if root is one])
    exchanged = []
    for region, root in placed:
        try:
            exchanged.append(_exchange(root, region))
        except MemdiagError as error:
            raise MemdiagError(f"{region.model}: {error}" if isinstance(model, Mapping) else str(error)) from None
    _refuse_twice(placed)
    _refuse_nested(exchanged)
    forwards = _forwards(exchanged)
    for module, forward in forwards:
        module.forward = forward
    return Applied([region for region, _ in placed], forwards)


def _spelled(root: nn.Module, region: Region) -> list[Region]:
    """A region; one of one module that stands for several as one region each."""
    if len(region.modules) > 1:
        return [region]
    names = [name for name, _ in root.named_modules(remove_duplicate=False)]
    return [replace(region, modules=(path,)) for path in matching(region.modules[0], names)]


def _exchange(root: nn.Module, region: Region) -> tuple[nn.Module, Region, list[nn.Module]]:
    """Whose forward is exchanged for a region, and the modules of the region."""
    modules = [_module(root, path) for path in region.modules]
    owner = modules[0] if len(modules) == 1 else _container(root, region)
    _refuse(region, owner, modules)
    return owner, region, modules


def _refuse_of_another(model: nn.Module, regions: list[Region]) -> None:
    """Refuses a plan of which nothing is in the model, nor in it under a wrapper: that it has no such module would send
    one looking for a slip in a name."""
    paths = [path for region in regions for path in region.modules]
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    if paths and not any(f".{name}".endswith(f".{path}") for path in paths for name in names):
        inside = ", ".join([name for name in names if name][:3])
        raise MemdiagError(f"the plan is of another model: this {type(model).__name__} has none of its modules, such "
                           f"as {paths[0]}; there is {inside or 'none inside'}")


def _forwards(exchanged: list[tuple[nn.Module, Region, list[nn.Module]]]) -> list[tuple[nn.Module, Forward]]:
    forwards: list[tuple[nn.Module, Forward]] = []
    runs: dict[nn.Sequential, list[tuple[int, int, tuple[str, ...]]]] = {}
    for owner, region, modules in exchanged:
        if len(modules) == 1:
            forwards.append((owner, Checkpointed(owner, vars(owner).get("forward"), region.keep)))
        elif isinstance(owner, nn.Sequential):  # always: _container() finds no other
            start = list(owner._modules).index(_name(region.modules[0]))
            runs.setdefault(owner, []).append((start, start + len(modules), region.keep))
    return forwards + [(owner, Chained(owner, sorted(of_it))) for owner, of_it in runs.items()]


def _module(model: nn.Module, path: str) -> nn.Module:
    module = model
    for name in path.split(".") if path else ():
        if isinstance(module, (torch.jit.ScriptModule, nn.DataParallel)):
            break
        child = module._modules.get(name)
        if child is None:
            names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
            close = get_close_matches(path, names, n=3) or names[:3]
            inside = "; the model is in its .module" if isinstance(model, nn.parallel.DistributedDataParallel) else ""
            raise MemdiagError(
                f"{path}: the model has no such module; there is {', '.join(close) or 'none inside'}{inside}")
        module = child
    if isinstance(module, torch.jit.ScriptModule):
        raise MemdiagError(f"{path}: is, or is inside, a torch.jit.ScriptModule, which runs code of its own; apply the "
                           "plan to the model that was scripted or traced, and leave it unscripted")
    if isinstance(module, nn.DataParallel):
        raise MemdiagError(f"{path}: is inside a DataParallel, whose replicas would run the forward of the module that "
                           "they were copied from; use DistributedDataParallel")
    return module


def _refuse_twice(placed: Iterable[tuple[Region, nn.Module]]) -> None:
    seen = set()
    for region, root in placed:
        for path in region.modules:
            if (root, path) in seen:
                raise MemdiagError(f"{path or 'the whole model'}: is in the plan twice")
            seen.add((root, path))


def _container(model: nn.Module, region: Region) -> nn.Sequential:
    """The module that runs the modules of a region one after the other."""
    parents = {path.rpartition(".")[0] for path in region.modules}
    if len(parents) > 1 or "" in region.modules:
        raise MemdiagError(f"{region}: are not children of one module, so they are not one region")
    (parent,) = parents
    container = _module(model, parent)
    names = [_name(path) for path in region.modules]
    there = list(container._modules)
    start = there.index(names[0])
    if isinstance(container, nn.Sequential) and "forward" in vars(container):
        raise MemdiagError(f"{region}: the forward of {parent or 'the model'} was exchanged, and may not be the chain "
                           "of its modules any more; undo that, or use regions of one module each")
    if isinstance(container, nn.Sequential) and is_chain(container):
        if there[start:start + len(names)] != names:
            raise MemdiagError(f"{region}: do not follow each other in {parent or 'the model'}, so they are not one "
                               "region")
        return container
    raise MemdiagError(
        f"{region}: are called by code of the model's own ({parent or 'the model'} is a {type(container).__name__}), "
        "which only you can put into one checkpoint. Where that code runs them, write what follows, with the "
        f"arguments that they take:\n\n{_code(region, container)}\n")


def _code(region: Region, container: nn.Module) -> str:
    """What to write by hand for modules that the model's own code runs."""
    Keep(region.keep)  # what cannot be kept is said first
    indices = isinstance(container, nn.ModuleList) and are_indices(region.modules)
    return "\n".join([*imports([region], CHECKPOINT), "", *chain(region, indices)])


def _name(path: str) -> str:
    return path.rpartition(".")[2]


def _refuse(region: Region, owner: nn.Module, modules: Iterable[nn.Module]) -> None:
    if type(owner).forward is nn.Module.forward and "forward" not in vars(owner):
        raise MemdiagError(f"{region}: has no forward, for a {type(owner).__name__} only holds modules; name these")
    if "_orig_mod" in owner._modules:
        raise MemdiagError(f"{region}: was compiled by torch.compile; name the module in it, with ._orig_mod at the "
                           "end, or apply the plan before")
    if any(isinstance(inner, nn.parallel.DistributedDataParallel) for module in modules for inner in module.modules()):
        raise MemdiagError(f"{region}: has a DistributedDataParallel in it, which cannot run a second time in "
                           "backward; name modules inside it")


def _refuse_nested(exchanged: list[tuple[nn.Module, Region, list[nn.Module]]]) -> None:
    """Refuses regions inside one another, and modules in two regions, by whatever names they go."""
    several = len({region.model for _, region, _ in exchanged}) > 1
    within: dict[nn.Module, list[Region]] = {}
    for _, region, modules in exchanged:
        for inner in {inner for module in modules for inner in module.modules()}:
            within.setdefault(inner, []).append(region)
    for owner, region, _ in exchanged:
        for around in within.get(owner, ()):
            if around is not region:
                one, other = (f"{each} of {each.model}" if several else each for each in (region, around))
                raise MemdiagError(f"{one}: is in {other} too, which is a region itself; regions cannot share "
                                   "modules or lie inside one another")
