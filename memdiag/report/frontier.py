"""Plans of checkpoints as a picture: the peak of the step under each against the time that the step then takes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np

from memdiag.plan import Option, Planning
from memdiag.plan.names import BARE, BY_HAND, FRONTIER, USUAL
from memdiag.report.layout import share
from memdiag.report.picture import BYTE_UNITS, TIME_UNITS, save
from memdiag.report.plans import script_name, usual_name
from memdiag.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Apart by shape, so that the picture reads in grey; the colours are those of the timeline.
_USUAL = {
    BARE: ("X", "#000000"),
    USUAL[1]: ("s", "#D55E00"),
    USUAL[2]: ("^", "#CC79A7"),
    USUAL[3]: ("v", "#009E73"),
    BY_HAND: ("D", "#8CCEF2"),
}
_FRONTIER, _CHOSEN, _BUDGET = "#00558A", "#E69F00", "#404040"


def draw_plans(planning: Planning, about: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Writes the picture of plans.

    Args:
        about: facts of the run.
        path: ends in .png, .svg or .pdf, which says what is written.

    Raises:
        MemdiagError: for another ending.
        OSError: when the file cannot be written.
    """
    save(path, lambda: plans_figure(planning, about))


def plans_figure(planning: Planning, about: dict[str, Any]) -> Figure:
    """The picture as a matplotlib figure that belongs to no window and no global state."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(7.0, 3.4), layout="constrained")
    axes = drawn.subplots()
    per, time_unit = next((unit for unit in TIME_UNITS if planning.step.work_ns >= unit[0]), TIME_UNITS[-1])
    scale, unit = next((unit for unit in BYTE_UNITS if planning.bare.peak.bytes >= unit[0]), BYTE_UNITS[-1])

    def at(option: Option) -> tuple[float, float]:
        return (planning.step.work_ns + option.plan.again_ns) / per, option.plan.peak.bytes / scale

    axes.set_title(f"{script_name(about)}, step {planning.step.number}: what checkpoints would make of it", loc="left")
    axes.set_xlabel(f"time of the step in forwards, backwards and optimizers ({time_unit})")
    axes.set_ylabel(f"peak of the step, allocated ({unit})")
    chosen = None if planning.chosen is None else planning.options[planning.chosen]
    for option in planning.options:
        if option.name in _USUAL:
            marker, colour = _USUAL[option.name]
            axes.plot(*at(option), marker=marker, markersize=6, linestyle="none", color=colour, zorder=4,
                      markeredgecolor="white", markeredgewidth=0.5,
                      label=_label(planning, option, usual_name(option.name)))
    frontier = [planning.options[0], *(one for one in planning.options if one.name.startswith(FRONTIER))]
    if len(frontier) > 1:
        x, y = zip(*map(at, frontier), strict=True)
        axes.plot(x, y, drawstyle="steps-post", color=_FRONTIER, linewidth=0.8, zorder=2)
        axes.plot(x[1:], y[1:], marker="o", markersize=3.5, linestyle="none", color=_FRONTIER, zorder=3,
                  label=f"{FRONTIER}1 … {frontier[-1].name}")
    if chosen is not None:
        axes.plot(*at(chosen), marker="o", markersize=11, linestyle="none", markerfacecolor="none",
                  markeredgecolor=_CHOSEN, markeredgewidth=1.8, zorder=5, label=_label(planning, chosen, _what(chosen)))
        if chosen.name not in _USUAL and chosen not in frontier:
            axes.plot(*at(chosen), marker="o", markersize=3.5, linestyle="none", color=_CHOSEN, zorder=3)
        if chosen.noise_ns:
            axes.errorbar(*at(chosen), xerr=chosen.noise_ns / 2 / per, color=_CHOSEN, linewidth=1, capsize=2, zorder=1,
                          label="chosen: how its time\ndiffered between steps")
    _draw_budget(axes, planning, scale)
    _set_limits(axes, planning, per, scale)
    _number(axes, [(one, *at(one)) for one in frontier[1:]], chosen)
    drawn.legend(loc="outside right upper", frameon=False, alignment="left", handlelength=1.6, labelspacing=0.8)
    return drawn


def _what(chosen: Option) -> str:
    return f"chosen: {usual_name(chosen.name) if chosen.name in _USUAL else chosen.name}"


def _label(planning: Planning, option: Option, name: str) -> str:
    more = "" if not option.plan.again_ns else f", +{share(option.plan.again_ns, planning.step.work_ns)}"
    return f"{name}\n{format_bytes(option.plan.peak.bytes)}{more}"


def _draw_budget(axes: Axes, planning: Planning, scale: int) -> None:
    budget, aside = planning.budget, planning.aside
    if budget is None:
        return
    axes.axhline(budget / scale, color=_BUDGET, linewidth=0.9, linestyle="--", zorder=1,
                 label=f"budget\n{format_bytes(budget)}")
    if aside:
        axes.axhspan(max(budget - aside, 0) / scale, budget / scale, facecolor="#E8E8E8", hatch="////",
                     edgecolor="#BDBDBD", linewidth=0, zorder=0, label=f"set aside\n{format_bytes(aside)}")


def _set_limits(axes: Axes, planning: Planning, per: int, scale: int) -> None:
    """All points and the budget, with room for the marks around them."""
    noise = 0 if planning.chosen is None else (planning.options[planning.chosen].noise_ns or 0) / 2
    times = [(planning.step.work_ns + one.plan.again_ns) / per for one in planning.options]
    if planning.chosen is not None:
        times += [times[planning.chosen] - noise / per, times[planning.chosen] + noise / per]
    peaks = [one.plan.peak.bytes / scale for one in planning.options]
    if planning.budget is not None:
        peaks += [planning.budget / scale, max(planning.budget - planning.aside, 0) / scale]
    for limits, values in ((axes.set_xlim, times), (axes.set_ylim, peaks)):
        low, high = min(values), max(values)
        room = 0.08 * (high - low) or 0.05 * high or 1
        limits(max(low - room, 0), high + room)


def _number(axes: Axes, points: list[tuple[Option, float, float]], chosen: Option | None) -> None:
    """The numbers of the frontier's plans below them to the left, where one does not cover another."""
    last: Any = None
    for option, x, y in points:
        here = axes.transLimits.transform((x, y))
        if last is not None and np.abs(here - last).max() < 0.035:
            continue
        last = here
        away = -6 if option is chosen else -3  # outside its ring
        axes.annotate(
            option.name.rpartition("_")[2], (x, y), xytext=(away, away), textcoords="offset points", ha="right",
            va="top", fontsize=6.5, color=_FRONTIER, zorder=6)
