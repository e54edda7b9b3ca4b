"""From a run to its diagnosis: rules first, then the verdict chosen from what they found."""

from __future__ import annotations

from dataclasses import replace

from memdiag.diagnose.evidence import Evidence
from memdiag.diagnose.model import Class, ClassShare, Diagnosis, Finding, Growth, Oom, RunnerUp, Severity, Verdict
from memdiag.diagnose.oom import out_of_memory
from memdiag.diagnose.rules import RULES
from memdiag.diagnose.rules.host import host_growth
from memdiag.diagnose.scaling import scaling
from memdiag.policy import SHORTAGE_BYTES, UNDETERMINED_SHARE
from memdiag.trace.view import View
from memdiag.units import format_bytes


def diagnose(run: View) -> Diagnosis:
    """Diagnoses a run. Pure: the same trace gives the same diagnosis."""
    at, oom = run.of_peak, out_of_memory(run)
    if at is None:
        why = "the events of the peak's step were not kept: record that step in full with --steps"
        verdict = Verdict(Class.UNDETERMINED, [], run.worst.phase.label if run.worst.phase else None, why)
        return Diagnosis(verdict, [], Growth(None, None, []), [], None, None, oom)
    found = Evidence(run, at)
    findings = [finding for rule in RULES for finding in rule(found)]
    small = found.peak_bytes < SHORTAGE_BYTES
    if small:
        findings = [finding for finding in findings if finding.cls in (None, Class.LEAK, Class.HOST_MEMORY)]
    findings.sort(key=lambda finding: (_ALWAYS_FIRST.get(finding.cls, len(_ALWAYS_FIRST)), -finding.bytes))
    host = host_growth(found)
    growth = found.growing.growth
    return Diagnosis(
        verdict=_without_memory(_verdict(found, findings, small), oom),
        findings=findings,
        growth=Growth(growth.bytes_per_step, None if host is None else host[0], growth.sites),
        scaling=scaling(found),
        runner_up=_runner_up(found, findings),
        reachable_bytes=found.saving(found.reachable),
        oom=oom,
    )


# What grows ends every run that is long enough, whatever its share is now.
_ALWAYS_FIRST: dict[Class | None, int] = {Class.LEAK: 0, Class.HOST_MEMORY: 1}


def _verdict(found: Evidence, findings: list[Finding], small: bool) -> Verdict:
    """A leak, wherever one is; else the process's own growth; else what most of the peak is."""
    by_class = found.by_class
    _, phase, _ = found.at.where(found.event)
    first = findings[0] if findings else None
    if first is not None and first.cls in _ALWAYS_FIRST:
        cls = first.cls
    elif small:
        cls = Class.NONE
    else:
        cls = max(by_class, key=lambda c: (by_class[c], c is not Class.UNDETERMINED), default=Class.NONE)
    if cls not in _ALWAYS_FIRST and by_class.get(Class.UNDETERMINED, 0) > UNDETERMINED_SHARE * found.peak_bytes:
        cls = Class.UNDETERMINED
    assert cls is not None
    shares = [ClassShare(c, size, size / found.peak_bytes) for c, size in by_class.items() if size]
    shares.sort(key=lambda share: (share.cls is not cls, -share.bytes))
    return Verdict(cls, shares, phase, _sentence(found, cls, first, phase))


def _without_memory(verdict: Verdict, oom: Oom | None) -> Verdict:
    """A run that died for want of memory was short of it, however little was alive."""
    if verdict.cls is not Class.NONE or oom is None or not oom.ended_run:
        return verdict
    asked = "a request" if oom.requested_bytes is None else f"a request of {format_bytes(oom.requested_bytes)}"
    where = f" at {oom.line}" if oom.line else ""
    return replace(verdict, cls=Class.UNDETERMINED, sentence=(
        f"Undetermined: the run ended by {asked}{where} that could not be met, while little was alive: what was asked "
        "for is the shortage."))


def _sentence(found: Evidence, cls: Class, first: Finding | None, phase: str | None) -> str:
    peak = format_bytes(found.peak_bytes)
    if cls is Class.NONE:
        return f"No shortage and no growth: the peak is {peak}, and nothing needs to be done."
    share = found.by_class.get(cls, 0) / found.peak_bytes if found.peak_bytes else 0.0
    where = f", in {phase}" if phase else ""
    if cls is Class.UNDETERMINED:
        return f"Undetermined: {share:.0%} of the peak of {peak}{where} has no owner that was seen."
    if first is not None and first.cls is cls:
        return f"{first.title}: {first.share:.0%} of the peak of {peak}{where}."
    return f"Mostly {cls.words}: {share:.0%} of the peak of {peak}{where}."


def _runner_up(found: Evidence, findings: list[Finding]) -> RunnerUp | None:
    first = next((f for f in findings if f.allocations is not None and f.severity is not Severity.LOW), None)
    if first is None or first.allocations is None:
        return None
    left, event = found.without(first.allocations, first.since)
    step, phase, place = found.at.where(event)
    return RunnerUp(
        left, step, phase, place.module, place.operator, place.line, f"without finding {findings.index(first) + 1}")
