"""Plans of checkpoints, as text and for machines."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from memdiag.diagnose import Class, Diagnosis
from memdiag.plan import ASKED_FOR, MOST_SAVED, OUTSIDE, UNUSED, WHOLE_MODEL, Option, Planning, Poor, Safety, Verdict
from memdiag.plan.names import BARE
from memdiag.plan.regions import Candidate
from memdiag.policy import PLAN_GAINS, PLAN_HOLDERS, PLAN_LINES, PLAN_REASONS, PLAN_TOLERANCE
from memdiag.report.json import SCHEMA_VERSION
from memdiag.report.layout import facts, paragraph, room, share, table, words
from memdiag.report.names import fold
from memdiag.report.places import words as place_words
from memdiag.trace import Role
from memdiag.trace.models import Model, model_of, models
from memdiag.trace.places import Place
from memdiag.units import format_bytes, format_time

_ASIDE = {ASKED_FOR: "as asked for", UNUSED: "reserved but not allocated", OUTSIDE: "outside PyTorch"}
_CLASSES = {  # what a holder of the lowest peak is short of, as a diagnosis calls it
    Role.PARAMETERS.label: Class.PARAMETERS, Role.BUFFERS.label: Class.PARAMETERS,
    Role.GRADIENTS.label: Class.GRADIENTS, Role.OPTIMIZER_STATE.label: Class.OPTIMIZER_STATE,
    Role.OPTIMIZER_TEMPORARIES.label: Class.WORKSPACE, Role.INPUTS.label: Class.INPUT_BATCHES,
}
_INSTEAD = {
    Class.PARAMETERS: "a lower precision, offloading, or sharding over ranks",
    Class.GRADIENTS: "an optimizer that steps inside backward, and lets go of each gradient there",
    Class.OPTIMIZER_STATE: "an optimizer that keeps less, such as SGD, factored or 8-bit state; or sharding over ranks",
    Class.WORKSPACE: "`foreach=False` in the optimizer, which then works on one parameter at a time",
    Class.INPUT_BATCHES: "smaller batches, each loaded when its turn comes",
}
_HELD = "\N{NO-BREAK SPACE}"
_PLAIN = "activations"  # the kind of a finding whose advice is to checkpoint


def render_plans(planning: Planning, about: dict[str, Any], diagnosis: Diagnosis | None = None) -> str:
    """Plans side by side, what single modules would do, what is less than it seems, and the plan that is chosen.

    Args:
        about: facts of the run.
        diagnosis: of the run; where no plan fits, it says what would help instead.
    """
    return "\n".join("\n".join(lines) + "\n" for lines in (
        _head(planning, script_name(about)), _table(planning), _gains(planning), _poor(planning),
        _unsafe(planning), _chosen(planning, diagnosis)) if lines)


def beside_verdict(planning: Planning, bound: int | None) -> str:
    """How plans go with a report that is printed before them; empty where the two are of different things.

    Args:
        bound: by how much its verdict says that checkpoints could lower the peak at most.
    """
    most = max(planning.bare.peak.bytes - one.plan.peak.bytes for one in planning.options)
    return "" if bound is None or most > bound else "\n".join(paragraph(
        f"The verdict's {format_bytes(bound)} is a bound that no plan exceeds; the plans' own peaks are exact."))


def script_name(about: dict[str, Any]) -> str:
    return os.path.basename(str(about.get("script") or "this run"))


def usual_name(name: str) -> str:
    """A plan's name in words: ``every_2nd_block`` is "every 2nd block"."""
    return "as it is" if name == BARE else words(name)


def _name(one: Candidate, path: str | None = None, short: bool = False) -> str:
    """What a candidate is called: its module, or the first and the last of several, and what it keeps.

    Args:
        path: under which the module is shown together with others.
        short: with a star and their number in the place of the operators that it keeps: in one step, that tells apart
            what one module may keep.
    """
    first, *more = one.modules
    name = f"{first}…{more[-1].rpartition('.')[2]}" if more else path or first
    if not one.keep:
        return name
    return f"{name}*{len(one.keep)}" if short else f"{name} keeping {', '.join(one.keep)}"


# --- sections ---------------------------------------------------------------------------------------------------


def _head(planning: Planning, name: str) -> list[str]:
    step = planning.step
    return [f"Checkpoints for {name}", *facts({
        "step": f"{step.number}, replayed under each plan",
        "time": f"{format_time(step.work_ns)} of work, measured: forwards, backwards and optimizers",
        "peak": ", in ".join(filter(None, (format_bytes(planning.bare.peak.bytes), planning.phase))),
        "inputs": f"{planning.other_inputs} other steps had inputs of other shapes, and have other peaks"
        if planning.other_inputs else None,
        "present": _present(planning),
        "left out": _twice(planning),
        "budget": None if planning.budget is None else format_bytes(planning.budget),
        "set aside": None if planning.budget is None else _aside(planning),
    })]


def _twice(planning: Planning) -> str | None:
    step = planning.step
    paths = {call.path for call in step.calls if not call.outermost and step.goes_back_twice(call)}
    return f"{len(paths)} modules that backward goes through more than once in a step" if paths else None


def _present(planning: Planning) -> str | None:
    """The checkpoints that the script has."""
    there = planning.step.present
    if not there:
        return None
    names = fold([one.what for one in there])
    return (f"checkpoints of the script's own stay: {', '.join(dict.fromkeys(names[one.what] for one in there))}; they "
            f"take {share(sum(one.again_ns for one in there), planning.step.work_ns)} of the step, and make "
            f"{format_bytes(sum(one.bytes for one in there))} again that would else have been there since forward")


def _aside(planning: Planning) -> str:
    if planning.set_aside is None:
        return (f"nothing, for the trace has no statistics of {planning.device} in this step; --set-aside SIZE keeps "
                "back what is not allocated by PyTorch there")
    if not planning.set_aside:
        return "nothing: the budget is for what PyTorch allocates; --set-aside SIZE keeps back more"
    return ", ".join(f"{format_bytes(size)} {_ASIDE[what]}" for what, size in planning.set_aside.items())


def _table(planning: Planning) -> list[str]:
    headers = ["", "name", "peak", "longer", "peak in", "checkpoints"]
    rows = [["→" if number == planning.chosen else "", option.name, format_bytes(option.plan.peak.bytes),
             _longer(planning, option), option.phase or ""] for number, option in enumerate(planning.options)]
    width = room(headers, rows)
    lines = []
    for row, option in zip(rows, planning.options, strict=True):
        first, *more = _cut(_folded(option.plan.chosen, short=True) or ["none"], width)
        lines += [[*row, first], *([*[""] * len(row), line] for line in more)]
    text = ["Plans, by the peak of the step and the time it takes longer", *table(headers, lines, "llrrll")]
    by_hand = any(one.by_hand for option in planning.options for one in option.plan.chosen)
    keeps = any(one.keep for option in planning.options for one in option.plan.chosen)
    runs = any(len(one.modules) > 1 for option in planning.options for one in option.plan.chosen)
    return text + paragraph("`longer` is a share of the step's time; --choose NAME takes another plan, and prints it "
                            "in full." + " *N: keeps the results of N operators." * keeps
                            + " 0…2: the modules 0 to 2 as one checkpoint; 0-2: each for itself." * runs
                            + " by_hand has a run of modules that only the script's own loop can make one checkpoint "
                              "of." * by_hand)


def _longer(planning: Planning, option: Option) -> str:
    return share(option.plan.again_ns, planning.step.work_ns)


def _cut(names: Sequence[str], width: int) -> list[str]:
    """Names in a few lines; what does not fit there is counted."""
    for shown in range(len(names), 0, -1):
        more = [f"and {len(names) - shown} more"] if shown < len(names) else []
        held = ", ".join(part.replace(" ", _HELD) for part in (*names[:shown], *more))
        lines = textwrap.wrap(held, width, break_long_words=False, break_on_hyphens=False)
        if len(lines) <= PLAN_LINES:
            break
    return [line.replace(_HELD, " ") for line in lines]


def _folded(chosen: Sequence[Candidate], short: bool = False) -> list[str]:
    """Names of candidates, repeated blocks that keep the same as one."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for one in chosen:
        if len(one.modules) == 1:
            alike.setdefault(one.keep, []).append(one.modules[0])
    names = {keep: fold(paths) for keep, paths in alike.items()}
    return list(dict.fromkeys(
        _name(one, names[one.keep][one.modules[0]] if len(one.modules) == 1 else None, short) for one in chosen))


def _gains(planning: Planning) -> list[str]:
    alike: dict[tuple[int, str, str], list[Candidate]] = {}
    for option in planning.gains:
        (one,) = option.plan.chosen
        gain = planning.bare.peak.bytes - option.plan.peak.bytes
        if len(one.modules) == 1 and not one.keep and gain > PLAN_TOLERANCE * planning.bare.peak.bytes:
            alike.setdefault((gain, _longer(planning, option), option.phase or ""), []).append(one)
    rows = [[format_bytes(gain), longer, phase, ", ".join(_folded(those)) + ("" if len(those) == 1 else " (each)")]
            for (gain, longer, phase), those in alike.items()]
    title = "What one module alone would do"
    return [title, *table(["peak lower by", "longer", "peak then in", "checkpoint"], rows[:PLAN_GAINS], "rrll")] \
        if rows else []


def _poor(planning: Planning) -> list[str]:
    lines = [line for poor in planning.poor for line in paragraph(_poor_words(planning, poor), "- ")]
    return ["What one would try first, and why not", *lines] if lines else []


def _poor_words(planning: Planning, poor: Poor) -> str:
    longer = f"{share(poor.again_ns, planning.step.work_ns)} longer"
    gain = planning.bare.peak.bytes - poor.peak_bytes
    falls = f"lowers the peak by {format_bytes(gain)}" if gain > 0 else \
        "does not lower the peak" if not gain else f"raises the peak by {format_bytes(-gain)}"
    saved = "" if poor.saved_bytes is None else f"frees {format_bytes(poor.saved_bytes)} of what is saved, but "
    better = next((one for one in planning.options if one.name == poor.better), None)
    instead = "" if better is None or not better.plan.chosen else (
        f"; {better.name} comes as low for {_longer(planning, better)}")
    if poor.name == WHOLE_MODEL:
        return f"The whole model as one checkpoint {saved}{falls} ({longer}): backward begins by making all of it " \
               f"again{instead}"
    if poor.name == MOST_SAVED:
        return f"`{poor.module}` saves most, and {saved}{falls} ({longer})"
    return f"{usual_name(poor.name).capitalize()} {falls} ({longer}){instead}"


def _unsafe(planning: Planning) -> list[str]:
    """Modules that are in no plan, where they would do something else when they run twice: those that do so of
    themselves, with the reason, and those that only contain them."""
    unsafe = {path: verdict for path, verdict in planning.safety.items() if verdict.safety is Safety.UNSAFE}
    if not unsafe:
        return []
    whole = {call.path for call in planning.step.calls if call.outermost}
    around = {path for path, verdict in unsafe.items()
              if _through_others(verdict, [one for other, one in unsafe.items() if other != path and (
                  path in whole or other.startswith(f"{path}."))])}
    why: dict[tuple[str, ...], list[str]] = {}
    for path, verdict in unsafe.items():
        if path not in around:
            why.setdefault(_reasons(path, verdict), []).append(path)
    groups = list(why.items())
    lines = ["Not safe to run twice, and in no plan" + (" but those that are allowed" if planning.allowed else "")]
    for reasons, paths in groups[:PLAN_REASONS]:
        more = f"; and {len(reasons) - 1} more" if len(reasons) > 1 else ""
        lines += paragraph(f"{_listed(planning, paths, whole)}: {reasons[0]}{more}", "- ")
    rest = sum(len(paths) for _, paths in groups[PLAN_REASONS:])
    if rest:
        lines += paragraph(f"and {rest} more modules, in the JSON")
    if around:
        these = _listed(planning, [path for path in unsafe if path in around], whole)
        lines += paragraph(f"{these}: for what is in {'them' if len(around) > 1 else 'it'}", "- ")
    return lines


def _through_others(verdict: Verdict, inside: Iterable[Verdict]) -> bool:
    """Whether all that is said of a module is said of modules inside it."""
    said = {reason for one in inside for reason in one.reasons}
    return bool(verdict.reasons) and said.issuperset(verdict.reasons)


def _reasons(path: str, verdict: Verdict) -> tuple[str, ...]:
    """Why a module is not safe, without its own name, so that repeated blocks read alike."""
    return tuple(reason.text.replace(f"`{path}.", "`") + (f" ({reason.line})" if reason.line else "")
                 for reason in verdict.reasons)


def _listed(planning: Planning, paths: Sequence[str], whole: Collection[str]) -> str:
    """Modules in a line: repeated blocks as one, and which of them are allowed."""
    names = fold([path for path in paths if path not in whole])
    listed = ", ".join(dict.fromkeys(names.get(path, "the whole model") for path in paths))
    allowed = [path for path in paths if path in planning.allowed]
    return listed if not allowed else f"{listed} (allowed: {', '.join(allowed)})"


def _chosen(planning: Planning, diagnosis: Diagnosis | None) -> list[str]:
    if planning.chosen is None:
        return _none_fits(planning, diagnosis)
    option, bare = planning.options[planning.chosen], planning.bare.peak.bytes
    if not option.plan.chosen:
        unsafe = any(verdict.safety is Safety.UNSAFE for verdict in planning.safety.values())
        lines = ["No checkpoint is needed" if planning.budget is not None else
                 f"No {'safe ' * unsafe}checkpoint would pay"]
        if unsafe and planning.budget is None:
            lines += paragraph(_ALLOW)
        return lines if planning.budget is None else [*lines, *facts(_left(planning, option))]
    noise = "" if option.noise_ns is None else (
        f"; from step to step that differed by {share(option.noise_ns, planning.step.work_ns)}")
    where = _place_words(option)
    return [f"Chosen: {option.name}", *facts({
        "checkpoints": ", ".join(_folded(option.plan.chosen)),
        "allowed": _allowed(planning, option),
        "peak": f"{format_bytes(option.plan.peak.bytes)}, {format_bytes(bare - option.plan.peak.bytes)} less"
        + (f", in {where}" if where else ""),
        "longer": f"{_longer(planning, option)} of the step's {format_time(planning.step.work_ns)}, by the time that "
                  f"these forwards took, and checkpoints themselves{noise}",
        **_left(planning, option),
    })]


def _left(planning: Planning, option: Option) -> dict[str, str | None]:
    headroom = planning.headroom(option)
    if headroom is None or planning.budget is None:
        return {}
    aside = format_bytes(planning.aside) if planning.aside else "nothing"
    return {"headroom": f"{format_bytes(headroom)} of {format_bytes(planning.budget)}, {aside} set aside"}


def _allowed(planning: Planning, option: Option) -> str | None:
    """Modules of a plan that are unsafe."""
    found = [path for one in option.plan.chosen for path in one.modules
             if planning.safety[path].safety is Safety.UNSAFE]
    if not found:
        return None
    why = "; ".join(f"{path}: {_reasons(path, planning.safety[path])[0]}" for path in found)
    return f"though not safe: {why}. apply_plan takes them with allow_unsafe={json.dumps(found)} alone"


_ALLOW = "Unsafe modules are in no plan; where what they do twice does no harm, --allow MODULE lets one be in plans"


def _none_fits(planning: Planning, diagnosis: Diagnosis | None) -> list[str]:
    floor = planning.floor
    assert floor is not None
    assert planning.budget is not None
    aside = ", with what is set aside" if planning.aside else ""
    largest = floor.holders[:PLAN_HOLDERS]
    lines = ["No plan fits", *paragraph(
        f"The lowest peak that was found is {format_bytes(floor.bytes)}, "
        f"{format_bytes(floor.bytes + planning.aside - planning.budget)} above the budget{aside}."), *facts({
            "peak": _place_words(floor.option) or None,
            "most of it": ", ".join(f"{words(name)} {format_bytes(size)}" for name, size in largest),
            "checkpoints": ", ".join(_folded(floor.option.plan.chosen)) or "none"})]
    lines += ["", "What would help instead"]
    for option in planning.options:
        headroom = planning.headroom(option)
        if headroom is not None and headroom >= 0:  # a run of modules that only the script itself can make one
            lines += paragraph(f"{option.name} fits, and has to be written into the script: "
                               + ", ".join(_folded(option.plan.chosen)), "> ")
    if any(verdict.safety is Safety.UNSAFE for verdict in planning.safety.values()):
        lines += paragraph(_ALLOW, "> ")
    for name, _ in largest:
        for text in _help(name, floor.option, diagnosis):
            lines += paragraph(f"{words(name)}: {text}", "> ")
    return lines + paragraph("`memdiag diagnose RUN` says what the peak is made of, and what would lower it", "> ")


def _place_words(option: Option) -> str:
    """Where a peak lies: its phase, and what allocates there."""
    where = [option.phase, None if option.place is None else place_words(option.place)]
    return "".join(f"{', ' * bool(number)}{part}" for number, part in enumerate(filter(None, where)))


def _help(holder: str, lowest: Option, diagnosis: Diagnosis | None) -> list[str]:
    """What to do about a holder of the lowest peak: what the run's findings advise, else what is true of any run."""
    cls = _CLASSES.get(holder)
    advice = [finding.advice[0].text for finding in ([] if diagnosis is None else diagnosis.findings)
              if finding.advice and finding.kind != _PLAIN and (
                  finding.cls in (Class.ACTIVATION, Class.WORKSPACE) if cls is None else finding.cls is cls)]
    if cls is not None:
        return advice[:1] or [_INSTEAD[cls]]
    place = lowest.place
    there = "" if place is None or place.operator is None else (
        f"what {place.operator} needs{f' at {place.line}' if place.line else ''}, computed in parts; ")
    return [*advice[:1], f"{there}a smaller batch or sequence"]


# --- JSON -------------------------------------------------------------------------------------------------------


def plans_to_json(planning: Planning, about: dict[str, Any]) -> str:
    """The same for machines: the contract of ``docs/json.md``."""
    step, bare, known = planning.step, planning.bare, models(about)
    return json.dumps({
        "schema_version": SCHEMA_VERSION,
        "about": about,
        "present": [{"what": one.what, "step_time_ns": one.again_ns, "bytes": one.bytes} for one in step.present],
        "other_inputs": planning.other_inputs,
        "baseline": {"peak_bytes": bare.peak.bytes, "phase": planning.phase, "step_time_ns": step.work_ns},
        "budget_bytes": planning.budget,
        "plans": [_plan(planning, option, known) for option in planning.options],
        "chosen": planning.chosen,
        "floor": None if planning.floor is None else {
            "bytes": planning.floor.bytes, **_where(planning.floor.option),
            "holders": [{"what": what, "bytes": size} for what, size in planning.floor.holders]},
        "gains": [{**_region(one.plan.chosen[0], known), **_gain(planning, one), **_where(one)}
                  for one in planning.gains],
        "poor_choices": [
            {"name": poor.name, "module": poor.module, "saved_bytes": poor.saved_bytes,
             "predicted": {"peak_bytes": poor.peak_bytes, "step_time_ns": step.work_ns + poor.again_ns},
             "better": poor.better} for poor in planning.poor],
        "safety": [
            {"module": path, "verdict": verdict.safety.value, "with": list(verdict.conditions),
             "reasons": [{"text": reason.text, "line": reason.line} for reason in verdict.reasons],
             "allowed": path in planning.allowed}
            for path, verdict in planning.safety.items()],
    }, indent=2, ensure_ascii=False)


def _plan(planning: Planning, option: Option, known: Sequence[Model]) -> dict[str, Any]:
    plan = option.plan
    return {
        "name": option.name,
        "regions": [{**_region(one, known), "gain": {"peak_bytes": gain, "step_time_ns": one.again_ns}}
                    for one, gain in zip(plan.chosen, option.alone, strict=True)],
        "predicted": {
            "peak_bytes": plan.peak.bytes, **_where(option), "step_time_ns": planning.step.work_ns + plan.again_ns,
            "time_noise_ns": option.noise_ns},
        "headroom_bytes": planning.headroom(option),
        "set_aside": planning.set_aside,
    }


def _region(one: Candidate, known: Sequence[Model]) -> dict[str, Any]:
    model = model_of(one.modules[0], known)
    return {"modules": list(one.modules), "kind": "selective" if one.keep else "full", "keep": list(one.keep),
            "model": None if model is None else model.name}


def _gain(planning: Planning, one: Option) -> dict[str, int]:
    return {"peak_bytes": planning.bare.peak.bytes - one.plan.peak.bytes, "step_time_ns": one.plan.again_ns}


def _where(option: Option) -> dict[str, str | None]:
    place = option.place or Place(None, None, None)
    return {"phase": option.phase, "module": place.module, "operator": place.operator, "line": place.line}
