"""From a trace to the facts that every report shows. Pure: what is drawn, printed or exported comes from here."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memdiag.diagnose import Diagnosis, diagnose
from memdiag.report.names import fold
from memdiag.trace import NONE, Kind, Level, Phase, Pool, Role, Trace
from memdiag.trace.ledger import Roles
from memdiag.trace.model import OUTSIDE_PYTORCH, RESERVED_PEAK, SNAPSHOT
from memdiag.trace.nesting import Nesting, span_rows
from memdiag.trace.peak import span_steps
from memdiag.trace.places import Place, birth, module_names, operator_names, relative
from memdiag.trace.timeline import timeline
from memdiag.trace.view import View

Ints = NDArray[np.int64]


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
class Group:
    """The segments of one stream and pool; fields as of :class:`Segments`."""

    stream: int
    pool: list[int]
    small: bool
    expandable: bool
    count: int
    bytes: int
    free_bytes: int
    largest_hole_bytes: int
    inactive_split_bytes: int


@dataclass(frozen=True)
class Segments:
    """What the allocator held of the device when a snapshot was taken.

    Attributes:
        free_bytes: of them, in no block that is in use.
        largest_hole_bytes: of the largest free block; it serves requests of its own stream and pool.
        inactive_split_bytes: free, in segments that are not free as a whole and cannot be given back.
    """

    count: int
    bytes: int
    free_bytes: int
    largest_hole_bytes: int
    inactive_split_bytes: int
    groups: list[Group]


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
        diagnosis: what is short, and why.
        not_seen: what the recording could not see, in its own words.
        segments: of the device, at the end of a memory snapshot; None for other runs.
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
    diagnosis: Diagnosis
    not_seen: list[str]
    segments: Segments | None


def summarize(trace: Trace, device: str | None = None) -> Summary:
    """Takes the facts of a run from its trace.

    Args:
        device: that the figures are to be about; without it, the one that :class:`View` takes.
    """
    view = View(trace, device=device)
    device = view.device
    peak = _peak(view)
    saved_step, saved = _saved(trace, view.nest, view.roles, peak.step)
    return Summary(
        about={name: value for name, value in trace.about.items() if name != "not_seen"},
        cut_short=trace.cut_short,
        device=device,
        other_devices={other: timeline(trace, other).peak_bytes for other in view.other_devices},
        peak=peak,
        roles_at_peak=_roles_at_peak(view),
        outside_allocator=_outside(view),
        phases=_phases(view),
        steps=_steps(trace),
        saved=saved,
        saved_step=saved_step,
        saved_earlier_bytes=_saved_earlier(trace, view.roles, view.worst.event) if view.of_peak is view else None,
        diagnosis=diagnose(view),
        not_seen=trace.not_seen,
        segments=_segments(trace, device),
    )


def _segments(trace: Trace, device: str) -> Segments | None:
    facts = trace.about.get("segments", {}).get(device)
    if facts is None:
        return None
    return Segments(**{**facts, "groups": [Group(**group) for group in facts["groups"]]})


# --- the peak ---------------------------------------------------------------------------------------------------


def _peak(view: View) -> Peak:
    moment, seen = view.worst, view.of_peak
    step, phase = moment.step, moment.phase.label if moment.phase is not None else None
    place = Place(None, None, None)
    if seen is not None:
        step, phase, place = seen.where(moment.event)
    reserved = view.highest(RESERVED_PEAK)
    return Peak(moment.bytes, reserved, step, phase, place.module, place.operator, place.line)


def _roles_at_peak(view: View) -> list[RoleAtPeak]:
    moment, seen = view.worst, view.of_peak
    if seen is None:
        nothing = [RoleAtPeak(role.label, 0, None, None) for role in Role if role is not Role.UNKNOWN]
        why = "the events of the peak's step were not kept; record that step in full with --steps"
        return [*nothing, RoleAtPeak(Role.UNKNOWN.label, moment.bytes, None, why)]
    trace, assigned = seen.trace, seen.roles
    alive = np.flatnonzero(assigned.at(moment.event) & seen.mine[assigned.allocation])
    size = trace["allocations"]["bytes"][assigned.allocation[alive]]
    result = []
    for role in Role:
        mine = np.flatnonzero(assigned.role[alive] == role)
        largest = proof = None
        if len(mine):
            row = alive[mine[size[mine].argmax()]]
            place = birth(trace, seen.nest, int(assigned.allocation[row]))
            born_in = " › ".join(part for part in (place.module, place.operator) if part)
            largest = trace.string(int(assigned.name[row])) or born_in or place.line
            proof = assigned.proofs[assigned.proof[row]] or None
        result.append(RoleAtPeak(role.label, int(size[mine].sum()), largest, proof))
    return result


# --- phases, steps, and what is outside -------------------------------------------------------------------------


def _phases(view: View) -> list[PhasePeak]:
    peaks = view.phase_peaks
    steps = view.trace["steps"]
    warm_up = np.isin(peaks.step, steps["step"][steps["warm_up"] != 0])
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


def _outside(view: View) -> OutsideAllocator:
    trace = view.trace
    pools = trace["allocations"]["pool"]

    def peak(pool: Pool) -> int | None:
        if not np.any(pools == pool):
            return None
        return sum(timeline(trace, name, pool).peak_bytes for name in trace.about["devices"])

    return OutsideAllocator(
        mapped=peak(Pool.MAPPED),
        numpy=peak(Pool.NUMPY),
        host_rss=_known(trace["steps"]["host_rss"].max(initial=NONE)),
        outside_pytorch=view.highest(OUTSIDE_PYTORCH),
    )


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
        if trace.about.get("source") == SNAPSHOT:
            return _claimed(trace, nest, assigned, peak_step)
        return None, []
    chosen = chosen[np.lexsort((saves["id"][chosen], saves["packed_event"][chosen]))]
    module = module_names(trace, nest, where[chosen])
    operator = operator_names(trace, nest, where[chosen])

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


def _claimed(trace: Trace, nest: Nesting, assigned: Roles, peak_step: int | None) -> tuple[int | None, list[Saved]]:
    """The same of a record that shows what was kept for backward, but not what kept it: by where it was born."""
    mine = np.unique(trace["claims"]["allocation"][trace["claims"]["role"] == Role.SAVED_ACTIVATIONS])
    mine = mine[assigned.of(mine, trace["allocations"]["event"][mine]) == Role.SAVED_ACTIVATIONS]
    rows = span_rows(trace, trace["allocations"]["span"][mine])
    steps = nest.of(span_steps(trace, nest), rows)
    step = peak_step if peak_step is not None and np.any(steps == peak_step) else int(steps.max(initial=NONE))
    chosen = steps == step
    mine, rows = mine[chosen], rows[chosen]
    alike: dict[tuple[int, int, int, int], list[int]] = defaultdict(list)  # a line makes tensors of several sizes
    for *place, size in zip(module_names(trace, nest, rows).tolist(), operator_names(trace, nest, rows).tolist(),
                            trace["allocations"]["line"][mine].tolist(),
                            trace["allocations"]["bytes"][mine].tolist(), strict=True):
        alike[place[0], place[1], place[2], size].append(size)
    found = [
        Saved(trace.string(module), False, trace.string(operator), relative(trace, trace.string(line)), None, None,
              len(sizes), sum(sizes), Role.SAVED_ACTIVATIONS.label, [])
        for (module, operator, line, _), sizes in alike.items()]
    return _known(step), sorted(found, key=lambda row: (-row.bytes, row.module or "", row.operator or ""))


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
            line=relative(trace, line),
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
