"""``memdiag check``: is it the same training with checkpoints, and what do they save and cost?"""

from __future__ import annotations

import functools
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from memdiag.cli import paths
from memdiag.cli.output import is_seen, json_path, show, show_or_write
from memdiag.errors import MemdiagError

if TYPE_CHECKING:
    from memdiag.check import Request, Verdict
    from memdiag.record.process.launch import Target

DIFFERENT, SAVES_NOTHING, COULD_NOT_RUN = 3, 4, 5
"""Exit statuses beside 0: not the same training, the same but no lower peak, no comparison."""


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("-m", "is_module", is_flag=True, help="TARGET is a module, as for `python -m`.")
@click.option("--plan", "plan_file", metavar="FILE", help="The plan file whose chosen plan is put onto the models.")
@click.option(
    "--checkpoint", "patterns", metavar="MODULE", multiple=True,
    help="Make modules of this name checkpoints; * stands for part of a name. May be given again and again.")
@click.option("--against", metavar="SCRIPT", help="Compare with another script, which gets the same arguments.")
@click.option("--allow", metavar="MODULE", multiple=True, help="Let an unsafe module of the plan be a checkpoint.")
@click.option(
    "--small", metavar="ARGS", help="Arguments with which the script fits in memory: values are compared with these.")
@click.option("--steps", type=click.IntRange(3), default=3, show_default=True, help="Training steps to compare.")
@click.option(
    "--rounds", type=click.IntRange(0), default=3, show_default=True, help="Runs of each kind that are timed.")
@click.option("--timed-steps", type=click.IntRange(4), default=8, show_default=True, help="Steps of each of them.")
@click.option("--json", "json_file", metavar="FILE", help="Also write the check as JSON; with -, print only that.")
@click.option("--markdown", metavar="FILE", type=click.Path(path_type=Path), help="Also write it as Markdown.")
@click.option("-f", "--force", is_flag=True, help="Replace files that exist.")
@click.option("-q", "--quiet", is_flag=True, help="No progress lines.")
@click.argument("target")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def check(
    is_module: bool, plan_file: str | None, patterns: tuple[str, ...], against: str | None, allow: tuple[str, ...],
    small: str | None, steps: int, rounds: int, timed_steps: int, json_file: str | None, markdown: Path | None,
    force: bool, quiet: bool, target: str, args: tuple[str, ...],
) -> Callable[[], int]:
    """Prove that checkpoints leave the training as it is.

    Runs the script as it is and with checkpoints, each several times in a
    process of its own, and compares inputs, outputs, gradients, buffers, random
    states, parameters and the schedule of their steps, bit for bit; then
    memory and time. The script is not changed.

    \b
        memdiag check --plan plan.json train.py --batch-size 8
        memdiag check --checkpoint "blocks.*" train.py
        memdiag check --against other.py train.py

    Ends with 0 where it is the same training and the peak is lower, 3 where it
    is another training, 4 where it saves nothing, and 5 where there is no
    comparison.
    """
    if sum((plan_file is not None, bool(patterns), against is not None)) != 1:
        raise click.UsageError("give one of --plan, --checkpoint and --against: what to compare the script with")
    if allow and plan_file is None:
        raise click.UsageError("--allow is about the unsafe modules of a plan; give --plan too")
    if target.endswith((".mdiag", ".json")):
        raise click.UsageError(f"{target} is no script; give the script, and the plan file with --plan")
    if paths.rank() is not None:
        raise click.UsageError("a check runs a script in one process at a time; start it without a launcher, and the "
                               "script as one process")
    return functools.partial(
        _check, target, args, is_module, plan_file, patterns, against, allow, small, (steps, rounds, timed_steps),
        json_file, markdown, force, quiet)


def _check(
    target: str, args: tuple[str, ...], is_module: bool, plan_file: str | None, patterns: tuple[str, ...],
    against: str | None, allow: tuple[str, ...], small: str | None, counts: tuple[int, int, int],
    json_file: str | None, markdown: Path | None, force: bool, quiet: bool,
) -> int:
    from memdiag.record.process.launch import Target
    from memdiag.record.process.launch import check as check_target

    scripts = [Target(module=target, args=args) if is_module else Target(path=target, args=args)]
    scripts += [] if against is None else [Target(path=against, args=args)]
    for script in scripts:
        check_target(script)
    inputs = [Path(name) for name in (None if is_module else target, against, plan_file) if name is not None]
    destination = json_path(json_file, inputs, force)
    if markdown is not None:
        paths.check_apart([markdown], inputs=[*inputs, *([] if destination is None else [destination])])
        paths.check_new(markdown, force)
    request = _request(scripts, plan_file, patterns, allow, small, counts)

    from memdiag.check import check as run
    from memdiag.report.check import check_to_json, check_to_markdown, render_check

    found = run(request, _progress(quiet))
    show_or_write(lambda: render_check(found), lambda: check_to_json(found), json_file, destination, quiet)
    if markdown is not None:
        paths.write(markdown, check_to_markdown(found))
        if not quiet and json_file != "-":
            show(f"wrote {markdown}")
    return _status(found.verdict)


def _request(
    scripts: list[Target], plan_file: str | None, patterns: tuple[str, ...], allow: tuple[str, ...],
    small: str | None, counts: tuple[int, int, int],
) -> Request:
    from memdiag.check.check import Request, planned_with, predicted
    from memdiag.check.spec import Regions

    said = with_others = None
    regions = Regions(patterns=patterns) if patterns else None
    if plan_file is not None:
        from memdiag.apply.read import read

        chosen, _ = read(plan_file, allow)
        if not chosen:
            raise MemdiagError(f"{plan_file}: its chosen plan has no checkpoint; choose another with `memdiag plan "
                               "--choose NAME --json FILE`")
        regions = Regions(tuple((region.modules, region.keep) for region in chosen))
        plan = json.loads(Path(plan_file).read_text(encoding="utf-8"))
        made_with = planned_with(plan)
        if made_with is None or made_with == scripts[0].args:
            said = predicted(plan)
        else:  # another batch has another peak
            with_others = made_with
    as_is, *others = scripts
    steps, rounds, timed_steps = counts
    try:
        few = None if small is None else tuple(shlex.split(small))
    except ValueError as error:
        raise MemdiagError(f"--small {small}: {error}") from None
    return Request(
        as_is, others[0] if others else None, regions, few, steps, rounds, timed_steps, said, with_others)


def _progress(quiet: bool) -> Callable[[str], None]:
    """Says what is done next, where it has someone to see it."""
    number = 0

    def say(text: str) -> None:
        nonlocal number
        number += 1
        if is_seen(sys.stderr, quiet):
            click.echo(f"memdiag: run {number}: {text}", err=True)

    return say


def _status(verdict: Verdict) -> int:
    from memdiag.check import Verdict

    return {Verdict.SAME: 0, Verdict.DIFFERENT: DIFFERENT, Verdict.SAVES_NOTHING: SAVES_NOTHING,
            Verdict.COULD_NOT_RUN: COULD_NOT_RUN}[verdict]
