"""Whether live memory at the same point of each step grows, by how much, and from which places."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from memdiag.diagnose.holders import capacity, is_variable, last_looks
from memdiag.diagnose.model import Growth, Ints, Mask, Site
from memdiag.policy import GROWTH_BIRTHS, GROWTH_RUN
from memdiag.trace import NONE, Level, Role
from memdiag.trace.model import GARBAGE, Trace
from memdiag.trace.places import Place, module_names, operator_names, relative
from memdiag.trace.view import View


@dataclass(frozen=True)
class Growing:
    """What grows from step to step.

    Attributes:
        growth: the numbers.
        leaks: over the run's allocations, those that survive at growing places; the state of one optimizer, which its
            own bounds limit, is growth and no leak; nor is what a container of a fixed capacity keeps.
        leak_sites: the places of the leaks.
        filling: those that survive at growing places in containers of a fixed capacity.
        cycles: those that survive at growing places in reference cycles, until the garbage collector comes by.
    """

    growth: Growth
    leaks: Mask
    leak_sites: list[Site]
    cycles: Mask
    filling: Mask


def growing(run: View) -> Growing:
    """Looks at what is alive at the ends of the steps that were recorded in full; where they are too few, at all that
    is alive at the ends of all steps, of which no place is known.

    A place in the code is growing where what it made is alive at the ends of later steps, more and more of it, until
    the last. The first step is warm-up and does not count; a cache that fills and stops is not growth; nor is what
    one step leaves for the next.
    """
    trace = run.trace
    steps = trace["steps"]
    ends = steps["end_event"][steps["level"] == Level.FULL]  # the first is what the others are compared with
    nothing = np.zeros(len(run.life.born), dtype=bool)
    if len(ends) <= GROWTH_BIRTHS:
        return Growing(Growth(_of_all(steps["end_bytes"]), None, []), nothing, [], nothing, nothing)
    first = np.searchsorted(ends, run.life.born, side="right")
    last = np.searchsorted(ends, run.life.died, side="right")
    size = trace["allocations"]["bytes"]
    survives = np.flatnonzero(run.mine & (last > first) & (run.life.born != NONE))
    site, keys = _sites(trace, run, survives)
    order = np.argsort(site, kind="stable")
    groups = np.split(survives[order], np.cumsum(np.bincount(site, minlength=len(keys)))[:-1])
    rates = np.array([
        _rate(_series(first[mine], last[mine], size[mine], len(ends)), _births(run, mine, first, last, len(ends)))
        for mine in groups])
    found = np.flatnonzero(rates > 0)
    found = found[np.argsort(-rates[found], kind="stable")]
    bounded, garbage = _state(run, survives, site, len(keys)), _garbage(trace, survives, site, len(keys))
    fills = _filling(trace, survives, site, len(keys)) & ~garbage
    bounded |= fills
    leaks, cycles, filling = nothing.copy(), nothing.copy(), nothing.copy()
    leaks[survives[np.isin(site, found) & ~(bounded | garbage)[site]]] = True
    cycles[survives[np.isin(site, found) & garbage[site]]] = True
    filling[survives[np.isin(site, found) & fills[site]]] = True
    places = [_place(trace, keys[number]) for number in found]
    sites = [Site(p.operator, p.module, p.line, float(rates[number])) for p, number in zip(places, found, strict=True)]
    leak_sites = [place for place, number in zip(sites, found, strict=True) if not (bounded | garbage)[number]]
    return Growing(Growth(float(rates[found].sum()), None, sites), leaks, leak_sites, cycles, filling)


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


def _state(run: View, allocations: Ints, site: Ints, sites: int) -> Mask:
    """Places where an optimizer's state is made, save those where that of ever more optimizers is."""
    claims, trace = run.trace["claims"], run.trace
    whose = np.full(len(trace["allocations"]["bytes"]), NONE, dtype=np.int64)
    mine = claims["role"] == Role.OPTIMIZER_STATE
    whose[claims["allocation"][mine]] = claims["proof"][mine]
    state = run.roles.of(allocations, run.life.died[allocations] - 1) == Role.OPTIMIZER_STATE
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
