"""Names of modules, where a range or a pattern stands for several. Apart, as plans and live models both ask for it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

_RANGES = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")


def matching(asked: str, names: Iterable[str]) -> list[str]:
    """The names that a range, as reports print it, or a pattern, as ``fnmatch`` has it, stands for.

    A pattern is matched name by name between the dots, so that ``blocks.*`` is ``blocks.0`` and not ``blocks.0.mlp``.
    A name that is there stands for itself alone. One that is not there is handed back, for the caller to refuse: of a
    range the first that is missing, for it must be there whole.

    >>> names = ["blocks", "blocks.0", "blocks.0.mlp", "blocks.1", "blocks.1.mlp", "blocks.2", "head"]
    >>> matching("blocks.0-1.mlp", names), matching("blocks.0,2", names)
    (['blocks.0.mlp', 'blocks.1.mlp'], ['blocks.0', 'blocks.2'])
    >>> matching("blocks.*", names), matching("blocks.0-5", names)
    (['blocks.0', 'blocks.1', 'blocks.2'], ['blocks.3'])
    >>> matching("head", names), matching("tail*", names)
    (['head'], ['tail*'])
    """
    there = [name for name in dict.fromkeys(names) if name]
    if asked in there:
        return [asked]
    found: dict[str, None] = {}
    for pattern in _spelled(asked.split(".")):
        mine = [name for name in there if _matches(name.split("."), pattern)]
        if not mine:
            return [".".join(pattern)]
        found.update(dict.fromkeys(mine))
    return list(found) or [asked]


def _spelled(parts: Sequence[str]) -> Iterator[Sequence[str]]:
    """A pattern once for each number of its ranges."""
    for place, part in enumerate(parts):
        if not part.isdecimal() and _RANGES.fullmatch(part):
            for run in part.split(","):
                first, _, last = run.partition("-")
                for number in range(int(first), int(last or first) + 1):
                    yield from _spelled([*parts[:place], str(number), *parts[place + 1:]])
            return
    yield parts


def _matches(names: Sequence[str], pattern: Sequence[str]) -> bool:
    return len(names) == len(pattern) and all(map(fnmatchcase, names, pattern))
