"""The verdict and its findings as text: the last sections of the report, and all that ``diagnose`` prints."""

from __future__ import annotations

from memdiag.diagnose import Diagnosis, Finding
from memdiag.policy import REPORT_FINDINGS
from memdiag.report.layout import facts, paragraph, share, table, words
from memdiag.report.summary import Summary
from memdiag.units import format_bytes


def render_verdict(summary: Summary) -> str:
    """What the shortage is, why, and what would change it."""
    return "\n".join("\n".join(section(summary)) + "\n" for section in VERDICT_SECTIONS)


def _verdict(summary: Summary) -> list[str]:
    diagnosis = summary.diagnosis
    reachable = diagnosis.reachable_bytes
    return [
        f"Verdict: {words(diagnosis.verdict.cls.value)}",
        *paragraph(diagnosis.verdict.sentence),
        *facts({
            "growth": _growth(diagnosis),
            "scales": _scaling(diagnosis),
            "next peak": _runner_up(diagnosis),
            "reachable": None if reachable is None else (
                f"checkpointing could lower the peak by {format_bytes(reachable)} at most"),
        }),
    ]


def _classes(summary: Summary) -> list[str]:
    rows = [[words(row.cls.value), format_bytes(row.bytes), share(row.bytes, summary.peak.allocated_bytes)]
            for row in summary.diagnosis.verdict.classes]
    return ["What the peak is made of", *(table(["class", "bytes", "share"], rows, "lrr") if rows else ["  not known"])]


def _findings(summary: Summary) -> list[str]:
    findings = summary.diagnosis.findings
    lines = ["Findings"]
    # What is no shortage but a mistake is always told.
    told = [finding for place, finding in enumerate(findings) if place < REPORT_FINDINGS or finding.cls is None]
    for number, finding in enumerate(told, 1):
        lines += _finding(number, finding, summary.peak.allocated_bytes)
    rest = len(findings) - len(told)
    if rest > 0:
        lines += paragraph(f"and {rest} smaller, in the JSON")
    return lines if findings else [*lines, "  none"]


VERDICT_SECTIONS = (_verdict, _classes, _findings)


def _finding(number: int, finding: Finding, peak_bytes: int) -> list[str]:
    size = f" ({format_bytes(finding.bytes)}" if finding.bytes else ""
    if finding.allocations is not None:
        size += f", {share(finding.bytes, peak_bytes)}"
    lines = paragraph(f"{finding.title}{size}{')' if size else ''}", f"{number}. ")
    for text in finding.evidence:
        lines += paragraph(text, "   - ")
    for advice in finding.advice:
        gain = "" if advice.bytes is None else f" (peak lower by {format_bytes(advice.bytes)})"
        lines += paragraph(f"{advice.text}{gain}", "   > ")
    return lines


def _growth(diagnosis: Diagnosis) -> str:
    rate, host = diagnosis.growth.bytes_per_step, diagnosis.growth.host_bytes_per_step
    said = []
    if rate is not None:
        said.append(f"{format_bytes(round(rate))} per step" if rate else "none from step to step")
    if host:
        said.append(f"{format_bytes(round(host))} per step of the process, beside its tensors")
    return "; ".join(said) or "not known: too few steps were recorded in full"


def _scaling(diagnosis: Diagnosis) -> str | None:
    source = {"measured": "measured", "shapes": "by shapes"}
    said = [f"{words(row.role)}: {format_bytes(row.bytes_per_unit)} for each unit of the {row.by}, and "
            f"{format_bytes(row.fixed_bytes)} whatever it is ({source[row.source]})" for row in diagnosis.scaling]
    return "; ".join(said) or None


def _runner_up(diagnosis: Diagnosis) -> str | None:
    found = diagnosis.runner_up
    if found is None:
        return None
    where = " › ".join(part for part in (found.module, found.operator) if part)
    place = ", ".join(part for part in (f"in {found.phase}" if found.phase else "", where, found.line) if part)
    return f"{format_bytes(found.allocated_bytes)} {found.without}" + (f": {place}" if place else "")
