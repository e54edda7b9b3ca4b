"""``memdiag report``: the report of a run file, as text or as JSON."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import click

from memdiag.cli.output import json_path, show_or_write


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--json", "json_file", metavar="FILE", help="Also write all of it as JSON; with -, print only that.")
@click.option("-f", "--force", is_flag=True, help="Replace FILE if it exists.")
def report(run: Path, json_file: str | None, force: bool) -> Callable[[], int]:
    """Print the report of a recorded run.

    RUN is a file that `memdiag profile` wrote, also one whose script crashed,
    ran out of memory or was killed.
    """
    return functools.partial(_report, run, json_file, force)


def _report(run: Path, json_file: str | None, force: bool) -> int:
    destination = json_path(json_file, [run], force)
    from memdiag.report import render_text, summarize, to_json
    from memdiag.trace import load

    summary = summarize(load(run))
    show_or_write(lambda: render_text(summary), lambda: to_json(summary), json_file, destination)
    return 0

