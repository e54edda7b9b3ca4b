"""The verdict and its findings as text: the last sections of the report, and all that ``diagnose`` prints."""

from __future__ import annotations

from memdiag.diagnose import Class, Diagnosis, Finding
from memdiag.policy import REPORT_FINDINGS
from memdiag.report.layout import facts, paragraph, share, table, words
from memdiag.report.summary import Summary
from memdiag.units import format_bytes


def render_verdict(summary: Summary) -> str:
    """What the shortage is, why, and what would change it."""
    return "\n".join("\n".join(section(summary)) + "\n" for section in VERDICT_SECTIONS)


def _verdict(summary: Summary) -> list[str]:
    diagnosis = summary.diagnosis
    # Of what grows there is more in every longer run: a bound of today's would say nothing.
    reachable, leak = diagnosis.reachable_bytes, diagnosis.verdict.cls is Class.LEAK
    return [
        f"Verdict: {words(diagnosis.verdict.cls.value)}",
        *paragraph(diagnosis.verdict.sentence),
        *facts({
            "growth": _growth(diagnosis),
            "scales": _scaling(diagnosis),
            "next peak": _runner_up(diagnosis),
            "reachable": None if reachable is None or leak else _reachable(reachable, _failed(diagnosis)),
        }),
    ]


def _classes(summary: Summary) -> list[str]:
    verdict = summary.diagnosis.verdict
    total = sum(row.bytes for row in verdict.classes)
    rows = [[words(row.cls.value), format_bytes(row.bytes), share(row.bytes, total)] for row in verdict.classes]
    title = "What was alive when the request failed" if _failed(summary.diagnosis) else "What the peak is made of"
    return [title, *(table(["class", "bytes", "share"], rows, "lrr") if rows else ["  not known"])]


def _findings(summary: Summary) -> list[str]:
    findings = summary.diagnosis.findings
    lines = ["Findings"]
    # What is no shortage but a mistake is always told.
    told = [finding for place, finding in enumerate(findings) if place < REPORT_FINDINGS or finding.cls is None]
    for number, finding in enumerate(told, 1):
        lines += _finding(number, finding, _failed(summary.diagnosis))
    rest = len(findings) - len(told)
    if rest > 0:
        lines += paragraph(f"and {rest} smaller, in the JSON")
    return lines if findings else [*lines, "  none"]


VERDICT_SECTIONS = (_verdict, _classes, _findings)


def _failed(diagnosis: Diagnosis) -> bool:
    """Whether it is about the moment at which a request failed, not the peak."""
    return diagnosis.verdict.moment == "failure"


def _reachable(size: int, failed: bool) -> str:
    if not size:
        return "nothing: checkpointing would " + ("have freed none" if failed else "not lower the peak")
    if failed:
        return f"checkpointing would have freed {format_bytes(size)} then, at most"
    return f"checkpointing could lower the peak by {format_bytes(size)} at most"


def _finding(number: int, finding: Finding, failed: bool) -> list[str]:
    sizes = [format_bytes(finding.bytes)] if finding.bytes else []
    if finding.allocations is not None:
        sizes.append(f"{finding.share:.1%}".replace("%", " %"))
    lines = paragraph(f"{finding.title} ({', '.join(sizes)})" if sizes else finding.title, f"{number}. ")
    for text in finding.evidence:
        lines += paragraph(text, "   - ")
    for advice in finding.advice:
        less = None if advice.bytes is None else format_bytes(advice.bytes)
        most = " at most" if advice.at_most else ""
        gain = "" if less is None else f" ({less} less then{most})" if failed else f" (peak lower by {less}{most})"
        lines += paragraph(f"{advice.text}{gain}", "   > ")
    return lines


def _growth(diagnosis: Diagnosis) -> str:
    rate, host = diagnosis.growth.bytes_per_step, diagnosis.growth.host_bytes_per_step
    said = []
    if rate is not None:
        said.append(f"{format_bytes(round(rate))} per step" if rate else "none from step to step")
    if host:
        said.append(f"the process, tensors left out, grows by {format_bytes(round(host))} per step")
    return "; ".join(said) or "not known: too few steps"


def _scaling(diagnosis: Diagnosis) -> str | None:
    said = []
    for row in diagnosis.scaling:
        unit = {"batch": "unit of batch size", "sequence": "unit of sequence length"}[row.by]
        source = {"measured": "measured over the steps", "shapes": "told by shapes"}[row.source]
        fixed = f" and {format_bytes(row.fixed_bytes)} fixed" if row.fixed_bytes else ""
        said.append(f"{words(row.role)}: {format_bytes(row.bytes_per_unit)} per {unit}{fixed} ({source})")
    return "; ".join(said) or None


def _runner_up(diagnosis: Diagnosis) -> str | None:
    found = diagnosis.runner_up
    if found is None:
        return None
    where = " › ".join(part for part in (found.module, found.operator) if part)
    place = ", ".join(part for part in (f"in {found.phase}" if found.phase else "", where, found.line) if part)
    return f"{format_bytes(found.allocated_bytes)} {found.without}" + (f": {place}" if place else "")
