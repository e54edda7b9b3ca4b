"""Choices that one would make first, and that are poor: each replayed like any plan, and held against the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from memdiag.plan.names import EVERY_BLOCK
from memdiag.plan.replay import Region, peak_under
from memdiag.plan.step import Step
from memdiag.policy import PLAN_POOR_ALIKE, PLAN_POOR_GAIN, PLAN_POOR_SHARE, PLAN_TOLERANCE
from memdiag.trace import NONE

if TYPE_CHECKING:
    from memdiag.plan.planning import Option

WHOLE_MODEL, MOST_SAVED = "whole_model", "most_saved"


@dataclass(frozen=True)
class Poor:
    """A choice that is worse than it seems.

    Attributes:
        name: WHOLE_MODEL: each outermost call is one region. MOST_SAVED: the module that saves most, by itself. Or the
            name of a usual plan.
        module: of MOST_SAVED.
        saved_bytes: what is saved inside it alone, and would not be, of one forward of the step; None for usual plans.
        peak_bytes: under it.
        again_ns: time that the step takes longer.
        better: the name of a plan that has as low a peak, or a lower one, in less time; None for MOST_SAVED, of which
            much less comes than was to be hoped for.
    """

    name: str
    module: str | None
    saved_bytes: int | None
    peak_bytes: int
    again_ns: int
    better: str | None


def poor_choices(step: Step, options: Sequence[Option], gains: Sequence[Option]) -> list[Poor]:
    """Those that are poor in this step.

    Args:
        options: plans, the first without a checkpoint.
        gains: of each candidate by itself; what lowers the peak most comes first.
    """
    whole = [Region((call,)) for call in step.calls if call.outermost]
    found = _whole_model(step, options, whole), _most_saved(step, options[0], gains, whole), _every_block(options)
    return [poor for poor in found if poor is not None]


def _whole_model(step: Step, options: Sequence[Option], whole: Sequence[Region]) -> Poor | None:
    saves, again = step.saves, 0
    for call in (call for region in whole for call in region.calls):
        inside = saves.inside(call)
        if (inside & (saves.unpacked != NONE)).any():
            again += int(saves.time_ns[inside].max()) - call.start_ns
    peak = peak_under(step, whole).bytes
    better = _better(options, peak, again)
    return None if better is None or not again else Poor(
        WHOLE_MODEL, None, _saved(step, whole), peak, again, better)


def _most_saved(step: Step, bare: Option, gains: Sequence[Option], whole: Sequence[Region]) -> Poor | None:
    everything, saved = _saved(step, whole), {}
    for one in gains:
        (candidate,) = one.plan.chosen
        mine = 0 if len(candidate.modules) > 1 or candidate.keep else _saved(step, candidate.regions)
        # What saves all that the model does is the model by another name.
        if PLAN_POOR_SHARE * bare.plan.peak.bytes <= mine < PLAN_POOR_ALIKE * everything:
            saved[one.name] = mine
    # Of those that save about as much the best: of equal blocks the last one frees nothing in time.
    as_much = PLAN_POOR_ALIKE * max(saved.values(), default=1)
    best = next((one for one in gains if saved.get(one.name, 0) >= as_much), None)
    if best is None or bare.plan.peak.bytes - best.plan.peak.bytes > PLAN_POOR_GAIN * saved[best.name]:
        return None
    return Poor(MOST_SAVED, best.name, saved[best.name], best.plan.peak.bytes, best.plan.again_ns, None)


def _every_block(options: Sequence[Option]) -> Poor | None:
    every = next((one for one in options if one.name == EVERY_BLOCK), None)
    if every is None:
        return None
    better = _better(options, every.plan.peak.bytes, every.plan.again_ns)
    return None if better is None else Poor(
        every.name, None, None, every.plan.peak.bytes, every.plan.again_ns, better)


def _better(options: Sequence[Option], peak: int, again_ns: int) -> str | None:
    """The cheapest plan that has as low a peak, to what a search looks for, and takes less time."""
    most = peak + PLAN_TOLERANCE * options[0].plan.peak.bytes
    cheaper = [one for one in options if one.plan.peak.bytes <= most and one.plan.again_ns < again_ns]
    return min(cheaper, key=lambda one: one.plan.again_ns).name if cheaper else None


def _saved(step: Step, regions: Sequence[Region]) -> int:
    """Bytes of what the step made that are saved inside regions, and by nobody else: of the forward that saves most,
    for one micro-batch may be gone when the next one comes."""
    saves = step.saves
    inside = np.zeros(len(saves.span), dtype=bool)
    for call in (call for region in regions for call in region.calls):
        inside |= saves.inside(call)
    known = saves.allocation != NONE
    mine = np.setdiff1d(saves.allocation[known & inside], saves.allocation[known & ~inside])
    mine = mine[step.born[mine] >= step.first]
    begins = np.array([call.start for call in step.calls if call.outermost], dtype=np.int64)
    forward = np.searchsorted(begins, step.born[mine], side="right")
    return int(np.bincount(forward, weights=step.size[mine]).max(initial=0))
