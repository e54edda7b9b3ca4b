"""``memdiag plot``: the picture of a run file."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import click

from memdiag.cli import paths


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", metavar="FILE", type=click.Path(path_type=Path),
    help="The picture; its name ends in .png, .svg or .pdf. Without this it is RUN with .png at its end.",
)
@click.option("-f", "--force", is_flag=True, help="Replace the picture if it exists.")
def plot(run: Path, output: Path | None, force: bool) -> Callable[[], int]:
    """Draw the memory of a recorded run over time.

    Live bytes stacked by what they are, over the whole run and enlarged over
    the step of the peak, with the phases shaded and the peak marked.
    """
    return functools.partial(_plot, run, output or run.with_suffix(".png"), force)


def _plot(run: Path, picture: Path, force: bool) -> int:
    paths.check_picture(picture)
    paths.check_apart([picture], inputs=[run])
    paths.check_new(picture, force)
    from memdiag.report import draw
    from memdiag.trace import load

    trace = load(run)
    with paths.whole(picture) as part:
        draw(trace, part)
    click.echo(f"wrote {picture}")
    return 0
