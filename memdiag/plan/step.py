"""One step of a run, as plans of checkpoints are made from it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from memdiag.errors import MemdiagError
from memdiag.trace import NONE, Kind, Phase, Trace
from memdiag.trace.model import AUTOCAST_ENDED, CACHED, COMPILED, GRAD_ON, RECOMPUTE
from memdiag.trace.nesting import span_rows
from memdiag.trace.places import at, relative
from memdiag.trace.view import View

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Call:
    """A module call of the step, with gradients on.

    Attributes:
        path: of the module; ``number`` counts its calls in the run.
        start, end: the memory events inside it are ``start`` to ``end - 1``.
        start_ns, end_ns: when it began and ended, as all times of the step are told: by the forward that ran once more
            without operators being recorded, and without its graph.
        first, last: ids of the spans inside it, its own included.
        arguments: allocations that it was given.
        outermost: no other call encloses it.
    """

    path: str
    number: int
    start: int
    end: int
    start_ns: int
    end_ns: int
    first: int
    last: int
    arguments: Ints
    outermost: bool


@dataclass(frozen=True)
class Saves:
    """What autograd saved in the step; arrays of equal length.

    Attributes:
        allocation: NONE where it was not seen to come.
        span: of the operator that saved it.
        time_ns: when it was saved: at the beginning or the end of the operator.
        packed, unpacked, released: memory events before each; ``unpacked`` is NONE where no backward asked for it.
        used: the same until the node that unpacked it had run. A checkpoint makes a tensor anew for that alone; what
            was saved in forward is released a little later, when the node's results have been made to fit.
    """

    allocation: Ints
    span: Ints
    time_ns: Ints
    packed: Ints
    unpacked: Ints
    released: Ints
    used: Ints

    def inside(self, call: Call) -> Mask:
        """What was saved in a call, that of the calls in it included."""
        found: Mask = (self.span >= call.first) & (self.span <= call.last)
        return found


@dataclass(frozen=True)
class Operators:
    """Operators of the step's forwards whose results a checkpoint could keep, in their order.

    Attributes:
        start, end: the memory events inside each are ``start`` to ``end - 1``.
    """

    name: list[str]
    start: Ints
    end: Ints
    took_ns: Ints


@dataclass(frozen=True)
class Present:
    """A checkpoint that the script has.

    Attributes:
        what: path of the module that runs again, else the line of what does.
        again_ns: time that it took to run again: its part of the backward that was recorded.
        bytes: of what it made again for backward: without it, that would have been there since forward.
    """

    what: str
    again_ns: int
    bytes: int


@dataclass(frozen=True)
class Step:
    """The facts of one step in full recording, on one device.

    Attributes:
        number: of the step.
        first, last: its memory events are ``first`` to ``last - 1``.
        before: bytes live before the first of them; ``live`` after each.
        size, born, died: of all allocations of the run: bytes (0 on other devices), events of birth and death.
        let_go: of allocations, the event before which Python lets go of it, if autograd does not keep it; NONE where
            that is not known, and for what the forward leaves behind.
        cached: allocations that autocast keeps until its block ends.
        saves: what autograd kept.
        operators: of its forwards.
        calls: of modules, in the order in which they began.
        work_ns: time in its forwards, when they ran once more, and in its backwards and steps of optimizers, when they
            were recorded.
        random_state: bytes of this device that a copy of the random state takes.
        ran: ids of the spans of its operators, in their order.
        twice: ids of the spans of operators that backward went through more than once; a checkpoint around them would
            run again each time.
        present: checkpoints that the script has already.
        keeping_ns: time that each operator of a region takes longer where the region keeps others, as it was measured.
        checkpoint_ns: time that a checkpoint takes beside what runs in it, as it was measured; and, in
            ``checkpointed_save_ns``, that each tensor takes longer which is saved in it.
    """

    number: int
    first: int
    last: int
    before: int
    live: Ints
    size: Ints
    born: Ints
    died: Ints
    let_go: Ints
    cached: Mask
    saves: Saves
    operators: Operators
    calls: list[Call]
    work_ns: int
    random_state: int
    ran: Ints
    twice: Ints
    present: list[Present]
    keeping_ns: int
    checkpoint_ns: int
    checkpointed_save_ns: int

    @cached_property
    def _made(self) -> tuple[Ints, Ints]:
        made = np.flatnonzero((self.size > 0) & (self.born >= self.first) & (self.born < self.last))
        made = made[np.argsort(self.born[made], kind="stable")]
        return made, self.born[made]

    def made_between(self, start: int, end: int) -> Ints:
        """Allocations of the events from one to before another, in their order."""
        made, born = self._made
        return made[slice(*np.searchsorted(born, (start, end)))]

    @cached_property
    def _begins(self) -> list[int]:
        return [call.first for call in self.calls]

    def operators_inside(self, call: Call) -> int:
        """How many operators a call runs, as the script calls them."""
        first, after = np.searchsorted(self.ran, (call.first, call.last + 1))
        return int(after - first)

    def goes_back_twice(self, call: Call) -> bool:
        """Whether backward went more than once through something in a call."""
        first, after = np.searchsorted(self.twice, (call.first, call.last + 1))
        return bool(after > first)

    def calls_inside(self, call: Call) -> list[Call]:
        """The module calls inside one, at whatever depth."""
        return self.calls[bisect_right(self._begins, call.first):bisect_right(self._begins, call.last)]


def planned_step(run: View) -> Step:
    """The step of a run that was recorded for plans.

    Raises:
        MemdiagError: there is none, it did not end, or its forward does not do the same when it runs again.
    """
    trace = run.trace
    second = trace["second_forwards"]
    if not len(second["step"]):
        ended = len(trace["steps"]["step"])
        raise MemdiagError(
            "no step of this run was recorded for plans: `memdiag plan SCRIPT` and `memdiag profile --plan SCRIPT` do "
            f"that in the third step, which must come and be recorded in full; {ended} steps ended in this run")
    number = int(second["step"][0])
    row = np.flatnonzero(trace["steps"]["step"] == number)
    if not len(row):
        raise MemdiagError(f"step {number}, which was recorded for plans, did not come to its end")
    first, last = (int(trace["steps"][name][row[0]]) for name in ("start_event", "end_event"))
    calls = _calls(run, first, last)
    let_go, cached = _let_go(run, [call for call in calls if call.outermost])
    pace = _pace(trace, calls)
    began, ended = (pace(np.array(ns, dtype=np.int64)).tolist() for ns in (
        [call.start_ns for call in calls], [call.end_ns for call in calls]))
    calls = [replace(call, start_ns=start, end_ns=end) for call, start, end in zip(calls, began, ended, strict=True)]
    line = run.line
    return Step(
        number, first, last, int(line.live[first - 1]) if first else line.start_bytes, line.live[first:last],
        np.where(run.mine, trace["allocations"]["bytes"], 0), run.life.born, run.life.died, let_go, cached,
        _saves(trace, first, last, pace), _operators(run, cached, pace), calls, _work(trace, number, calls),
        int(trace.about.get("random_state_bytes", 0)) if run.device == "cpu" else 0,
        np.sort(trace["spans"]["id"][trace["spans"]["kind"] == Kind.OPERATOR]),
        _twice(trace, first, last), _present(run, number, first, last), int(trace.about.get("keeping_ns", 0)),
        int(trace.about.get("checkpoint_ns", 0)), int(trace.about.get("checkpointed_save_ns", 0)))


def _work(trace: Trace, number: int, calls: Sequence[Call]) -> int:
    """Time in outermost modules, backwards and optimizers; that of memdiag's own work between them is not in it."""
    times = trace["step_times"]
    return sum(call.end_ns - call.start_ns for call in calls if call.outermost) + int(
        times["ns"][times["step"] == number].sum())


def _twice(trace: Trace, first: int, last: int) -> Ints:
    spans = trace["spans"]
    mine = (spans["kind"] == Kind.NODE) & (spans["start_event"] >= first) & (spans["end_event"] <= last)
    mine &= spans["forward"] != NONE
    nodes = np.stack([spans[name][mine].astype(np.int64) for name in ("forward", "name", "sequence")], axis=1)
    found, times = np.unique(nodes, axis=0, return_counts=True)
    return np.unique(found[times > 1, 0])


def _present(run: View, number: int, first: int, last: int) -> list[Present]:
    trace, spans = run.trace, run.trace["spans"]
    inside = (spans["start_event"] >= first) & (spans["end_event"] <= last)
    backward = inside & (spans["kind"] == Kind.PHASE) & np.isin(spans["name"], trace.numbers(Phase.BACKWARD.label))
    times = trace["step_times"]
    worked = times["ns"][(times["step"] == number) & (times["phase"] == Phase.BACKWARD)].sum()
    pace = worked / max((spans["end_ns"] - spans["start_ns"])[backward].sum(), 1)
    again = inside & (spans["flags"] & RECOMPUTE != 0)
    around = span_rows(trace, spans["parent"])
    outermost = np.flatnonzero(again & ~((around != NONE) & again[around]))
    found: dict[str, Present] = {}
    born, died, size = run.life.born, run.life.died, np.where(run.mine, trace["allocations"]["bytes"], 0)
    for row in outermost.tolist():
        name, line = trace.text[spans["name"][row]], trace.string(int(spans["line"][row]))
        what = name if spans["kind"][row] == Kind.MODULE or line is None else relative(trace, line) or line
        start, end = int(spans["start_event"][row]), int(spans["end_event"][row])
        left = (born >= start) & (born < end) & (died >= end)
        before = found.get(what, Present(what, 0, 0))
        found[what] = Present(
            what, before.again_ns + int(pace * (spans["end_ns"][row] - spans["start_ns"][row])),
            before.bytes + int(size[left].sum()))
    return list(found.values())


def _pace(trace: Trace, calls: Sequence[Call]) -> Callable[[Ints], Ints]:
    """From times of the recorded forwards to those of the forwards that ran once more: what lies between two moments at
    which a module call began or ended is spread as it was when it was recorded."""
    table = trace["second_calls"]
    if not len(table["step"]):
        raise MemdiagError("the run was recorded by an older memdiag, and has no times for plans: record it again")
    order = np.argsort(table["forward"], kind="stable")
    names = [trace.text[name] for name in table["module"][order]]
    if names != [call.path for call in calls] or (table["end_ns"] == NONE).any():
        outermost = next((call.path for call in calls if call.outermost), "the model")
        raise MemdiagError(
            f"`{outermost}` does not call the same modules when it runs again on the same inputs: there is no plan "
            "for it")
    moments = np.array([call.start_ns for call in calls] + [call.end_ns for call in calls], dtype=np.int64)
    again = np.concatenate([table["start_ns"][order], table["end_ns"][order]])
    origin, first = moments.min(), again.min()  # times since the epoch are too long for floating point
    by_time = np.lexsort((again, moments))

    def pace(ns: Ints) -> Ints:
        told: Ints = np.rint(
            np.interp(ns - origin, moments[by_time] - origin, again[by_time] - first)).astype(np.int64)
        return told

    return pace


def _saves(trace: Trace, first: int, last: int, pace: Callable[[Ints], Ints]) -> Saves:
    saves, ends = trace["saves"], trace["save_ends"]
    mine = (saves["packed_event"] >= first) & (saves["packed_event"] <= last)
    unpacked, released = (np.full(int(saves["id"].max(initial=-1)) + 1, NONE, dtype=np.int64) for _ in range(2))
    unpacked[ends["save"]], released[ends["save"]] = ends["unpacked_event"], ends["released_event"]
    rows = saves["id"][mine]
    # Where the step ends without it, it is there until then.
    gone = np.where(released[rows] == NONE, last, released[rows])
    spans, savers, packed = trace["spans"], span_rows(trace, saves["span"][mine]), saves["packed_event"][mine]
    begins = packed == at(spans["start_event"], savers)
    time_ns = np.where(begins, at(spans["start_ns"], savers), at(spans["end_ns"], savers))
    return Saves(
        saves["allocation"][mine], saves["span"][mine], pace(time_ns), packed, unpacked[rows], gone, _used(trace, gone))


def _operators(run: View, cached: Mask, pace: Callable[[Ints], Ints]) -> Operators:
    trace = run.trace
    table = trace["keepable"]
    order = np.argsort(table["start_ns"], kind="stable")
    # One that another calls is not seen by a checkpoint.
    over = np.maximum.accumulate(table["end_ns"][order])
    order = order[np.append(True, table["start_ns"][order[1:]] >= over[:-1])[:len(order)]]
    name, start, end, took = (
        column[order] for column in (
            table["name"], table["start_event"], table["end_event"],
            pace(table["end_ns"]) - pace(table["start_ns"])))
    # What autocast casts once for all, a region that runs again casts anew: there are more of them then than were kept.
    casts = run.life.born[cached]
    row = np.searchsorted(start, casts, side="right") - 1
    casting = np.unique(name[row[(row >= 0) & (casts < end[row])]])
    could = ~np.isin(name, casting)
    return Operators([trace.text[number] for number in name[could]], start[could], end[could], took[could])


def _used(trace: Trace, released: Ints) -> Ints:
    """When the node that lets go of something had run."""
    nodes = trace["node_ends"]
    order = np.argsort(nodes["event"], kind="stable")
    ran = nodes["event"][order]
    over = at(trace["spans"]["end_event"], span_rows(trace, nodes["span"]))[order]
    last = np.searchsorted(ran, released) - 1  # of the nodes that had run by then
    if not len(ran):
        return released
    return np.where((last >= 0) & (released <= over[last]), ran[last], released)


def _calls(run: View, first: int, last: int) -> list[Call]:
    trace, spans, nest = run.trace, run.trace["spans"], run.nest
    wanted = (spans["kind"] == Kind.MODULE) & (spans["start_event"] >= first) & (spans["end_event"] <= last)
    wanted &= (spans["flags"] & GRAD_ON != 0) & (spans["flags"] & RECOMPUTE == 0)
    inside = _last_inside(spans["id"], spans["parent"])
    arguments = trace["arguments"]
    order = np.argsort(arguments["span"], kind="stable")
    of, given = arguments["span"][order], arguments["allocation"][order]
    found = []
    for row in np.flatnonzero(wanted).tolist():
        span = int(spans["id"][row])
        low, high = np.searchsorted(of, (span, span + 1))
        start, end, start_ns, end_ns = (
            int(spans[name][row]) for name in ("start_event", "end_event", "start_ns", "end_ns"))
        found.append(Call(
            trace.text[spans["name"][row]], int(spans["call"][row]), start, end, start_ns, end_ns, span,
            int(inside[row]), given[low:high], bool(nest.outer_module[row] in (NONE, row))))
    return sorted(found, key=lambda call: call.first)


def _last_inside(ids: Ints, parents: Ints) -> Ints:
    """The last id inside each span; ids are given out in the order in which spans begin."""
    last = ids.copy()
    row_of = {span: row for row, span in enumerate(ids.tolist())}
    for row in np.argsort(ids)[::-1].tolist():
        parent = row_of.get(int(parents[row]))
        if parent is not None:
            last[parent] = max(last[parent], last[row])
    return last


def _is_compiled(trace: Trace, call: Call) -> bool:
    """Whether compiled code ran inside a call."""
    spans = trace["spans"]
    inside = (spans["kind"] == Kind.FUNCTION) & (spans["start_event"] >= call.start) & (spans["end_event"] <= call.end)
    return any(trace.text[name].startswith(COMPILED) for name in set(spans["name"][inside].tolist()))


def _let_go(run: View, forwards: list[Call]) -> tuple[Ints, Mask]:
    """When Python lets go of what forwards make, and what autocast keeps: told by forwards that ran once more."""
    trace, born = run.trace, run.life.born
    table, second, marks = trace["allocations"], trace["second_forwards"], trace["marks"]
    let_go, cached = np.full(len(born), NONE, dtype=np.int64), np.zeros(len(born), dtype=bool)
    ended = np.sort(marks["event"][np.isin(marks["kind"], trace.numbers(AUTOCAST_ENDED))])
    for number, call in enumerate(forwards):
        again = second["forward"] == number
        rows = np.flatnonzero((born >= call.start) & (born < call.end))
        rows = rows[np.argsort(born[rows])]
        if any(len(rows) != again.sum() or (table[name][rows] != second[name][again]).any()
               for name in ("bytes", "device")):
            if _is_compiled(trace, call):
                raise MemdiagError(
                    f"`{call.path}` runs compiled, and what compiled code keeps is the compiler's choice: run the "
                    "script with TORCH_COMPILE_DISABLE=1 in the environment for a plan of it as it is written; "
                    "--emit compile tells the compiler")
            raise MemdiagError(
                f"`{call.path}` does not do the same when it runs again on the same inputs: there is no plan for it")
        died = second["died"][again]
        known = died >= 0
        let_go[rows[known]] = born[rows[died[known] - 1]] + 1
        kept = rows[died == CACHED]
        cached[kept] = True
        following = np.searchsorted(ended, born[kept], side="right")
        known = following < len(ended)
        let_go[kept[known]] = ended[following[known]]
    return let_go, cached
