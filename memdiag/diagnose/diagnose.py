"""From a run to its diagnosis: rules first, then the verdict chosen from what they found."""

from __future__ import annotations

from dataclasses import replace

from memdiag.diagnose.evidence import Evidence
from memdiag.diagnose.growth import growing
from memdiag.diagnose.model import Class, ClassShare, Diagnosis, Finding, Growth, Oom, RunnerUp, Severity, Verdict
from memdiag.diagnose.oom import Failure, out_of_memory
from memdiag.diagnose.rules import OUT_OF_MEMORY, RULES
from memdiag.diagnose.rules.host import host_growth
from memdiag.diagnose.scaling import scaling
from memdiag.policy import SHORTAGE_BYTES, UNDETERMINED_SHARE
from memdiag.trace import Phase, Role
from memdiag.trace.view import View
from memdiag.units import format_bytes


def diagnose(run: View) -> Diagnosis:
    """Diagnoses a run. Pure: the same trace gives the same diagnosis."""
    oom, failure = out_of_memory(run)
    found = _evidence(run, oom, failure)
    if found is None:
        why = "the events of the peak's step were not kept: record that step in full with --steps"
        verdict = Verdict(Class.UNDETERMINED, [], run.worst.phase.label if run.worst.phase else None, why)
        return Diagnosis(
            _with_failure(verdict, oom), _ending(oom, []), growing(run).growth, [], None, None, oom)
    findings = [finding for rule in RULES for finding in rule(found)]
    small = _needed(found) < SHORTAGE_BYTES
    if small:
        findings = [finding for finding in findings if finding.cls in (None, Class.LEAK, Class.HOST_MEMORY)]
    findings.sort(key=lambda finding: (_ALWAYS_FIRST.get(finding.cls, len(_ALWAYS_FIRST)), -finding.bytes))
    host = host_growth(found)
    growth = found.growing.growth
    verdict = _verdict(found, findings, small)
    findings.sort(key=lambda finding: finding.cls is not verdict.cls)  # what the verdict says is told first
    if isinstance(found, Failure):
        assert oom is not None
        verdict = _of_failure(verdict, found, oom, findings)
        findings = [replace(finding, severity=Severity.HIGH) if finding.cls is verdict.cls else finding
                    for finding in findings]
    else:
        verdict = _with_failure(verdict, oom)
    findings = _ending(oom, findings) + findings
    return Diagnosis(
        verdict=verdict,
        findings=findings,
        growth=Growth(growth.bytes_per_step, None if host is None else host[0], growth.sites),
        scaling=scaling(found),
        runner_up=None if isinstance(found, Failure) else _runner_up(found, findings),
        reachable_bytes=found.saving(found.reachable),
        oom=oom,
    )


def _evidence(run: View, oom: Oom | None, failure: Failure | None) -> Evidence | None:
    """The moment to diagnose: the one at which the run died for want of memory, else the highest one."""
    if oom is not None and oom.ended_run and failure is not None:
        return failure
    return None if run.of_peak is None else Evidence(run, run.of_peak)


def _needed(found: Evidence) -> int:
    return found.needed_bytes if isinstance(found, Failure) else found.peak_bytes


# What grows ends every run that is long enough, whatever its share is now.
_ALWAYS_FIRST: dict[Class | None, int] = {Class.LEAK: 0, Class.HOST_MEMORY: 1}


def _verdict(found: Evidence, findings: list[Finding], small: bool) -> Verdict:
    """A leak, wherever one is; else the process's own growth; else what most of the peak is."""
    by_class, phase = found.by_class, found.phase
    first = findings[0] if findings else None
    if first is not None and first.cls in _ALWAYS_FIRST:
        cls = first.cls
    elif small:
        cls = Class.NONE
    else:
        cls = max(by_class, key=lambda c: (by_class[c], c is not Class.UNDETERMINED), default=Class.NONE)
    # What was asked for in vain has no class either: it could have become anything.
    unknown = by_class.get(Class.UNDETERMINED, 0) + _needed(found) - found.peak_bytes
    if cls not in _ALWAYS_FIRST and unknown > UNDETERMINED_SHARE * _needed(found):
        cls = Class.UNDETERMINED
    assert cls is not None
    shares = [ClassShare(c, size, size / found.peak_bytes) for c, size in by_class.items() if size]
    shares.sort(key=lambda share: (share.cls is not cls, -share.bytes))
    return Verdict(cls, shares, phase, _sentence(found, cls, findings, phase))


def _of_failure(verdict: Verdict, found: Failure, oom: Oom, findings: list[Finding]) -> Verdict:
    """The verdict of a run that died for want of memory: it was short of it, however little was alive."""
    cls, alive = verdict.cls, found.peak_bytes
    share = found.by_class.get(cls, 0) / alive if alive else 0.0
    if cls not in _ALWAYS_FIRST and found.needed_bytes < SHORTAGE_BYTES:
        cls, why = Class.UNDETERMINED, "It is not PyTorch's tensors that fill the memory."
    elif cls is Class.UNDETERMINED and found.requested_bytes > alive:
        why = "What was asked for is the shortage: it is more than all that was there."
    elif cls is Class.UNDETERMINED:
        why = f"{share:.0%} of that has no owner that was seen."
    elif findings and findings[0].cls is cls:
        why = f"{findings[0].title}: {findings[0].share:.0%} of that."
    else:
        why = f"Mostly {cls.words}: {share:.0%} of that."
    sentence = f"The run ended by {_asked(oom)}, while {format_bytes(alive)} were allocated. {why}"
    return replace(verdict, cls=cls, sentence=sentence, moment="failure")


def _with_failure(verdict: Verdict, oom: Oom | None) -> Verdict:
    """The verdict about the peak of a run in which a request failed that it survived, or of which little is known."""
    if oom is None or not oom.ended_run and verdict.cls is not Class.NONE:
        return verdict
    cls = Class.UNDETERMINED if verdict.cls is Class.NONE else verdict.cls
    if oom.ended_run:
        what = f"The run ended by {_asked(oom)}; what was alive then was not kept."
    else:
        what = f"The script went on after {_asked(oom)}."
    if verdict.cls is Class.NONE:
        return replace(verdict, cls=cls, sentence=f"{what} Little else was alive at any time.")
    return replace(verdict, cls=cls, sentence=f"{what} Of the peak: {verdict.sentence}")


def _ending(oom: Oom | None, others: list[Finding]) -> list[Finding]:
    """A finding for the request that a run died of; its remedies, where the other findings have none."""
    if oom is None or not oom.ended_run:
        return []
    there = "what was alive then was not kept" if oom.allocated_bytes is None else (
        f"{format_bytes(oom.allocated_bytes)} were allocated then")
    where = " › ".join(part for part in (oom.module, oom.operator) if part)
    evidence = [_asked(oom) + (f" ({where})" if where else ""), there]
    earlier = oom.earlier
    if earlier is not None and earlier.allocated_bytes is not None and oom.allocated_bytes is not None:
        more = oom.allocated_bytes - earlier.allocated_bytes
        if more:
            evidence.append(f"at the same point step {earlier.step} had {format_bytes(abs(more))} "
                            + ("less" if more > 0 else "more"))
    return [Finding(None, OUT_OF_MEMORY, "The run ended for want of memory", Severity.HIGH, 0, 0.0, evidence,
                    [] if others else oom.remedies, birth=oom.line)]


def _asked(oom: Oom) -> str:
    asked = "a request of a size that is not known" if oom.requested_bytes is None else (
        f"a request of {format_bytes(oom.requested_bytes)}")
    where = f" at {oom.line}" if oom.line else f" in {oom.phase}" if oom.phase else ""
    return f"{asked}{where} that could not be met"


_IN_PHASE = {
    Phase.OPTIMIZER.label: "in the optimizer's step",
    Phase.OTHER.label: "outside forward, backward and the optimizer's step",
}


def _sentence(found: Evidence, cls: Class, findings: list[Finding], phase: str | None) -> str:
    first = next((finding for finding in findings if finding.cls is cls), None)
    peak = format_bytes(found.peak_bytes)
    if cls is Class.NONE:
        growth = " that matters" if found.growing.growth.bytes_per_step else ""
        return f"No shortage and no growth{growth}: the peak is {peak}, and nothing needs to be done."
    share = found.by_class.get(cls, 0) / found.peak_bytes if found.peak_bytes else 0.0
    where = "" if phase is None else f", {_IN_PHASE.get(phase, f'in {phase}')}"
    if cls is Class.HOST_MEMORY and first is not None:
        return f"{first.title}, its tensors not counted; they peak at {peak}{where}."
    if cls is Class.LEAK and first is not None and not first.bytes:
        return f"{first.title}; the peak is {peak}{where}."
    if cls is Class.LEAK and first is not None:
        return f"{first.title}: what earlier steps left is {first.share:.0%} of the peak of {peak}{where}."
    if cls is Class.UNDETERMINED:
        held = found.of(cls) & (found.role == Role.HELD)
        why = "has no owner that was seen"
        if 2 * found.bytes_of(held) > found.by_class.get(cls, 0):
            why = f"is held by the script, the largest part by {found.held_by(held)}, for what is not known"
        return f"Undetermined: {share:.0%} of the peak of {peak}{where}{',' * bool(where)} {why}."
    if first is not None:
        return f"{first.title}: {first.share:.0%} of the peak of {peak}{where}."
    return f"Mostly {cls.words}: {share:.0%} of the peak of {peak}{where}."


def _runner_up(found: Evidence, findings: list[Finding]) -> RunnerUp | None:
    first = next((f for f in findings if f.allocations is not None and f.severity is not Severity.LOW), None)
    if first is None or first.allocations is None:
        return None
    gone = first.allocations if first.cured is None else first.cured
    left, event = found.without(gone, first.since, part=first.part)
    step, phase, place = found.at.where(event)
    return RunnerUp(
        left, step, phase, place.module, place.operator, place.line, f"without finding {findings.index(first) + 1}")
