"""Checkpointing that is there already: what it frees, what it costs, and where it goes wrong."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from memdiag.diagnose.evidence import Evidence
from memdiag.diagnose.model import Advice, Finding, Ints, Severity
from memdiag.policy import RECOMPUTE_FREES, RECOMPUTE_TIME
from memdiag.trace import NONE, Kind, Role
from memdiag.trace.model import OTHER_RANDOM, RECOMPUTE, REPLAYED
from memdiag.trace.places import module_names, relative
from memdiag.units import format_bytes


def recompute(found: Evidence) -> Iterable[Finding]:
    regions = _regions(found)
    if len(regions):
        yield from _worth(found, regions)
    yield from _state_written_again(found)
    yield from _other_random_numbers(found)
    yield from _no_gradient(found)


def _regions(found: Evidence) -> Ints:
    """Spans of the outermost modules that ran again, in steps that are not warm-up."""
    trace = found.at.trace
    spans = trace["spans"]
    again = (spans["kind"] == Kind.MODULE) & (spans["flags"] & RECOMPUTE != 0)
    outermost = again & (found.at.nest.outer_module == np.arange(len(again)))
    warm = found.run.trace["steps"]["step"][found.run.trace["steps"]["warm_up"] != 0]
    return np.flatnonzero(outermost & ~np.isin(found.at.span_steps, warm))


def _worth(found: Evidence, regions: Ints) -> Iterable[Finding]:
    """Regions that free next to nothing, or whose recomputation costs more of the step than it frees of the peak."""
    trace, nest = found.at.trace, found.at.nest
    spans = trace["spans"]
    steps = np.unique(found.at.span_steps[regions])
    steps = steps[steps != NONE]
    if not len(steps):
        return
    inside = np.isin(nest.of(nest.outer_module, found.at.born_in), regions)
    freed = int(found.size[inside & (found.role == Role.RECOMPUTED_ACTIVATIONS)].sum()) // len(steps)
    of_step = spans_of(found, steps)
    took = int((spans["end_ns"][regions] - spans["start_ns"][regions]).sum())
    time = took / max(int((spans["end_ns"][of_step] - spans["start_ns"][of_step]).sum()), 1)
    share = freed / found.peak_bytes if found.peak_bytes else 0.0
    names = sorted({trace.string(int(name)) or "" for name in spans["name"][regions]})
    said = [
        f"{len(names)} checkpointed region{'s' if len(names) > 1 else ''} ({', '.join(names[:3])}"
        + (", …)" if len(names) > 3 else ")"),
        f"in a step they make {format_bytes(freed)} anew, which is what they free: {share:.1%} of the peak",
        f"running them again takes {time:.0%} of the step, measured while recording",
    ]
    advice = [Advice("checkpoint what saves most instead: see the largest tensors saved for backward", None)]
    if share < RECOMPUTE_FREES:
        yield Finding(
            None, "checkpoint_frees_nothing", "The checkpoints that are there free next to nothing", Severity.MEDIUM,
            freed, share, said, advice)
    elif time >= RECOMPUTE_TIME and time > share:
        yield Finding(
            None, "costly_recompute", "Recomputation costs more of the step than it frees of the peak",
            Severity.LOW, freed, share, said, advice)


def spans_of(found: Evidence, steps: Ints) -> Ints:
    """Rows of the spans of steps."""
    is_step = found.at.trace["spans"]["kind"] == Kind.STEP
    return np.flatnonzero(is_step & np.isin(found.at.span_steps, steps))


def _state_written_again(found: Evidence) -> Iterable[Finding]:
    """Buffers that a region writes to, and so writes twice for each step."""
    trace = found.run.trace
    marks = trace["marks"]
    texts = [text for kind, text in zip(marks["kind"].tolist(), marks["text"].tolist(), strict=True)
             if trace.string(kind) == REPLAYED]
    if not texts:
        return
    names = sorted({trace.string(text) or "" for text in texts})
    yield Finding(
        None, "replay_hazard", "Recomputation updates state a second time", Severity.HIGH, 0, 0.0,
        [f"written in forward, and again in backward: {', '.join(names[:4])}" + (", …" if len(names) > 4 else ""),
         "running statistics and counters then move twice with each step"],
        [Advice("leave these modules out of the checkpointed regions", None)])


def _other_random_numbers(found: Evidence) -> Iterable[Finding]:
    """Operators that drew other random numbers when they ran again than they had in forward."""
    trace, nest = found.run.trace, found.run.nest
    spans = trace["spans"]
    drawn = np.flatnonzero(spans["flags"] & OTHER_RANDOM)
    if not len(drawn):
        return
    places = {
        (trace.string(name) or "", trace.string(module), relative(trace, trace.string(line)))
        for name, module, line in zip(
            spans["name"][drawn].tolist(), module_names(trace, nest, drawn).tolist(), spans["line"][drawn].tolist(),
            strict=True)}
    said = sorted(" ".join(part for part in (
        name, f"in {module}" if module else "", f"({line})" if line else "") if part) for name, module, line in places)
    yield Finding(
        None, "replay_hazard", "Recomputation draws other random numbers than forward did", Severity.HIGH, 0, 0.0,
        [f"ran again for a checkpoint without the random state of the forward: {', '.join(said[:3])}"
         + (", …" if len(said) > 3 else ""),
         f"{len(drawn)} times in the run: the gradients are those of another forward than the one that made the loss"],
        [Advice("`preserve_rng_state=True` in these checkpoints, which is the default", None)],
        birth=relative(trace, trace.string(int(spans["line"][drawn[0]]))))


def _no_gradient(found: Evidence) -> Iterable[Finding]:
    """Calls of the reentrant checkpoint that no backward came to."""
    trace, nest = found.run.trace, found.run.nest
    spans = trace["spans"]
    calls = _named(found, Kind.FUNCTION, "CheckpointFunction")
    closed = np.isin(found.run.span_steps[calls], trace["steps"]["step"])
    undone = np.isin(
        found.run.span_steps[calls], found.run.span_steps[_named(found, Kind.NODE, "CheckpointFunctionBackward")])
    recomputing = nest.of(nest.node, calls) != NONE
    lost = calls[closed & ~undone & ~recomputing]
    if not len(lost):
        return
    line = relative(trace, trace.string(int(spans["line"][lost[0]])))
    yield Finding(
        None, "reentrant_pitfall", "Reentrant checkpoints pass no gradient", Severity.HIGH, 0, 0.0,
        [f"{len(lost)} calls in forward, and no backward came to any of them" + (f" ({line})" if line else ""),
         "none of their inputs wants gradients, so the parameters inside are never trained"],
        [Advice("`use_reentrant=False`", None)], birth=line)


def _named(found: Evidence, kind: Kind, name: str) -> Ints:
    trace = found.run.trace
    spans = trace["spans"]
    return np.flatnonzero((spans["kind"] == kind) & np.isin(spans["name"], trace.numbers(name)))
