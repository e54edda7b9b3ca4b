"""How much may gather in the stream before it is read."""

from __future__ import annotations

from dataclasses import dataclass

from memdiag.trace import Level

# Events. Until one is read it takes some 3 KB in full recording and 1.7 KB in light: with room for what reading adds,
# a tenth of a gigabyte at most. Cutting at a step's end costs nothing but time; elsewhere it costs a gap in the marks.
_AT_STEP_END = {Level.FULL: 10_000, Level.LIGHT: 30_000}
_ANYWHERE = {Level.FULL: 60_000, Level.LIGHT: 60_000}
_GROWTH = 2  # of a chunk over the longest before it, however few events those had
_FADES = 0.95  # what is left, with each chunk, of the most events for one: an odd chunk is forgotten


@dataclass
class _Count:
    """Of something that can be counted in a chunk: how many there were at most, and the most events for one of late."""

    longest: int
    each: float = 0

    def learn(self, number: int, events: int) -> None:
        if number:
            self.longest = max(self.longest, number)
            self.each = max(events / number, self.each * _FADES)

    def enough(self, number: int, limit: int) -> bool:
        return number > _GROWTH * self.longest or number * self.each > limit


class Gathering:
    """Tells when the stream is to be read, so that the process grows with no run, however long.

    How many events are in the stream cannot be asked. What can be counted are steps, and our marks. How many events
    come with one is learned from what was read: with a mark about four in full recording, hundreds in light. Steps are
    counted apart from marks, since a run may do much that is marked and leaves few events, such as thousands of calls
    of a small model between steps of a large one.
    """

    def __init__(self) -> None:
        self._marks = {Level.FULL: _Count(2_500, 4), Level.LIGHT: _Count(0)}
        self._steps = {Level.FULL: _Count(1), Level.LIGHT: _Count(0)}

    def read(self, level: Level, steps: int, marks: int, events: int) -> None:
        """A chunk was read, in which so many steps ended, with so many marks and events."""
        self._marks[level].learn(marks, events)
        self._steps[level].learn(steps, events)

    def enough(self, level: Level, steps: int, marks: int, at_step_end: bool) -> bool:
        """Whether a chunk in which so many steps have ended, with so many marks, is to be read now."""
        limit = (_AT_STEP_END if at_step_end else _ANYWHERE)[level]
        return self._marks[level].enough(marks, limit) or self._steps[level].enough(steps, limit)
