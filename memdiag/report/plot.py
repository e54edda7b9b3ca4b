"""The timeline as a picture: live bytes by role over the run, and over the step of the peak."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from memdiag.policy import PLOT_COLUMNS, PLOT_PHASES, PLOT_STEP_COLUMNS, PLOT_VISIBLE
from memdiag.report.layout import words
from memdiag.report.picture import BYTE_UNITS, TIME_UNITS, save
from memdiag.trace import NONE, Kind, Level, Phase, Role, Trace
from memdiag.trace.ledger import Roles, ledger, roles
from memdiag.trace.nesting import nesting
from memdiag.trace.peak import Worst, span_steps, worst
from memdiag.trace.timeline import Timeline, devices, timeline
from memdiag.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# After Okabe and Ito's colours, which stay apart for every kind of colour vision; both blues are moved away from their
# neighbours in brightness, so that the picture reads in grey. Roles that are akin share a colour, apart by hatching.
_LOOK: dict[Role, tuple[str, str]] = {
    Role.PARAMETERS: ("#00558A", ""),
    Role.BUFFERS: ("#00558A", "////"),
    Role.GRADIENTS: ("#009E73", ""),
    Role.OPTIMIZER_STATE: ("#CC79A7", ""),
    Role.OPTIMIZER_TEMPORARIES: ("#CC79A7", "////"),
    Role.INPUTS: ("#F0E442", ""),
    Role.SAVED_ACTIVATIONS: ("#D55E00", ""),
    Role.OTHER_ACTIVATIONS: ("#E69F00", ""),
    Role.RECOMPUTED_ACTIVATIONS: ("#E69F00", "////"),
    Role.HELD: ("#000000", ""),
    Role.BACKWARD_TEMPORARIES: ("#8CCEF2", ""),
    Role.WORKSPACE: ("#8CCEF2", "////"),
    Role.ALLOCATOR_ROUNDING: ("#999999", "...."),
    Role.UNKNOWN: ("#FFFFFF", "xxxx"),
}
_PHASE_TINT = {
    Phase.FORWARD: "#EDF4FA",
    Phase.BACKWARD: "#F6DDCD",
    Phase.OPTIMIZER: "#DCC6D6",
    Phase.EVALUATION: "#CDE6DA",
    Phase.OTHER: "#F4F4F4",
}
_PHASES = {phase.label: phase for phase in Phase}
_FOLDED = "#BDBDBD"
_HATCH = "#303030"


def draw(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Writes the picture of a run.

    Args:
        path: ends in .png, .svg or .pdf, which says what is written.

    Raises:
        MemdiagError: for another ending.
        OSError: when the file cannot be written.
    """
    save(path, lambda: figure(trace))


# --- what is drawn ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """Bytes by role at chosen moments; each holds until the next.

    Attributes:
        time_ns: ascending.
        events: the memory event of each moment, NONE before the first.
        bytes: shape ``(len(Role), len(time_ns))``.
        low: where ``bytes`` are the highest of a stretch, the lowest live bytes of it; None where all is drawn.
    """

    time_ns: Ints
    events: Ints
    bytes: Ints
    low: Ints | None = None


def envelope(time_ns: Ints, live: Ints, columns: int) -> Ints:
    """Indices that draw a curve as all its points would, at a width of ``columns``.

    Each column keeps its lowest, its first highest and its last point, so what is idle for long keeps its level.
    """
    if len(live) <= 3 * columns:
        return np.arange(len(live))
    starts, low, high = _columns(time_ns, live, columns)
    return np.unique(np.concatenate([low, high, np.append(starts[1:], len(live)) - 1]))


def _columns(time_ns: Ints, live: Ints, columns: int) -> tuple[Ints, Ints, Ints]:
    """For each column that has events: its first event, its lowest, and its first highest."""
    column = (time_ns - time_ns[0]) * columns // (time_ns[-1] - time_ns[0] + 1)
    starts = np.flatnonzero(np.diff(column, prepend=-1)).astype(np.int64)
    parts = [live[start:end] for start, end in zip(starts, np.append(starts[1:], len(live)), strict=True)]
    low = starts + np.array([part.argmin() for part in parts], dtype=np.int64)
    high = starts + np.array([part.argmax() for part in parts], dtype=np.int64)
    return starts, low, high


def curve(trace: Trace, line: Timeline, assigned: Roles, between: tuple[int, int], from_ns: int, to_ns: int,
          highest_of: int | None = None) -> Curve:
    """The bytes by role over the events ``[first, last)`` and the time around them.

    Args:
        highest_of: draw the highest moment of each of so many columns, and the lowest apart: for more ups and downs
            than can be told apart.
    """
    first, last = between
    # Events of several threads or devices can be a little out of order; a curve runs one way.
    time = np.maximum.accumulate(np.clip(line.time_ns[first:last], from_ns, to_ns))
    live = line.live[first:last]
    if highest_of is not None:
        starts, low, high = _columns(time, live, highest_of)
        times, events, lowest = np.append(time[starts], to_ns), first + np.append(high, high[-1]), live[low]
        lowest = np.append(lowest, lowest[-1])
    else:
        kept = envelope(time, live, PLOT_COLUMNS)
        times = np.concatenate([[from_ns], time[kept], [to_ns]]).astype(np.int64)
        events = np.concatenate([[first - 1], first + kept, [last - 1]]).astype(np.int64)
        lowest = None
    chosen, which = np.unique(events, return_inverse=True)
    return Curve(times, events, ledger(trace, assigned, line.device, chosen)[:, which], lowest)


@dataclass(frozen=True)
class _Panel:
    """One time axis: from when to when, its curve, and where the peak lies in it."""

    title: str
    trace: Trace
    start_ns: int
    end_ns: int
    curve: Curve
    peak_ns: int


@dataclass(frozen=True)
class _Picture:
    """All that is drawn. ``at_peak`` is the bytes of each role, None where the step of the peak was folded."""

    panels: list[_Panel]
    peak_bytes: int
    at_peak: Ints | None


def _picture(trace: Trace) -> _Picture:
    device = devices(trace)[0]
    line = timeline(trace, device)
    moment = worst(trace, line)
    assigned = roles(trace)
    start, end = _extent(trace, line)
    full_steps = int((trace["steps"]["level"] == Level.FULL).sum())
    crowded = len(line.live) > 0 and full_steps * PLOT_STEP_COLUMNS > PLOT_COLUMNS
    # Columns of two steps or more each hold a whole one, with its peak and its low.
    columns = min(full_steps // 2, PLOT_COLUMNS // PLOT_STEP_COLUMNS) if crowded else None
    whole = curve(trace, line, assigned, (0, len(line.live)), start, end, columns)
    title = f"the whole run ({device})" + (": its highest moments; the line is the lowest" if crowded else "")
    seen = moment.trace
    if seen is None:
        return _Picture([_Panel(title, trace, start, end, whole, _middle(trace, moment, start))], moment.bytes, None)
    if seen is not trace:
        line, assigned = timeline(seen, device), roles(seen, assigned)
    peak_ns = int(line.time_ns[moment.event]) if moment.event != NONE else start
    panels = [_Panel(title, trace, start, end, whole, peak_ns)]
    at_peak = ledger(seen, assigned, device, np.array([moment.event]))[:, 0]
    step = _step_around(seen, moment.event, trace["steps"]["step"])
    if step != NONE:
        spans = seen["spans"]
        number = seen.text[spans["name"][step]]
        first, last, start, end = (
            int(spans[column][step]) for column in ("start_event", "end_event", "start_ns", "end_ns"))
        part = curve(seen, line, assigned, (first, last), start, end)
        panels.append(_Panel(f"step {number}, the step of the peak", seen, start, end, part, peak_ns))
    return _Picture(panels, moment.bytes, at_peak)


def _extent(trace: Trace, line: Timeline) -> tuple[int, int]:
    """First and last moment of a run."""
    times = [line.time_ns[line.time_ns > 0], trace["spans"]["start_ns"], trace["spans"]["end_ns"],
             trace["steps"]["start_ns"], trace["steps"]["end_ns"]]
    known = [column for column in times if len(column)]
    return (min(int(c.min()) for c in known), max(int(c.max()) for c in known)) if known else (0, 1)


def _middle(trace: Trace, moment: Worst, start: int) -> int:
    """When a peak was whose events were folded away: about the middle of its step."""
    steps = trace["steps"]
    row = np.flatnonzero(steps["step"] == moment.step) if moment.step is not None else np.empty(0, np.int64)
    return int(steps["start_ns"][row[0]] + steps["end_ns"][row[0]]) // 2 if len(row) else start


def _step_around(trace: Trace, event: int, closed: Ints) -> int:
    """Row of the step span around an event, or NONE outside steps; ``closed`` are the steps that ended."""
    spans, nest = trace["spans"], nesting(trace)
    inside = (spans["kind"] == Kind.STEP) & (spans["start_event"] <= event) & (spans["end_event"] > event)
    rows = np.flatnonzero(inside & (span_steps(trace, nest, closed) != NONE))
    return int(rows[0]) if len(rows) else NONE


@dataclass(frozen=True)
class Folded:
    """A stretch of light steps: when each started, how high it went and what was alive at its end; ``end_ns`` ends the
    last."""

    start_ns: Ints
    peak: Ints
    left: Ints
    end_ns: int


def folded(trace: Trace, columns: int) -> list[Folded]:
    """The stretches of folded steps, each at most ``columns`` values wide with its highest and lowest kept."""
    steps, peaks = trace["steps"], trace["phase_peaks"]
    light = np.flatnonzero(steps["level"] == Level.LIGHT)
    if not len(light):
        return []
    high = steps["end_bytes"][light].copy()
    place = np.searchsorted(steps["step"][light], peaks["step"])
    known = (place < len(light)) & (steps["step"][light][np.minimum(place, len(light) - 1)] == peaks["step"])
    np.maximum.at(high, place[known], peaks["bytes"][known])
    stretches = []
    for rows in np.split(np.arange(len(light)), np.flatnonzero(np.diff(light) > 1) + 1):
        start, end = steps["start_ns"][light[rows]], int(steps["end_ns"][light[rows[-1]]])
        column = (start - start[0]) * columns // max(end - int(start[0]) + 1, 1)
        first = np.flatnonzero(np.diff(column, prepend=-1))
        left = np.minimum.reduceat(steps["end_bytes"][light[rows]], first)
        stretches.append(Folded(start[first], np.maximum.reduceat(high[rows], first), left, end))
    return stretches


# --- drawing ----------------------------------------------------------------------------------------------------


def figure(trace: Trace) -> Figure:
    """The picture as a matplotlib figure that belongs to no window and no global state."""
    from matplotlib.figure import Figure

    picture = _picture(trace)
    panels = picture.panels
    legend = _legend(picture)
    lines = sum(1 + label.count("\n") for label, *_ in legend) + 2
    # As high as the panels need, or as the legend does: a line of it takes 0.17 inches.
    height = max(2.4 * len(panels) + 0.2, 0.17 * lines)
    drawn = Figure(figsize=(7.0, height), layout="constrained")
    for panel, axes in zip(panels, drawn.subplots(len(panels), 1, squeeze=False)[:, 0], strict=True):
        _draw_panel(axes, panel, picture.peak_bytes)
    _draw_legend(drawn, legend, None if picture.at_peak is None else "alive at the peak")
    return drawn


def _draw_panel(axes: Axes, panel: _Panel, top: int) -> None:
    length = panel.end_ns - panel.start_ns
    per, name = next((unit for unit in TIME_UNITS if length >= 2 * unit[0]), TIME_UNITS[-1])
    scale, unit = next((unit for unit in BYTE_UNITS if top >= unit[0]), BYTE_UNITS[-1])

    def at(time_ns: Ints) -> Floats:
        moments: Floats = (np.asarray(time_ns) - panel.start_ns) / per
        return moments

    axes.set_title(panel.title, loc="left")
    axes.set_xlabel(f"time ({name})")
    axes.set_xlim(0, max(length / per, 1))
    if not top:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "nothing was allocated", transform=axes.transAxes, ha="center", va="center")
        return
    axes.set_ylabel(f"live memory ({unit})")
    axes.set_ylim(0, top / scale * 1.25)  # room above the curve for what is written there
    _draw_phases(axes, panel, per)
    # From the top of the stack down, each from zero: the lower ones cover, and no seams show between them.
    heights = np.cumsum(panel.curve.bytes, axis=0) / scale
    for role in reversed(Role):
        if panel.curve.bytes[role].any():
            colour, hatch = _LOOK[role]
            axes.fill(*_stairs(at(panel.curve.time_ns), heights[role]), facecolor=colour, hatch=hatch,
                      edgecolor=_HATCH if hatch else colour, linewidth=0, zorder=2)
    if panel.curve.low is not None:
        axes.step(at(panel.curve.time_ns), panel.curve.low / scale, where="post", color="black", linewidth=0.7,
                  zorder=2)
    for stretch in folded(panel.trace, PLOT_COLUMNS):
        start, end = at(stretch.start_ns), float(at(np.array(stretch.end_ns)))
        axes.axvspan(start[0], end, facecolor="white", linewidth=0, zorder=2.1)
        axes.fill(*_stairs(np.append(start, end), np.append(stretch.peak, stretch.peak[-1]) / scale),
                  facecolor=_FOLDED, linewidth=0, zorder=2.2)
        axes.step(np.append(start, end), np.append(stretch.left, stretch.left[-1]) / scale, where="post",
                  color="black", linewidth=0.7, zorder=2.3)
    _mark_peak(axes, float(at(np.array(panel.peak_ns))), top, scale)


def _stairs(x: Floats, height: Floats) -> tuple[Floats, Floats]:
    """The outline of an area from zero up to a height that holds from each x to the next, without idle corners."""
    turns = np.flatnonzero(np.diff(height, prepend=np.nan))  # the first one always turns
    x, height = np.append(x[turns], x[-1]), height[turns]
    return np.concatenate([[x[0]], np.repeat(x, 2)[1:-1], [x[-1]]]), np.concatenate([[0], np.repeat(height, 2), [0]])


def _mark_peak(axes: Axes, x: float, peak: int, scale: int) -> None:
    left = x < 0.7 * axes.get_xlim()[1]
    axes.plot([x], [peak / scale], marker=7, markersize=5, color="black", clip_on=False, zorder=4)  # 7: tip down
    axes.annotate(f"peak {format_bytes(peak)}", (x, peak / scale), xytext=(5 if left else -5, 3),
                  textcoords="offset points", ha="left" if left else "right", va="bottom", fontweight="bold", zorder=4)


def _phases_of(panel: _Panel) -> Ints:
    """Rows of the phase spans that a panel shades: none where there would be too many to tell apart."""
    spans = panel.trace["spans"]
    length = np.minimum(spans["end_ns"], panel.end_ns) - np.maximum(spans["start_ns"], panel.start_ns)
    rows = np.flatnonzero((spans["kind"] == Kind.PHASE) & (length * PLOT_COLUMNS > panel.end_ns - panel.start_ns))
    return rows if len(rows) <= PLOT_PHASES else rows[:0]


def _draw_phases(axes: Axes, panel: _Panel, per: int) -> None:
    spans = panel.trace["spans"]
    for row in _phases_of(panel):
        label = panel.trace.text[spans["name"][row]]
        start, end = (float(np.clip(spans[column][row], panel.start_ns, panel.end_ns) - panel.start_ns) / per
                      for column in ("start_ns", "end_ns"))
        axes.axvspan(start, end, facecolor=_PHASE_TINT[_PHASES[label]], linewidth=0, zorder=0)
        # About what fits: a letter is some 1.2 % of the axes wide.
        if (end - start) / axes.get_xlim()[1] > 0.012 * len(label):
            axes.text((start + end) / 2, 0.985, label, transform=axes.get_xaxis_transform(), ha="center", va="top",
                      fontsize=7, color="#404040")


def _legend(picture: _Picture) -> list[tuple[str, str, str]]:
    """Label, colour and hatch of what is drawn: roles from the top of the stack down, then phases."""
    entries = []
    for role in reversed(Role):
        highest = max(int(panel.curve.bytes[role].max()) for panel in picture.panels)
        if highest > PLOT_VISIBLE * picture.peak_bytes or (picture.at_peak is not None and picture.at_peak[role]):
            size = "" if picture.at_peak is None else f"\n{format_bytes(int(picture.at_peak[role]))}"
            entries.append((words(role.label) + size, *_LOOK[role]))
    if any(folded(panel.trace, 1) for panel in picture.panels):
        entries.append(("peaks of light steps,\nwithout roles; the\nline: at their ends", _FOLDED, ""))
    names = {panel.trace.text[panel.trace["spans"]["name"][row]] for panel in picture.panels
             for row in _phases_of(panel)}
    return entries + [(phase.label, _PHASE_TINT[phase], "") for phase in Phase if phase.label in names]


def _draw_legend(drawn: Figure, entries: list[tuple[str, str, str]], title: str | None) -> None:
    from matplotlib.patches import Patch

    if entries:
        drawn.legend(
            handles=[Patch(facecolor=colour, hatch=hatch * 2, edgecolor=_HATCH, linewidth=0.4, label=label)
                     for label, colour, hatch in entries],
            loc="outside right upper", frameon=False, alignment="left", handlelength=1.6, labelspacing=0.4,
            title=title)
