"""Plans of checkpoints, as text and for machines."""

from __future__ import annotations

import json
import os
from typing import Any

from memdiag.plan import Option, Planning, Reason, Safety
from memdiag.policy import PLAN_GAINS, PLAN_REASONS
from memdiag.report.json import SCHEMA_VERSION
from memdiag.report.layout import facts, paragraph, share, table, words
from memdiag.report.names import fold
from memdiag.units import format_bytes


def render_plans(planning: Planning, about: dict[str, Any]) -> str:
    """Plans side by side, what single modules would do, and the one that is chosen.

    Args:
        about: facts of the run.
    """
    name = os.path.basename(str(about.get("script") or "this run"))
    return "\n".join("\n".join(lines) + "\n" for lines in (
        _head(planning, name), _table(planning), _gains(planning), _unsafe(planning), _chosen(planning)) if lines)


def _head(planning: Planning, name: str) -> list[str]:
    step = planning.step
    return [f"Checkpoints for {name}", *facts({
        "step": f"{step.number}, replayed under each plan",
        "peak": ", in ".join(filter(None, (format_bytes(planning.options[0].plan.peak.bytes), planning.phase))),
        "budget": None if planning.budget is None else format_bytes(planning.budget),
    })]


def _table(planning: Planning) -> list[str]:
    bare = planning.options[0].plan.peak.bytes
    rows = []
    for number, option in enumerate(planning.options):
        rows.append([
            "→" if number == planning.chosen else "", words(option.name) if "frontier" not in option.name else "",
            format_bytes(option.plan.peak.bytes), share(option.plan.peak.bytes, bare), option.phase or "",
            _time(planning, option), _modules(option)])
    return ["Plans, by the peak of the step and the time it takes longer",
            *table(["", "", "peak", "of bare", "then in", "longer", "checkpoints"], rows, "llrrlrl")]


def _time(planning: Planning, option: Option) -> str:
    return share(option.plan.again_ns, planning.step.work_ns)


def _modules(option: Option) -> str:
    return _folded([path for one in option.plan.chosen for path in one.modules]) or "none"


def _folded(paths: list[str]) -> str:
    names = fold(paths)
    return ", ".join(dict.fromkeys(names[path] for path in paths))


def _gains(planning: Planning) -> list[str]:
    rows = []
    for gain, plan in [(gain, plan) for gain, plan in planning.gains if gain > 0][:PLAN_GAINS]:
        rows.append([format_bytes(gain), share(plan.again_ns, planning.step.work_ns), plan.chosen[0].modules[0]])
    title = "What one module alone would do"
    return [title, *table(["peak lower by", "longer", "checkpoint"], rows, "rrl")] if rows else []


def _unsafe(planning: Planning) -> list[str]:
    """Modules that are in no plan, where they would do something else when they run twice."""
    why: dict[tuple[Reason, ...], list[str]] = {}
    for path, verdict in planning.safety.items():
        if verdict.safety is Safety.UNSAFE:
            why.setdefault(verdict.reasons, []).append(path)
    if not why:
        return []
    lines = ["Not safe to run twice, and in no plan"]
    for reasons, paths in list(why.items())[:PLAN_REASONS]:
        first = reasons[0]
        more = f"; and {len(reasons) - 1} more" if len(reasons) > 1 else ""
        where = f" ({first.line})" if first.line else ""
        lines += paragraph(f"{_folded(paths)}: {first.text}{where}{more}", "- ")
    rest = sum(len(paths) for paths in list(why.values())[PLAN_REASONS:])
    return lines + (paragraph(f"and {rest} more modules, in the JSON") if rest else [])


def _chosen(planning: Planning) -> list[str]:
    if planning.floor is not None:
        assert planning.budget is not None
        largest = ", ".join(f"{words(name)} {format_bytes(size)}" for name, size in planning.floor.holders[:3])
        return ["No plan fits", *paragraph(
            f"The lowest peak that was found is {format_bytes(planning.floor.bytes)}, "
            f"{format_bytes(planning.floor.bytes - planning.budget)} above the budget. Most of it is {largest}.")]
    assert planning.chosen is not None
    if not planning.options[planning.chosen].plan.chosen:
        unsafe = any(verdict.safety is Safety.UNSAFE for verdict in planning.safety.values())
        return ["No checkpoint is needed" if planning.budget is not None else
                f"No {'safe ' * unsafe}checkpoint would pay"]
    option = planning.options[planning.chosen]
    bare = planning.options[0].plan.peak.bytes
    return ["Chosen", *facts({
        "checkpoints": _modules(option),
        "peak": f"{format_bytes(option.plan.peak.bytes)}, {format_bytes(bare - option.plan.peak.bytes)} less"
        + (f", in {option.phase}" if option.phase else ""),
        "longer": _time(planning, option) + " of the step, by the time that these forwards took"
        + ("" if option.noise_ns is None else
           f"; from step to step that differed by {share(option.noise_ns, planning.step.work_ns)}"),
        "headroom": None if planning.budget is None else format_bytes(planning.budget - option.plan.peak.bytes),
    })]


def plans_to_json(planning: Planning, about: dict[str, Any]) -> str:
    """The same for machines: the contract of ``docs/json.md``."""
    step, bare = planning.step, planning.options[0].plan
    return json.dumps({
        "schema_version": SCHEMA_VERSION,
        "about": about,
        "baseline": {"peak_bytes": bare.peak.bytes, "phase": planning.phase, "step_time_ns": step.work_ns},
        "budget_bytes": planning.budget,
        "plans": [_plan(planning, option) for option in planning.options],
        "chosen": planning.chosen,
        "floor": None if planning.floor is None else {
            "bytes": planning.floor.bytes,
            "holders": [{"what": what, "bytes": size} for what, size in planning.floor.holders]},
        "safety": [
            {"module": path, "verdict": verdict.safety.value, "with": list(verdict.conditions),
             "reasons": [{"text": reason.text, "line": reason.line} for reason in verdict.reasons]}
            for path, verdict in planning.safety.items()],
    }, indent=2, ensure_ascii=False)


def _plan(planning: Planning, option: Option) -> dict[str, Any]:
    plan, budget = option.plan, planning.budget
    return {
        "name": option.name,
        "regions": [
            {"modules": list(one.modules), "kind": "selective" if one.keep else "full", "keep": list(one.keep),
             "gain": {"peak_bytes": gain, "step_time_ns": one.again_ns}}
            for one, gain in zip(plan.chosen, option.alone, strict=True)],
        "predicted": {
            "peak_bytes": plan.peak.bytes, "phase": option.phase, "step_time_ns": planning.step.work_ns + plan.again_ns,
            "time_noise_ns": option.noise_ns},
        "headroom_bytes": None if budget is None else budget - plan.peak.bytes,
        "set_aside": {},
    }
