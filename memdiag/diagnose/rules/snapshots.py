"""Copies of a model's state, as state dicts are: told by what is copied together, not by who keeps it."""

from __future__ import annotations

import numpy as np

from memdiag.diagnose.evidence import Evidence
from memdiag.diagnose.model import Mask
from memdiag.policy import SNAPSHOT_PARAMETERS
from memdiag.trace import NONE, Role


def snapshots(found: Evidence) -> tuple[Mask, float, int]:
    """What leaks and comes as whole copies of the parameters: in the step that made it, for each parameter at least
    one storage of its size, made outside modules and not saved by autograd. Copies of an optimizer's state have these
    sizes too; the state that optimizers have now is none.

    Returns:
        Which allocations they are; how many copies of the parameters are kept at a time, in the median; and how often
        some were.
    """
    nothing = np.zeros(len(found.size), dtype=bool)
    parameters = found.size[found.alive & (found.role == Role.PARAMETERS)]
    sizes, needed = np.unique(parameters, return_counts=True)
    if len(parameters) < SNAPSHOT_PARAMETERS:
        return nothing, 0.0, 0
    outside = found.at.nest.of(found.at.nest.module, found.at.born_in) == NONE
    mine = found.growing.leaks & outside & ~np.isin(
        found.role, (Role.SAVED_ACTIVATIONS, Role.OPTIMIZER_STATE)) & np.isin(found.size, sizes)
    copies, whole = [], nothing.copy()
    for step in np.unique(found.at.born_step[mine]).tolist():
        kept = np.flatnonzero(mine & (found.at.born_step == step))
        there = np.bincount(np.searchsorted(sizes, found.size[kept]), minlength=len(sizes))
        if (number := int((there // needed).min())) > 0:
            copies.append(number)
            whole[kept] = True
    return (whole, float(np.median(copies)), len(copies)) if copies else (nothing, 0.0, 0)
