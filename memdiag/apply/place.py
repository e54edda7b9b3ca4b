"""Whose modules the regions of a plan are: each goes onto its own model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from memdiag.apply.read import Region
from memdiag.emit.pieces import Roots
from memdiag.errors import MemdiagError
from memdiag.trace.models import Model


def place(
    given: nn.Module | Mapping[str, nn.Module], regions: Sequence[Region], known: Sequence[Model]
) -> list[tuple[Region, nn.Module]]:
    """Regions by the names of their own models, and these models.

    Args:
        given: the one model that all regions are of; or models by their names.
        known: models of the script that was planned, as far as the plan tells.

    Raises:
        MemdiagError: a region is of a model that is not given, or what is given is another model of the script.
    """
    if isinstance(given, Mapping):
        return _on_several(given, regions, known)
    if not isinstance(given, nn.Module):
        raise MemdiagError(f"a plan goes onto a model, or onto several by their names, and not onto a "
                           f"{type(given).__name__}")
    names = dict.fromkeys(region.model for region in regions)
    if len(names) > 1:
        raise MemdiagError(f"the plan has modules of {_listed(names, known)}; give each by its name: "
                           f"memdiag.apply_plan({Roots(known).mapping(names)}, …)")
    if names.keys() <= {None}:
        return [(region, given) for region in _named_here(given, regions)]
    (name,) = names
    _refuse_other(given, str(name), known)
    return [(_relative(region, known), given) for region in regions]


def _on_several(
    given: Mapping[str, nn.Module], regions: Sequence[Region], known: Sequence[Model]
) -> list[tuple[Region, nn.Module]]:
    for name, model in given.items():
        if not isinstance(model, nn.Module):
            raise MemdiagError(f"{name}: is a {type(model).__name__}, and no model")
    placed = [_relative(region, known) if region.model is not None else _by_prefix(region, given)
              for region in regions]
    names = dict.fromkeys(region.model for region in placed)
    there = {*names, *(one.name for one in known)}
    missing = [name for name in names if name not in given]
    if missing or not there.issuperset(given):
        what = f"{missing[0]} is not given" if missing else (
            f"{next(name for name in given if name not in there)} is none of the planned script's")
        raise MemdiagError(f"{what}: the plan has modules of {_listed(names, known)}; give each by its name: "
                           f"memdiag.apply_plan({Roots(known).mapping(names)}, …)")
    for name, model in given.items():
        _refuse_other(model, name, known)
    return [(region, given[str(region.model)]) for region in placed]


def _relative(region: Region, known: Sequence[Model]) -> Region:
    """A region by its own model's names."""
    model = next((one for one in known if one.name == region.model), None)
    return region if model is None else replace(region, modules=tuple(map(model.relative, region.modules)))


def _by_prefix(region: Region, given: Mapping[str, nn.Module]) -> Region:
    """A region whose modules begin with the name of a model; the plan itself does not say whose they are."""
    for name in given:
        if all(path == name or path.startswith(f"{name}.") for path in region.modules):
            return replace(region, model=name, modules=tuple(
                path[len(name):].removeprefix(".") for path in region.modules))
    raise MemdiagError(f"{region}: the plan does not say of which model that is; give one model, or begin the names "
                       f"with those that are given here, as in {next(iter(given), 'model')}.{region.modules[0]}")


def _named_here(model: nn.Module, regions: Sequence[Region]) -> list[Region]:
    """The regions by the model's own names. Where a script has several models, a plan that does not say whose its
    modules are has the name of a variable before those of all but the first."""
    names = {path.partition(".")[0] for region in regions for path in region.modules}
    if len(names) != 1 or names <= {"", *(name for name, _ in model.named_children())}:
        return list(regions)
    here = [replace(region, modules=tuple(path.partition(".")[2] for path in region.modules)) for region in regions]
    there = {name for name, _ in model.named_modules(remove_duplicate=False) if name}
    return here if there.issuperset(path for region in here for path in region.modules) else list(regions)


def _refuse_other(model: nn.Module, name: str, known: Sequence[Model]) -> None:
    """Refuses what is another model of the planned script: by its class, or where that is the same by its size.

    Nothing else tells, and a wrapper or a subclass of the planned model is none of the others.
    """
    inside = _inside(model)
    cls, parameters = type(inside).__name__, list(inside.parameters())
    count = None if any(map(is_lazy, parameters)) else sum(one.numel() for one in parameters)
    own = next((one for one in known if one.name == name), None)
    if own is None:
        return
    for other in known:
        as_large = count is not None and count == other.parameters != own.parameters
        if other.cls == cls and (own.cls != cls or as_large):
            size = "" if own.cls != cls else f" with {count:,} parameters"
            raise MemdiagError(f"the plan is of {own}, and a {cls}{size} is given, which in the planned script is "
                               f"`{other.name}`; give it `{own.name}`, or plan anew for a script that was changed")


def _inside(model: nn.Module) -> nn.Module:
    """The model in wrappers such as ``DistributedDataParallel``, and in what ``torch.compile`` returns."""
    while model._modules.keys() in ({"module"}, {"_orig_mod"}):
        (inner,) = model._modules.values()
        if inner is None:
            break
        model = inner
    return model


def _listed(names: Mapping[str | None, Any], known: Sequence[Model]) -> str:
    models = {one.name: one for one in known}
    said = [str(models[name]) if name in models else f"`{name}`" for name in names if name is not None]
    if None in names:
        said.append("one that it does not name")
    return " and ".join(filter(None, (", ".join(said[:-1]), said[-1]))) if said else "no model"
