"""``memdiag diagnose``: the verdict of a run file, and an exit status for a CI job."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from memdiag.cli.output import FAILED, json_path, show_or_write
from memdiag.errors import MemdiagError
from memdiag.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from memdiag.report import Summary

_OVER = "over="


def _conditions(context: click.Context, parameter: click.Parameter, value: str | None) -> list[str]:
    """The parts of ``--fail-on``, each of which is known to mean something."""
    from memdiag.diagnose import Class
    from memdiag.diagnose.rules import KINDS

    parts = [part.strip() for part in (value or "").split(",") if part.strip()]
    known = {cls.value for cls in Class} | KINDS
    for part in parts:
        if part.startswith(_OVER):
            try:
                parse_bytes(part.removeprefix(_OVER))
            except MemdiagError as error:
                raise click.BadParameter(str(error)) from None
        elif part not in known:
            raise click.BadParameter(f"{part!r} is no class or kind of finding; there are {', '.join(sorted(known))}")
    return parts


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--json", "json_file", metavar="FILE", help="Also write the whole report as JSON; -: print only that.")
@click.option("-f", "--force", is_flag=True, help="Replace FILE if it exists.")
@click.option(
    "--fail-on", metavar="WHAT", callback=_conditions,
    help="Exit with 3 where the run has one of these: classes and kinds of findings, and over=SIZE for the peak; "
    "several with commas between.",
)
def diagnose(run: Path, json_file: str | None, force: bool, fail_on: list[str]) -> Callable[[], int]:
    """Say what a recorded run is short of, why, and what would help.

    \b
        memdiag diagnose memdiag-train.12345.mdiag
        memdiag diagnose --fail-on leak,over=20GiB memdiag-train.12345.mdiag
    """
    return functools.partial(_diagnose, run, json_file, force, fail_on)


def _diagnose(run: Path, json_file: str | None, force: bool, fail_on: list[str]) -> int:
    destination = json_path(json_file, [run], force)
    from memdiag.report import render_verdict, summarize, to_json
    from memdiag.trace import load

    summary = summarize(load(run))
    show_or_write(lambda: render_verdict(summary), lambda: to_json(summary), json_file, destination)
    failed = [text for condition in fail_on if (text := _failure(condition, summary)) is not None]
    for text in failed:
        click.echo(f"memdiag: failed: {text}", err=True)
    return FAILED if failed else 0


def _failure(condition: str, summary: Summary) -> str | None:
    """Why a condition of ``--fail-on`` holds; None where it does not."""
    diagnosis = summary.diagnosis
    if condition.startswith(_OVER):
        limit = parse_bytes(condition.removeprefix(_OVER))
        peak = summary.peak.allocated_bytes
        return f"{condition}: the peak is {format_bytes(peak)}" if peak > limit else None
    for finding in diagnosis.findings:
        if condition == finding.kind or finding.cls is not None and condition == finding.cls.value:
            return f"{condition}: {finding.title}"
    if condition == diagnosis.verdict.cls.value:
        return f"{condition}: {diagnosis.verdict.sentence}"
    return None
