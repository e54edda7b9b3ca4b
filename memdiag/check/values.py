"""The values themselves, where digests have told two runs apart: how far apart they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from memdiag.policy import CHECK_COSINE, CHECK_ELEMENT, CHECK_NOISE
from memdiag.record.facts import innermost

Place = tuple[int, str, str, int]
"""Number of the optimizer's step, stage, name, number among those of the name."""


class Keeper:
    """Keeps values in a folder, each in a file of its own."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._known: dict[Place, int] = {}

    def __call__(self, place: Place, thing: Any) -> None:
        number = self._known.setdefault(place, len(self._known))
        if isinstance(thing, torch.Tensor):
            thing = innermost(thing).detach().to("cpu", copy=True)
        torch.save({"place": list(place), "value": thing}, self._folder / f"{number}.pt")


class Kept:
    """Values that a run has kept; each is read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[Place, Path] = {}
        for path in folder.glob("*.pt") if folder.is_dir() else ():
            step, stage, name, nth = torch.load(path, weights_only=True, mmap=True)["place"]
            self._files[step, stage, name, nth] = path

    def __contains__(self, place: Place) -> bool:
        return place in self._files

    def of(self, place: Place) -> Any:
        """The value; None where none was kept."""
        path = self._files.get(place)
        return None if path is None else torch.load(path, weights_only=True)["value"]


@dataclass(frozen=True)
class Apart:
    """How far two values are apart.

    Attributes:
        absolute: the largest difference of two elements.
        relative: the largest, of elements, of the difference beside the larger of the two.
        norm: the norm of the difference beside that of the first, in float64.
        cosine: of the angle between the two; None where one is zero.
        ratio: the second is the first times this, to a millionth; None where it is not.
    """

    absolute: float
    relative: float
    norm: float
    cosine: float | None
    ratio: float | None


def apart(a: Any, b: Any) -> Apart | None:
    """How far two values are apart; None for what are no numbers, or of two shapes."""
    one, other = _numbers(a), _numbers(b)
    if one is None or other is None or one.shape != other.shape or not one.numel():
        return None
    difference = (one - other).abs()
    if not bool(torch.isfinite(one).eq(torch.isfinite(other)).all()):
        return Apart(math.inf, math.inf, math.inf, None, None)
    difference = torch.nan_to_num(difference, nan=0.0, posinf=0.0)
    larger = torch.maximum(one.abs(), other.abs())
    beside = torch.where(difference > 0, difference / larger, torch.zeros_like(difference))
    norm, others = float(torch.linalg.vector_norm(one)), float(torch.linalg.vector_norm(other))
    dot = float(torch.dot(one.reshape(-1), other.reshape(-1)))
    return Apart(
        float(difference.max()), float(torch.nan_to_num(beside, nan=0.0, posinf=0.0).max()),
        float(torch.linalg.vector_norm(difference)) / (norm + _TINY),
        dot / (norm * others) if norm and others else None, _ratio(one, other))


_TINY, _EQUAL = 1e-30, 1e-6


def _ratio(one: torch.Tensor, other: torch.Tensor) -> float | None:
    """Of the second to the first, where it is one number for all elements but 1."""
    largest = int(one.abs().argmax())
    if not float(one.reshape(-1)[largest]):
        return None
    ratio = float(other.reshape(-1)[largest] / one.reshape(-1)[largest])
    scaled = one * ratio
    near = float((scaled - other).abs().max()) <= _EQUAL * float(scaled.abs().max())
    return ratio if near and abs(ratio - 1) > _EQUAL else None


def _numbers(value: Any) -> torch.Tensor | None:
    """In float64, flat; None for what are none."""
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.Tensor)):
        return None
    tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.to(torch.float64).reshape(-1)


_UNIT = {torch.float64: 2.0**-52, torch.float32: 2.0**-23, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def within_noise(a: Any, repeated: Sequence[Any], b: Any, length: int) -> bool:
    """Whether a value is as near to that of one run as those of other runs of the same script are.

    The norm of the difference, beside that of the value, is at most ``CHECK_NOISE`` times what repeated runs differ by,
    or the unit of the data type where that is more; the cosine between the two is 1 but for ``CHECK_COSINE``; and no
    element differs by more than ``CHECK_ELEMENT`` units times the root of the length of a sum times the root mean
    square of the value, or ``CHECK_NOISE`` times what it differs by in repeated runs. What is zero may be as far from
    it as in these.

    Args:
        repeated: of other runs.
        length: of the sums that make the values, such as the rows of a batch that the gradient of a weight is summed
            over.
    """
    found = apart(a, b)
    floors = [floor for again in repeated if (floor := apart(a, again)) is not None]
    if found is None or not floors:
        return False
    norm, element = max(floor.norm for floor in floors), max(floor.absolute for floor in floors)
    numbers = _numbers(a)
    assert numbers is not None  # else there is no distance
    mean_square = float(numbers.square().mean())
    if not mean_square:
        return found.absolute <= CHECK_NOISE * element
    unit = _UNIT.get(a.dtype, _UNIT[torch.float32]) if isinstance(a, torch.Tensor) else _UNIT[torch.float64]
    largest = max(CHECK_ELEMENT * unit * math.sqrt(length * mean_square), CHECK_NOISE * element)
    return found.norm <= CHECK_NOISE * max(norm, unit) and found.absolute <= largest and (
        found.cosine is None or found.cosine >= 1 - CHECK_COSINE)
