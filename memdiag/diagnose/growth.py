"""Whether live memory at the same point of each step grows, by how much, and from which places."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from memdiag.diagnose.holders import capacity, is_variable, last_looks
from memdiag.diagnose.model import Growth, Ints, Mask, Site
from memdiag.policy import GROWTH_BIRTHS, GROWTH_MORE, GROWTH_RUN
from memdiag.trace import NONE, Level, Role
from memdiag.trace.model import GARBAGE, Trace
from memdiag.trace.places import Place, module_names, operator_names, relative
from memdiag.trace.view import View

_PERSISTENT = (Role.PARAMETERS, Role.BUFFERS, Role.GRADIENTS, Role.OPTIMIZER_STATE)


@dataclass(frozen=True)
class Growing:
    """What grows from step to step.

    Attributes:
        growth: the numbers.
        leaks: over the run's allocations, those that survive at growing places; the state of one optimizer, which its
            own bounds limit, is growth and no leak; nor is what a container of a fixed capacity keeps.
        leak_rate: bytes of leaks that come with every step.
        leak_sites: their places, where steps were recorded in full.
        filling: those that survive at growing places in containers of a fixed capacity.
        cycles: those that survive at growing places in reference cycles, until the garbage collector comes by.
    """

    growth: Growth
    leaks: Mask
    leak_rate: float
    leak_sites: list[Site]
    cycles: Mask
    filling: Mask


def growing(run: View) -> Growing:
    """Looks at what is alive at the ends of steps, from place to place.

    A place in the code is growing where what it made is alive at the ends of later steps, more and more of it, until
    the last. The first step is warm-up and does not count; a cache that fills and stops is not growth; nor is what
    one step leaves for the next. Of light steps no place is known: there it is one size, or all other sizes together.
    By how much, and where, is told by the steps that were recorded in full; by the light ones where those are too few,
    or grew by much less.
    """
    trace, steps = run.trace, run.trace["steps"]
    light = np.flatnonzero(steps["level"] == Level.LIGHT)
    left = np.flatnonzero(run.mine & (run.born_in == NONE) & np.isin(run.born_step, steps["step"][light]))
    of_light = _light(run, left, steps["step"][light], steps["end_event"][light])
    ends = steps["end_event"][steps["level"] == Level.FULL]  # the first is what the others are compared with
    first = np.searchsorted(ends, run.life.born, side="right")
    last = np.searchsorted(ends, run.life.died, side="right")
    survives = run.mine & (last > first) & (run.life.born != NONE)
    survives[left] = False
    size = trace["allocations"]["bytes"]
    if len(ends) <= GROWTH_BIRTHS:
        leaks, cycles, filling = (of_light.mask(kind) for kind in (of_light.leaks, of_light.garbage, of_light.fills))
        # What a few steps in full left, too, is known by its size.
        leaks |= survives & np.isin(size, size[leaks]) & ~np.isin(_last_roles(run), _PERSISTENT)
        rate = of_light.rate or _of_all(steps["end_bytes"])
        return Growing(Growth(rate, None, []), leaks, of_light.leak_rate, [], cycles, filling)
    site, keys = _sites(trace, run, np.flatnonzero(survives))
    of_full = _Places(run, np.flatnonzero(survives), site, len(keys), first, last, len(ends))
    found = np.flatnonzero(of_full.rates > 0)
    found = found[np.argsort(-of_full.rates[found], kind="stable")]
    places = [_place(trace, keys[number]) for number in found]
    sites = [Site(p.operator, p.module, p.line, float(of_full.rates[number]))
             for p, number in zip(places, found, strict=True)]
    leak_sites = [place for place, number in zip(sites, found, strict=True) if of_full.leaks[number]]
    leaks, cycles, filling = (of_full.mask(kind) for kind in (of_full.leaks, of_full.garbage, of_full.fills))
    # Light steps do not tell what else grows from a leak, save by its size.
    bounded = np.setdiff1d(size[survives & ~leaks], size[leaks])
    leaks |= of_light.mask(of_light.leaks) & ~np.isin(size, bounded)
    rate, leak_rate = of_full.rate, of_full.leak_rate
    if of_light.leak_rate > GROWTH_MORE * rate:
        rate = leak_rate = of_light.leak_rate
    return Growing(Growth(rate, None, sites), leaks, leak_rate, leak_sites, cycles, filling)


class _Places:
    """How places grow.

    Args:
        allocations: what outlives its step.
        site: the place of each, a number below ``sites``.
        first, last: of all allocations of the run, the steps from and before whose ends they are alive.

    Attributes:
        rates: bytes per step by which each place grows; 0 where it does not. ``rate`` is their sum.
        bounded: places that hold what only cycles keep, what fills containers, or an optimizer's state.
        leaks, garbage, fills: those of the growing places that leak, that hold what only cycles keep, and that fill.
    """

    def __init__(
        self, run: View, allocations: Ints, site: Ints, sites: int, first: Ints, last: Ints, steps: int
    ) -> None:
        size = run.trace["allocations"]["bytes"]
        order = np.argsort(site, kind="stable")
        groups = np.split(allocations[order], np.cumsum(np.bincount(site, minlength=sites))[:-1]) if sites else []
        self.rates = np.array([  # one allocation does not grow; of light steps there may be thousands of a size each
            0.0 if len(mine) < 2 else
            _rate(_series(first[mine], last[mine], size[mine], steps), _births(run, mine, first, last, steps))
            for mine in groups])
        grows = self.rates > 0
        self.rate = float(self.rates.sum())
        garbage = _garbage(run.trace, allocations, site, sites)
        fills = _filling(run.trace, allocations, site, sites) & ~garbage
        self.bounded = garbage | fills | _state(run, allocations, site, sites)
        self.garbage, self.fills, self.leaks = grows & garbage, grows & fills, grows & ~self.bounded
        self.leak_rate = float(self.rates[self.leaks].sum())
        self._allocations, self._site, self._count = allocations, site, len(size)

    def mask(self, places: Mask) -> Mask:
        """What of these places outlives its step, over all allocations."""
        found = np.zeros(self._count, dtype=bool)
        found[self._allocations[places[self._site]]] = True
        return found


def _light(run: View, left: Ints, steps: Ints, ends: Ints) -> _Places:
    """How what light steps leave grows, by its size.

    Args:
        left: what they leave.
        steps, ends: their numbers, and the events at their ends.
    """
    size = run.trace["allocations"]["bytes"]
    first = np.zeros(len(size), dtype=np.int64)
    first[left] = np.searchsorted(steps, run.born_step[left])
    last = np.searchsorted(ends, run.life.died, side="right")
    # What the last of them leaves is not known to stay.
    number = max(len(ends) - 1, 0)
    last = np.minimum(last, number)
    left = left[last[left] > first[left]]
    if number <= GROWTH_BIRTHS:
        left = left[:0]
    sizes, site = np.unique(size[left], return_inverse=True)
    alike = _Places(run, left, site.reshape(-1), len(sizes), first, last, number)
    # Of batches of many lengths none comes often enough: together they may grow all the same.
    site = np.where((alike.rates > 0) | alike.bounded, np.arange(len(sizes)), len(sizes))[site.reshape(-1)]
    return _Places(run, left, site, len(sizes) + 1, first, last, number)


def _of_all(live: Ints) -> float | None:
    """Growth of all that is alive at the ends of steps, where it rises with every one; None where it does not."""
    if len(live) <= GROWTH_RUN:
        return None
    return _rate(live, np.zeros(len(live), dtype=np.int64)) or None


def swelling(run: View, leaks: Mask) -> Ints:
    """Of what every step makes anew, larger each time: by how many bytes each allocation exceeds the first of its kind.

    What is computed from something that grows is larger in each step, though no step leaves it to the next. Allocations
    are of one kind where line, kernel and their number within the step are the same.
    """
    table, excess = run.trace["allocations"], np.zeros(len(leaks), dtype=np.int64)
    rows = np.flatnonzero(run.mine & ~leaks & (run.born_step != NONE) & (table["line"] != NONE))
    if not len(rows):
        return excess
    keys = np.unique(np.stack([table["line"][rows], table["kernel"][rows]]), axis=1, return_inverse=True)[1].reshape(-1)
    step, size = run.born_step[rows], table["bytes"][rows]
    order = np.lexsort((run.life.born[rows], step, keys))
    new = np.append(True, (np.diff(keys[order]) != 0) | (np.diff(step[order]) != 0))
    number = np.empty(len(rows), dtype=np.int64)
    number[order] = np.arange(len(rows)) - np.maximum.accumulate(np.where(new, np.arange(len(rows)), 0))
    order = np.lexsort((step, number, keys))
    first = np.flatnonzero(np.append(True, (np.diff(keys[order]) != 0) | (np.diff(number[order]) != 0)))
    length = np.diff(np.append(first, len(rows)))
    rises = np.append(True, (np.diff(size[order]) > 0) & (np.diff(step[order]) == 1))
    rises[first] = True
    swells = np.logical_and.reduceat(rises, first) & (length >= GROWTH_RUN)
    excess[rows[order]] = np.repeat(swells, length) * (size[order] - np.repeat(size[order][first], length))
    return excess


def _sites(trace: Trace, run: View, allocations: Ints) -> tuple[Ints, Ints]:
    """Which place each allocation was born at, and each place's module, operator and line as numbers of text."""
    where = run.born_in[allocations]
    operator = operator_names(trace, run.nest, where)
    kernel = trace["allocations"]["kernel"][allocations]
    key = np.stack([
        module_names(trace, run.nest, where), np.where(operator != NONE, operator, kernel),
        trace["allocations"]["line"][allocations],
    ], axis=1)
    keys, site = np.unique(key, axis=0, return_inverse=True)
    return site.reshape(-1), keys


def _garbage(trace: Trace, allocations: Ints, site: Ints, sites: int) -> Mask:
    """Places of which the recorder looked at something that survives, and found all of it in reference cycles alone.

    It looks at the largest places. Where nothing that it looked at is held otherwise, the small ones are the same.
    """
    looked, held = np.zeros(sites, dtype=bool), np.zeros(sites, dtype=bool)
    for place, chain in _chains(trace, allocations, site):
        looked[place] = True
        held[place] |= chain != GARBAGE
    return looked & ~held if held.any() else np.full(sites, bool(looked.any()))


def _last_roles(run: View) -> Ints:
    every = np.arange(len(run.life.died), dtype=np.int64)
    return run.roles.of(every, run.life.died - 1).astype(np.int64)


def _state(run: View, allocations: Ints, site: Ints, sites: int) -> Mask:
    """Places where an optimizer's state is made, save those where that of ever more optimizers is."""
    claims, trace = run.trace["claims"], run.trace
    whose = np.full(len(trace["allocations"]["bytes"]), NONE, dtype=np.int64)
    mine = claims["role"] == Role.OPTIMIZER_STATE
    whose[claims["allocation"][mine]] = claims["proof"][mine]
    state = _last_roles(run)[allocations] == Role.OPTIMIZER_STATE
    pairs = np.unique(np.stack([site[state], whose[allocations[state]]]), axis=1)
    owners = np.bincount(pairs[0], minlength=sites)
    return (owners > 0) & (owners < GROWTH_BIRTHS)


def _filling(trace: Trace, allocations: Ints, site: Ints, sites: int) -> Mask:
    """Places of which the recorder looked at something that survives, and found it in containers of a fixed capacity,
    save for what a variable referred to at that moment."""
    looked, other = np.zeros(sites, dtype=bool), np.zeros(sites, dtype=bool)
    for place, chain in _chains(trace, allocations, site):
        if not is_variable(chain):
            looked[place] = True
            other[place] |= capacity(chain) is None
    return looked & ~other


def _chains(trace: Trace, allocations: Ints, site: Ints) -> Iterator[tuple[int, str | None]]:
    """Of each of these allocations that was looked at, its place and the chain that was found last."""
    of_site = dict(zip(allocations.tolist(), site.tolist(), strict=True))
    for allocation, look in last_looks(trace).items():
        if allocation in of_site:
            yield of_site[allocation], trace.string(look.chain)


def _place(trace: Trace, key: Ints) -> Place:
    module, operator, line = (trace.string(int(number)) for number in key)
    return Place(module, operator, relative(trace, line))


def _series(first: Ints, last: Ints, size: Ints, steps: int) -> Ints:
    """Bytes alive at the end of each step."""
    delta = np.zeros(steps + 1, dtype=np.int64)
    np.add.at(delta, first, size)
    np.subtract.at(delta, last, size)
    return np.cumsum(delta[:-1])


def _births(run: View, allocations: Ints, first: Ints, last: Ints, steps: int) -> Ints:
    """From how many steps something is alive, at the end of each."""
    first, last = first[allocations], last[allocations]
    born = run.born_step[allocations]
    _, group = np.unique(born, return_inverse=True)
    number = int(group.max(initial=-1)) + 1
    begins, ends = np.full(number, steps, dtype=np.int64), np.zeros(number, dtype=np.int64)
    np.minimum.at(begins, group, first)
    np.maximum.at(ends, group, last)
    return _series(begins, ends, np.ones(number, dtype=np.int64), steps)


def _rate(live: Ints, births: Ints) -> float:
    """Growth in bytes per step; 0 where it is none.

    Args:
        live, births: bytes, and steps from which there are any, at the end of each step; of the first, the warm-up, it
            does not matter how they came.

    It is measured between steps that set a new maximum, so that what grows only every few steps (at the end of an
    epoch) counts with its period. It must go on until the end: a run that ends two periods after the last new maximum
    has stopped growing.
    """
    records = np.flatnonzero(np.diff(np.maximum.accumulate(live)) > 0) + 1
    if len(records) < 2:
        return 0.0
    first, last = int(records[0]), int(records[-1])
    # More and more births alive; or one thing that is made anew, larger each time, and never smaller.
    piling_up = births[last] >= GROWTH_BIRTHS and births[last] > births[first - 1]
    swelling = len(records) >= GROWTH_RUN and bool(np.all(np.diff(live[first:]) > 0))
    period = (last - first) / (len(records) - 1)
    if not (piling_up or swelling) or len(live) - 1 - last >= 2 * period:
        return 0.0
    return float(live[last] - live[first]) / (last - first)
