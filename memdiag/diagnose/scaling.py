"""What of the peak scales with the batch or the sequence: measured where batches differ, else told by shapes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np

from memdiag.diagnose.evidence import Evidence
from memdiag.diagnose.model import Class, Ints, Scaling
from memdiag.policy import SCALING_FIT, SCALING_SHARE
from memdiag.trace import Level, Role
from memdiag.trace.ledger import ledger

_LINE_NEEDS = 3  # a line goes through any two points
_FIRST_INPUT = re.compile(r"(\w+)\[([\d, ]+)\]")


def scaling(found: Evidence) -> list[Scaling]:
    """Roles that grow with a dimension of the inputs, and by how much for each unit of it."""
    return _measured(found) or _from_shapes(found)


def _measured(found: Evidence) -> list[Scaling]:
    """From steps whose inputs differ in one dimension alone: a straight line through each role at the steps' peaks."""
    trace, line = found.run.trace, found.run.line
    steps = trace["steps"]
    rows = [row for row in np.flatnonzero((steps["level"] == Level.FULL) & (steps["warm_up"] == 0)).tolist()
            if steps["end_event"][row] > steps["start_event"][row]]
    texts = [trace.string(int(steps["input_shapes"][row])) for row in rows]
    shapes = [_shape(text) for text in texts]
    if len(set(shapes)) < _LINE_NEEDS or None in shapes or len({len(shape or ()) for shape in shapes}) > 1:
        return []
    sizes = np.array(shapes, dtype=np.int64)
    varying = np.flatnonzero(np.ptp(sizes, axis=0))
    names = _names(texts[0])
    if len(varying) != 1 or varying[0] >= len(names):
        return []
    peaks = np.array([
        steps["start_event"][row] + int(line.live[steps["start_event"][row] : steps["end_event"][row]].argmax())
        for row in rows], dtype=np.int64)
    order = np.argsort(peaks)
    bytes_ = ledger(trace, found.run.roles, found.run.device, peaks[order])
    units = sizes[order, varying[0]].astype(float)
    result = []
    for role in Role:
        of_role = bytes_[role].astype(float)
        if of_role.max() < SCALING_SHARE * found.peak_bytes:
            continue
        slope, fixed = (float(number) for number in np.polyfit(units, of_role, 1))
        far = np.abs(slope * units + fixed - of_role).max()
        # What would be negative at size 0 bends: it grows faster than the dimension.
        if slope > 0 and max(float(far), -fixed) <= SCALING_FIT * of_role.max():
            result.append(Scaling(
                role.label, names[varying[0]], round(slope), max(round(fixed), 0), "measured"))
    return result


def _from_shapes(found: Evidence) -> list[Scaling]:
    """From the shapes of what was saved: a tensor that has the batch among its dimensions holds a part for each."""
    table = found.run.trace["steps"]
    row = np.flatnonzero(table["step"] == found.step)
    text = found.run.trace.string(int(table["input_shapes"][row[0]])) if len(row) else None
    shape = _shape(text)
    if shape is None:
        return []
    mine = found.alive & (found.role == Role.SAVED_ACTIVATIONS) & (found.of(Class.ACTIVATION) | found.leaked)
    allocations, saved = found.saves.shapes_of(mine)
    total = int(found.size[mine].sum())
    if total < SCALING_SHARE * found.peak_bytes:
        return []
    result = []
    for position, name in enumerate(_names(text)):
        size = shape[position]
        if size < 2 or position and shape.count(size) > 1:  # which of the two a tensor has cannot be told
            continue
        outer = math.prod(shape[:position]) if position else None
        powers = np.array([_power(dims, size, outer) for dims in saved], dtype=np.int64)
        scales: Ints = found.size[allocations] * powers
        if scales.any():
            fixed = int(found.size[allocations[powers == 0]].sum())
            result.append(Scaling(
                Role.SAVED_ACTIVATIONS.label, name, round(int(scales.sum()) / size), fixed, "shapes"))
    return result


def _power(dims: Sequence[int], size: int, outer: int | None) -> int:
    """How often a dimension of the inputs is among those of a tensor, or part of one.

    Args:
        outer: product of the dimensions before it, which tensors are often folded with; None for the first, the batch,
            which comes first in tensors too, heads, tokens or windows folded into it.
    """
    if outer is None:
        return int(bool(dims) and dims[0] % size == 0)
    return sum(dim in (size, size * outer) for dim in dims)


def _shape(text: str | None) -> tuple[int, ...] | None:
    """The dimensions of the first input."""
    first = _FIRST_INPUT.search(text or "")
    return None if first is None else tuple(int(size) for size in first[2].split(","))


def _names(text: str | None) -> list[str]:
    """What the leading dimensions of the first input are: tokens are integers, sequences of features three-dimensional;
    of what else there is (rows of features, images) only the batch is known."""
    shape, first = _shape(text), _FIRST_INPUT.search(text or "")
    if not shape or first is None:
        return []
    tokens = first[1].startswith(("int", "uint")) and len(shape) >= 2
    return ["batch", "sequence"] if tokens or len(shape) == 3 else ["batch"]
