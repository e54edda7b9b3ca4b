"""Runs a script as it is and in another way, and says whether it is the same training, and what it saves and costs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from memdiag.check.arms import Arms, Left, arms
from memdiag.check.bisect import bisect
from memdiag.check.cause import Cause, likely_cause, why_failed
from memdiag.check.compare import Compared, Outcome, Pair, began_otherwise, compare, places
from memdiag.check.entries import BEGAN_PARAMETERS, Entry, Failure, Key, Run, Stage
from memdiag.check.measured import Memory, Times, memory, times
from memdiag.check.probed import Probed, probed
from memdiag.check.spec import RECORDED, TIMES, VALUES, Regions
from memdiag.check.wrapped import first_names, renamed
from memdiag.errors import MemdiagError
from memdiag.record.process.launch import Target
from memdiag.trace import Trace, load


class Verdict(Enum):
    """Of a check."""

    SAME = "same_training"
    DIFFERENT = "different_training"
    SAVES_NOTHING = "saves_nothing"
    COULD_NOT_RUN = "could_not_run"


@dataclass(frozen=True)
class Request:
    """What to check.

    Attributes:
        script: as it is.
        other: another script that should be the same training; None for the same with checkpoints.
        regions: the checkpoints, where ``other`` is None.
        small: arguments with which the script fits in memory, where it does not with its own: values are compared with
            these.
        steps: training steps that are compared.
        rounds: runs of each kind that are timed.
        timed_steps: training steps of each of them.
        predicted: of the plan; None where it was made with other arguments.
        planned_with: these; None where they are the script's own, or the plan does not say.
    """

    script: Target
    other: Target | None
    regions: Regions | None
    small: tuple[str, ...] | None
    steps: int
    rounds: int
    timed_steps: int
    predicted: Predicted | None = None
    planned_with: tuple[str, ...] | None = None

    @property
    def second(self) -> Target:
        return self.other or self.script


@dataclass(frozen=True)
class Predicted:
    """What a plan has said.

    Attributes:
        peak_bytes, bare_peak_bytes: of a step with its checkpoints, and without.
        step_ns, bare_step_ns: the time of its forwards, backwards and steps of optimizers.
    """

    peak_bytes: int
    bare_peak_bytes: int
    step_ns: int
    bare_step_ns: int


@dataclass(frozen=True)
class Difference:
    """The first difference.

    Attributes:
        stage: None where the second run failed before there was any.
        step: of an optimizer, from 0.
        pairs: what differs in it.
        worst_absolute, worst_relative: the largest, of elements; None where nothing that differs is a number.
        worst: the name of what differs most, beside its norm.
        guilty: of several regions, those that do it by themselves, or together; None where it was not looked for.
        alone: whether they are all that does it.
        probed: what the probe of their safety says of them; None where there was none.
    """

    stage: Stage | None
    step: int
    pairs: tuple[Pair, ...]
    worst_absolute: float | None
    worst_relative: float | None
    worst: str | None
    cause: Cause
    guilty: tuple[str, ...] | None = None
    alone: bool = True
    probed: tuple[Probed, ...] | None = None


@dataclass(frozen=True)
class Check:
    """What a check has found.

    Attributes:
        why_not: why it could not be run, or is no comparison; None where it is one.
        output: the last lines of a run that failed.
        steps: of optimizers, that were compared.
        noise: places where two runs of the script as it is differ.
        unreadable: tensors whose values were not seen.
        memories, times: of the script as it is and of the second; None where they were not measured.
        failed: how the second run ended, where it did not end well.
        precision: types of the models' parameters, and autocast.
        regions: that were put in: modules and kept operators of each, by their names.
    """

    request: Request
    verdict: Verdict
    stages: dict[Stage, Outcome]
    difference: Difference | None = None
    why_not: str | None = None
    output: str | None = None
    steps: int = 0
    noise: int = 0
    unreadable: tuple[str, ...] = ()
    memories: tuple[Memory | None, Memory | None] = (None, None)
    times: tuple[Times | None, Times | None] = (None, None)
    failed: Failure | None = None
    precision: str = ""
    regions: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = ()

    @property
    def predicted_step_ns(self) -> int | None:
        """The measured step as it is, and what the plan adds to one."""
        predicted, bare = self.request.predicted, self.times[0]
        if predicted is None or bare is None:
            return None
        return bare.step_ns + predicted.step_ns - predicted.bare_step_ns


NOTHING_COMPARED = {stage: Outcome.NOT_COMPARED for stage in Stage}


def check(request: Request, say: Callable[[str], None] = lambda text: None) -> Check:
    """Runs a check.

    Args:
        say: called with what is done next.
    """
    with arms(say) as started:
        found = compare_values(request, started)
        if found.verdict is Verdict.COULD_NOT_RUN:
            return found
        try:
            memories, taken = _measure(request, started)
        except MemdiagError as error:
            return replace(found, verdict=Verdict.COULD_NOT_RUN, why_not=str(error))
    found = replace(found, memories=memories, times=taken)
    before, after = memories
    if found.verdict is Verdict.SAME and before is not None and after is not None and after.peak >= before.peak:
        return replace(found, verdict=Verdict.SAVES_NOTHING)
    return found


class _NoComparisonError(Exception):
    """There is nothing to compare; what a run printed last."""

    def __init__(self, reason: str, output: str | None = None) -> None:
        super().__init__(reason)
        self.output = output


# --- the same training? -------------------------------------------------------------------------------------------


def compare_values(request: Request, started: Arms) -> Check:
    """The check without memory and time."""
    try:
        return _compare(request, started)
    except _NoComparisonError as error:
        return Check(request, Verdict.COULD_NOT_RUN, NOTHING_COMPARED, why_not=str(error), output=error.output)
    except MemdiagError as error:  # the checkpoints cannot be put into the script's models
        return Check(request, Verdict.COULD_NOT_RUN, NOTHING_COMPARED, why_not=str(error))


@dataclass(frozen=True)
class _Runs:
    """Starts runs of both scripts.

    Attributes:
        there: names in the second script, by those in the first, where they are others.
    """

    script: Target
    second: Target
    started: Arms
    steps: int
    there: Mapping[str, str]

    def values(
        self, step: int, wanted: Sequence[Pair], regions: Regions | None, *, floor: bool = False
    ) -> list[Left]:
        """One of each that keeps values of what differs in a step; with ``floor`` two more of the first."""
        listed = tuple((step, *pair.key) for pair in wanted)
        there = tuple((step, stage, self.there.get(name, name), nth) for step, stage, name, nth in listed)
        runs = [(self.script, None, listed), (self.second, regions, there),
                *([(self.script, None, listed)] * 2 if floor else [])]
        return [self.started.start("values", one, which, self.steps, places, told="the values of what differs")
                for one, which, places in runs]


def _compare(request: Request, started: Arms) -> Check:
    script, second = request.script, request.second
    if request.small is not None:
        script, second = replace(script, args=request.small), replace(second, args=request.small)
    with_checkpoints = "the other script" if request.other else "with checkpoints"
    a, noise = _baseline(script, request.steps, started)
    second_left = started.start("compare", second, request.regions, request.steps, told=with_checkpoints)
    b = second_left.run
    if b.problem is not None:
        raise _NoComparisonError(b.problem, second_left.last_lines())
    names = first_names(a, b) if request.other else {}
    b = renamed(b, names)
    runs = _Runs(script, second, started, request.steps, {first: name for name, first in names.items()})

    def compared_with(run: Run, regions: Regions | None) -> Compared:
        return compare(a, run, _within_noise(a, run, noise, runs, regions) if noise else ())

    compared = compared_with(b, request.regions)
    found = Check(
        request, Verdict.SAME, compared.stages, steps=compared.steps, noise=len(noise),
        unreadable=tuple(dict.fromkeys((*a.unreadable, *b.unreadable))), failed=b.failure, precision=_precision(a),
        regions=tuple((tuple(modules), tuple(keep)) for modules, keep in b.about.get("regions", ())))
    if compared.step is None and b.failure is None:
        return found

    def differs(regions: Regions) -> bool:
        run = started.start("compare", second, regions, request.steps, told="some of the regions").run
        return run.failure is not None or compared_with(run, regions).step is not None

    if compared.step is None and b.failure is not None:
        cause = why_failed(b) or Cause(
            f"the second run ends with {b.failure.kind}, and the first does not",
            f"{b.failure.kind}: {_first_line(b.failure.text)}")
        difference = Difference(None, max(len(b.segments) - 1, 0), (), None, None, None, cause)
        found = replace(found, verdict=Verdict.COULD_NOT_RUN, output=second_left.last_lines(), why_not=(
            f"the script ends with {b.failure.kind} {with_checkpoints}"
            + (f", at {b.failure.line}" if b.failure.line else "")))
    else:
        difference = _difference(a, b, compared, runs, request.regions)
        found = replace(found, verdict=Verdict.DIFFERENT)
    if request.other is None:
        guilty, alone = bisect(found.regions, differs)
        suspects = {module for modules, _ in found.regions for module in modules
                    if guilty is None or ", ".join(modules) in guilty}
        reasons = probed(second, suspects, started)
        cause = difference.cause
        if reasons and cause.last_resort:
            cause = _by_the_probe(reasons[0], cause)
        difference = replace(difference, guilty=guilty, alone=alone, probed=reasons, cause=cause)
    return replace(found, difference=difference)


def _by_the_probe(reason: Probed, otherwise: Cause) -> Cause:
    """What the compared values do not tell by themselves."""
    return Cause(f"`{reason.module}`: {reason.text}" + (f" ({reason.line})" if reason.line else ""),
                 f"two forwards of `{reason.module}` from one state; and {otherwise.proved_by}", (reason.module,))


def _precision(a: Run) -> str:
    """Types of parameters, and of autocast."""
    first = a.segments[0]
    kinds = dict.fromkeys(entry.dtype or "" for entry in first.of(BEGAN_PARAMETERS))
    casts = dict.fromkeys(entry.value.removeprefix("torch.") for entry in first.of(Stage.SCHEDULE.value)
                          if entry.name.startswith("autocast of") and entry.value != "off")
    return ", ".join(kinds) + (f", autocast to {', '.join(casts)}" if casts else "")


def _baseline(script: Target, steps: int, started: Arms) -> tuple[Run, set[tuple[int, Key]]]:
    """A run of the script as it is, and the places where others of it differ.

    Raises:
        _NoComparisonError: it fails, or is another training each time.
    """
    first = started.start("compare", script, None, steps, told="the script as it is")
    a = first.run
    problem = _problem(a)
    if problem is not None:
        raise _NoComparisonError(problem, first.last_lines())
    again = started.start("compare", script, None, steps, told="the script as it is, again, for its noise").run
    names = began_otherwise(a.segments[0], again.segments[0]) if again.segments else ()
    if names:
        raise _NoComparisonError(
            f"two runs of the script as it is begin with other parameters ({names[0]}), though Python's, NumPy's and "
            "PyTorch's random generators begin alike: does it go on from a file that an earlier run has left, or seed "
            "itself by the time?")
    noise = places(a, again)
    if noise:  # a third tells more of how large it is
        noise |= places(a, started.start("compare", script, None, steps, told="as it is, for the third time").run)
    inputs = [key for _, key in sorted(noise) if key[0] == Stage.INPUTS.value]
    if inputs:
        raise _NoComparisonError(
            f"two runs of the script as it is are given other data ({inputs[0][1]}), though Python's, NumPy's and "
            "PyTorch's random generators begin alike: nothing can be compared; take out what changes from run to run, "
            "such as a seed from the time, or the order of files or of threads")
    return a, noise


def _problem(a: Run) -> str | None:
    """Why the script as it is cannot be compared with."""
    if a.problem is not None:
        return f"the script as it is: {a.problem}"
    if a.failure is not None and a.failure.out_of_memory:
        return ("the script as it is runs out of memory, so there is nothing to compare with: name arguments with "
                'which it fits, as in --small "--batch-size 1", and values are compared with these')
    if a.failure is not None:
        where = f" at {a.failure.line}" if a.failure.line else ""
        return f"the script as it is ends with {a.failure.kind}{where}: {_first_line(a.failure.text)}"
    if not any(segment.whole for segment in a.segments):
        return "no training step ended in the script as it is: no step of an optimizer, and no backward"
    return None


def _difference(a: Run, b: Run, compared: Compared, runs: _Runs, regions: Regions | None) -> Difference:
    from memdiag.check.values import Kept, apart

    stage, step = compared.first, compared.step
    assert stage is not None
    assert step is not None
    pairs = compared.different[stage]
    if step >= compared.steps:  # one run has more steps: there are no values
        return Difference(stage, step, tuple(pairs), None, None, None, likely_cause(a, b, compared, {}))
    mine, others = (Kept(left.folder / VALUES) for left in runs.values(step, pairs, regions))
    ratios: dict[str, float] = {}
    absolute: float | None = None
    relative: float | None = None
    worst, norm = None, -1.0
    for pair in pairs:
        kind, name, nth = pair.key
        found = apart(mine.of((step, kind, name, nth)), others.of((step, kind, runs.there.get(name, name), nth)))
        if found is None:
            continue
        absolute, relative = max(absolute or 0.0, found.absolute), max(relative or 0.0, found.relative)
        if found.norm > norm:
            worst, norm = pair.name, found.norm
        if found.ratio is not None:
            ratios[pair.name] = found.ratio
    cause = likely_cause(a, b, compared, ratios)
    return Difference(stage, step, tuple(pairs), absolute, relative, worst, cause)


def _within_noise(
    a: Run, b: Run, noise: set[tuple[int, Key]], runs: _Runs, regions: Regions | None
) -> set[tuple[int, Key]]:
    """Places where the second run differs from the first by no more than the first from its repetitions.

    Looked at are those in which these differ, and all that come after such a one: these can be equal by chance.
    """
    from memdiag.check.values import Kept, within_noise

    found: set[tuple[int, Key]] = set()
    moments = [segment.moments() for segment in a.segments]
    order = {stage.value: number for number, stage in enumerate(Stage)}

    def when(step: int, key: Key) -> tuple[int, float, int]:
        return (step, *moments[step].get(key, (0, order[key[0]])))

    earliest = min(when(step, key) for step, key in noise)
    differ = {(step, key) for step, key in places(a, b) if when(step, key) >= earliest}
    for step in sorted({step for step, _ in differ}):
        mine = [(at, key) for at, key in sorted(differ) if at == step]
        entries = {entry.key: entry for entry in a.segments[step].entries}
        pairs = [Pair(entries[key], entries[key]) for _, key in mine if key in entries]
        if not pairs:
            continue
        first, second, *others = (Kept(left.folder / VALUES) for left in runs.values(step, pairs, regions, floor=True))
        length = max((_elements(entry) for entry in a.segments[step].of(Stage.INPUTS.value)), default=1)
        for at, key in mine:
            kind, name, nth = key
            place = (at, *key)
            second_value = second.of((at, kind, runs.there.get(name, name), nth))
            if within_noise(first.of(place), [other.of(place) for other in others], second_value, length):
                found.add((at, key))
    return found


def _elements(entry: Entry) -> int:
    return math.prod(json.loads(entry.shape or "[]"))


def _first_line(text: str) -> str:
    return next(iter(text.splitlines()), "")


# --- memory and time ----------------------------------------------------------------------------------------------


def _measure(
    request: Request, started: Arms
) -> tuple[tuple[Memory | None, Memory | None], tuple[Times | None, Times | None]]:
    """The script as it is, and the second; where arguments are given with which it fits, it may run out of memory with
    its own."""
    arms_of = ((request.script, None), (request.second, request.regions))
    names = ("the script as it is", "the other script" if request.other else "the script with checkpoints")
    memories: list[Memory | None] = []
    for (script, regions), name in zip(arms_of, names, strict=True):
        left = started.start("record", script, regions, request.steps, told=f"memory, {name}")
        trace = _recorded(left, name)
        if trace.about.get("ended_out_of_memory"):
            if request.small is None or memories:
                raise MemdiagError(f"{name} runs out of memory with its own arguments:\n{left.last_lines()}")
            memories.append(None)
        else:
            memories.append(memory(trace))
    runs: tuple[list[Left], list[Left]] = ([], [])
    for number in range(request.rounds):
        order = (0, 1) if number % 2 == 0 else (1, 0)  # what gets slower as time goes by does so for both
        for which in order:
            if memories[which] is None:
                continue
            script, regions = arms_of[which]
            runs[which].append(started.start(
                "time", script, regions, request.timed_steps,
                told=f"time, {names[which]}, {number + 1} of {request.rounds}"))
    taken = [times([left.folder / TIMES for left in those]) if those else None for those in runs]
    return (memories[0], memories[1]), (taken[0], taken[1])


def _recorded(left: Left, name: str) -> Trace:
    """What a run has recorded, to its end or until it had no memory.

    Raises:
        MemdiagError: it ended otherwise.
    """
    path = left.folder / RECORDED
    trace = load(path) if path.exists() else None
    if trace is None or left.status and not trace.about.get("ended_out_of_memory"):
        raise MemdiagError(f"{name} ended with status {left.status} while its memory was recorded:\n"
                           f"{left.last_lines()}")
    return trace


def planned_with(plan: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The arguments of the script that a plan was made from; None where it does not say."""
    about = plan.get("about")
    argv = about.get("argv") if isinstance(about, dict) else None
    return tuple(map(str, argv[1:])) if isinstance(argv, list) and argv else None


def predicted(plan: Mapping[str, Any]) -> Predicted | None:
    """What the chosen plan of a plan file says; None where it does not."""
    try:
        said, bare = plan["plans"][plan["chosen"]]["predicted"], plan["baseline"]
        return Predicted(int(said["peak_bytes"]), int(bare["peak_bytes"]), int(said["step_time_ns"]),
                         int(bare["step_time_ns"]))
    except (LookupError, TypeError, ValueError):
        return None  # a plan that somebody has written by hand
