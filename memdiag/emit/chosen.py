"""The plan that is written: its regions, where they may be written at all."""

from __future__ import annotations

from memdiag.emit.pieces import Region
from memdiag.errors import MemdiagError
from memdiag.plan import Option, Planning, Safety
from memdiag.units import format_bytes


def chosen(planning: Planning) -> tuple[Option, list[Region]]:
    """The chosen plan, and its regions in the order in which they run.

    Raises:
        MemdiagError: there is nothing to write, or what there is must not be.
    """
    if planning.chosen is None:
        assert planning.floor is not None
        assert planning.budget is not None
        raise MemdiagError(
            f"there is no plan to write: none fits {format_bytes(planning.budget)}, and the lowest peak that was found "
            f"is {format_bytes(planning.floor.bytes)}; give a higher --budget, or --minimum")
    option = planning.options[planning.chosen]
    regions: list[Region] = list(option.plan.chosen)
    if not regions:
        raise MemdiagError("there is nothing to write: the chosen plan has no checkpoint"
                           + ("" if planning.budget is None else ", for the budget is kept without"))
    for path in (path for region in regions for path in region.modules):
        verdict = planning.safety.get(path)
        if verdict is not None and verdict.safety is Safety.UNSAFE and path not in planning.allowed:
            why = "; ".join(reason.text for reason in verdict.reasons)
            raise MemdiagError(f"{path}: is in the plan, and unsafe to run twice: {why}. Nothing is written of it")
    return option, regions


def refuse_runs(regions: list[Region], what: str) -> None:
    """
    Raises:
        MemdiagError: several modules are one region.
    """
    for region in regions:
        if len(region.modules) > 1:
            raise MemdiagError(
                f"{', '.join(region.modules)} are one checkpoint in the plan, and {what} makes one of each module; "
                "--emit code writes it, memdiag.apply_plan applies it")
