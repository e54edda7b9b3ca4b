"""``--emit compile``: a budget for models that ``torch.compile`` compiles, which checkpoint by themselves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from memdiag.emit.pieces import NEEDS, Region
from memdiag.plan.step import Call, Mask, Step
from memdiag.trace import NONE


def compile_(step: Step, regions: Sequence[Region], head: str) -> str:
    """The setting of the compiler's partitioner that keeps the share which a plan keeps.

    Args:
        head: what the plan is, in a line.
    """
    kept, saved, least = kept_bytes(step, regions)
    share = round((kept - least) / (saved - least), 2) if saved > least else 1.0
    return f"""\
# {head}
# The compiler chooses itself what it computes again. It takes a share: 0 keeps what the model is given, 1 what it keeps
# by its own choice. Under the plan {kept - least:,} bytes are kept of {saved - least:,} that the model's forward saves
# beside what it is given: that share is counted. What comes of it is not: the compiler's own choice saves less than
# that, it goes by its own estimate of time, and the peak has more than what is saved. So profile again with it, and go
# lower where the peak is too high.

# Needs {NEEDS}. Before the model is compiled:
import torch._functorch.config

torch._functorch.config.activation_memory_budget = {share}

# PyTorch 2.13 or later has the same for a part of a model; it must be all of what is compiled as one graph. In place of
# the setting above, inside the function that is compiled:
#
#     with torch.autograd.graph.region_activation_memory_budget({share}):
#         output = model(input)
"""


def kept_bytes(step: Step, regions: Sequence[Region]) -> tuple[int, int, int]:
    """Of what was made in a step and saved for backward: bytes that stay under a plan until backward comes to them; all
    of it; and what stays where each forward is one region. Each allocation counts once.

    A region keeps what it is given, the results of operators that it is told to, and what others have saved as well.
    """
    saves = step.saves
    fresh = (saves.allocation != NONE) & (saves.unpacked != NONE)
    fresh[fresh] = (step.born[saves.allocation[fresh]] >= step.first) & (step.size[saves.allocation[fresh]] > 0)
    whole = np.unique(saves.allocation[fresh])

    def bytes_with(stays: Mask, inside: Mask) -> int:
        stays[saves.allocation[fresh & ~inside]] = True
        return int(step.size[whole[stays[whole]]].sum())

    stays, inside = _none(step)
    for region in regions:
        for call in step.calls:
            if call.path in region.modules:
                inside |= saves.inside(call)
                stays[call.arguments] |= call.path == region.modules[0]
                stays[_results(step, call, region.keep)] = True
    kept = bytes_with(stays, inside)
    stays, inside = _none(step)
    for call in step.calls:
        if call.outermost:
            inside |= saves.inside(call)
            stays[call.arguments] = True
    return kept, int(step.size[whole].sum()), bytes_with(stays, inside)


def _none(step: Step) -> tuple[Mask, Mask]:
    return np.zeros(len(step.size), dtype=bool), np.zeros(len(step.saves.span), dtype=bool)


def _results(step: Step, call: Call, keep: Sequence[str]) -> list[int]:
    """What the operators to keep have made in a call, and left."""
    operators, found = step.operators, []
    for name, start, end in zip(operators.name, operators.start.tolist(), operators.end.tolist(), strict=True):
        if name in keep and call.start <= start and end <= call.end:
            made = step.made_between(start, end)
            found += made[step.died[made] >= end].tolist()
    return found
