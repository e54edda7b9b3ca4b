"""Memory that is kept from step to step, more of it each time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from memdiag.diagnose.evidence import Evidence
from memdiag.diagnose.model import Advice, Class, Finding, Holder, Severity
from memdiag.policy import LEAK_STEPS
from memdiag.trace import NONE, Role
from memdiag.trace.places import relative
from memdiag.units import format_bytes


def leaks(found: Evidence) -> Iterable[Finding]:
    growing = found.growing
    sites = growing.leak_sites
    rate = sum(site.bytes_per_step for site in sites)
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


def _holder(found: Evidence) -> Holder | None:
    """Who holds the most of it, as far as the recording looked."""
    trace = found.run.trace
    holders = trace["holders"]
    leaking = found.growing.leaks
    total: dict[tuple[str, str | None], int] = defaultdict(int)
    for allocation, chain, line in zip(
            holders["allocation"].tolist(), holders["chain"].tolist(), holders["line"].tolist(), strict=True):
        if allocation != NONE and leaking[allocation]:
            total[trace.string(chain) or "", trace.string(line)] += int(trace["allocations"]["bytes"][allocation])
    if not total:
        return None
    chain, line = max(total, key=lambda key: total[key])
    return Holder(relative(trace, line), chain.split(" → "))
