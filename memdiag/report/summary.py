"""From a trace to the facts that every report shows. Pure: what is drawn, printed or exported comes from here."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memdiag.report.names import fold
from memdiag.trace import NONE, Kind, Level, Phase, Pool, Role, Trace
from memdiag.trace.ledger import Roles, roles
from memdiag.trace.nesting import Nesting, nesting, span_rows
from memdiag.trace.peak import Worst, phase_at, phase_peaks, span_steps, worst
from memdiag.trace.timeline import devices, of_device, timeline

Ints = NDArray[np.int64]

RESERVED_PEAK = "reserved_bytes.all.peak"
"""Device statistic: the most that the allocator has held so far, free blocks included."""
OUTSIDE_PYTORCH = "outside_pytorch_bytes"
"""Device statistic: memory of the device in use by others than PyTorch's allocator."""


@dataclass(frozen=True)
class Peak:
    """The highest live bytes of the run, and where it was. What is not known is None.

    Attributes:
        operator: the outermost ATen operator, or in backward the node of the graph.
        module: in backward, the module whose forward is undone.
    """

    allocated_bytes: int
    reserved_bytes: int | None
    step: int | None
    phase: str | None
    module: str | None
    operator: str | None
    line: str | None


@dataclass(frozen=True)
class RoleAtPeak:
    """Bytes of one role at the peak, what the largest allocation of it is, and the proof for that one."""

    role: str
    bytes: int
    largest: str | None
    proof: str | None


@dataclass(frozen=True)
class OutsideAllocator:
    """Peaks of memory that is not in the allocator's total, in bytes; None where none was seen.

    Attributes:
        mapped: shared memory and mapped files.
        numpy: storages that belong to NumPy or another library.
        host_rss: resident memory of the process, everything included.
        outside_pytorch: of the device, in use by others.
    """

    mapped: int | None
    numpy: int | None
    host_rss: int | None
    outside_pytorch: int | None


@dataclass(frozen=True)
class PhasePeak:
    """Peak of a phase in a step; ``step`` is None outside steps."""

    step: int | None
    phase: str
    peak_bytes: int
    warm_up: bool


@dataclass(frozen=True)
class Step:
    """One step; ``recorded`` is "full" or "light"."""

    step: int
    warm_up: bool
    recorded: str
    end_bytes: int
    host_rss_bytes: int | None
    input_shapes: str | None


@dataclass(frozen=True)
class Saved:
    """Tensors alike that autograd kept in one step, each storage counted once.

    Attributes:
        module: path of the first saver; where ``folded``, of all the repeated blocks.
        count: number of storages.
        bytes: of the storages, which may be larger than the tensors.
        savers: every module and operator that saved one of them.
    """

    module: str | None
    folded: bool
    operator: str | None
    line: str | None
    dtype: str | None
    shape: list[int] | None
    count: int
    bytes: int
    role: str
    savers: list[str]


@dataclass(frozen=True)
class Summary:
    """The facts of a run.

    Attributes:
        about: facts of the run as the trace has them.
        cut_short: why the file holds only a part of the run; None where it holds all.
        device: the one the figures are about; ``other_devices`` maps the others to their peaks.
        roles_at_peak: one for each role, in the order of roles; their bytes sum to the peak's.
        phases, steps: in the order of the run.
        saved: largest first; ``saved_step`` is the step they are from, None where the script has no steps.
        saved_earlier_bytes: at the peak, saved activations born before the peak's step: graphs that something keeps.
            None where the peak's events were folded.
        not_seen: what the recording could not see, in its own words.
    """

    about: dict[str, Any]
    cut_short: str | None
    device: str
    other_devices: dict[str, int]
    peak: Peak
    roles_at_peak: list[RoleAtPeak]
    outside_allocator: OutsideAllocator
    phases: list[PhasePeak]
    steps: list[Step]
    saved: list[Saved]
    saved_step: int | None
    saved_earlier_bytes: int | None
    not_seen: list[str]


def summarize(trace: Trace) -> Summary:
    """Takes the facts of a run from its trace."""
    device, *others = devices(trace)
    line = timeline(trace, device)
    nest = nesting(trace)
    moment = worst(trace, line)
    seen = moment.trace if moment.trace is not None else trace
    assigned = roles(trace)
    seen_nest, seen_roles = (nest, assigned) if seen is trace else (nesting(seen), roles(seen))
    peak = _peak(trace, moment, seen_nest, device)
    saved_step, saved = _saved(trace, nest, assigned, peak.step)
    peak_event = moment.event
    return Summary(
        about={name: value for name, value in trace.about.items() if name != "not_seen"},
        cut_short=trace.cut_short,
        device=device,
        other_devices={other: timeline(trace, other).peak_bytes for other in others},
        peak=peak,
        roles_at_peak=_roles_at_peak(moment, seen_nest, seen_roles, device),
        outside_allocator=_outside(trace, device),
        phases=_phases(trace, nest, device),
        steps=_steps(trace),
        saved=saved,
        saved_step=saved_step,
        saved_earlier_bytes=_saved_earlier(trace, assigned, peak_event) if seen is trace else None,
        not_seen=trace.not_seen,
    )


# --- the peak ---------------------------------------------------------------------------------------------------


def _peak(trace: Trace, moment: Worst, nest: Nesting, device: str) -> Peak:
    step, phase = moment.step, moment.phase.label if moment.phase is not None else None
    birth = _Birth(None, None, None)
    seen = moment.trace
    if seen is not None and moment.event != NONE:
        allocation = int(np.flatnonzero(seen["allocations"]["event"] == moment.event)[0])
        birth = _birth(seen, nest, allocation)
        around = int(phase_at(seen, moment.event + 1)[-1])
        phase = seen.text[seen["spans"]["name"][around]] if around != NONE else None
        within = around if around != NONE else seen.span_row(int(seen["allocations"]["span"][allocation]))
        step = _known(span_steps(seen, nest, trace["steps"]["step"])[within]) if within != NONE else None
    reserved = _statistic(trace, RESERVED_PEAK, device)
    return Peak(moment.bytes, reserved, step, phase, birth.module, birth.operator, birth.line)


@dataclass(frozen=True)
class _Birth:
    module: str | None
    operator: str | None
    line: str | None


def _birth(trace: Trace, nest: Nesting, allocation: int) -> _Birth:
    """Where an allocation was born."""
    allocations, spans = trace["allocations"], trace["spans"]
    span = int(allocations["span"][allocation])
    row = trace.span_row(span)
    lines = [allocations["line"][allocation], *(spans["line"][up] for up in trace.ancestors(span))]
    return _Birth(
        module=trace.string(_module_names(trace, nest, np.array([row]))[0]),
        operator=trace.string(_operator_names(trace, nest, np.array([row]))[0])
        or trace.string(int(allocations["kernel"][allocation])),
        line=_line(trace, next((int(text) for text in lines if text != NONE), NONE)),
    )


def _module_names(trace: Trace, nest: Nesting, rows: Ints) -> Ints:
    """Text of the innermost module around span rows; in backward, of the forward that is undone."""
    spans = trace["spans"]
    forward = span_rows(trace, _at(spans["forward"], nest.of(nest.node, rows)))
    module = nest.of(nest.module, rows)
    return _at(spans["name"], np.where(module != NONE, module, nest.of(nest.module, forward)))


def _operator_names(trace: Trace, nest: Nesting, rows: Ints) -> Ints:
    """Text of the outermost operator, node or custom Function around span rows."""
    spans = trace["spans"]
    unit = nest.of(nest.unit, rows)
    inner = nest.of(nest.operator, rows)
    function = np.where(_at(spans["kind"], rows) == Kind.FUNCTION, rows, NONE)
    return _at(spans["name"], np.where(unit != NONE, unit, np.where(function != NONE, function, inner)))


def _at(column: NDArray[Any], rows: Ints) -> Ints:
    """A column at rows, NONE where there is no row."""
    found = np.full(len(rows), NONE, dtype=np.int64)
    found[rows != NONE] = column[rows[rows != NONE]]
    return found


def _roles_at_peak(moment: Worst, nest: Nesting, assigned: Roles, device: str) -> list[RoleAtPeak]:
    trace = moment.trace
    if trace is None:
        nothing = [RoleAtPeak(role.label, 0, None, None) for role in Role if role is not Role.UNKNOWN]
        why = "the events of the peak's step were not kept; record that step in full with --steps"
        return [*nothing, RoleAtPeak(Role.UNKNOWN.label, moment.bytes, None, why)]
    alive = np.flatnonzero(assigned.at(moment.event) & of_device(trace, device)[assigned.allocation])
    size = trace["allocations"]["bytes"][assigned.allocation[alive]]
    result = []
    for role in Role:
        mine = np.flatnonzero(assigned.role[alive] == role)
        largest = proof = None
        if len(mine):
            row = alive[mine[size[mine].argmax()]]
            birth = _birth(trace, nest, int(assigned.allocation[row]))
            born_in = " › ".join(part for part in (birth.module, birth.operator) if part)
            largest = trace.string(int(assigned.name[row])) or born_in or birth.line
            proof = assigned.proofs[assigned.proof[row]] or None
        result.append(RoleAtPeak(role.label, int(size[mine].sum()), largest, proof))
    return result


# --- phases, steps, and what is outside -------------------------------------------------------------------------


def _phases(trace: Trace, nest: Nesting, device: str) -> list[PhasePeak]:
    peaks = phase_peaks(trace, nest, timeline(trace, device))
    warm_up = np.isin(peaks.step, trace["steps"]["step"][trace["steps"]["warm_up"] != 0])
    return [
        PhasePeak(_known(step), Phase(phase).label, size, warm)
        for step, phase, size, warm in zip(
            peaks.step.tolist(), peaks.phase.tolist(), peaks.bytes.tolist(), warm_up.tolist(), strict=True)
    ]


def _steps(trace: Trace) -> list[Step]:
    steps = trace["steps"]
    columns = (steps[name].tolist() for name in ("step", "warm_up", "level", "end_bytes", "host_rss", "input_shapes"))
    return [
        Step(step, bool(warm_up), Level(level).name.lower(), end_bytes, _known(rss), trace.string(shapes))
        for step, warm_up, level, end_bytes, rss, shapes in zip(*columns, strict=True)
    ]


def _outside(trace: Trace, device: str) -> OutsideAllocator:
    pools = trace["allocations"]["pool"]

    def peak(pool: Pool) -> int | None:
        if not np.any(pools == pool):
            return None
        return sum(timeline(trace, name, pool).peak_bytes for name in trace.about["devices"])

    return OutsideAllocator(
        mapped=peak(Pool.MAPPED),
        numpy=peak(Pool.NUMPY),
        host_rss=_known(trace["steps"]["host_rss"].max(initial=NONE)),
        outside_pytorch=_statistic(trace, OUTSIDE_PYTORCH, device),
    )


def _statistic(trace: Trace, name: str, device: str) -> int | None:
    """The highest value of a device's statistic over the steps; None where the device has none."""
    table = trace["device_stats"]
    if name not in trace.text or device not in trace.about.get("devices", ()):
        return None
    mine = (table["name"] == trace.text.index(name)) & (table["device"] == trace.about["devices"].index(device))
    return int(table["value"][mine].max()) if mine.any() else None


# --- saved for backward -----------------------------------------------------------------------------------------

_Alike = tuple[str | None, str | None, str | None, str | None, str]  # operator, line, dtype, shape, role


def _saved(trace: Trace, nest: Nesting, assigned: Roles, peak_step: int | None) -> tuple[int | None, list[Saved]]:
    """What autograd kept in the step of the peak, or where that kept nothing in the last step that did."""
    saves = trace["saves"]
    where = span_rows(trace, saves["span"])
    steps = nest.of(span_steps(trace, nest), where)
    step = peak_step if peak_step is not None and np.any(steps == peak_step) else int(steps.max(initial=NONE))
    chosen = np.flatnonzero(steps == step)
    if not len(chosen):
        return None, []
    chosen = chosen[np.lexsort((saves["id"][chosen], saves["packed_event"][chosen]))]
    module = _module_names(trace, nest, where[chosen])
    operator = _operator_names(trace, nest, where[chosen])

    # A storage that was not found among the allocations is counted as itself.
    allocation = saves["allocation"][chosen]
    found = allocation != NONE
    storage = np.where(found, allocation, -2 - saves["id"][chosen])
    _, first, of_storage = np.unique(storage, return_index=True, return_inverse=True)
    size = saves["bytes"][chosen]
    size[found] = trace["allocations"]["bytes"][allocation[found]]
    role = np.full(len(chosen), Role.UNKNOWN, dtype=np.int64)
    role[found] = assigned.of(allocation[found], saves["packed_event"][chosen][found] - 1)

    key = np.stack([module, operator, *(saves[name][chosen] for name in ("line", "dtype", "shape")), role], axis=1)
    groups, group_of_storage = np.unique(key[first], axis=0, return_inverse=True)
    group_of_storage = group_of_storage.reshape(-1)
    count = np.bincount(group_of_storage, minlength=len(groups))
    total = np.zeros(len(groups), dtype=np.int64)
    np.add.at(total, group_of_storage, size[first])
    savers: list[list[tuple[int, int]]] = [[] for _ in groups]
    for group, *saver in np.unique(
            np.stack([group_of_storage[of_storage], module, operator], axis=1), axis=0).tolist():
        savers[group].append((saver[0], saver[1]))

    alike: dict[_Alike, list[int]] = defaultdict(list)
    for number, (_, *rest, which) in enumerate(groups.tolist()):
        operator_text, line, dtype, shape = (trace.string(index) for index in rest)
        alike[operator_text, line, dtype, shape, Role(which).label].append(number)
    result = []
    for kind, members in alike.items():
        result += _folded(trace, kind, members, groups[:, 0].tolist(), count, total, savers)
    return _known(step), sorted(result, key=lambda row: (-row.bytes, row.module or "", row.operator or ""))


def _saved_earlier(trace: Trace, assigned: Roles, event: int) -> int:
    spans, allocations = trace["spans"], trace["allocations"]
    around = (spans["kind"] == Kind.STEP) & (spans["start_event"] <= event) & (spans["end_event"] > event)
    if not np.any(around):
        return 0
    kept = assigned.at(event) & np.isin(assigned.role, (Role.SAVED_ACTIVATIONS, Role.RECOMPUTED_ACTIVATIONS))
    kept &= allocations["event"][assigned.allocation] < int(spans["start_event"][around].max())
    return int(allocations["bytes"][assigned.allocation[kept]].sum())


def _folded(trace: Trace, alike: _Alike, members: list[int], modules: list[int], count: Ints, total: Ints,
            savers: list[list[tuple[int, int]]]) -> list[Saved]:
    """Rows of groups that differ in their module alone, repeated blocks as one."""
    operator, line, dtype, shape, role = alike
    names = {number: trace.string(modules[number]) for number in members}
    folded = fold(name for name in names.values() if name is not None)
    blocks: dict[str | None, list[int]] = defaultdict(list)
    for number in members:
        name = names[number]
        blocks[None if name is None else folded[name]].append(number)
    return [
        Saved(
            module=name,
            folded=len({names[number] for number in block}) > 1,
            operator=operator,
            line=_relative(trace, line),
            dtype=dtype,
            shape=None if shape is None else [int(size) for size in re.findall(r"\d+", shape)],
            count=int(count[block].sum()),
            bytes=int(total[block].sum()),
            role=role,
            savers=_savers(trace, {saver for number in block for saver in savers[number]}),
        )
        for name, block in blocks.items()
    ]


def _savers(trace: Trace, pairs: set[tuple[int, int]]) -> list[str]:
    by_operator: dict[str | None, set[str]] = defaultdict(set)
    for module, operator in pairs:
        by_operator[trace.string(operator)].add(trace.string(module) or "")
    texts = set()
    for operator_text, modules in by_operator.items():
        for module_text in fold(modules).values():
            texts.add(" › ".join(part for part in (module_text, operator_text) if part))
    return sorted(text for text in texts if text)


# --- small helpers ----------------------------------------------------------------------------------------------


def _known(value: int | np.integer[Any]) -> int | None:
    return None if value == NONE else int(value)


def _line(trace: Trace, index: int) -> str | None:
    return _relative(trace, trace.string(index))


def _relative(trace: Trace, line: str | None) -> str | None:
    """A line relative to the script's folder where it lies below it."""
    folder = os.path.join(os.path.dirname(trace.about.get("script") or ""), "")
    if line is not None and folder and line.startswith(folder):
        return line[len(folder):]
    return line
