"""How much may gather in the stream before it is read."""

from __future__ import annotations

from dataclasses import dataclass

from memdiag.trace import Level

# Events. Until one is read it takes some 3 KB in full recording and 1.7 KB in light: with room for what reading adds,
# a tenth of a gigabyte at most. Cutting at a step's end costs nothing but time; elsewhere it costs a gap in the marks.
_AT_STEP_END = {Level.FULL: 10_000, Level.LIGHT: 30_000}
_ANYWHERE = {Level.FULL: 60_000, Level.LIGHT: 60_000}
_GROWTH = 2  # of a chunk over the longest before it, however few events those had


@dataclass
class _Learned:
    """Marks of the longest chunk, and how many events came with how many marks of late."""

    longest: int
    events: float
    marks: float


class Gathering:
    """Tells when the stream is to be read, so that the process grows with no run, however long.

    How many events are in the stream cannot be asked. What can be counted are our marks, and how many events come with
    a mark is learned from what was read: in full recording about four, in light hundreds.
    """

    def __init__(self) -> None:
        self._learned = {Level.FULL: _Learned(2_500, 4, 1), Level.LIGHT: _Learned(0, 0, 0)}

    def read(self, level: Level, marks: int, events: int) -> None:
        """A chunk was read, with so many marks and events."""
        learned = self._learned[level]
        learned.longest = max(learned.longest, marks)
        # The younger half counts as much as all before it: a run's phases differ.
        learned.events = learned.events / 2 + events
        learned.marks = learned.marks / 2 + marks

    def enough(self, level: Level, marks: int, at_step_end: bool) -> bool:
        """Whether a chunk that has so many marks is to be read now."""
        learned = self._learned[level]
        limit = (_AT_STEP_END if at_step_end else _ANYWHERE)[level]
        return marks > _GROWTH * learned.longest or marks * learned.events > limit * learned.marks
