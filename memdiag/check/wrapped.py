"""Names of a second script whose modules are wrapped, told by those of the first."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from memdiag.check.entries import Entry, Run, Stage

_LEVELS = 3
"""Wrappers around one another that a name is taken out of."""


def first_names(a: Run, b: Run) -> dict[str, str]:
    """Of names that the first run does not have, those that it has without a part or a few: a wrapper puts its
    attribute between (``blocks.0.inner.fc`` is ``blocks.0.fc``). No two become one."""
    mine, others = _names(a), _names(b)
    found: dict[str, str] = {}
    taken = set(others)
    for name in others:
        if name not in mine:
            without = next((one for one in _shorter(name) if one in mine and one not in taken), None)
            if without is not None:
                found[name] = without
                taken.add(without)
    return found


def renamed(run: Run, names: Mapping[str, str]) -> Run:
    """The run with other names; also where these are what an entry says, as of the parameters of a group."""
    return replace(run, segments=[
        replace(segment, entries=[_renamed(entry, names) for entry in segment.entries]) for segment in run.segments])


def _renamed(entry: Entry, names: Mapping[str, str]) -> Entry:
    value = entry.value
    if entry.stage == Stage.SCHEDULE.value and ", " in value:
        value = ", ".join(names.get(name, name) for name in value.split(", "))
    return entry._replace(name=names.get(entry.name, entry.name), value=value)


def _names(run: Run) -> dict[str, None]:
    return dict.fromkeys(entry.name for segment in run.segments for entry in segment.entries)


def _shorter(name: str) -> Iterator[str]:
    """A name without one of its parts, then without two, and so on."""
    level: Collection[tuple[str, ...]] = [tuple(name.split("."))]
    for _ in range(_LEVELS):
        level = dict.fromkeys(parts[:place] + parts[place + 1:] for parts in level for place in range(len(parts) - 1))
        yield from map(".".join, level)
