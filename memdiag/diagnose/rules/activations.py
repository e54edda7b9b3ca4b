"""What forward makes and backward needs; and the patterns that make it more than it must be."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from memdiag.diagnose.evidence import Evidence
from memdiag.diagnose.holders import last_looks_at, who_holds_most
from memdiag.diagnose.model import Advice, Class, Finding, Ints, Mask
from memdiag.policy import FINDING_SHARE, MICRO_BATCHES, PATTERN_SHARE, WORST_BATCH
from memdiag.trace import NONE, Kind, Phase, Role
from memdiag.trace.places import at
from memdiag.units import format_bytes

_COPIES = ("aten::clone", "aten::_to_copy", "aten::to")

Pattern = Callable[[Evidence, Mask], Finding | None]


def activations(found: Evidence) -> Iterable[Finding]:
    """The most telling pattern, or activations as such."""
    chosen = found.of(Class.ACTIVATION) & ~found.single
    if not found.matters(chosen):
        return
    named: list[Finding] = []
    for pattern in _PATTERNS:
        finding = pattern(found, chosen)
        if finding is not None:
            named.append(finding)
        if finding is not None and pattern is _unused_graph:  # the others are about forwards that train
            chosen = chosen & ~found.saves.never_read
            if not found.matters(chosen):
                break
    yield from named
    if not named:
        yield _plain(found, chosen)


def _plain(found: Evidence, chosen: Mask) -> Finding:
    evidence = [f"{format_bytes(found.bytes_of(chosen))} of activations {found.when}", found.origin(chosen)]
    anew = found.bytes_of(chosen & (found.role == Role.RECOMPUTED_ACTIVATIONS))
    if anew:
        evidence.append(f"{format_bytes(anew)} of it were made anew for a checkpoint")
    reachable = f"could free {format_bytes(found.saving(found.reachable))} at most"
    passing = found.bytes_of(chosen & (found.role == Role.BACKWARD_TEMPORARIES))
    if passing:
        evidence.append(f"{format_bytes(passing)} of it are gradients on their way through backward")
    advice = _checkpointing(found)
    if advice:
        evidence.append(f"checkpointing {reachable}")
        if 2 * anew > found.bytes_of(chosen):
            advice = [replace(advice[0], text="checkpoint smaller parts, such as each block by itself")]
    elif found.leaking:
        advice = [Advice("end the leak first: what is freed here, it takes again in later steps", None)]
    else:
        evidence.append(f"checkpointing is not the answer: it {reachable}")
        advice = [Advice("compute in chunks where it is made, or with an operator that keeps less", None)]
    unsaved = found.bytes_of(chosen & (found.role == Role.OTHER_ACTIVATIONS))
    title = "Activations kept for backward"
    if 2 * unsaved > found.bytes_of(chosen):
        title = "Results that no backward needs"
    return found.finding(Class.ACTIVATION, "activations", title, chosen, evidence, advice)


def _checkpointing(found: Evidence) -> list[Advice]:
    """Checkpointing as advice, where it could lower the peak by enough; what grows comes back with the next steps."""
    saving = found.saving(found.reachable)
    if saving < FINDING_SHARE * found.peak_bytes or found.leaking:
        return []
    return [Advice("checkpoint the modules that save most", saving, at_most=True)]


def _unused_graph(found: Evidence, chosen: Mask) -> Finding | None:
    """Graphs that no backward ever went through: saved, and let go without being read."""
    mine = chosen & found.saves.never_read
    if found.bytes_of(mine) < PATTERN_SHARE * found.bytes_of(chosen):
        return None
    since = found.saves.last_saved
    return found.finding(
        Class.ACTIVATION, "evaluation_graph", "A graph is built that no backward uses", mine,
        [f"{format_bytes(found.bytes_of(mine))} were saved for a backward, and let go without one", found.origin(mine)],
        [Advice("run that forward under `torch.no_grad()`", found.saving(mine, since))], since=since)


def _kept(found: Evidence, chosen: Mask) -> Finding | None:
    """Activations that something holds though no backward needs them: beyond their step, or beyond the forward."""
    spans, nest, life = found.at.trace["spans"], found.at.nest, found.at.life
    inner, outer = nest.of(nest.module, found.at.born_in), nest.of(nest.outer_module, found.at.born_in)
    since = found.kept_since()
    step_over = (found.at.born_step != NONE) & (found.at.born_step < found.step)
    step_over &= (found.role == Role.OTHER_ACTIVATIONS) | (
        (found.role == Role.SAVED_ACTIVATIONS) & (found.saves.last_read <= since))
    # What a forward's own variables hold is gone when the outermost call has ended; what lives on was stored.
    inside = (inner != NONE) & (found.role == Role.OTHER_ACTIVATIONS) & ~found.saves.saved
    stored = inside & (life.died > at(spans["end_event"], outer))
    # A copy that nothing saves was made to be stored: without that there is none.
    since[stored] = np.where(found.made_by(*_COPIES), life.born, at(spans["end_event"], inner))[stored]
    mine = chosen & (step_over | stored)
    saving = found.saving(mine, since)
    if saving < FINDING_SHARE * found.peak_bytes:
        return None
    earlier, now = found.bytes_of(mine & step_over), found.bytes_of(mine & ~step_over)
    in_graphs = found.bytes_of(mine & (found.role == Role.SAVED_ACTIVATIONS))
    holder = who_holds_most(found.at.trace, last_looks_at(found.at.trace, mine))
    evidence = ["checkpointing frees none of it: " + ("something in the script holds it" if holder is None else
                                                      holder.sentence)]
    if in_graphs:
        evidence.insert(0, f"{format_bytes(in_graphs)} of it was saved for a backward: the graph of that step is kept")
    if now:
        evidence.insert(0, f"{format_bytes(now)} were made in this step, and are there after the forward")
    if earlier:
        evidence.insert(0, f"{format_bytes(earlier)} were made in an earlier step, and do not grow in number")
    return found.finding(
        Class.ACTIVATION, "hidden_states", "Activations are held that no backward needs", mine, evidence,
        [Advice("do not store them, or let go of them when the step is over", saving)], holder=holder, since=since)


def _micro_batches(found: Evidence, chosen: Mask) -> Finding | None:
    """Several forwards of one model alive at once, before one backward."""
    calls = found.saves.calls(found.step) if found.step != NONE else []
    size = np.array([found.bytes_of(chosen & call) for call in calls])
    alike = [call for call, bytes_ in zip(calls, size, strict=True) if bytes_ >= size.max() / 2]
    backwards = _backwards(found)
    if len(alike) < MICRO_BATCHES or not len(backwards):
        return None
    mine = chosen & np.logical_or.reduce(alike)
    if found.bytes_of(mine) < PATTERN_SHARE * found.bytes_of(chosen):
        return None
    # In every step all calls but one could have been through their backward before the next.
    # So could their inputs, where nothing but the graph held them.
    of_graphs = (found.role == Role.INPUTS) & (found.at.life.died <= found.step_ends())
    freed, every = np.zeros(len(chosen), dtype=bool), mine.copy()
    for step in {found.step, *found.at.trace["steps"]["step"].tolist()}:
        of_step = found.saves.calls(step)
        for call in of_step[:-1]:
            freed |= call & (chosen | of_graphs)
        for call in of_step:
            every |= chosen & call
    evidence = [f"{format_bytes(found.bytes_of(mine))} were saved by {len(alike)} calls of the same model in this step",
                f"one of them saved {format_bytes(int(size.max()))}"]
    in_step = int((backwards == found.step).sum())
    if in_step >= len(alike):
        return found.finding(
            Class.ACTIVATION, "retained_graph", f"The graphs of {len(alike)} forwards outlive their backwards", every, [
                *evidence, f"{in_step} backwards went through them in this step, and let none go (`retain_graph`)"],
            [Advice("detach what a forward leaves for the next (`state.detach()`); then `retain_graph` is not needed",
                    found.saving(freed))])
    return found.finding(
        Class.ACTIVATION, "retained_graph", f"{len(alike)} forwards are alive together before one backward", every,
        evidence,
        [Advice("where their losses are only summed, call backward on each loss as it comes", found.saving(freed))])


def _backwards(found: Evidence) -> Ints:
    """The step of each backward."""
    spans, nest = found.at.trace["spans"], found.at.nest
    phases = np.flatnonzero((spans["kind"] == Kind.PHASE) & np.isin(
        spans["name"], found.at.trace.numbers(Phase.BACKWARD.label)))
    return nest.of(found.at.span_steps, phases)


def _largest(found: Evidence, chosen: Mask) -> tuple[int, ...]:
    """The largest shape among those that were saved."""
    return max(found.saves.shapes_of(chosen)[1], key=math.prod)


def _times(shape: tuple[int, ...]) -> str:
    return " × ".join(str(size) for size in shape)


def _attention(found: Evidence, chosen: Mask) -> Finding | None:
    softmaxes = found.saves.softmaxes
    every = found.around(softmaxes, between_products=True)
    mine = chosen & every
    if found.bytes_of(mine) < PATTERN_SHARE * found.bytes_of(chosen):
        return None
    shape = _largest(found, every & softmaxes.saved)
    evidence = [f"{format_bytes(found.bytes_of(mine))} are softmaxes of up to {_times(shape)}, what they are made "
                "from and what is made of them"]
    if shape[-1] == shape[-2]:
        evidence.append("they grow with the square of the sequence")
    return found.finding(
        Class.ACTIVATION, "attention_matrix", "Attention matrices are kept for backward", mine, evidence,
        [Advice("`torch.nn.functional.scaled_dot_product_attention`, which keeps no matrix", found.saving(mine)),
         *_checkpointing(found)])


def _logits(found: Evidence, chosen: Mask) -> Finding | None:
    losses = found.saves.class_losses
    every = found.around(losses)
    mine = chosen & every
    if found.bytes_of(mine) < PATTERN_SHARE * found.bytes_of(chosen):
        return None
    return found.finding(
        Class.ACTIVATION, "logits", "The logits and their copies in the loss", mine,
        [f"{format_bytes(found.bytes_of(mine))} are logits of up to {_times(_largest(found, every & losses.saved))}, "
         "what the loss makes of them, and their gradients"],
        # Chunks lower also what is there without gradients: of a teacher, and inside the loss.
        [Advice("compute the loss in chunks of tokens", found.saving(every), at_most=True), *_checkpointing(found)])


def _worst_batch(found: Evidence, chosen: Mask) -> Finding | None:
    """One step far above the others, with inputs of another shape."""
    peaks = found.run.phase_peaks
    work = np.isin(peaks.phase, (Phase.FORWARD, Phase.BACKWARD)) & (peaks.step != NONE)
    steps = np.unique(peaks.step[work])
    if found.step == NONE or len(steps) < 3 or found.step not in steps:
        return None
    highest = np.array([peaks.bytes[work & (peaks.step == step)].max() for step in steps])
    median = float(np.median(highest))
    if found.peak_bytes < WORST_BATCH * median:
        return None
    table = found.run.trace["steps"]
    shapes = {int(s): found.run.trace.string(int(t)) for s, t in zip(table["step"], table["input_shapes"], strict=True)}
    mine, others = shapes.get(found.step), {text for step, text in shapes.items() if step != found.step}
    if mine is None or mine in others:
        return None
    return found.finding(
        Class.ACTIVATION, "worst_batch", "One batch is much larger than the others", chosen,
        [f"the step of the peak has inputs {mine}, and reaches {format_bytes(found.peak_bytes)}",
         f"the median step reaches {format_bytes(round(median))}"],
        [Advice("bucket or cap the lengths", round(found.peak_bytes - median)), *_checkpointing(found)])


_PATTERNS: tuple[Pattern, ...] = (_unused_graph, _kept, _micro_batches, _attention, _logits, _worst_batch)
