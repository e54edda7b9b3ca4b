"""Whether live memory at the same point of each step grows, by how much, and from which places."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from memdiag.diagnose.alive import births
from memdiag.diagnose.holders import capacity, is_variable, last_looks
from memdiag.diagnose.model import Growth, Ints, Mask, Site
from memdiag.policy import GROWTH_BIRTHS, GROWTH_RUN
from memdiag.trace import NONE, Level, Role
from memdiag.trace.model import GARBAGE, Trace
from memdiag.trace.places import Place, relative
from memdiag.trace.view import View


@dataclass(frozen=True)
class Growing:
    """What grows from step to step.

    Attributes:
        growth: the numbers.
        leaks: over the run's allocations, those that survive at growing places; the state of one optimizer, which its
            own bounds limit, is growth and no leak; nor is what a container of a fixed capacity keeps.
        leak_rate: bytes of leaks that come with every step.
        leak_sites: their places; without names where only light steps had them.
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
    one step leaves for the next. Where light steps made something is not known: there a place is that of what has the
    same size in the steps in full, or else a size.
    """
    steps = run.trace["steps"]
    light, total = steps["level"] == Level.LIGHT, _of_all(steps["end_bytes"])
    found = _growing(run, light, np.ones(len(light), dtype=bool))
    if light.any() and total and not found.growth.bytes_per_step:
        # What each step makes anew, a little larger, light steps do not tell.
        found = _growing(run, light, ~light)
        if not found.growth.bytes_per_step:
            found = replace(found, growth=Growth(total, None, []))
    return found


def _growing(run: View, light: Mask, chosen: Mask) -> Growing:
    """What grows from end to end of the chosen steps."""
    trace, steps = run.trace, run.trace["steps"]
    left = run.mine & (run.born_in == NONE) & np.isin(run.born_step, steps["step"][light])
    # What the last step leaves is not known to stay, if it is a light one.
    number = int(chosen.sum()) - int(light[chosen][-1:].sum())
    ends = steps["end_event"][chosen][:number]
    if number <= GROWTH_BIRTHS:
        nothing = np.zeros(len(left), dtype=bool)
        return Growing(Growth(None, None, []), nothing, 0.0, [], nothing, nothing)
    first = np.searchsorted(ends, run.life.born, side="right")
    first[left] = np.searchsorted(steps["step"][chosen], run.born_step[left])
    last = np.searchsorted(ends, run.life.died, side="right")
    survives = np.flatnonzero(run.mine & (last > first) & (run.life.born != NONE))
    # Of light steps only what outlives the next one too is known: the others count as little in full ones.
    counts = last - first > int((light & chosen).any())
    keys, site = np.unique(births(run, survives), axis=0, return_inverse=True)
    site = site.reshape(-1)
    site = _by_size(run, survives, site, left[survives], (last - first)[survives])
    keys = np.concatenate([keys, np.full((int(site.max(initial=-1)) + 1 - len(keys), keys.shape[1]), NONE)])
    places = _Places(run, survives, site, len(keys), counts, first, last, number)
    joined = _of_many_sizes(run, survives, site, left[survives], places)
    if joined is not None:
        # Its place is the largest of those that are known.
        known = np.flatnonzero(joined & (keys != NONE).any(axis=1))
        total = np.bincount(site, trace["allocations"]["bytes"][survives], len(keys))
        site = np.where(joined[site], len(keys), site)
        keys = np.concatenate([keys, keys[known[total[known].argmax()]][None] if len(known) else np.full((1, 3), NONE)])
        places = _Places(run, survives, site, len(keys), counts, first, last, number)
    found = np.flatnonzero(places.rates > 0)
    found = found[np.argsort(-places.rates[found], kind="stable")]
    named = [_place(trace, key) for key in keys[found]]
    sites = [Site(p.operator, p.module, p.line, float(places.rates[number]))
             for p, number in zip(named, found, strict=True)]
    leak_sites = [place for place, number in zip(sites, found, strict=True) if places.leaks[number]]
    return Growing(
        Growth(places.rate, None, sites), places.mask(places.leaks), places.leak_rate, leak_sites,
        places.mask(places.garbage), places.mask(places.fills))


class _Places:
    """How places grow.

    Args:
        allocations: what outlives its step.
        site: the place of each, a number below ``sites``.
        counts: which of all allocations of the run make a place grow.
        first, last: of all allocations of the run, the steps from and before whose ends they are alive.

    Attributes:
        rates: bytes per step by which each place grows; 0 where it does not. ``rate`` is their sum.
        bounded: places that hold what only cycles keep, what fills containers, or an optimizer's state.
        leaks, garbage, fills: those of the growing places that leak, that hold what only cycles keep, and that fill.
    """

    def __init__(
        self, run: View, allocations: Ints, site: Ints, sites: int, counts: Mask, first: Ints, last: Ints, steps: int
    ) -> None:
        size = run.trace["allocations"]["bytes"]
        counted = np.flatnonzero(counts[allocations])
        counted = counted[np.argsort(site[counted], kind="stable")]
        ends = np.cumsum(np.bincount(site[counted], minlength=sites))
        groups = np.split(allocations[counted], ends[:-1]) if sites else []
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


def _by_size(run: View, allocations: Ints, site: Ints, light: Mask, steps: Ints) -> Ints:
    """The place of each allocation, where those that light steps left have that of others of their size, if there are
    any: the place whose allocations live for most steps. An optimizer's state is apart."""
    site = site.copy()
    kind = 2 * run.trace["allocations"]["bytes"][allocations] + _is_state(run, allocations)
    pairs, pair = np.unique(np.stack([kind[~light], site[~light]]), axis=1, return_inverse=True)
    lived = np.bincount(pair.reshape(-1), steps[~light], pairs.shape[1])
    most = {}
    for row in np.argsort(lived, kind="stable").tolist():
        most[int(pairs[0, row])] = int(pairs[1, row])
    new = int(site.max(initial=-1)) + 1
    kinds, group = np.unique(kind[light], return_inverse=True)
    of_kind = np.array([most.get(kind, new + place) for place, kind in enumerate(kinds.tolist())], dtype=np.int64)
    site[light] = of_kind[group.reshape(-1)]
    return site


def _of_many_sizes(run: View, allocations: Ints, site: Ints, light: Mask, places: _Places) -> Mask | None:
    """Places to be taken as one: of batches of many lengths no size comes often enough. None where there are none.

    They are the sizes of light steps that do not grow, and places in full steps of many sizes that do not either.
    """
    count = len(places.rates)
    idle = (places.rates == 0) & ~places.bounded
    in_full, in_light = (np.bincount(site[where], minlength=count) > 0 for where in (~light, light))
    sizes = np.bincount(np.unique(np.stack([site, run.trace["allocations"]["bytes"][allocations]]), axis=1)[0],
                        minlength=count)
    number = np.bincount(site, minlength=count)
    alone = idle & in_light & ~in_full
    varying = idle & in_full & (sizes >= GROWTH_BIRTHS) & (2 * sizes > number)
    return alone | varying if alone.any() else None


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


def _garbage(trace: Trace, allocations: Ints, site: Ints, sites: int) -> Mask:
    """Places of which the recorder looked at something that survives, and found all of it in reference cycles alone.

    It looks at the largest places. Where nothing that it looked at is held otherwise, the small ones are the same.
    """
    looked, held = np.zeros(sites, dtype=bool), np.zeros(sites, dtype=bool)
    for place, chain in _chains(trace, allocations, site):
        looked[place] = True
        held[place] |= chain != GARBAGE
    return looked & ~held if held.any() else np.full(sites, bool(looked.any()))


def _is_state(run: View, allocations: Ints) -> Mask:
    """Whether each was an optimizer's state at last."""
    found: Mask = run.roles.of(allocations, run.life.died[allocations] - 1) == Role.OPTIMIZER_STATE
    return found


def _state(run: View, allocations: Ints, site: Ints, sites: int) -> Mask:
    """Places where an optimizer's state is made, save those where that of ever more optimizers is."""
    claims, trace = run.trace["claims"], run.trace
    whose = np.full(len(trace["allocations"]["bytes"]), NONE, dtype=np.int64)
    mine = claims["role"] == Role.OPTIMIZER_STATE
    whose[claims["allocation"][mine]] = claims["proof"][mine]
    state = _is_state(run, allocations)
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
