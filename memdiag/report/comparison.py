"""Two runs compared, as text and for machines."""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import replace
from typing import Any

from memdiag.diagnose.compare import OTHER_INPUTS, ComparedLine, Comparison, Side
from memdiag.policy import COMPARED_LINES
from memdiag.report.json import SCHEMA_VERSION
from memdiag.report.layout import INDENT, facts, paragraph, table, words
from memdiag.report.places import folded
from memdiag.report.places import words as place_words
from memdiag.trace.places import Place
from memdiag.units import format_bytes


def comparison_as_dict(comparison: Comparison) -> dict[str, Any]:
    """The comparison as JSON-able values, in the order of the contract (``docs/json.md``)."""
    a, b = comparison.a, comparison.b
    return {
        "schema_version": SCHEMA_VERSION,
        "about": [a.about, b.about],
        "comparable": comparison.comparable,
        "why_not": comparison.why_not,
        "peak": {"a_bytes": a.peak_bytes, "b_bytes": b.peak_bytes},
        "roles": {role.label: {"a_bytes": size, "b_bytes": b.roles[role]} for role, size in a.roles.items()},
        "lines": [{**vars(line.place), "a_bytes": line.a_bytes, "b_bytes": line.b_bytes, "b_line": line.b_line}
                  for line in comparison.lines],
    }


def comparison_to_json(comparison: Comparison) -> str:
    """The comparison as JSON text, with a newline at its end."""
    return json.dumps(comparison_as_dict(comparison), indent=2) + "\n"


def render_comparison(comparison: Comparison, names: tuple[str, str] = ("", "")) -> str:
    """The comparison for a person; every line fits 80 columns, the last one ends with a newline.

    Args:
        names: of the two, where they have any.
    """
    header = ["Two runs compared", *facts({"A": _run(comparison.a, names[0]), "B": _run(comparison.b, names[1])})]
    drawn = [header, *(section(comparison) for section in (_why_not, _peaks, _roles, _lines))]
    return "\n".join("\n".join(lines) + "\n" for lines in drawn if lines)


def _run(side: Side, name: str) -> str:
    program, *arguments = side.about.get("argv") or [side.about.get("script") or "a run"]
    command = f"{shlex.join([os.path.basename(program), *arguments])}, on {side.device}"
    return f"{name}: {command}" if name else command


def _why_not(comparison: Comparison) -> list[str]:
    if comparison.comparable:
        return []
    inputs = all(text.startswith(OTHER_INPUTS) for text in comparison.why_not)
    return ["Not comparable" + (", unless the inputs are what was changed" if inputs else
                                ": what follows is no measure of a change"),
            *(line for text in comparison.why_not for line in paragraph(text, "- "))]


def _peaks(comparison: Comparison) -> list[str]:
    a, b = comparison.a, comparison.b
    change = b.peak_bytes - a.peak_bytes
    share = f" ({change / a.peak_bytes:+.1%})".replace("%", " %") if a.peak_bytes else ""
    return [f"Peak: {_signed(change)}{share}", *facts({"A": _peak(a), "B": _peak(b)})]


def _peak(side: Side) -> str:
    step = "outside the steps" if side.step is None else f"step {side.step}"
    where = ", ".join(part for part in (step, side.phase, place_words(side.place)) if part)
    return f"{format_bytes(side.peak_bytes)}, {where}"


def _signed(change: int) -> str:
    return f"{'+' if change > 0 else ''}{format_bytes(change)}"


def _roles(comparison: Comparison) -> list[str]:
    a, b = comparison.a, comparison.b
    rows = [(role.label, size, b.roles[role]) for role, size in a.roles.items() if size or b.roles[role]]
    rows.sort(key=lambda row: (-abs(row[2] - row[1]), -row[1]))
    rows.append(("total", a.peak_bytes, b.peak_bytes))
    cells = [[words(role), *_figures(first, second)] for role, first, second in rows]
    return ["Alive at the peak, by role", *table(["role", "A", "B", "change"], cells, "lrrr")]


def _figures(first: int, second: int) -> list[str]:
    return [format_bytes(first), format_bytes(second), _signed(second - first) if first != second else "-"]


def _words(line: ComparedLine, scripts: tuple[str, str]) -> Place:
    """The place, with both lines where their numbers differ, or files that are not the two runs' scripts."""
    if line.b_line is None:
        return line.place
    (file, _, first), (other, _, number) = (text.rpartition(":") for text in (line.place.line or "", line.b_line))
    if file == other or (file, other) == scripts:
        return line.place if first == number else replace(line.place, line=f"{line.place.line} (B: {number})")
    return replace(line.place, line=f"{line.place.line} (B: {line.b_line})")


def _has_no_places(side: Side) -> bool:
    """Whether light recording, or none of the peak's events, left most of its bytes without a place."""
    return side.places is None or side.light and 2 * side.places.get(Place(None, None, None), 0) > side.peak_bytes


def _lines(comparison: Comparison) -> list[str]:
    title = "What moved the peak, by the place that allocated it"
    unknown = [name for name, side in (("A", comparison.a), ("B", comparison.b)) if _has_no_places(side)]
    if unknown:
        return [title, *paragraph(
            f"not known of most of {' and '.join(unknown)}, recorded in light there: record the step of the peak in "
            "full (`--steps`)")]
    first, second = (os.path.basename(side.about.get("script") or "") for side in (comparison.a, comparison.b))
    if first != second and any(line.b_line for line in comparison.lines):
        title += f"\n{INDENT}(lines of {first}, which is {second} in B)"
    pairs = {_words(line, (first, second)): (line.a_bytes, line.b_bytes)
             for line in comparison.lines if line.a_bytes != line.b_bytes}
    moved = [(sum(first for first, _ in both), sum(second for _, second in both), place)
             for place, both in folded(pairs, alike=True).items()]
    moved.sort(key=lambda row: (-abs(row[1] - row[0]), -row[0]))
    if not moved:
        return [title, f"{INDENT}nothing: every place has the same bytes in both"]
    rows = [[*_figures(first, second), place_words(place)] for first, second, place in moved[:COMPARED_LINES]]
    rest = moved[COMPARED_LINES:]
    if rest:
        sums = (sum(row[0] for row in rest), sum(row[1] for row in rest))
        rows.append([*_figures(*sums), f"{len(rest)} places that moved less"])
    return [title, *table(["A", "B", "change", "allocated by"], rows, "rrrl")]
