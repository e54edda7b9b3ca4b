"""Memory that is kept from step to step, more of it each time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from memdiag.diagnose.evidence import Evidence
from memdiag.diagnose.model import Advice, Class, Finding, Holder, Severity
from memdiag.policy import LEAK_STEPS
from memdiag.trace import NONE, Role
from memdiag.trace.model import GARBAGE
from memdiag.trace.places import relative
from memdiag.units import format_bytes


def leaks(found: Evidence) -> Iterable[Finding]:
    growing = found.growing
    sites = growing.leak_sites
    rate = sum(site.bytes_per_step for site in sites)
    yield from _cycles(found)
    if not sites or rate * LEAK_STEPS < found.peak_bytes:
        return
    chosen = found.leaked
    graph = (found.role == Role.SAVED_ACTIVATIONS) | (found.role == Role.RECOMPUTED_ACTIVATIONS)
    in_graphs = found.bytes_of(chosen & graph)
    since = found.kept_since()
    where = sites[0]
    evidence = [
        f"live memory at the end of a step grows by {format_bytes(round(rate))} per step, until the last",
        f"at the peak {format_bytes(found.bytes_of(chosen))} were left from earlier steps",
        "most of it is allocated at " + (where.line or where.operator or "a place that is not known")
        + f", {format_bytes(round(where.bytes_per_step))} per step",
    ]
    if in_graphs:
        evidence.append(f"{format_bytes(in_graphs)} of it was saved for a backward: graphs are kept")
    holder = _holder(found)
    if holder is not None:
        evidence.append("kept by " + " → ".join(holder.chain) + (f" ({holder.line})" if holder.line else ""))
    keep = (
        "keep a number (`.item()`) or a detached tensor (`.detach()`), not one with its graph" if 2 * in_graphs
        > found.bytes_of(chosen) else "let go of it when its step is over, keep a bounded number, or move it to disk")
    yield found.finding(
        Class.LEAK, "growth", f"Memory grows by {format_bytes(round(rate))} with every step", chosen, evidence,
        [Advice(keep, found.saving(found.growing.leaks, since))], Severity.HIGH, holder, since)


def _cycles(found: Evidence) -> Iterable[Finding]:
    """What nothing holds any more, and nothing has collected yet."""
    if found.at is not found.run:
        return
    waiting, since = found.growing.cycles, found.kept_since()
    if found.matters(waiting):
        yield found.finding(
            Class.ACTIVATION, "garbage_cycle", "Reference cycles wait for the garbage collector", waiting,
            [f"{format_bytes(found.bytes_of(waiting))} at the peak are held by cycles alone, and are no leak"],
            [Advice("break the cycle, or call `gc.collect()` every few steps", found.saving(waiting, since))],
            since=since)


def _holder(found: Evidence) -> Holder | None:
    """Who holds the most of it, as far as the recording looked. Where no statement was found, the line is None."""
    trace, leaking = found.run.trace, found.growing.leaks
    holders = trace["holders"]
    last: dict[int, tuple[int, int]] = {}  # of several looks at an allocation the last counts
    for allocation, root, chain, line in zip(
            *(holders[name].tolist() for name in ("allocation", "root", "chain", "line")), strict=True):
        if allocation != NONE and leaking[allocation]:
            last.pop(allocation, None)
            if trace.string(root) != GARBAGE:
                last[allocation] = chain, line
    total: dict[tuple[int, int], int] = defaultdict(int)
    for allocation, kept in last.items():
        total[kept] += int(trace["allocations"]["bytes"][allocation])
    if not total:
        return None
    chain, line = max(total, key=lambda kept: total[kept])
    return Holder(relative(trace, trace.string(line)), (trace.string(chain) or "").split(" → "))
