"""Memory that is kept from step to step, more of it each time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from memdiag.diagnose.evidence import Evidence
from memdiag.diagnose.holders import capacity, is_variable, last_looks_at, who_holds_most
from memdiag.diagnose.model import Advice, Class, Finding, Holder, Mask, Severity
from memdiag.diagnose.rules.failures import TRACEBACK
from memdiag.diagnose.rules.snapshots import snapshots
from memdiag.policy import FINDING_SHARE, PATTERN_SHARE, SWELLING_SHARE
from memdiag.trace import NONE, Role
from memdiag.trace.model import ITS_GRAPH
from memdiag.trace.places import at
from memdiag.units import format_bytes

_LET_GO = "let go of it when its step is over, keep a bounded number, or move it to disk"
_DETACH = "keep a number (`.item()`) or a detached tensor (`.detach()`), not one with its graph"


def leaks(found: Evidence) -> Iterable[Finding]:
    yield from _cycles(found)
    yield from _filling(found)
    if found.leaking:
        yield _leak(found) if found.at is found.run else _in_light(found)


def _leak(found: Evidence) -> Finding:
    chosen = found.leaked
    graph = (found.role == Role.SAVED_ACTIVATIONS) | (found.role == Role.RECOMPUTED_ACTIVATIONS)
    in_graphs = found.bytes_of(chosen & graph)
    since = found.kept_since()
    unread = _unread(found)
    holder = _holder(found, found.growing.leaks)
    evidence = _evidence(found, in_graphs, holder)
    part = None
    if 2 * found.bytes_of(chosen & graph & unread) > found.bytes_of(chosen):
        # Without a graph nothing of it is there, in the step that makes it as little as later.
        evidence.append("no backward ever reads what that forward saves")
        since = np.where(unread, found.saves.last_saved, since)
        gone = found.growing.leaks | unread
        advice = Advice("run that forward under `torch.no_grad()`", found.saving(gone, since))
    else:
        gathered = _gathered(found)
        since[gathered] = found.at.life.born[gathered]
        keep = _DETACH if _through_graph(holder) or 2 * in_graphs > found.bytes_of(chosen) else _LET_GO
        gone, part = found.growing.leaks | gathered, found.swelling
        state = found.role == Role.OPTIMIZER_STATE
        if 2 * found.bytes_of(chosen & state) > found.bytes_of(chosen):
            gone = gone & state
            evidence.append("it is the state of ever more optimizers, all of which are kept")
            keep = "make an optimizer once, or let go of the last one when the next is made"
        if holder is not None and any(TRACEBACK in piece for piece in holder.chain):
            keep = "keep the text of the exception (`str(error)`), not the exception: its traceback keeps the frames"
        saving = found.saving(gone, since, part=part)
        more = saving - found.saving(gone, since)
        if more >= SWELLING_SHARE * found.peak_bytes:
            evidence.append(f"{format_bytes(more)} more are in what each step computes from it, larger every time")
        advice = Advice(keep, saving)
    kind, title = "growth", _grows(found)
    copies, number, times = snapshots(found)
    if found.bytes_of(chosen & copies) > PATTERN_SHARE * found.bytes_of(chosen):
        kind, title = "model_copy", "Copies of the model's state are kept, more of them with time"
        evidence += [
            f"{times} times, {number:g} storage{'s' * (number != 1)} of each parameter's size came together and "
            "stayed, outside the model: a state dict of it, or of its optimizer",
            "a file of training state is called a checkpoint too; activation checkpointing is something else"]
        advice = Advice(
            "write it to disk (`torch.save`) or move it to the host (`.cpu()`), and keep only the last or the best",
            advice.bytes)
    finding = found.finding(Class.LEAK, kind, title, chosen, evidence, [advice], Severity.HIGH, holder, since)
    return replace(finding, cured=gone, part=part)


def _in_light(found: Evidence) -> Finding:
    """A leak, where the peak is in a light step: what it is of, and what to do about it, is told by the full steps."""
    chosen = found.leaked
    holder = _holder(found, found.growing.leaks)
    in_graphs = found.bytes_of(chosen & (found.role == Role.SAVED_ACTIVATIONS))
    if holder is not None and not _through_graph(holder):
        in_graphs = 0  # light steps do not tell when a graph lets go of what Python holds too
    kind, title, keep = "growth", _grows(found), _LET_GO
    if _through_graph(holder) or 2 * in_graphs > found.bytes_of(chosen):
        keep = _DETACH
    of_full = Evidence(found.run, found.run, found.run.line.peak_event)
    if of_full.bytes_of(of_full.leaked):
        told = _leak(of_full)
        kind, title = told.kind, told.title
        if told.advice[0].text not in (_LET_GO, _DETACH):
            keep = told.advice[0].text
    return found.finding(
        Class.LEAK, kind, title, chosen, _evidence(found, in_graphs, holder),
        [Advice(keep, found.saving(chosen) or None)], Severity.HIGH, holder)


def _grows(found: Evidence) -> str:
    return f"Memory grows by {format_bytes(round(found.leak_rate))} with every step"


def _through_graph(holder: Holder | None) -> bool:
    return holder is not None and any(ITS_GRAPH in piece for piece in holder.chain)


def _evidence(found: Evidence, in_graphs: int, holder: Holder | None) -> list[str]:
    first, left = found.growing.leak_sites[0], found.bytes_of(found.leaked)
    where = first.line or first.operator
    evidence = [
        f"live memory at the end of a step grows by {format_bytes(round(found.leak_rate))} per step, until the last",
        f"{found.when} {format_bytes(left)} were left from earlier steps" if left else
        "how much of the peak earlier steps have left is not known",
        f"the largest part is allocated at {where}, {format_bytes(round(first.bytes_per_step))} per step" if where else
        "where it is allocated is not known of light steps: record some in full (`--steps`)",
    ]
    if in_graphs:
        evidence.append(f"{format_bytes(in_graphs)} of it was saved for a backward: graphs are kept")
    if holder is not None:
        evidence.append(holder.sentence)
    return evidence


def _unread(found: Evidence) -> Mask:
    """What was saved by forwards that no backward goes through in the whole run, told by the line that calls them."""
    trace, saves = found.at.trace, found.saves
    outer = found.at.nest.of(found.at.nest.outer_module, found.at.born_in)
    line = np.where(outer != NONE, at(trace["spans"]["line"], outer), trace["allocations"]["line"])
    read = np.unique(line[saves.saved & ~saves.unread])
    unread: Mask = saves.unread & ~np.isin(line, read)
    return unread


def _gathered(found: Evidence) -> Mask:
    """Concatenations of all that leaked so far from one place: copies, made of it alone."""
    trace, life = found.at.trace, found.at.life
    copies = np.flatnonzero(found.concatenated & (found.size >= FINDING_SHARE * found.peak_bytes))
    table = trace["allocations"]
    places, place = np.unique(np.stack([table["line"], table["kernel"]]), axis=1, return_inverse=True)
    place = place.reshape(-1)
    leaking = np.zeros(places.shape[1], dtype=bool)
    leaking[place[found.growing.leaks]] = True
    kept = np.flatnonzero(leaking[place])  # what the last step left is not known to stay, but is gathered too
    gathered = np.zeros(len(found.size), dtype=bool)
    for copy in copies.tolist():
        there = (life.born[kept] < life.born[copy]) & (life.died[kept] > life.born[copy])
        gathered[copy] = found.size[copy] in np.bincount(place[kept], there * found.size[kept])
    return gathered


def _cycles(found: Evidence) -> Iterable[Finding]:
    """What nothing holds any more, and nothing has collected yet."""
    if found.at is not found.run:
        return
    waiting, since = found.growing.cycles, found.kept_since()
    if found.matters(waiting):
        yield found.finding(
            Class.ACTIVATION, "garbage_cycle", "Reference cycles wait for the garbage collector", waiting,
            [f"{format_bytes(found.bytes_of(waiting))} {found.when} are held by cycles alone, and are no leak"],
            [Advice("break the cycle, or call `gc.collect()` every few steps", found.saving(waiting, since))],
            since=since)


def _filling(found: Evidence) -> Iterable[Finding]:
    """What a container of a fixed capacity keeps, more with every step until it is full."""
    kept = found.filling
    holder = _holder(found, found.growing.filling)
    if holder is None or not found.matters(kept):
        return
    most = capacity(" → ".join(holder.chain))
    cls = found.main_class(kept, Class.INPUT_BATCHES, Class.ACTIVATION)
    items = len(np.unique(found.at.born_step[kept & found.alive]))
    yield found.finding(
        cls, "filling_container", "A container fills, up to a fixed number of items", kept,
        [f"{format_bytes(found.bytes_of(kept))} {found.when}, from {items} steps",
         f"{holder.sentence}: it ends at {most:,} items, and is no leak"],
        [Advice("fewer items, a smaller dtype (uint8), or host memory",
                found.saving(kept, found.replaced(kept)) or None)],
        holder=holder)


def _holder(found: Evidence, grown: Mask) -> Holder | None:
    """Who holds the most of what grows, as far as the recording looked; without a line where no statement was found."""
    trace = found.run.trace
    ends = trace["steps"]["end_event"]
    stays = np.searchsorted(ends, found.run.life.died) - np.searchsorted(ends, found.run.life.born) > 1
    looks = last_looks_at(trace, grown)
    # What is gone a step later has only passed through the place that grows, save where all of it is made anew.
    staying = {allocation: look for allocation, look in looks.items() if stays[allocation]}
    # What a variable referred to when it was looked at is kept by a container, if others of its kind are.
    contained = {allocation: look for allocation, look in staying.items() if not is_variable(trace.string(look.chain))}
    return who_holds_most(trace, contained or staying or looks)
