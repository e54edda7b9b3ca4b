"""What code in single operators makes, and one of torch's own operators would not: in forward and backward alike."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from memdiag.diagnose.evidence import Evidence
from memdiag.diagnose.model import Advice, Class, Finding, Mask
from memdiag.units import format_bytes

# `log_softmax` keeps its result, and `nll_loss` nothing of that size; each makes one gradient of it in backward
# (derivatives.yaml of PyTorch: _log_softmax_backward_data, nll_loss_backward). Of a plain softmax the same holds: its
# result, the gradient that comes in, and the one that goes out.
_FUSED_TENSORS = 3


def elementwise(found: Evidence) -> Iterable[Finding]:
    broadcast, shapes = found.broadcast
    if shapes is not None:
        first, second, result = shapes
        # As many elements in another shape look like a slip.
        advice = "give both the same shape (`squeeze(-1)`), if their elements belong together one by one"
        if math.prod(first) != math.prod(second):
            advice = "compute it in chunks of rows, or with an operator that reduces as it goes (`torch.cdist`)"
        yield _finding(
            found, "broadcast", "Two operands are broadcast against each other", broadcast,
            [f"{list(first)} and {list(second)} become {list(result)}: {_number(found, broadcast)} of that size, "
             f"{format_bytes(found.bytes_of(broadcast))}, are alive {found.when}"],
            Advice(advice, found.saving(broadcast)))
    softmax = found.written_softmax
    if softmax.any():
        largest = int(found.size[softmax & found.alive].max())
        yield _finding(
            found, "written_softmax", "A softmax is written out in single operators", softmax,
            [f"{_number(found, softmax)} of its size, {format_bytes(found.bytes_of(softmax))}, are alive {found.when}",
             f"in one operator {_FUSED_TENSORS} would be: its result, and two gradients in backward"],
            Advice("`torch.nn.functional.cross_entropy`, `log_softmax` or `softmax`; or compute it in chunks of rows",
                   found.saving(softmax, keeping=_FUSED_TENSORS * largest)))


def _number(found: Evidence, chosen: Mask) -> str:
    number = int(np.count_nonzero(chosen & found.alive))
    return f"{number} tensor{'s' * (number > 1)}"


def _finding(
    found: Evidence, kind: str, title: str, chosen: Mask, evidence: list[str], advice: Advice
) -> Finding:
    """It belongs to the class that most of its bytes are of."""
    cls = found.main_class(chosen, Class.ACTIVATION, Class.WORKSPACE)
    return found.finding(cls, kind, title, chosen, [*evidence, found.origin(chosen)], [advice])
