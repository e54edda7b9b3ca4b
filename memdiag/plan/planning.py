"""What a recorded step says of checkpoints: plans side by side, and which one is chosen."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

import numpy as np

from memdiag.errors import MemdiagError
from memdiag.garbage import uncollected
from memdiag.modulenames import matching
from memdiag.plan.aside import ASKED_FOR, known_aside
from memdiag.plan.names import BARE, BY_HAND, FRONTIER, USUAL, WITHIN_BUDGET
from memdiag.plan.obvious import Poor, poor_choices
from memdiag.plan.regions import Candidate, candidates
from memdiag.plan.safety import Safety, Verdict, chains, verdicts, with_checkpoints, wrapped
from memdiag.plan.search import Plan, Search
from memdiag.plan.step import Step, planned_step
from memdiag.policy import PLAN_BY_HAND, PLAN_TOLERANCE
from memdiag.trace import NONE, Level, Role
from memdiag.trace.places import Place
from memdiag.trace.view import View

_FREED = {  # what checkpoints change; all else at the peak is there whatever the plan
    Role.SAVED_ACTIVATIONS, Role.OTHER_ACTIVATIONS, Role.RECOMPUTED_ACTIVATIONS, Role.WORKSPACE,
    Role.BACKWARD_TEMPORARIES, Role.UNKNOWN}


@dataclass(frozen=True)
class Option:
    """A plan among others.

    Attributes:
        name: ``none``, ``every_block``, ``every_2nd_block``, or what it is on the frontier; of a module by itself its
            path.
        phase: of its peak; ``recompute`` while a region runs again.
        place: of its peak: what allocates then, or the region that runs again; None where something else goes before.
        noise_ns: the time of what would run again, times the share by which backward and the optimizers' steps differed
            from step to step once warm; None where one step was seen.
        alone: bytes by which each of its checkpoints by itself would lower the peak.
    """

    name: str
    plan: Plan
    alone: tuple[int, ...]
    phase: str | None
    place: Place | None
    noise_ns: int | None


@dataclass(frozen=True)
class Floor:
    """The lowest peak that was found, and what is left there.

    Attributes:
        option: the plan.
        holders: roles that no checkpoint changes, and the rest as one, largest first; they sum to the bytes.
    """

    option: Option
    holders: list[tuple[str, int]]

    @property
    def bytes(self) -> int:
        return self.option.plan.peak.bytes


@dataclass(frozen=True)
class Planning:
    """Plans of one step.

    Attributes:
        device: whose memory it is about.
        budget: bytes that were asked for.
        set_aside: of the budget, by what for; None where the run does not tell what to keep back on its device.
        options: the usual ones by name, then the frontier, highest peak first; last, ``by_hand``, one with runs of
            modules that have to be written into the script, where that is better than all others.
        chosen: index among these: the one that was named; with a budget the cheapest that fits (None: none does);
            asked for the smallest, the cheapest of those that are as low as any; else the one with the least peak ×
            step time.
        gains: of each module by itself; what lowers the peak most comes first.
        floor: where no plan fits the budget.
        poor: what one would choose first, and better does not.
        other_inputs: steps that ended with inputs of other shapes: their peaks are others.
        safety: of each module that was called; unsafe ones are in no plan, but for those that are allowed.
    """

    step: Step
    device: str
    phase: str | None
    budget: int | None
    set_aside: dict[str, int] | None
    options: list[Option]
    chosen: int | None
    gains: list[Option]
    floor: Floor | None
    poor: list[Poor]
    other_inputs: int
    safety: dict[str, Verdict]
    allowed: frozenset[str]

    @property
    def bare(self) -> Plan:
        """The step as it was recorded."""
        return self.options[0].plan

    @property
    def aside(self) -> int:
        """Bytes of the budget that are kept back."""
        return sum((self.set_aside or {}).values())

    def headroom(self, option: Option) -> int | None:
        """Bytes of the budget that a plan leaves, beside what is set aside; None without a budget."""
        return None if self.budget is None else self.budget - self.aside - option.plan.peak.bytes


# Plans make hundreds of thousands of small objects and no cycles; to look through all that the process has, the model
# of a script that has just ended included, takes as long as a search.
@uncollected()
def plans(
    run: View, budget: int | None = None, smallest: bool = False, *, name: str | None = None,
    allow: Collection[str] = (), set_aside: int | None = None,
) -> Planning:
    """Plans for the step of a run that was recorded for them.

    Args:
        budget: bytes that may be in use, with what is set aside.
        smallest: choose the lowest peak that is found, to PLAN_TOLERANCE of the bare one: what a batch changes more is
            not bought at any price.
        name: choose the plan of this name.
        allow: modules that may be in plans though they are unsafe; ranges and patterns stand for all that they match.
        set_aside: bytes of the budget to keep back, instead of what the run tells itself.

    Raises:
        MemdiagError: there is no such step; there is no plan of the name; a module to allow was not called.
    """
    step = planned_step(run)
    safety = verdicts(run.trace)
    allowed = _called(allow, safety)
    unsafe = {path for path, verdict in safety.items() if verdict.safety is Safety.UNSAFE} - allowed
    nowhere = with_checkpoints(run.trace) | wrapped(run.trace)
    everything = _free(step, candidates(step, chains(run.trace), unsafe | nowhere), nowhere)
    among = [one for one in everything if not one.by_hand and unsafe.isdisjoint(one.modules)]
    search = Search(step, among)
    usual = {BARE: search.plan([])}
    blocks = _blocks(everything)
    if not unsafe.isdisjoint(path for block in blocks for path in block.modules):
        blocks = []  # some of them alone are no usual plan
    for every, usually in USUAL.items():
        if len(blocks) > every:
            usual[usually] = search.plan(blocks[::every])
    lowest = search.smallest()
    tolerance = int(PLAN_TOLERANCE * usual[BARE].peak.bytes)
    near = search.within(lowest.peak.bytes + tolerance) or lowest
    frontier = {f"{FRONTIER}{number}": plan for number, plan in enumerate(search.frontier(near)) if plan.chosen}
    aside = None if budget is None else known_aside(run, step.number) if set_aside is None else {ASKED_FOR: set_aside}
    room = None if budget is None else max(budget - sum((aside or {}).values()), 0)
    if room is not None:
        fitting = search.within(room) or (lowest if lowest.peak.bytes <= room else None)
        if fitting is not None and fitting.chosen:
            frontier = {**frontier, WITHIN_BUDGET: fitting}
    options = [_option(run, step, search, named, plan) for named, plan in (*usual.items(), *frontier.items())]
    chosen = _choose(step, options, room, tolerance if smallest else None)
    written = [one for one in everything if one.by_hand and unsafe.isdisjoint(one.modules)]
    if written:
        rival = near if room is None or chosen is None else options[chosen].plan
        wider = Search(step, [*among, *written])
        plan = _by_hand(step, wider, rival, room)
        options += [] if plan is None else [_option(run, step, wider, BY_HAND, plan)]
    if name is not None:
        chosen = _named(options, name)
    gains = [_option(run, step, search, one.modules[0], search.plan([one])) for one in among
             if len(one.modules) == 1 and not one.keep]
    gains.sort(key=lambda gain: (gain.plan.peak.bytes, gain.plan.again_ns))
    return Planning(
        step=step, device=run.device, phase=options[0].phase, budget=budget,
        set_aside={} if budget is None else aside, options=options, chosen=chosen, gains=gains,
        floor=_floor(run, _option(run, step, search, "lowest", lowest)) if chosen is None else None,
        poor=poor_choices(step, options, gains) if among else [],
        other_inputs=_other_inputs(run, step.number), safety=safety, allowed=allowed)


def _other_inputs(run: View, number: int) -> int:
    steps = run.trace["steps"]
    shapes, mine = steps["input_shapes"], steps["input_shapes"][steps["step"] == number]
    return int(((shapes != NONE) & ~np.isin(shapes, mine)).sum())


def _free(step: Step, among: Sequence[Candidate], nowhere: Collection[str]) -> list[Candidate]:
    """Candidates that are not inside a checkpoint of the script's own, nor among others that can be none."""
    inside = {one.what for one in step.present}

    def free(path: str) -> bool:
        parts = path.split(".")
        return path not in nowhere and inside.isdisjoint(".".join(parts[:n]) for n in range(1, len(parts) + 1))

    return [one for one in among if all(map(free, one.modules))]


def _called(allow: Collection[str], safety: dict[str, Verdict]) -> frozenset[str]:
    """The modules that are allowed, each by its name."""
    found = frozenset(path for asked in allow for path in matching(asked, safety))
    for path in sorted(found.difference(safety)):
        close = get_close_matches(path, safety, n=3) or list(safety)[:3]
        raise MemdiagError(f"{path}: no module of this name was called in the step that plans are made from; there "
                           f"is {', '.join(close) or 'none at all'}")
    return found


def _named(options: Sequence[Option], name: str) -> int:
    names = [one.name for one in options]
    if name not in names:
        raise MemdiagError(f"{name}: there is no plan of this name; there is {', '.join(names)}")
    return names.index(name)


def _choose(step: Step, options: Sequence[Option], room: int | None, tolerance: int | None) -> int | None:
    """The cheapest that fits; or the cheapest that is as low as any, to a tolerance; or the least peak × time."""
    if room is None and tolerance is not None:
        room = min(one.plan.peak.bytes for one in options) + tolerance
    if room is not None:
        fitting = [number for number, one in enumerate(options) if one.plan.peak.bytes <= room]
        return min(fitting, key=lambda number: options[number].plan.again_ns, default=None)
    return min(range(len(options)), key=lambda number: (
        options[number].plan.peak.bytes * (step.work_ns + options[number].plan.again_ns)))


def _blocks(among: Sequence[Candidate]) -> list[Candidate]:
    """Items of lists of modules, those inside others left out."""
    items = {one.modules[0]: one for one in among
             if not one.keep and len(one.modules) == 1 and one.modules[0].rpartition(".")[2].isdecimal()}
    return [one for path, one in items.items() if not any(path.startswith(f"{other}.") for other in items)]


def _by_hand(step: Step, search: Search, rival: Plan, budget: int | None) -> Plan | None:
    """A plan with runs of modules that only the script itself can put into one checkpoint, where that is better: where
    it alone fits the budget, or spares time."""
    plan = search.within(rival.peak.bytes if budget is None else budget)
    if plan is None or not any(one.by_hand for one in plan.chosen):
        return None
    alone = budget is not None and rival.peak.bytes > budget
    return plan if alone or rival.again_ns - plan.again_ns > PLAN_BY_HAND * step.work_ns else None


def _option(run: View, step: Step, search: Search, name: str, plan: Plan) -> Option:
    peak, bare = plan.peak, search.plan([]).peak.bytes
    alone = tuple(bare - search.plan([one]).peak.bytes for one in plan.chosen)
    if peak.region is not None:
        phase: str | None = "recompute"
        place: Place | None = Place(peak.region.calls[0].path, None, None)
    else:
        event = min(max(peak.event, step.first), step.last - 1)
        comes = (run.trace["allocations"]["event"] == event).any()
        phase, place = run.phase_of(event), run.where(event)[2] if comes else None
    return Option(name, plan, alone, phase, place, _noise(run, plan))


def _noise(run: View, plan: Plan) -> int | None:
    """By how much the time may be off: of two steps that do the same one takes that much longer than the other."""
    times, steps = run.trace["step_times"], run.trace["steps"]
    warm = steps["step"][(steps["level"] == Level.FULL) & (steps["warm_up"] == 0)]
    took = [int(times["ns"][times["step"] == step].sum()) for step in np.intersect1d(warm, times["step"]).tolist()]
    return plan.again_ns * (max(took) - min(took)) // max(took) if len(took) > 1 else None


def _floor(run: View, lowest: Option) -> Floor:
    peak = lowest.plan.peak
    holders = [(role.label, total) for role, total in run.by_role(peak.event).items() if total and role not in _FREED]
    holders.append(("activations and temporaries", peak.bytes - sum(total for _, total in holders)))
    return Floor(lowest, sorted(holders, key=lambda holder: -holder[1]))
