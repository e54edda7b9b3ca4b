"""The moment at which an allocator had no memory for a request: what was asked for, what was there, what would help."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from memdiag.diagnose.alive import by_place
from memdiag.diagnose.evidence import Evidence
from memdiag.diagnose.model import Advice, Earlier, Ints, Mask, Oom
from memdiag.diagnose.rules import RULES
from memdiag.policy import FINDING_SHARE, OOM_REMEDIES, SHORTAGE_BYTES
from memdiag.trace import NONE, Kind, Level, Phase
from memdiag.trace.nesting import span_rows
from memdiag.trace.places import Place, module_names, operator_names, relative
from memdiag.trace.view import View


def out_of_memory(run: View) -> tuple[Oom | None, Failure | None]:
    """The last request of a run that failed, and the evidence at that moment. Pure.

    The first is None where none failed; the second also where the events around it were not kept.
    """
    trace = run.trace
    table = trace["out_of_memory"]
    if not len(table["event"]):
        return None, None
    last = {name: int(column[-1]) for name, column in table.items()}
    device = None if last["device"] == NONE else trace.about["devices"][last["device"]]
    if device is not None and device != run.device:
        run = View(trace, device=device)
    row = int(span_rows(trace, table["span"][-1:])[0])
    step, phase = last["step"], Phase(last["phase"]).label
    if row != NONE:  # recorded in full
        around = int(run.nest.phase[row])
        phase = trace.text[trace["spans"]["name"][around]] if around != NONE else phase
        if phase in (Phase.EVALUATION.label, Phase.OTHER.label):  # may come after the last step
            step = int(run.span_steps[row])
    place, forward_line = _place(run, last, row)
    at, event = _moment(run, last, row)
    requested = _known(last["bytes"])
    outside, free = _device(run, last)
    told = (trace.about.get("failed_requests") or [{}])[-1]  # only the allocator's own record tells
    free = told.get("free_bytes", free)
    found = None if at is None else Failure(run, at, event, step, phase, requested or 0)
    return Oom(
        device=device,
        requested_bytes=requested,
        step=_known(step),
        phase=phase,
        module=place.module,
        operator=place.operator,
        line=place.line,
        forward_line=forward_line,
        allocated_bytes=_known(last["allocated"]) if at is None else at.live_after(event),
        reserved_bytes=_known(last["reserved"]),
        free_bytes=free,
        outside_pytorch_bytes=outside,
        largest_hole_bytes=told.get("largest_hole_bytes"),
        remedies=[] if found is None else _remedies(found, requested, place),
        roles=None if at is None else {role.label: size for role, size in at.by_role(event).items()},
        places=None if at is None else by_place(at, event),
        earlier=None if row == NONE else _earlier(run, last, row),
        failures=len(table["event"]),
        ended_run=bool(trace.about.get("ended_out_of_memory")),
    ), found


def _place(run: View, last: dict[str, int], row: int) -> tuple[Place, str | None]:
    """Where the request was made, and the line of the forward that was being undone."""
    trace, spans = run.trace, run.trace["spans"]
    rows = np.array([row])
    node = NONE if row == NONE else int(run.nest.node[row])
    undone = NONE
    if node != NONE and spans["forward"][node] != NONE and spans["line"][node] != last["caller"]:
        undone = int(spans["line"][node])
    # Where no Python code ran inside it, what a node does has the line of its forward.
    line = last["caller"] if last["line"] in (NONE, undone) and last["caller"] != NONE else last["line"]
    module, operator = (int(names(trace, run.nest, rows)[0]) for names in (module_names, operator_names))
    return Place(
        trace.string(module), trace.string(operator if operator != NONE else last["kernel"]),
        relative(trace, trace.string(line))), relative(trace, trace.string(undone))


def _moment(run: View, last: dict[str, int], row: int) -> tuple[View | None, int]:
    """The view that has the events around it, and the last event before it there."""
    if row != NONE:
        return run, last["event"] - 1
    light = run.trace.peak_step
    if light is None:
        return None, NONE
    at = View(light, of=run)
    numbers = [int(light.text[name]) for name in light["spans"]["name"][light["spans"]["kind"] == Kind.STEP]]
    if last["step"] not in numbers:
        return None, NONE
    return at, int(np.searchsorted(at.line.time_ns, last["time_ns"], side="right")) - 1


def _device(run: View, last: dict[str, int]) -> tuple[int | None, int | None]:
    """Bytes of the device that others had when it was last asked, at the end of a step; and what was left of it."""
    outside, total = (_statistic(run, last, name) for name in ("outside_pytorch_bytes", "device_total_bytes"))
    if outside is None or total is None or last["reserved"] == NONE:
        return outside, None
    free = total - outside - last["reserved"]
    return outside, free if free >= 0 else None  # others have taken more since


def _statistic(run: View, last: dict[str, int], name: str) -> int | None:
    trace = run.trace
    stats = trace["device_stats"]
    mine = np.isin(stats["name"], trace.numbers(name)) & (stats["device"] == last["device"])
    mine = np.flatnonzero(mine & (stats["step"] < last["step"]))
    return int(stats["value"][mine[-1]]) if len(mine) else None


def _earlier(run: View, last: dict[str, int], row: int) -> Earlier | None:
    trace, nest = run.trace, run.nest
    spans, steps = trace["spans"], trace["steps"]
    unit = int(nest.unit[row])
    whole = np.flatnonzero((steps["level"] == Level.FULL) & (steps["step"] < last["step"]))
    if unit == NONE or not len(whole):
        return None
    warm_up = steps["warm_up"][whole] != 0
    other = int(whole[~warm_up][-1] if (~warm_up).any() else whole[-1])
    number = int(steps["step"][other])
    units = nest.unit == np.arange(len(nest.unit))  # outermost operators and nodes
    mine = np.flatnonzero(units & (nest.step == nest.step[row]))
    theirs = np.flatnonzero(units & (run.span_steps == number))
    reached = int(np.searchsorted(mine, unit, side="right"))
    then = None
    if reached <= len(theirs) and _same(run, mine[:reached], theirs[:reached]):
        there = int(theirs[reached - 1])
        event = int(spans["start_event"][there]) + last["event"] - int(spans["start_event"][unit])
        if event <= spans["end_event"][there]:
            then = run.live_after(event - 1)
    return Earlier(number, bool(steps["warm_up"][other]), reached, len(theirs), then)


def _same(run: View, mine: Ints, theirs: Ints) -> bool:
    """Whether the same operators ran in the same modules."""
    name = run.trace["spans"]["name"]
    module_of_mine, module_of_theirs = (module_names(run.trace, run.nest, rows) for rows in (mine, theirs))
    return np.array_equal(name[mine], name[theirs]) and np.array_equal(module_of_mine, module_of_theirs)


class Failure(Evidence):
    """The evidence at the moment of a failure: what counts is what is alive then.

    Attributes:
        requested_bytes: asked for; 0 where that is not known.
    """

    when = "when the request failed"

    def __init__(
        self, run: View, at: View, event: int, step: int, phase: str | None, requested_bytes: int
    ) -> None:
        super().__init__(run, at, event)
        self._step, self._phase = step, phase
        self.requested_bytes = requested_bytes

    @cached_property
    def step(self) -> int:
        return self._step

    @cached_property
    def phase(self) -> str | None:
        return self._phase

    @property
    def needed_bytes(self) -> int:
        """What would have been alive, had the request been met."""
        return self.peak_bytes + self.requested_bytes

    def matters(self, chosen: Mask) -> bool:
        """Whether ``chosen`` is enough of what was needed to be a finding."""
        return self.bytes_of(chosen) >= max(1.0, FINDING_SHARE * self.needed_bytes)

    def saving(
        self, chosen: Mask, since: Ints | None = None, during: tuple[Phase, ...] = (), keeping: int = 0,
        part: Ints | None = None,
    ) -> int:
        """Bytes of ``chosen`` that would not be alive."""
        if during and not self.at.within(*during)[self.event]:
            return 0
        gone = max(0, self.bytes_of(chosen if since is None else chosen & (since <= self.event)) - keeping)
        return gone + (0 if part is None else int(part[self.alive & ~chosen].sum()))


def _remedies(found: Failure, requested: int | None, place: Place) -> list[Advice]:
    advice = []
    if found.peak_bytes >= SHORTAGE_BYTES:
        findings = [finding for rule in RULES for finding in rule(found) if finding.cls is not None]
        advice = [advice for finding in findings for advice in finding.advice if advice.bytes != 0]
    if requested is not None and requested >= found.peak_bytes:
        where = place.line or place.operator or "the place of the request"
        text = (f"ask for less at {where}: it is more than all that was alive (a shape broadcast by mistake, or a "
                "larger batch?)")
        advice.append(Advice(text, requested))
    best: dict[str, Advice] = {}
    for one in sorted(advice, key=lambda one: one.bytes or 0, reverse=True):
        best.setdefault(one.text, one)
    measured = [one for one in best.values() if one.bytes is not None]
    return (measured or list(best.values()))[:OOM_REMEDIES]


def _known(value: int) -> int | None:
    return None if value == NONE else value
