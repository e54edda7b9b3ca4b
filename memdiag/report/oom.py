"""The request that failed for want of memory, as text."""

from __future__ import annotations

from memdiag.diagnose import Oom
from memdiag.policy import OOM_PLACES
from memdiag.report.layout import INDENT, facts, paragraph, share, table, words
from memdiag.report.places import folded
from memdiag.report.places import words as place_words
from memdiag.report.summary import Summary
from memdiag.units import format_bytes


def oom_section(summary: Summary) -> list[str]:
    """What was asked for, what was there, and what would have helped; nothing where no request failed."""
    oom = summary.diagnosis.oom
    if oom is None:
        return []
    asked = "a size that is not known" if oom.requested_bytes is None else format_bytes(oom.requested_bytes)
    lines = [f"Out of memory: {asked} asked for", *facts(_known(oom))]
    if oom.roles is None:
        return [*lines, *paragraph("What was alive is not known: the events of a light step were not kept.")]
    rows = [[words(role), format_bytes(size), share(size, oom.allocated_bytes or 0)]
            for role, size in sorted(oom.roles.items(), key=lambda item: -item[1]) if size]
    if rows:
        lines += ["", f"{INDENT}What filled it", *table(["role", "bytes", "share"], rows, "lrr")]
        lines += ["", *_places(oom)]
    if oom.remedies:
        measured = any(remedy.bytes is not None for remedy in oom.remedies)
        lines += ["", f"{INDENT}What {'would have helped most' if measured else 'may help; how much was not measured'}"]
    for remedy in oom.remedies:
        most = " at most" if remedy.at_most else ""
        gain = "" if remedy.bytes is None else f" ({format_bytes(remedy.bytes)} less{most})"
        lines += paragraph(f"{remedy.text}{gain}", "> ")
    return lines


def _known(oom: Oom) -> dict[str, str | None]:
    times = f"; of {oom.failures} requests that failed, the last" if oom.failures > 1 else ""
    step = "outside the steps" if oom.step is None else f"step {oom.step}"
    device = [(oom.allocated_bytes, "allocated"), (oom.reserved_bytes, "reserved"), (oom.free_bytes, "free"),
              (oom.outside_pytorch_bytes, "in use outside PyTorch")]
    return {
        "device": oom.device,
        "there": ", ".join(f"{format_bytes(size)} {what}" for size, what in device if size is not None) or None,
        "holes": _holes(oom),
        "when": ", ".join(part for part in (step, oom.phase) if part) + times,
        "then": "the run ended by it" if oom.ended_run else "the script went on",
        "where": " › ".join(part for part in (oom.module, oom.operator) if part) or "not known",
        "line": oom.line or "not known",
        "forward": oom.forward_line,
        "progress": _progress(oom),
    }


def _holes(oom: Oom) -> str | None:
    """Whether fragmentation had a part in it."""
    hole, asked = oom.largest_hole_bytes, oom.requested_bytes
    if hole is None or asked is None:
        return None
    if hole >= asked:
        return f"the largest had {format_bytes(hole)}: enough, but of another stream or pool, or not to be split"
    text = f"the largest had {format_bytes(hole)}: none was large enough"
    if oom.reserved_bytes is None or oom.allocated_bytes is None:
        return text
    held = oom.reserved_bytes - oom.allocated_bytes
    if held >= asked:
        return f"{text}, though {format_bytes(held)} were free in all: fragmentation"
    return f"{text}, and {format_bytes(held)} free in all would not have been either: not fragmentation"


def _progress(oom: Oom) -> str | None:
    earlier = oom.earlier
    if earlier is None:
        return None
    text = f"at operator {earlier.operators}; step {earlier.step}{' (warm-up)' if earlier.warm_up else ''} had " \
        f"{earlier.of} in all"
    if earlier.allocated_bytes is not None and oom.allocated_bytes is not None:
        more = oom.allocated_bytes - earlier.allocated_bytes
        than = "as now" if not more else f"{format_bytes(abs(more))} {'less' if more > 0 else 'more'} than now"
        text += f", and {format_bytes(earlier.allocated_bytes)} allocated at the same point: {than}"
    return text


def _places(oom: Oom) -> list[str]:
    assert oom.places is not None
    sums = sorted(((sum(sizes), place) for place, sizes in folded(oom.places).items()), key=lambda pair: -pair[0])
    rows = [[format_bytes(size), place_words(place)] for size, place in sums[:OOM_PLACES]]
    rest = sums[OOM_PLACES:]
    if rest:
        rows.append([format_bytes(sum(size for size, _ in rest)), f"{len(rest)} smaller places"])
    return table(["bytes", "allocated by"], rows, "rl")
