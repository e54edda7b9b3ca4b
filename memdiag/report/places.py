"""Places in the code, repeated blocks as one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from typing import TypeVar

from memdiag.report.names import fold
from memdiag.trace.places import Place

Figures = TypeVar("Figures", bound=Hashable)


def folded(figures: Mapping[Place, Figures], alike: bool = False) -> dict[Place, list[Figures]]:
    """The figures of places that differ in an index of their module alone, in order.

    Args:
        alike: only places with equal figures fold.
    """
    groups: dict[tuple[Hashable, ...], list[Place]] = defaultdict(list)
    for place, figure in figures.items():
        groups[place.operator, place.line, figure if alike else None].append(place)
    found: dict[Place, list[Figures]] = defaultdict(list)
    for places in groups.values():
        names = fold(place.module for place in places if place.module is not None)
        for place in places:
            module = None if place.module is None else names[place.module]
            found[Place(module, place.operator, place.line)].append(figures[place])
    return found


def words(place: Place) -> str:
    """A place in a line: module, operator and line of code, as far as they are known."""
    where = " › ".join(part for part in (place.module, place.operator) if part)
    return ", ".join(part for part in (where, place.line) if part) or "not known"
