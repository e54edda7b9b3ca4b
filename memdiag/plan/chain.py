"""The cheapest plan within a budget, among regions that run one after the other.

Backward comes to what forward made last first. So while it is at one part of the forward, all that came before is as
forward left it, and all that came after is gone; what a plan frees in the earlier parts is one sum. A plan is then a
way through the parts, each bare or inside a region, and of all ways to a part only those count of which no other has
freed as much in less time (labels). Each part must fit when forward is at it, and when backward is, what the earlier
ones freed taken off. Bytes are exact as long as regions share no tensor; where they do, the replay tells, and the
budget is lowered by what is too much.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memdiag.plan.regions import Candidate
from memdiag.plan.replay import Replay, Replayed
from memdiag.plan.step import Call, Ints, Step
from memdiag.policy import PLAN_LABELS
from memdiag.trace import NONE


@dataclass(frozen=True)
class _Way:
    """From one part to another.

    Attributes:
        candidate: the region between them; NONE where the part stays bare.
        end: the part that it leads to.
        freed: bytes that are not there while backward is at later parts.
        needed: the highest that live memory comes while forward and backward are at it, if nothing before is freed.
    """

    candidate: int
    end: int
    freed: int
    again_ns: int
    needed: int


_APART = 4
"""Of repeated blocks, and runs of them, so many at either end are replayed each for itself. Those between do above what
is there before them as the last of the first did: all else in the step being equal, exactly that."""

_NO_LABELS = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros((0, 3), dtype=np.int64)


@dataclass(frozen=True)
class _Track:
    """One forward of a step with its backward, or all that there is in the step.

    Attributes:
        ids: of the spans at which its parts begin; the last one is behind the end.
        starts: slots in which forward is there.
        over: slots from which on backward asks for what is before each, and what comes after is gone.
    """

    ids: Ints
    starts: Ints
    over: Ints

    def part(self, span: int) -> int:
        return int(np.searchsorted(self.ids, span))

    def needed(self, live: Replayed, begin: int, end: int) -> int:
        return max(self._forward(live, begin, end), self._backward(live, begin, end))

    def above(self, live: Replayed, bare: Replayed, begin: int, end: int) -> tuple[int, int, int]:
        """What a region frees for all that comes later; and how high it goes in forward and in backward, above what is
        there when these come to it."""
        forward, backward = self._levels(bare, begin, end)
        return (live.freed(int(self.starts[end]), int(self.over[end])), self._forward(live, begin, end) - forward,
                self._backward(live, begin, end) - backward)

    def level(self, bare: Replayed, begin: int, end: int, above: tuple[int, int, int]) -> int:
        """The highest that live memory comes, from how far it is above."""
        forward, backward = self._levels(bare, begin, end)
        return max(forward + above[1], backward + above[2])

    def _levels(self, bare: Replayed, begin: int, end: int) -> tuple[int, int]:
        return bare.before(int(self.starts[begin])), bare.before(int(self.over[end]))

    def _forward(self, live: Replayed, begin: int, end: int) -> int:
        return live.highest(int(self.starts[begin]), int(self.starts[end]))

    def _backward(self, live: Replayed, begin: int, end: int) -> int:
        return live.highest(int(self.over[end]), int(self.over[begin]))


def _passes(step: Step) -> list[Call]:
    """The outermost calls, where they are all of one model, one for each micro-batch; else none."""
    outermost = [call for call in step.calls if call.outermost]
    return outermost if len({call.path for call in outermost}) == 1 and len(outermost) > 1 else []


def _turns(one: Candidate, passes: Sequence[Call]) -> list[tuple[Call, ...]] | None:
    """The calls of a candidate that runs once, or once in each pass; None for others."""
    turns = [region.calls for region in one.regions]
    if not passes:
        return turns if len(turns) == 1 else None
    within = [[turn for turn in turns if call.first < turn[0].first <= call.last] for call in passes]
    return [turn[0] for turn in within] if all(len(turn) == 1 for turn in within) else None


def _tracks(step: Step, passes: Sequence[Call], runs: Sequence[Sequence[tuple[Call, ...]]]) -> list[_Track]:
    tracks = []
    for number in range(max(len(passes), 1)):
        turns = [turns[number] for turns in runs]
        events = {turn[0].first: turn[0].start for turn in turns} | {turn[-1].last + 1: turn[-1].end for turn in turns}
        ids = np.array(sorted(events), dtype=np.int64)
        starts = 2 * np.array([events[key] for key in ids.tolist()], dtype=np.int64)
        following = passes[number + 1] if number + 1 < len(passes) else None
        tracks.append(_Track(ids, starts, _over(step, ids, following)))
    return tracks


def _over(step: Step, ids: Ints, following: Call | None) -> Ints:
    """The slots from which on backward asks for what was saved before each of some spans."""
    saves, end, parts = step.saves, 2 * step.last + 2, max(len(ids) - 1, 0)
    part = np.searchsorted(ids, saves.span, side="right") - 1
    used = (saves.unpacked != NONE) & (part >= 0)
    if following is not None:
        used &= saves.span < following.first
        if not (saves.unpacked[used] > following.start).any():
            end = 2 * following.start
    asked = np.full(parts + 1, end, dtype=np.int64)
    np.minimum.at(asked, np.clip(part[used], 0, parts), 2 * saves.unpacked[used])
    over = np.minimum.accumulate(asked)  # of part p: when the parts up to p are no more as they were
    return np.concatenate([[end], over[:-1]]) if parts else over


class Chain:
    """Candidates that run once, or once in each of a step's forwards of the same model, as ways through the forward.

    Attributes:
        floor: bytes that no plan gets below: what is there before the first part, after it, and in the optimizer.
        whole: all candidates do so.
    """

    def __init__(self, replay: Replay, among: Sequence[Candidate]) -> None:
        step = replay.step
        passes = _passes(step)
        mine = {number: _turns(one, passes) for number, one in enumerate(among)}
        runs = {number: turns for number, turns in mine.items() if turns is not None}
        tracks = _tracks(step, passes, list(runs.values()))
        if any(len(track.ids) != len(tracks[0].ids) for track in tracks) or any(
                track.part(turn[0].first) != tracks[0].part(turns[0][0].first)
                or track.part(turn[-1].last + 1) != tracks[0].part(turns[0][-1].last + 1)
                for turns in runs.values() for track, turn in zip(tracks, turns, strict=True)):
            runs, tracks = {}, _tracks(step, passes, [])  # the forwards of the step do not do the same
        self.whole = len(runs) == len(among)
        parts = self._parts = max(len(tracks[0].ids) - 1, 0)
        bare = replay.under([])
        self._ways: list[list[_Way]] = [
            [_Way(NONE, number + 1, 0, 0, max(track.needed(bare, number, number + 1) for track in tracks))]
            for number in range(parts)]
        kinds: dict[object, list[int]] = defaultdict(list)
        for number in runs:
            kinds[among[number].kind].append(number)
        for alike in kinds.values():
            seen: list[tuple[int, int, int]] = []
            for place, number in enumerate(alike):
                turn = runs[number][0]
                begin, end = tracks[0].part(turn[0].first), tracks[0].part(turn[-1].last + 1)
                if not seen or place < _APART or place >= len(alike) - _APART:
                    live = replay.under(among[number].regions)
                    seen = [track.above(live, bare, begin, end) for track in tracks]
                needed = max(track.level(bare, begin, end, one) for track, one in zip(tracks, seen, strict=True))
                self._ways[begin].append(_Way(
                    number, end, min(freed for freed, _, _ in seen), among[number].again_ns, needed))
        self._highest = bare.peak.bytes
        self.floor = self._tail = self._highest
        if parts:
            begins = [int(track.starts[0]) for track in tracks[1:]] + [2 * step.last + 2]
            self.floor = max(bare.highest(0, int(tracks[0].starts[0])), *(
                bare.highest(int(track.over[0]), begin) for track, begin in zip(tracks, begins, strict=True)))
            self._tail = max(bare.highest(int(track.starts[-1]), int(track.over[parts])) for track in tracks)

    def within(self, budget: int) -> list[int] | None:
        """Numbers of the candidates of the cheapest plan; None where none fits."""
        if self.floor > budget or not self._parts:
            return [] if self._highest <= budget else None
        # What is still needed at a part or later: to have freed more than that is of no use.
        most = [max(way.needed for way in ways) for ways in self._ways] + [self._tail]
        enough = np.maximum.accumulate(most[::-1])[::-1] - budget
        waiting: dict[int, list[tuple[Ints, Ints, Ints]]] = defaultdict(list)
        waiting[0] = [(np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64), np.full((1, 3), NONE))]
        labels: list[tuple[Ints, Ints, Ints]] = []
        for part in range(self._parts + 1):
            found = waiting.pop(part, None)
            if found is None:
                labels.append(_NO_LABELS)
                continue
            freed, spent, came = (np.concatenate(columns) for columns in zip(*found, strict=True))
            freed, spent, came = _best(np.minimum(freed, enough[part]), spent, came)
            labels.append((freed, spent, came))
            for way in self._ways[part] if part < self._parts else []:
                fits = np.flatnonzero(way.needed - freed <= budget)
                if len(fits):
                    waiting[way.end].append((
                        freed[fits] + way.freed, spent[fits] + way.again_ns,
                        np.stack([np.full(len(fits), part), fits, np.full(len(fits), way.candidate)], axis=1)))
        freed, spent, _ = labels[-1]
        fits = np.flatnonzero(self._tail - freed <= budget)
        if not len(fits):
            return None
        return self._back(labels, int(fits[spent[fits].argmin()]))

    def _back(self, labels: list[tuple[Ints, Ints, Ints]], row: int) -> list[int]:
        """The regions of the way that a label at the end has come."""
        chosen, part = [], self._parts
        while part > 0:
            part, row, candidate = (int(number) for number in labels[part][2][row])
            if candidate != NONE:
                chosen.append(candidate)
        return chosen[::-1]


def _best(freed: Ints, spent: Ints, came: Ints) -> tuple[Ints, Ints, Ints]:
    """Labels of which no other has freed as much in less time; where there are too many, some of each stretch."""
    order = np.lexsort((-freed, spent))
    freed, spent, came = freed[order], spent[order], came[order]
    more = np.concatenate([[True], freed[1:] > np.maximum.accumulate(freed)[:-1]])
    freed, spent, came = freed[more], spent[more], came[more]
    if len(freed) > PLAN_LABELS:
        few = np.linspace(0, len(freed) - 1, PLAN_LABELS).astype(np.int64)
        freed, spent, came = freed[few], spent[few], came[few]
    return freed, spent, came
