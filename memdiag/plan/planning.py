"""What a recorded step says of checkpoints: plans side by side, and which one is chosen."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from memdiag.plan.regions import Candidate, candidates
from memdiag.plan.safety import Safety, Verdict, chains, verdicts, with_checkpoints
from memdiag.plan.search import Plan, Search
from memdiag.plan.step import Step, planned_step
from memdiag.policy import PLAN_BY_HAND
from memdiag.trace import Level, Role
from memdiag.trace.view import View

_FREED = {  # what checkpoints change; all else at the peak is there whatever the plan
    Role.SAVED_ACTIVATIONS, Role.OTHER_ACTIVATIONS, Role.RECOMPUTED_ACTIVATIONS, Role.WORKSPACE,
    Role.BACKWARD_TEMPORARIES, Role.UNKNOWN}


@dataclass(frozen=True)
class Option:
    """A plan among others.

    Attributes:
        name: ``none``, ``every_block``, ``every_2nd_block``, or what it is on the frontier.
        phase: of its peak; ``recompute`` while a region runs again.
        noise_ns: the time of what would run again, times the share by which backward and the optimizers' steps differed
            from step to step once warm; None where one step was seen.
        alone: bytes by which each of its checkpoints by itself would lower the peak.
    """

    name: str
    plan: Plan
    alone: tuple[int, ...]
    phase: str | None
    noise_ns: int | None


@dataclass(frozen=True)
class Floor:
    """The lowest peak that was found, and what is left there.

    Attributes:
        holders: roles that no checkpoint changes, and the rest as one, largest first; they sum to the bytes.
    """

    bytes: int
    holders: list[tuple[str, int]]


@dataclass(frozen=True)
class Planning:
    """Plans of one step.

    Attributes:
        options: the usual ones by name, then the frontier, highest peak first; last, ``by_hand``, one with runs of
            modules that have to be written into the script, where that is better than all others.
        chosen: index among these: with a budget the cheapest that fits (None: none does); asked for the smallest, that;
            else the one with the least peak × step time of the frontier.
        gains: of each candidate by itself, largest first: bytes by which the peak falls (rises, where negative), and
            the plan.
        floor: where no plan fits the budget.
        safety: of each module that was called; unsafe ones are in no plan.
    """

    step: Step
    phase: str | None
    budget: int | None
    options: list[Option]
    chosen: int | None
    gains: list[tuple[int, Plan]]
    floor: Floor | None
    safety: dict[str, Verdict]


def plans(run: View, budget: int | None = None, smallest: bool = False) -> Planning:
    """Plans for the step of a run that was recorded for them.

    Args:
        budget: bytes that the peak may have.
        smallest: choose the lowest peak that is found.

    Raises:
        MemdiagError: there is no such step.
    """
    step = planned_step(run)
    safety = verdicts(run.trace)
    unsafe = {path for path, verdict in safety.items() if verdict.safety is Safety.UNSAFE}
    everything = _free(step, candidates(step, chains(run.trace)), with_checkpoints(run.trace))
    among = [one for one in everything if not one.by_hand and unsafe.isdisjoint(one.modules)]
    search = Search(step, among)
    lowest = search.smallest()
    usual = {"none": search.plan([])}
    blocks = _blocks(everything)
    if not unsafe.isdisjoint(path for block in blocks for path in block.modules):
        blocks = []  # some of them alone are no usual plan
    for every, name in ((1, "every_block"), (2, "every_2nd_block"), (3, "every_3rd_block")):
        if len(blocks) > every:
            usual[name] = search.plan(blocks[::every])
    frontier = {f"frontier_{number}": plan for number, plan in enumerate(search.frontier(lowest)) if plan.chosen}
    if budget is not None:
        fitting = search.within(budget)
        if fitting is not None and fitting.chosen:
            frontier = {**frontier, "within_budget": fitting}
    options = [_option(run, step, search, name, plan) for name, plan in (*usual.items(), *frontier.items())]
    chosen = _choose(step, options, budget, smallest, lowest)
    written = [one for one in everything if one.by_hand and unsafe.isdisjoint(one.modules)]
    if written:
        rival = lowest if budget is None or chosen is None else options[chosen].plan
        wider = Search(step, [*among, *written])
        plan = _by_hand(step, wider, rival, budget)
        options += [] if plan is None else [_option(run, step, wider, "by_hand", plan)]
    single = [one for one in among if not one.keep and len(one.modules) == 1]
    gains = [(search.plan([]).peak.bytes - plan.peak.bytes, plan) for plan in (search.plan([one]) for one in single)]
    gains.sort(key=lambda gain: (-gain[0], gain[1].again_ns))
    return Planning(
        step, _phase(run, step, usual["none"]), budget, options, chosen, gains,
        _floor(run, lowest) if budget is not None and chosen is None else None, safety)


def _free(step: Step, among: Sequence[Candidate], around: Collection[str]) -> list[Candidate]:
    """Candidates that are not inside a checkpoint of the script's own, nor have one in them."""
    inside = {one.what for one in step.present}

    def free(path: str) -> bool:
        parts = path.split(".")
        return path not in around and inside.isdisjoint(".".join(parts[:n]) for n in range(1, len(parts) + 1))

    return [one for one in among if all(map(free, one.modules))]


def _choose(
    step: Step, options: Sequence[Option], budget: int | None, smallest: bool, lowest: Plan
) -> int | None:
    if budget is not None:
        fitting = [number for number, one in enumerate(options) if one.plan.peak.bytes <= budget]
        return min(fitting, key=lambda number: options[number].plan.again_ns, default=None)
    if smallest:
        return next(number for number, one in enumerate(options) if one.plan.peak.bytes == lowest.peak.bytes)
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
    bare = search.plan([]).peak.bytes
    alone = tuple(bare - search.plan([one]).peak.bytes for one in plan.chosen)
    return Option(name, plan, alone, _phase(run, step, plan), _noise(run, plan))


def _phase(run: View, step: Step, plan: Plan) -> str | None:
    if plan.peak.region is not None:
        return "recompute"
    return run.phase_of(min(max(plan.peak.event, step.first), step.last - 1))


def _noise(run: View, plan: Plan) -> int | None:
    """By how much the time may be off: of two steps that do the same one takes that much longer than the other."""
    times, steps = run.trace["step_times"], run.trace["steps"]
    warm = steps["step"][(steps["level"] == Level.FULL) & (steps["warm_up"] == 0)]
    took = [int(times["ns"][times["step"] == step].sum()) for step in np.intersect1d(warm, times["step"]).tolist()]
    return plan.again_ns * (max(took) - min(took)) // max(took) if len(took) > 1 else None


def _floor(run: View, lowest: Plan) -> Floor:
    holders = [(role.label, total) for role, total in run.by_role(lowest.peak.event).items()
               if total and role not in _FREED]
    holders.append(("activations and temporaries", lowest.peak.bytes - sum(total for _, total in holders)))
    return Floor(lowest.peak.bytes, sorted(holders, key=lambda holder: -holder[1]))
