"""Where two runs first differ, stage by stage. Pure: from what the runs have left."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from memdiag.check.entries import BEGAN_PARAMETERS, BUFFERS_MIDWAY, NOTHING, Entry, Key, Run, Segment, Stage


class Outcome(Enum):
    """Of a stage."""

    EQUAL = "equal"
    WITHIN_NOISE = "within_noise"
    DIFFERENT = "different"
    NOT_COMPARED = "not_compared"


@dataclass(frozen=True)
class Pair:
    """What one run has at a place, and the other.

    Attributes:
        a, b: None where the run has no such thing.
    """

    a: Entry | None
    b: Entry | None

    @property
    def name(self) -> str:
        entry = self.a or self.b
        return "" if entry is None else entry.name

    @property
    def key(self) -> Key:
        entry = self.a or self.b
        return ("", "", 0) if entry is None else entry.key


@dataclass(frozen=True)
class Compared:
    """Two runs, side by side.

    Attributes:
        step: of the optimizer, in which they first differ, from 0; None where they never do.
        stages: how each came out: in that step, or in all where none differs.
        different: what differs in that step, in the order in which it was looked at.
        steps: that both have.
        first: the first stage that differs; None where none does.
    """

    step: int | None
    stages: dict[Stage, Outcome]
    different: dict[Stage, list[Pair]]
    steps: int
    first: Stage | None = None


_CALLS = frozenset((Stage.INPUTS, Stage.OUTPUTS))
"""Stages whose entries are calls: those that only one run has are told by the counts in the schedule."""

Places = Collection[tuple[int, Key]]
"""Number of an optimizer's step, and an entry in it."""


def compare(a: Run, b: Run, within: Places = ()) -> Compared:
    """Compares two runs.

    Args:
        within: places where the two differ by no more than two runs of one script.
    """
    steps = min(len(a.segments), len(b.segments))
    both = list(zip(a.segments, b.segments, strict=False))
    for step, (one, other) in enumerate(both):
        pairs = {stage: _pairs(one, other, stage) for stage in Stage}
        found = {stage: [pair for pair in pairs[stage] if (step, pair.key) not in within] for stage in Stage}
        if any(found.values()):
            outcomes = {stage: _outcome(one, other, stage, found[stage], pairs[stage]) for stage in Stage}
            return Compared(step, outcomes, found, steps, _first(one, other, found))
    noisy = {stage for step, (one, other) in enumerate(both) for stage in Stage if _pairs(one, other, stage)}
    stages = {stage: _outcome(*both[-1], stage, [], [stage] * (stage in noisy)) if both else Outcome.NOT_COMPARED
              for stage in Stage}
    different: dict[Stage, list[Pair]] = {stage: [] for stage in Stage}
    if len(a.segments) != len(b.segments) and a.failure is None and b.failure is None:
        stages[Stage.SCHEDULE] = Outcome.DIFFERENT
        counts = [Entry(Stage.SCHEDULE.value, "steps of optimizers", 0, str(len(run.segments))) for run in (a, b)]
        different[Stage.SCHEDULE] = [Pair(*counts)]
        return Compared(steps, stages, different, steps, Stage.SCHEDULE)
    return Compared(None, stages, different, steps)


def _first(one: Segment, other: Segment, found: Mapping[Stage, Sequence[Pair]]) -> Stage:
    """The stage of what was taken first of all that differs: a micro-batch begins with what those before it left."""
    moments = other.moments() | one.moments() if one.micro_batches == other.micro_batches else {}
    when = {stage: min(moments.get(pair.key, (0, place)) for pair in found[stage])
            for place, stage in enumerate(Stage) if found[stage]}
    return min(when, key=lambda stage: when[stage])


def places(a: Run, b: Run) -> set[tuple[int, Key]]:
    """Places where two runs differ."""
    return {(step, pair.key) for step, (one, other) in enumerate(zip(a.segments, b.segments, strict=False))
            for stage in Stage for pair in _pairs(one, other, stage)}


def began_otherwise(one: Segment, other: Segment) -> tuple[str, ...]:
    """Parameters of models that are called for the first time in a step, and were not alike before."""
    others = other.by_key(BEGAN_PARAMETERS)
    return tuple(entry.name for key, entry in one.by_key(BEGAN_PARAMETERS).items()
                 if key in others and others[key].value != entry.value)


def _entries(segment: Segment, stage: Stage) -> dict[Key, Entry]:
    """Of a step that was broken off, buffers are those that its forward left."""
    if stage is Stage.BUFFERS and not segment.whole:
        return {(stage.value, name, nth): entry._replace(stage=stage.value)
                for (_, name, nth), entry in segment.by_key(BUFFERS_MIDWAY).items()}
    return segment.by_key(stage.value)


def _both(one: Segment, other: Segment, stage: Stage) -> tuple[dict[Key, Entry], dict[Key, Entry]]:
    if stage is Stage.BUFFERS and not (one.whole and other.whole):
        one, other = (Segment(segment.entries, whole=False) for segment in (one, other))
    return _entries(one, stage), _entries(other, stage)


def _pairs(one: Segment, other: Segment, stage: Stage) -> list[Pair]:
    """What differs."""
    mine, others = _both(one, other, stage)
    common = [Pair(entry, others[key]) for key, entry in mine.items() if key in others and (
        entry.value, entry.shape, entry.dtype) != (others[key].value, others[key].shape, others[key].dtype)]
    if stage in _CALLS or not (one.whole and other.whole):
        return common
    missing = [Pair(entry, None) for key, entry in mine.items() if key not in others and entry.value != NOTHING]
    return common + missing + [
        Pair(None, entry) for key, entry in others.items() if key not in mine and entry.value != NOTHING]


def _outcome(
    one: Segment, other: Segment, stage: Stage, different: Sequence[object], with_noise: Sequence[object]
) -> Outcome:
    if different:
        return Outcome.DIFFERENT
    mine, others = _both(one, other, stage)
    if not (one.whole and other.whole) and stage in _AT_THE_END and not mine.keys() & others.keys():
        return Outcome.NOT_COMPARED
    return Outcome.WITHIN_NOISE if with_noise else Outcome.EQUAL


_AT_THE_END = frozenset((Stage.GRADIENTS, Stage.RANDOM_STATE, Stage.PARAMETERS))
"""Stages that a step comes to after backward."""
