"""Which of several checkpoints makes the difference."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memdiag.check.spec import Regions

Region = tuple[tuple[str, ...], tuple[str, ...]]


def bisect(
    found: Sequence[Sequence[Sequence[str]]], differs: Callable[[Regions], bool]
) -> tuple[tuple[str, ...] | None, bool]:
    """The smallest part of the regions that differs by itself, looked for by halves.

    Args:
        found: all that were put in, patterns written out: modules and kept operators of each.
        differs: whether a run with some of them differs.

    Returns:
        their names, and whether a run with all others does not differ; (None, True) where there is but one, or a run
        with all of them by their names does not differ.
    """
    whole: list[Region] = [(tuple(modules), tuple(keep)) for modules, keep in found]
    if len(whole) < 2:
        return None, True
    part = whole
    while len(part) > 1:
        half = len(part) // 2
        # Where the one half is equal and the other too, they only differ together.
        part_of = next((some for some in (part[:half], part[half:]) if differs(Regions(tuple(some)))), None)
        if part_of is None:
            break
        part = part_of
    others = [region for region in whole if region not in part]
    alone = not others or not differs(Regions(tuple(others)))
    return tuple(", ".join(modules) for modules, _ in part), alone
