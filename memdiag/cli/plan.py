"""``memdiag plan``: where to put activation checkpoints, from a recorded run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import click

from memdiag.cli.output import json_path, show, show_or_write
from memdiag.emit import FORMS
from memdiag.errors import MemdiagError
from memdiag.units import parse_bytes


def _size(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    try:
        return None if value is None else parse_bytes(value)
    except MemdiagError as error:
        raise click.BadParameter(str(error)) from None


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--budget", metavar="SIZE", callback=_size, help="Choose the cheapest plan whose peak is at most SIZE.")
@click.option("--minimum", is_flag=True, help="Choose the plan with the lowest peak.")
@click.option("--json", "json_file", metavar="FILE", help="Also write all of it as JSON; with -, print only that.")
@click.option("--emit", "form", type=click.Choice(FORMS), help="Print only what to write for it by hand.")
@click.option("-f", "--force", is_flag=True, help="Replace FILE if it exists.")
def plan(
    run: Path, budget: int | None, minimum: bool, json_file: str | None, form: str | None, force: bool
) -> Callable[[], int]:
    """Say where activation checkpoints would pay.

    RUN is a file that `memdiag profile --plan` wrote: its third step is
    replayed under each plan.

    \b
        memdiag profile --plan --stop-after 3 -o run.mdiag train.py
        memdiag plan --budget 20GiB run.mdiag
    """
    if minimum and budget is not None:
        raise click.UsageError("--budget and --minimum choose different plans; give one of them")
    if form is not None and json_file is not None:
        raise click.UsageError("--emit prints the plan alone; give --json in a command of its own")
    return functools.partial(_plan, run, budget, minimum, json_file, form, force)


def _plan(
    run: Path, budget: int | None, minimum: bool, json_file: str | None, form: str | None, force: bool
) -> int:
    destination = json_path(json_file, [run], force)
    from memdiag.plan import plans
    from memdiag.report.plans import plans_to_json, render_plans
    from memdiag.trace import load
    from memdiag.trace.view import View

    trace = load(run)
    view = View(trace)
    planning = plans(view, budget, minimum)
    if form is not None:
        from memdiag.emit.emit import emit

        show(emit(form, planning, view))
        return 0
    show_or_write(
        lambda: render_plans(planning, trace.about), lambda: plans_to_json(planning, trace.about), json_file,
        destination)
    return 0
