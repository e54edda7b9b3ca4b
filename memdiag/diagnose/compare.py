"""Two runs compared at their peaks, and whether the comparison is fair."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from memdiag.diagnose.alive import by_place
from memdiag.diagnose.growth import growing
from memdiag.policy import COMPARED_SHARE
from memdiag.trace import NONE, Role
from memdiag.trace.places import Place
from memdiag.trace.view import View
from memdiag.units import format_bytes

OTHER_INPUTS = "other inputs"
"""What a reason begins with that is none where the inputs are what was changed."""


@dataclass(frozen=True)
class Side:
    """One of the two runs, at its peak.

    Attributes:
        about: facts of the run.
        step, phase, place: of the peak; None where not known.
        warm_up: nothing after the warm-up comes near the peak.
        light: the step of the peak was recorded lightly.
        roles: bytes by role, which sum to the peak.
        places: bytes by place of birth, the same sum; None where the peak's events were not kept.
    """

    about: dict[str, Any]
    device: str
    peak_bytes: int
    step: int | None
    phase: str | None
    place: Place
    warm_up: bool
    light: bool
    roles: dict[Role, int]
    places: dict[Place, int] | None


@dataclass(frozen=True)
class ComparedLine:
    """What was alive at both peaks of one place of birth, in bytes.

    Attributes:
        place: as it is in A, where it is in both.
        b_line: its line in B, where the script was changed so that it is another one, or has another name; else None.
    """

    place: Place
    a_bytes: int
    b_bytes: int
    b_line: str | None = None


@dataclass(frozen=True)
class Comparison:
    """Two runs.

    Attributes:
        lines: largest difference first; empty where the peak's events of a run were not kept.
        why_not: reasons not to compare the two, each a sentence; none where it is fair.
    """

    a: Side
    b: Side
    lines: list[ComparedLine]
    why_not: list[str]

    @property
    def comparable(self) -> bool:
        return not self.why_not


def compare(a: View, b: View) -> Comparison:
    """Compares two runs. Pure; it warns (``why_not``), and compares all the same."""
    sides = _side(a), _side(b)
    lines = []
    first, second = (side.places for side in sides)
    if first is not None and second is not None:
        there = _same(first, second, *(os.path.basename(side.about.get("script") or "") for side in sides))
        for place, size in first.items():
            other = there.get(place)
            lines.append(
                ComparedLine(place, size, 0) if other is None else
                ComparedLine(place, size, second[other], None if other == place else other.line))
        found = set(there.values())
        lines += [ComparedLine(place, 0, size) for place, size in second.items() if place not in found]
        lines.sort(key=lambda line: (-abs(line.b_bytes - line.a_bytes), -line.a_bytes))
    return Comparison(*sides, lines, list(_reasons((a, b), sides)))


def _same(
    first: Mapping[Place, int], second: Mapping[Place, int], script: str, other_script: str
) -> dict[Place, Place]:
    """Places of the first run, and which they are in the second: those of one line, and those in one order. Where the
    script has another name, a line of the same number says less than the order."""
    named = {place: place for place in second}
    renamed = bool(script and other_script) and script != other_script
    if renamed:
        named = {_in_file(place, other_script, script): place for place in second}
    same: dict[Place, Place] = {}
    for pairs in (_in_order, _of_one_line) if renamed else (_of_one_line, _in_order):
        found = set(same.values())
        same |= pairs([p for p in first if p not in same], [p for p in named if p not in found])
    return {place: named[other] for place, other in same.items()}


def _of_one_line(first: Collection[Place], second: Collection[Place]) -> dict[Place, Place]:
    others = set(second)
    return {place: place for place in first if place in others}


def _in_order(first: Collection[Place], second: Collection[Place]) -> dict[Place, Place]:
    """Of places with the same module, operator and file, as many in both: the first is the first, and so on."""
    groups, others = _groups(first), _groups(second)
    return {
        a: b for key, places in groups.items() if len(places) == len(others.get(key, ()))
        for a, b in zip(places, others[key], strict=True)}


def _in_file(place: Place, file: str, other: str) -> Place:
    """A place in a file, as one in another."""
    at, colon, number = (place.line or "").rpartition(":")
    return replace(place, line=f"{other}{colon}{number}") if at == file else place


def _groups(places: Iterable[Place]) -> dict[tuple[Any, ...], list[Place]]:
    """Places of the same module, operator and file, in the order of their lines: where a script was changed elsewhere,
    they are on other lines in the same order."""
    found: dict[tuple[Any, ...], list[Place]] = defaultdict(list)
    for place in places:
        if place.line is not None:
            found[place.module, place.operator, place.line.rpartition(":")[0]].append(place)
    return {key: sorted(group, key=_number) for key, group in found.items()}


def _number(place: Place) -> int:
    return int((place.line or "").rpartition(":")[2] or 0)


def _side(view: View) -> Side:
    moment, at = view.worst, view.of_peak
    trace = view.trace
    step, phase = moment.step, None if moment.phase is None else moment.phase.label
    place = Place(None, None, None)
    roles = {role: moment.bytes if role is Role.UNKNOWN else 0 for role in Role}
    places = None
    if at is not None:
        step, phase, place = at.where(moment.event)
        roles, places = at.by_role(moment.event), by_place(at, moment.event)
    about = {name: value for name, value in trace.about.items() if name != "not_seen"}
    return Side(
        about, view.device, moment.bytes, step, phase, place, _is_cold(view, moment.bytes), at is not view, roles,
        places)


def _is_cold(view: View, peak: int) -> bool:
    steps = view.trace["steps"]
    phases = view.phase_peaks
    # What comes before the first step has ended belongs to it.
    warm_up = np.isin(phases.step, steps["step"][steps["warm_up"] != 0]) | (phases.step == 0)
    if _later_steps(view) == 0:
        warm_up |= phases.step == NONE  # what comes after the last step is as cold as that
    highest = int(phases.bytes[~warm_up].max(initial=0))
    return highest < (1 - COMPARED_SHARE) * peak


def _reasons(views: tuple[View, View], sides: tuple[Side, Side]) -> Iterator[str]:
    (a, b), (side_a, side_b) = views, sides
    for name, view, side in (("A", a, side_a), ("B", b, side_b)):
        if view.trace.cut_short is not None:
            yield f"{name} holds only a part of its run: {view.trace.cut_short}"
        if view.trace.about.get("ended_out_of_memory"):
            yield f"{name} ended for want of memory: it peaks where it stopped"
        if side.light:
            yield f"{name} peaks in a step recorded in light: modules, operators and lines are not known there"
    if side_a.warm_up != side_b.warm_up:
        cold, warm = ("A", "B") if side_a.warm_up else ("B", "A")
        yield f"{cold} peaks in its warm-up and {warm} after it: one is cold, the other warm"
    elif bool(_later_steps(a)) != bool(_later_steps(b)):
        cold, warm = ("B", "A") if _later_steps(a) else ("A", "B")
        yield f"{cold} has only its warm-up, {warm} has steps after it: one is cold, the other warm"
    shapes = _shapes(a, side_a), _shapes(b, side_b)
    if all(shapes) and shapes[0].isdisjoint(shapes[1]):
        yield f"{OTHER_INPUTS}: {_listed(shapes[0])} in A, {_listed(shapes[1])} in B"
    yield from _settings(side_a, side_b)
    yield from _growth(a, b)


def _later_steps(view: View) -> int:
    """How many steps ended after the warm-up."""
    return int((view.trace["steps"]["warm_up"] == 0).sum())


def _shapes(view: View, side: Side) -> set[str]:
    """Shapes of the inputs in the step of the peak; of all steps where that step's are not known."""
    steps = view.trace["steps"]
    known = [(int(step), text) for step, number in zip(steps["step"], steps["input_shapes"], strict=True)
             if (text := view.trace.string(int(number))) is not None]
    at_peak = {text for step, text in known if step == side.step}
    return at_peak or {text for _, text in known}


def _listed(shapes: set[str]) -> str:
    first = sorted(shapes)[0]
    return first if len(shapes) == 1 else f"{first} and {len(shapes) - 1} more"


def _settings(a: Side, b: Side) -> Iterator[str]:
    on_cpu = a.device == b.device == "cpu"
    names = (a.about.get("device_names", {}).get(a.device), b.about.get("device_names", {}).get(b.device))
    kinds = (a.device.partition(":")[0], b.device.partition(":")[0])
    if kinds[0] != kinds[1]:
        yield f"another device: {a.device} in A, {b.device} in B"
    elif None not in names and names[0] != names[1]:
        yield f"another device: {names[0]} in A, {names[1]} in B"
    for what, key, matters in (
        ("version of PyTorch", "torch", True), ("version of CUDA", "cuda", not on_cpu),
        ("default dtype", "default_dtype", True), ("number of threads", "threads", on_cpu),
        ("setting of the allocator", "allocator_settings", not on_cpu), ("number of ranks", "world_size", True),
    ):
        values = a.about.get(key), b.about.get(key)
        if matters and values[0] != values[1]:
            yield f"another {what}: {_value(values[0])} in A, {_value(values[1])} in B"


def _value(value: Any) -> str:
    return "none" if value is None else str(value)


def _growth(a: View, b: View) -> Iterator[str]:
    """What grows with every step is larger in the run that has more of them."""
    number = _later_steps(a), _later_steps(b)
    rates = [growing(view).growth.bytes_per_step or 0.0 for view in (a, b)]
    more = max(rates) * abs(number[0] - number[1])
    if more > COMPARED_SHARE * min(a.worst.bytes, b.worst.bytes):
        yield (f"A has {number[0]} steps after its warm-up and B {number[1]}, and memory grows with each: by "
               f"{format_bytes(round(rates[0]))} in A, {format_bytes(round(rates[1]))} in B")
