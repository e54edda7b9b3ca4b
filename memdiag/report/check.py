"""What a check has found: for a person, for machines, and for a paper or a pull request."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tabulate import tabulate

from memdiag.check.check import Check, Difference, Request, Verdict
from memdiag.check.compare import Outcome
from memdiag.check.measured import WARM, Memory, Times
from memdiag.check.spec import SEED
from memdiag.policy import CHECK_NAMES
from memdiag.report.json import SCHEMA_VERSION
from memdiag.report.layout import facts, paragraph, table, words
from memdiag.report.names import fold
from memdiag.units import format_bytes

if TYPE_CHECKING:
    from memdiag.record.process.launch import Target

_SAID = {
    Verdict.SAME: "the same training", Verdict.DIFFERENT: "NOT the same training",
    Verdict.SAVES_NOTHING: "the same training, but the peak is no lower", Verdict.COULD_NOT_RUN: "could not be checked"}


def render_check(found: Check) -> str:
    """The check for a person; every line fits 80 columns, the last one ends with a newline."""
    sections = [_head(found), _difference(found), _stages(found), _measures(found), _about(found)]
    return "\n".join("\n".join(lines) + "\n" for lines in sections if lines)


def _head(found: Check) -> list[str]:
    request = found.request
    lines = paragraph(f"{_command(request.script)}: {_SAID[found.verdict]}")
    for told in _told_of(request):
        lines += paragraph(told)
    if found.why_not is not None:
        reason, *code = found.why_not.splitlines()
        lines += [*paragraph(reason), *(f"    {line}" if line else "" for line in code)]
    if found.output and found.verdict is Verdict.COULD_NOT_RUN:
        lines += ["", "  The last that it printed:", *(f"    {line}" for line in found.output.splitlines())]
    return [line[2:] if number == 0 else line for number, line in enumerate(lines)]


def _told_of(request: Request) -> list[str]:
    """What was compared otherwise than one would think."""
    told = []
    if request.other is not None:
        told.append(f"the second script: {_command(request.other)}")
    if request.small is not None:
        told.append(f"values compared with other arguments: {shlex.join(request.small)}; memory and time are of its "
                    "own")
    if request.planned_with is not None:
        told.append(f"the plan was made with other arguments ({shlex.join(request.planned_with) or 'none'}), so what "
                    "it predicts is not set beside what is measured")
    return told


def _command(script: Target) -> str:
    return shlex.join(script.argv)


def _difference(found: Check) -> list[str]:
    difference = found.difference
    if difference is None:
        return []
    names = list(dict.fromkeys(pair.name for pair in difference.pairs))
    known: dict[str, str | None] = {
        "where": None if difference.stage is None else (
            f"{words(difference.stage.value)}, in step {difference.step} of the optimizer: {_some(names)}"),
        "shapes": _shapes(difference),
        "worst": _worst(difference),
        "likely cause": difference.cause.text,
        "proved by": difference.cause.proved_by,
        "guilty": _guilty(difference),
        "the probe": _probed(difference),
    }
    title = "First difference" if difference.stage is not None else "Why"
    return [title, *facts(known)]


def _shapes(difference: Difference) -> str | None:
    entries = [pair.a or pair.b for pair in difference.pairs[:CHECK_NAMES]]
    kinds = dict.fromkeys(f"{entry.dtype}{entry.shape}" for entry in entries if entry is not None and entry.shape)
    return ", ".join(kinds) or None


def _worst(difference: Difference) -> str | None:
    if difference.worst_absolute is None or difference.worst_relative is None:
        return None
    return (f"absolute {difference.worst_absolute:.3g}, relative {difference.worst_relative:.3g}; most of all "
            f"{difference.worst}")


def _guilty(difference: Difference) -> str | None:
    if difference.guilty is None:
        return None
    together = " together" if len(difference.guilty) > 1 else ""
    others = "" if difference.alone else ", and others beside it" if not together else ", and others beside them"
    return f"{', '.join(difference.guilty)}{together}{others}"


def _probed(difference: Difference) -> str | None:
    if difference.probed is None:
        return None
    if not difference.probed:
        return "finds nothing in it that forbids a checkpoint: look at what is around it"
    reasons = [f"{reason.module} {reason.text}{f' ({reason.line})' if reason.line else ''}"
               for reason in difference.probed]
    more = len(reasons) - CHECK_NAMES
    return "; ".join(reasons[:CHECK_NAMES]) + (f"; and {more} more" if more > 0 else "")


def _stages(found: Check) -> list[str]:
    if all(outcome is Outcome.NOT_COMPARED for outcome in found.stages.values()):
        return []
    noise = "are equal bit for bit" if not found.noise else f"differ in {found.noise} places themselves"
    rows = [[words(stage.value), words(outcome.value)] for stage, outcome in found.stages.items()]
    when = "" if found.difference is None or found.difference.stage is None else (
        f", as of step {found.difference.step}")
    title = f"Compared: {_number(found.steps, 'step')} of the optimizer{when}"
    lines = [title, *table(["stage", "outcome"], rows, "ll"), ""]
    lines += paragraph(f"Two runs of the script as it is {noise}.")
    if found.unreadable:
        lines += paragraph(f"Not compared, for their values cannot be read: {_some(list(found.unreadable))}.")
    return lines


def _measures(found: Check) -> list[str]:
    rows = _rows(found)
    if not rows:
        return []
    return [f"Measured, after {WARM} steps", *table(["", "as it is", _second(found), "change"], rows, "lrrr")]


def _second(found: Check) -> str:
    return "checkpoints" if found.request.other is None else "the other"


def _rows(found: Check) -> list[list[str]]:
    peak = _sizes(found, lambda memory: memory.peak)
    if found.memories[0] is None and found.memories[1] is not None:
        peak[0] = "out of memory"  # the one thing that lets a script be measured with checkpoints alone
    rows = [["peak", *peak], *_phases(found)]
    if any(memory is not None and memory.reserved is not None for memory in found.memories):
        rows.append(["reserved", *_sizes(found, lambda memory: memory.reserved)])
    predicted, after = found.request.predicted, found.memories[1]
    if predicted is not None and after is not None:
        rows.append(["peak, predicted", format_bytes(predicted.bare_peak_bytes), format_bytes(predicted.peak_bytes),
                     f"off {_percent(predicted.peak_bytes, after.peak, 2)}"])
    one, other = found.times
    if not any(found.times):
        return rows if any(found.memories) else []
    rows.append(["step time", *_pair(one, other, lambda t: f"{t.step_ns / 1e6:.1f} ± {_ms(t.spread_ns // 2)}",
                                     lambda t: t.step_ns)])
    said = found.predicted_step_ns
    if said is not None and other is not None:
        rows.append(["step time, predicted", "", _ms(said), f"off {_percent(said, other.step_ns, 1)}"])
    rows.append(["examples a second", *_pair(one, other, lambda t: _told_rate(t, t.examples),
                                             lambda t: _rate(t, t.examples))])
    rows.append(["updates a second", *_pair(one, other, lambda t: _told_rate(t, t.updates),
                                            lambda t: _rate(t, t.updates))])
    return rows


def _phases(found: Check) -> list[list[str]]:
    names = dict.fromkeys(phase for memory in found.memories if memory is not None for phase in memory.phases)
    return [[f"  {words(phase)}", *_sizes(found, lambda memory, phase=phase: memory.phases.get(phase))]
            for phase in names if phase in ("forward", "backward", "optimizer")]


def _sizes(found: Check, size: Any) -> list[str]:
    sizes = [None if memory is None else size(memory) for memory in found.memories]
    told = ["-" if size is None else format_bytes(size) for size in sizes]
    return [*told, _change(sizes)]


def _pair(one: Times | None, other: Times | None, told: Any, value: Any) -> list[str]:
    values = [None if times is None else value(times) for times in (one, other)]
    return [*("-" if times is None else told(times) for times in (one, other)), _change(values)]


def _change(values: Sequence[float | None]) -> str:
    before, after = values
    return "" if before is None or after is None or not before else _percent(after, before, 1)


def _percent(after: float, before: float, digits: int) -> str:
    return f"{100 * (after / before - 1):+.{digits}f} %" if before else "-"


def _ms(ns: float) -> str:
    return f"{ns / 1e6:.1f} ms"


def _rate(times: Times, count: int) -> float:
    return count / (times.wall_step_ns / 1e9) if times.wall_step_ns else 0.0


def _told_rate(times: Times, count: int) -> str:
    rate = _rate(times, count)
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _facts(found: Check) -> dict[str, str | None]:
    memory = next((memory for memory in found.memories if memory is not None), None)
    regions = [", ".join(modules) for modules, _ in found.regions]
    kept = sorted({operator for _, keep in found.regions for operator in keep})
    known: dict[str, str | None] = {
        "checkpoints": ", ".join(dict.fromkeys(fold(regions).values())) + (
            f"; kept: {', '.join(kept)}" if kept else "") or None,
        "precision": found.precision or None,
        "seed": f"{SEED}, of Python, NumPy and PyTorch, before the script's own",
    }
    if memory is None:
        return known
    about = memory.about
    rounds = _number(found.request.rounds, "run")
    clock = "processor time" if memory.device == "cpu" else "time of the day, the device waited for"
    return {
        "inputs": memory.shapes, **known,
        "device": f"{memory.device} ({(about.get('device_names') or {}).get(memory.device, '')})",
        "versions": f"memdiag {about['memdiag']}, torch {about['torch']}, Python {about['python']}"
        + (f", CUDA {about['cuda']}" if memory.device != "cpu" else ""),
        "threads": str(about.get("threads", "")) or None,
        "clock": None if not any(found.times) else (
            f"step time is {clock}, the median of {_number(_count(found), 'step')} in {rounds}, ± half of what "
            "is between the quartiles; rates are by the time of the day"),
    }


def _number(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _count(found: Check) -> int:
    return max((len(times.work_ns) for times in found.times if times is not None), default=0)


def _about(found: Check) -> list[str]:
    return ["Under what", *facts(_facts(found))] if found.verdict is not Verdict.COULD_NOT_RUN else []


def _some(names: Sequence[str]) -> str:
    folded = list(dict.fromkeys(fold(names).values()))
    more = f" and {len(folded) - CHECK_NAMES} more" if len(folded) > CHECK_NAMES else ""
    return ", ".join(folded[:CHECK_NAMES]) + more


# --- JSON and Markdown --------------------------------------------------------------------------------------------


def check_as_dict(found: Check) -> dict[str, Any]:
    """The check as JSON-able values, in the order of the contract (``docs/json.md``)."""
    (before, after), (one, other), request = found.memories, found.times, found.request
    known = next((memory.about for memory in found.memories if memory is not None), {})
    return {
        "schema_version": SCHEMA_VERSION,
        "about": {**known, "argv": request.script.argv, "other": None if request.other is None else request.other.argv,
                  "small": None if request.small is None else list(request.small), "check_seed": SEED,
                  "precision": found.precision},
        "verdict": found.verdict.value,
        "why_not": found.why_not,
        "regions": [{"modules": list(modules), "kind": "selective" if keep else "full", "keep": list(keep)}
                    for modules, keep in found.regions],
        "stages": {stage.value: outcome.value for stage, outcome in found.stages.items()},
        "steps_compared": found.steps,
        "noisy_places": found.noise,
        "not_read": list(found.unreadable),
        "first_difference": None if found.difference is None else _difference_as_dict(found.difference),
        "memory": {
            "baseline_peak_bytes": None if before is None else before.peak,
            "plan_peak_bytes": None if after is None else after.peak,
            "predicted_peak_bytes": None if request.predicted is None else request.predicted.peak_bytes,
            "baseline": _memory(before), "plan": _memory(after)},
        "time": {
            "baseline_step_ns": None if one is None else one.step_ns,
            "plan_step_ns": None if other is None else other.step_ns,
            "predicted_step_ns": found.predicted_step_ns,
            "spread": {"baseline_ns": None if one is None else one.spread_ns,
                       "plan_ns": None if other is None else other.spread_ns},
            "baseline": _times(one), "plan": _times(other)},
    }


def _difference_as_dict(difference: Difference) -> dict[str, Any]:
    return {
        "stage": None if difference.stage is None else difference.stage.value,
        "step": difference.step,
        "names": list(dict.fromkeys(pair.name for pair in difference.pairs)),
        "tensors": [{"name": pair.name, "shape": entry.shape, "dtype": entry.dtype}
                    for pair in difference.pairs if (entry := pair.a or pair.b) is not None],
        "worst_absolute": difference.worst_absolute,
        "worst_relative": difference.worst_relative,
        "worst": difference.worst,
        "likely_cause": difference.cause.text,
        "proved_by": difference.cause.proved_by,
        "modules": list(difference.cause.names),
        "guilty": None if difference.guilty is None else list(difference.guilty),
        "guilty_alone": difference.alone,
        "probed": None if difference.probed is None else [reason._asdict() for reason in difference.probed],
    }


def _memory(memory: Memory | None) -> dict[str, Any] | None:
    return None if memory is None else {
        "phase": memory.phase, "phases": memory.phases, "reserved_bytes": memory.reserved, "device": memory.device,
        "inputs": memory.shapes}


def _times(times: Times | None) -> dict[str, Any] | None:
    return None if times is None else {
        "steps": len(times.work_ns), "wall_step_ns": times.wall_step_ns, "examples_per_step": times.examples,
        "updates_per_step": times.updates, "examples_per_second": _rate(times, times.examples),
        "updates_per_second": _rate(times, times.updates)}


def check_to_json(found: Check) -> str:
    """The check as JSON text, with a newline at its end."""
    return json.dumps(check_as_dict(found), indent=2, ensure_ascii=False) + "\n"


def check_to_markdown(found: Check) -> str:
    """The check as Markdown: the sentence, two tables and what it was measured under."""
    lines = [f"**`{_command(found.request.script)}`: {_SAID[found.verdict]}**", ""]
    for told in _told_of(found.request):
        lines += [f"{told[0].upper()}{told[1:]}.", ""]
    if found.why_not is not None:
        lines += [found.why_not, ""]
    if found.difference is not None:
        difference = found.difference
        lines += [f"First difference: {words(difference.stage.value)} in step {difference.step}."
                  if difference.stage is not None else "", f"Likely cause: {difference.cause.text}. Proved by: "
                  f"{difference.cause.proved_by}.", ""]
    rows = _rows(found)
    if rows:
        lines += [tabulate(rows, ["", "as it is", _second(found), "change"], tablefmt="github", disable_numparse=True,
                           colalign=("left", "right", "right", "right")), ""]
    if any(outcome is not Outcome.NOT_COMPARED for outcome in found.stages.values()):
        stages = [[words(stage.value), words(outcome.value)] for stage, outcome in found.stages.items()]
        head = ["stage", _number(found.steps, "step")]
        lines += [tabulate(stages, head, tablefmt="github", disable_numparse=True), ""]
    lines += [f"- {name}: {fact}" for name, fact in _facts(found).items() if fact]
    return "\n".join(lines) + "\n"
