"""The summary as text: 80 columns, no colour, the same on a terminal and in a pipe."""

from __future__ import annotations

import os
import shlex
from statistics import median_low
from typing import Any

from memdiag.policy import SAVED_ROWS, UNKNOWN_SHARE
from memdiag.report.layout import INDENT, WIDTH, facts, paragraph, share, table, words
from memdiag.report.names import shorten
from memdiag.report.oom import oom_section
from memdiag.report.summary import PhasePeak, Saved, Summary
from memdiag.report.verdict import VERDICT_SECTIONS
from memdiag.trace import Phase, Role
from memdiag.trace.model import SNAPSHOT
from memdiag.units import format_bytes


def render_text(summary: Summary) -> str:
    """The report for a person; every line fits 80 columns, the last one ends with a newline."""
    sections = (_header, _peak, oom_section, _alive, _phases, _saved, _segments, _outside, _not_seen, *VERDICT_SECTIONS)
    drawn = [section(summary) for section in sections]
    return "\n".join("\n".join(lines) + "\n" for lines in drawn if lines)


# --- sections ---------------------------------------------------------------------------------------------------


def _header(summary: Summary) -> list[str]:
    about = summary.about
    program, *arguments = about.get("argv") or [about.get("script") or about.get("snapshot") or ""]
    command = shlex.join([os.path.basename(program), *arguments]) if program else "this run"
    name = about.get("device_names", {}).get(summary.device)
    versions = [("torch", "torch"), ("CUDA", "cuda"), ("Python", "python"), ("memdiag", "memdiag")]
    known = {
        "device": f"{summary.device} ({name})" if name else summary.device,
        "rank": f"{about.get('rank')} of {about['world_size']}" if (about.get("world_size") or 1) > 1 else None,
        "versions": ", ".join(f"{name} {about[key]}" for name, key in versions if about.get(key)),
        "settings": about.get("allocator_settings"),
        "steps": _steps(summary),
        "figures": _figures(about),
        "ended": _ended(summary),
    }
    return [shorten(f"Memory of {command}", WIDTH), *facts(known)]


def _figures(about: dict[str, Any]) -> str:
    if about.get("source") != SNAPSHOT:
        return "measured, from every allocation and free that PyTorch reported"
    return "measured, from the allocator's own record; roles are inferred from it"


def _done(summary: Summary) -> int:
    """Steps of the script that ended, recorded or not."""
    last = max((step.step for step in summary.steps), default=-1)
    return max(int(summary.about.get("steps") or 0), last + 1)


def _steps(summary: Summary) -> str:
    done = _done(summary)
    full = sum(step.recorded == "full" for step in summary.steps)
    light = len(summary.steps) - full
    missed = done - len(summary.steps)
    if not done:
        begun = {Phase.BACKWARD.label, Phase.OPTIMIZER.label} & {row.phase for row in summary.phases}
        return "none: " + (
            "the first did not come to its end" if begun else "no backward and no optimizer step was seen")
    said = [f"{full} recorded in full"] if full else []
    said += [f"{light} in light" if said else f"{light} recorded in light"] if light else []
    said += [f"{missed} not recorded (see Not seen)"] if missed else []
    # Without the recorder's last word nobody knows how many there were.
    more = " or more" if summary.cut_short is not None and "steps" not in summary.about else ""
    return f"{done}{more}: {', '.join(said)}"


def _ended(summary: Summary) -> str | None:
    """What ended the run before its end; None where it came there."""
    if summary.cut_short is not None:
        return f"{summary.cut_short}; this is what was there"
    about, done = summary.about, _done(summary)
    by = about.get("ended_by")
    if by is None:
        return None
    why = " (Ctrl-C)" if by == KeyboardInterrupt.__name__ else ""
    why = " (out of memory)" if about.get("ended_out_of_memory") else why
    return f"by {by}{why}, {f'after {done} step' + 's' * (done > 1) if done else 'before a step had ended'}"


def _peak(summary: Summary) -> list[str]:
    peak = summary.peak
    if not peak.allocated_bytes:
        return ["Peak", f"{INDENT}nothing was allocated on {summary.device}"]
    where = " › ".join(part for part in (peak.module, peak.operator) if part)
    unknown = "not known"
    if peak.step is not None and _is_light(summary, peak.step):
        unknown = f"not kept of a light step; `--steps {peak.step}:{peak.step + 1}` records it in full"
    known = {
        "reserved": None if peak.reserved_bytes is None else f"{format_bytes(peak.reserved_bytes)} by the allocator",
        "when": ", ".join([_step_words(summary, peak.step), *([peak.phase] if peak.phase else [])]),
        "where": where or unknown,
        "line": peak.line or unknown,
    }
    return [f"Peak: {format_bytes(peak.allocated_bytes)} allocated", *facts(known)]


def _is_light(summary: Summary, step: int) -> bool:
    """Whether a step was recorded in light; what comes after the last step goes on as that was."""
    row = next((row for row in summary.steps if row.step == step), summary.steps[-1] if summary.steps else None)
    return row is not None and row.step <= step and row.recorded == "light"


def _step_words(summary: Summary, step: int | None) -> str:
    if step is None:
        return "outside the steps" if summary.steps else "no step"
    row = next((row for row in summary.steps if row.step == step), None)
    if row is None:
        return f"step {step} ({'recorded in part' if step < _done(summary) else 'unfinished'})"
    notes = [note for note, holds in (("warm-up", row.warm_up), ("light", row.recorded == "light")) if holds]
    return f"step {step}" + (f" ({', '.join(notes)})" if notes else "")


def _alive(summary: Summary) -> list[str]:
    total = summary.peak.allocated_bytes
    if not total:
        return ["Alive at the peak, by role", f"{INDENT}nothing"]
    rows = []
    for row in sorted(summary.roles_at_peak, key=lambda row: -row.bytes):
        if row.bytes or row.role == Role.UNKNOWN.label:
            rows.append([words(row.role), format_bytes(row.bytes), share(row.bytes, total), row.largest or ""])
    rows.append(["total", format_bytes(sum(row.bytes for row in summary.roles_at_peak)), share(total, total), ""])
    lines = ["Alive at the peak, by role", *table(["role", "bytes", "share", "largest"], rows, "lrrl")]
    unknown = next(row for row in summary.roles_at_peak if row.role == Role.UNKNOWN.label)
    if unknown.bytes > UNKNOWN_SHARE * total:
        why = f" ({unknown.proof})" if unknown.proof else ""
        lines += paragraph(f"The other figures are lower bounds: {share(unknown.bytes, total)} is unknown{why}.")
    return lines


def _phases(summary: Summary) -> list[str]:
    title = "Peaks by phase"
    rows = []
    for phase in Phase:
        mine = [row for row in summary.phases if row.phase == phase.label]
        if mine:
            warm, steady = ([row for row in mine if row.warm_up is first] for first in (True, False))
            rows.append([phase.label, _highest(warm)[0],
                         format_bytes(median_low(row.peak_bytes for row in steady)) if steady else "-",
                         *_highest(steady)])
    if not rows:
        return [title, f"{INDENT}no phase was seen"]
    return [title, *table(["phase", "warm-up", "later: median", "later: highest", "in step"], rows, "lrrrr")]


def _highest(rows: list[PhasePeak]) -> tuple[str, str]:
    if not rows:
        return "-", "-"
    row = max(rows, key=lambda row: row.peak_bytes)
    return format_bytes(row.peak_bytes), "outside" if row.step is None else str(row.step)


def _saved(summary: Summary) -> list[str]:
    own = [row for row in summary.saved if row.role not in _NOT_FOR_BACKWARD]
    shared: dict[str, int] = {}
    for row in summary.saved:
        if row.role in _NOT_FOR_BACKWARD:
            shared[row.role] = shared.get(row.role, 0) + row.bytes
    title = "Largest tensors saved for backward"
    if summary.saved_step is not None:
        title += f", in {_step_words(summary, summary.saved_step)}"
    if not summary.saved:
        light = summary.steps and all(step.recorded == "light" for step in summary.steps)
        return [title, f"{INDENT}{'not known: nothing was recorded in full' if light else 'none was seen'}"]
    rows = []
    for row in own[:SAVED_ROWS]:
        rows.append([format_bytes(row.bytes), str(row.count), _saver(row)])
        rows.append(["", "", _tensor(row)])
        others = [saver for saver in row.savers if saver != _saver(row)]
        if others:
            rows.append(["", "", f"also by {others[0]}" if len(others) == 1 else f"also by {len(others)} others"])
    lines = [title]
    if rows:
        rest = own[SAVED_ROWS:]
        if rest:
            rows.append([format_bytes(sum(row.bytes for row in rest)), str(sum(row.count for row in rest)),
                         f"{len(rest)} smaller kinds"])
        rows.append([format_bytes(sum(row.bytes for row in own)), str(sum(row.count for row in own)),
                     "in all, each storage once"])
        lines += table(["bytes", "count", "saved by"], rows, "rrl")
    if summary.saved_earlier_bytes:
        lines += paragraph(
            f"Saved in earlier steps and still alive at the peak: {format_bytes(summary.saved_earlier_bytes)}: "
            "something keeps their graphs.")
    if shared:
        sizes = ", ".join(f"{words(role)} {format_bytes(size)}" for role, size in shared.items())
        only = "Saved too, but" if own else "None but what is"
        lines += paragraph(f"{only} alive anyway: {sizes}.")
    return lines


# Their bytes are there whether or not autograd keeps a reference.
_NOT_FOR_BACKWARD = {role.label for role in (Role.PARAMETERS, Role.BUFFERS, Role.INPUTS)}


def _saver(row: Saved) -> str:
    return " › ".join(part for part in (row.module, row.operator) if part) or "not known"


def _tensor(row: Saved) -> str:
    parts = [f"{row.dtype or ''} {row.shape if row.shape is not None else ''}".strip(), row.line]
    if row.role != Role.SAVED_ACTIVATIONS.label:
        parts.append(words(row.role))
    return ", ".join(part for part in parts if part)


def _segments(summary: Summary) -> list[str]:
    held = summary.segments
    if held is None:
        return []
    free = [(held.largest_hole_bytes, "the largest hole"), (held.inactive_split_bytes, "in segments that are in use")]
    lines = ["Segments, when the snapshot was taken", *facts({
        "held": f"{format_bytes(held.bytes)} in {held.count:,} segment{'s' * (held.count != 1)}",
        "free": ", ".join([format_bytes(held.free_bytes), *(f"{format_bytes(size)} {what}" for size, what in free)])})]
    if not held.groups:
        return lines
    rows = [[f"{group.stream:#x}" if group.stream > _SMALL_STREAM else str(group.stream),
             f"{'small' if group.small else 'large'}{' of ' + str(tuple(group.pool)) if any(group.pool) else ''}",
             str(group.count), format_bytes(group.bytes), format_bytes(group.free_bytes),
             format_bytes(group.largest_hole_bytes)] for group in held.groups]
    return [*lines, *table(["stream", "pool", "count", "held", "free", "largest hole"], rows, "llrrrr")]


_SMALL_STREAM = 9999  # streams are handles: what is longer is an address


def _outside(summary: Summary) -> list[str]:
    outside = summary.outside_allocator
    figures = [
        ("shared memory and mapped files", outside.mapped),
        ("storages of NumPy and other libraries", outside.numpy),
        ("resident memory of the process, all included", outside.host_rss),
        (f"{summary.device}, in use outside PyTorch", outside.outside_pytorch),
        *((f"allocated on {device}", size) for device, size in summary.other_devices.items()),
    ]
    rows = [[what, format_bytes(size)] for what, size in figures if size is not None]
    lines = ["Outside this allocator", *(table(["what", "peak"], rows, "lr") if rows else [])]
    if summary.about.get("source") == SNAPSHOT:
        lines += paragraph("Not in a snapshot: it tells of PyTorch's allocator alone.")
    elif outside.host_rss is None:
        lines += paragraph("The resident memory of the process is not known: it is read where a step ends.")
    return lines


def _not_seen(summary: Summary) -> list[str]:
    said = [line for text in summary.not_seen for line in paragraph(text, "- ")]
    return ["Not seen", *(said or [f"{INDENT}nothing is known to be missing"])]
