"""What may be a checkpoint, and what running it again takes."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from math import isqrt
from statistics import median_low

import numpy as np

from memdiag.plan.replay import Region
from memdiag.plan.step import Call, Ints, Step
from memdiag.policy import PLAN_CANDIDATES, PLAN_KEPT, PLAN_KEPT_SHARE, PLAN_RUN
from memdiag.trace import NONE

_INDEX = re.compile(r"\d+")


@dataclass(frozen=True)
class Candidate:
    """Modules that may be a checkpoint.

    Attributes:
        modules: the path of one, or of several that follow each other.
        regions: one for each time that they run in the step.
        again_ns: time that they take to run again, until all is there that was saved, and that a checkpoint itself
            takes: as long as they took when nothing was recorded, and of repeated blocks as long as the median one;
            what is kept is taken off.
        keep: operators whose results are kept.
        by_hand: several modules that a loop of the script's own runs, so that it has to be written there.
        saved_bytes: of the step's own tensors that it saves for backward.
        kind: equal for those that are alike: repeated blocks, as many of them, with the same kept.
    """

    modules: tuple[str, ...]
    regions: tuple[Region, ...]
    again_ns: int
    keep: tuple[str, ...] = ()
    by_hand: bool = False
    saved_bytes: int = 0
    kind: object = None


@dataclass(frozen=True)
class _One:
    """A module: which saves are its own, of which kind it is, how long it took in all, and until the last save.

    Repeated blocks are of one kind: they save as much, and have the same path but for an index.
    """

    path: str
    calls: tuple[Call, ...]
    saved: frozenset[int]
    kind: int
    saved_bytes: int
    whole_ns: int
    again_ns: int


def candidates(step: Step, chains: Collection[str] = (), barred: Collection[str] = ()) -> list[Candidate]:
    """Modules below the outermost that save something which backward asks for, in the order in which they first run.

    Of modules that save the same, one inside the other, the one that runs the least again stands for all.

    Args:
        chains: paths of modules that run what is in them one after the other, as ``nn.Sequential`` does.
        barred: paths of modules that will be in no plan; they stand for others only where all that save the same are.
    """
    ones = _with_typical_times(_ones(step))
    best: dict[frozenset[int], _One] = {}

    def price(one: _One) -> tuple[bool, int]:
        return one.path in barred, one.again_ns

    for one in ones.values():
        if one.saved and (one.saved not in best or price(one) < price(best[one.saved])):
            best[one.saved] = one
    found = [_alone(one) for one in best.values()]
    found += [kept for one in best.values() for kept in _keeping(step, one)]
    found += _runs(step, ones, chains)
    return sorted(_largest(found), key=lambda one: one.regions[0].calls[0].first)


def _largest(found: list[Candidate]) -> Iterator[Candidate]:
    """As many as can be searched: kinds that save most in one of them, all of a kind or none."""
    left = PLAN_CANDIDATES
    count = Counter(one.kind for one in found)
    kinds = {one.kind: one for one in sorted(found, key=lambda one: one.saved_bytes)}
    taken: set[object] = set()
    for kind, _ in sorted(kinds.items(), key=lambda pair: -pair[1].saved_bytes):
        left -= count[kind]
        if left < 0 and taken:
            break
        taken.add(kind)
    return (one for one in found if one.kind in taken)


def _alone(one: _One, keep: tuple[str, ...] = (), less_ns: int = 0) -> Candidate:
    return Candidate(
        (one.path,), tuple(Region((call,), keep) for call in one.calls), max(one.again_ns - less_ns, 0), keep,
        saved_bytes=one.saved_bytes, kind=(one.kind, keep))


def _ones(step: Step) -> dict[str, _One]:
    """All modules below the outermost, by path."""
    calls: dict[str, list[Call]] = defaultdict(list)
    for call in step.calls:
        if not call.outermost:
            calls[call.path].append(call)
    for path in {call.path for call in step.calls if step.goes_back_twice(call)}:
        calls.pop(path, None)
    saves = step.saves
    order = np.argsort(saves.span, kind="stable")
    spans = saves.span[order]
    found = {}
    kinds: dict[tuple[object, ...], int] = {}
    for path, mine in calls.items():
        saved: list[int] = []
        again_ns = 0
        for call in mine:
            rows = order[slice(*np.searchsorted(spans, (call.first, call.last + 1)))]
            if (saves.unpacked[rows] != NONE).any():
                saved += rows.tolist()
                again_ns += int(saves.time_ns[rows].max()) - call.start_ns + step.checkpoint_ns
                again_ns += len(rows) * step.checkpointed_save_ns
        rows = np.array(saved, dtype=np.int64)
        sizes = step.size[saves.allocation[rows]] * (saves.allocation[rows] != NONE)
        kind = _INDEX.sub("*", path), *sizes.tolist()
        own = np.unique(step.saves.allocation[rows])
        own = own[(own != NONE) & (step.born[own] >= step.first)]
        found[path] = _One(
            path, tuple(mine), frozenset(saved), kinds.setdefault(kind, len(kinds)), int(step.size[own].sum()),
            sum(call.end_ns - call.start_ns for call in mine), again_ns)
    return found


def _with_typical_times(ones: dict[str, _One]) -> dict[str, _One]:
    alike: dict[int, list[_One]] = defaultdict(list)
    for one in ones.values():
        alike[one.kind].append(one)
    typical = {kind: (int(median_low(one.whole_ns for one in those)), int(median_low(one.again_ns for one in those)))
               for kind, those in alike.items()}
    return {path: replace(one, whole_ns=typical[one.kind][0], again_ns=typical[one.kind][1])
            for path, one in ones.items()}


# --- operators that are kept --------------------------------------------------------------------------------------


def _keeping(step: Step, one: _One) -> Iterator[Candidate]:
    """A module that keeps operators: first what takes longest for its bytes, then that and the next, and so on."""
    if not any(step.calls_inside(call) for call in one.calls):
        return  # a layer: to keep what it makes is to leave it alone
    if any(_uses_earlier_casts(step, call) for call in one.calls):
        return  # run again it casts more than at first, and PyTorch counts what runs where something is kept
    keep: list[str] = []
    less_ns = -step.keeping_ns * sum(map(step.operators_inside, one.calls))
    for name, took_ns in _worth_keeping(step, one)[:PLAN_KEPT]:
        keep.append(name)
        less_ns += took_ns
        if less_ns > 0:
            yield _alone(one, tuple(keep), less_ns)


def _uses_earlier_casts(step: Step, call: Call) -> bool:
    """Whether a call uses weights that autocast had cast before it."""
    saved = step.saves.allocation[step.saves.inside(call) & (step.saves.allocation != NONE)]
    return bool((step.cached[saved] & (step.born[saved] < call.start)).any())


def _worth_keeping(step: Step, one: _One) -> list[tuple[str, int]]:
    """Operators, and the time that they would take again, best first by time for each byte that they make."""
    operators = step.operators
    sizes: dict[str, int] = defaultdict(int)
    times: dict[str, int] = defaultdict(int)
    for call in one.calls:
        rows = range(*np.searchsorted(operators.start, (call.start, call.end)))
        stop = int(step.saves.packed[list(one.saved)].max())
        for row in rows:
            name, start, end = operators.name[row], int(operators.start[row]), int(operators.end[row])
            made = step.made_between(start, end)
            made = made[step.died[made] >= end]
            if not len(made) or end > call.end:
                continue
            sizes[name] += int(step.size[made].sum())
            if end <= stop:
                times[name] += int(operators.took_ns[row])
    least = max(PLAN_KEPT_SHARE * one.again_ns, 1)
    worth = [(name, times[name]) for name in sizes if times[name] >= least]
    return sorted(worth, key=lambda pair: (-pair[1] / sizes[pair[0]], pair[0]))


# --- modules that follow each other -------------------------------------------------------------------------------


def _runs(step: Step, ones: dict[str, _One], chains: Collection[str]) -> Iterator[Candidate]:
    """Several modules as one checkpoint: of each length up to a few, and in ever longer steps beyond."""
    for paths, by_hand in (*_in_chains(step, chains), *_in_loops(step, chains)):
        if not all(path in ones for path in paths):
            continue  # backward goes through some more than once
        those = [ones[path] for path in paths]
        calls = list(zip(*(one.calls for one in those), strict=True))
        for length in _lengths(len(those)):
            for start in range(len(those) - length + 1):
                run = those[start:start + length]
                if run[0].saved and run[-1].saved:
                    whole_ns = sum(one.whole_ns + len(one.saved) * step.checkpointed_save_ns for one in run[:-1])
                    yield Candidate(
                        tuple(one.path for one in run),
                        tuple(Region(turn[start:start + length]) for turn in calls),
                        whole_ns + run[-1].again_ns, by_hand=by_hand,
                        saved_bytes=sum(one.saved_bytes for one in run), kind=tuple(one.kind for one in run))


def _lengths(count: int) -> Iterator[int]:
    """Longer runs than twice the square root of their number keep no less, and have more to make anew at once."""
    length = 2
    while length <= min(PLAN_RUN, 2 * isqrt(count), count):
        yield length
        length += max(length // 2, 1)


def _in_chains(step: Step, chains: Collection[str]) -> Iterator[tuple[list[str], bool]]:
    """What follows each other in a module that runs nothing else, whenever it runs."""
    count = Counter(call.path for call in step.calls)
    calls: dict[str, list[Call]] = defaultdict(list)
    for call in step.calls:
        calls[call.path].append(call)
    for path in sorted(chains):
        around = calls[path]
        prefix = "" if around and around[0].outermost else f"{path}."
        turns = {tuple(inner.path for inner in step.calls_inside(call) if _is_child(inner.path, prefix))
                 for call in around}
        names = turns.pop() if len(turns) == 1 else ()
        if len(names) > 1 and all(count[name] == len(around) for name in names):
            yield list(names), False


def _is_child(path: str, prefix: str) -> bool:
    return path.startswith(prefix) and "." not in path[len(prefix):]


def _in_loops(step: Step, chains: Collection[str]) -> Iterator[tuple[list[str], bool]]:
    """Items of a list of modules that a loop runs once, each on what the one before has made, and nothing between."""
    count = Counter(call.path for call in step.calls)
    run: list[Call] = []
    for call in step.calls:
        if count[call.path] > 1 or not call.path.rpartition(".")[2].isdecimal():
            continue
        if run and not _follows(step, run[-1], call):
            if not call.first <= run[-1].last:  # one inside another is no end of the run of the outer ones
                yield from _loop(run, chains)
                run = []
            else:
                continue
        run.append(call)
    yield from _loop(run, chains)


def _loop(run: Sequence[Call], chains: Collection[str]) -> Iterator[tuple[list[str], bool]]:
    if len(run) > 1 and run[0].path.rpartition(".")[0] not in chains:
        yield [call.path for call in run], True


def _follows(step: Step, one: Call, other: Call) -> bool:
    same = one.path.rpartition(".")[0] == other.path.rpartition(".")[0]
    return same and other.first == one.last + 1 and bool(_made_in(step, one, other.arguments))


def _made_in(step: Step, call: Call, allocations: Ints) -> int:
    born = step.born[allocations]
    return int(((born >= call.start) & (born < call.end)).sum())
