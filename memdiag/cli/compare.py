"""``memdiag compare``: what moved the peak between two runs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import click

from memdiag.cli.output import json_path, show_or_write


@click.command()
@click.argument("a", metavar="RUN", type=click.Path(path_type=Path))
@click.argument("b", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--json", "json_file", metavar="FILE", help="Also write the comparison as JSON; with -, print only that.")
@click.option("-f", "--force", is_flag=True, help="Replace FILE if it exists.")
def compare(a: Path, b: Path, json_file: str | None, force: bool) -> Callable[[], int]:
    """Say which roles and lines moved the peak from one run to another.

    Where the two are no fair comparison (cold against warm, other inputs,
    another device or version), the reasons come first.

    \b
        memdiag compare before.mdiag after.mdiag
    """
    return functools.partial(_compare, a, b, json_file, force)


def _compare(a: Path, b: Path, json_file: str | None, force: bool) -> int:
    destination = json_path(json_file, [a, b], force)
    from memdiag.diagnose import compare as compared
    from memdiag.report import comparison_to_json, render_comparison
    from memdiag.trace import load
    from memdiag.trace.view import View

    comparison = compared(View(load(a)), View(load(b)))
    show_or_write(
        lambda: render_comparison(comparison, (str(a), str(b))), lambda: comparison_to_json(comparison), json_file,
        destination)
    return 0
