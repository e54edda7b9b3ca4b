"""``memdiag profile``: runs a script, records it, reports on it."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from memdiag.cli.running import Outputs, prepare, run

if TYPE_CHECKING:
    from memdiag.trace import Trace


Steps = tuple[int | None, int | None] | None


def _steps(context: click.Context, parameter: click.Parameter, value: str | None) -> Steps:
    if value is None:
        return None
    first, colon, last = (part.strip() for part in value.partition(":"))
    if not colon or not all(part == "" or part.isdecimal() for part in (first, last)):
        raise click.BadParameter(f"{value!r} is not A:B; 10:20 records steps 10 to 19, 10: all from step 10 on")
    start, end = (int(part) if part else None for part in (first, last))
    if end is not None and (start or 0) >= end:
        raise click.BadParameter(f"{value!r} holds no step: the first number must be smaller than the second")
    return start, end


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("-m", "is_module", is_flag=True, help="TARGET is a module, as for `python -m`.")
@click.option(
    "-o", "--output", metavar="FILE", type=click.Path(path_type=Path),
    help="The run file. Without this it is named after the script and the process, in the current folder.",
)
@click.option("-f", "--force", is_flag=True, help="Replace files that exist.")
@click.option("-q", "--quiet", is_flag=True, help="No progress line, and no closing line that names the run file.")
@click.option("--no-report", is_flag=True, help="Do not print the report at the end.")
@click.option(
    "--plot", metavar="FILE", type=click.Path(path_type=Path), help="Also draw a picture (.png, .svg or .pdf)."
)
@click.option("--json", "json_file", metavar="FILE", help="Also write the report as JSON; - is standard output.")
@click.option(
    "--plan", "make_plan", is_flag=True,
    help="Also say where activation checkpoints would pay. The third step's forward runs four times for it.")
@click.option("--steps", metavar="A:B", callback=_steps, help="Full detail only for steps A to B-1, counted from 0.")
@click.option("--stop-after", metavar="N", type=click.IntRange(min=1), help="End the script when N steps have ended.")
@click.option(
    "--max-events", metavar="N", type=click.IntRange(min=0),
    help="Record in full until N events (about two million), and only peaks and growth after that.",
)
@click.argument("target")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def profile(
    is_module: bool, output: Path | None, force: bool, quiet: bool, no_report: bool, plot: Path | None,
    json_file: str | None, make_plan: bool, steps: Steps, stop_after: int | None,
    max_events: int | None, target: str, args: tuple[str, ...],
) -> Callable[[], int]:
    """Run a training script and account for its memory.

    TARGET is the script; all that follows it belongs to the script, options
    included. It runs as under plain python and ends with the same exit status.
    A run file is written also when it crashes or runs out of memory.

    \b
        memdiag profile train.py --batch-size 8
        memdiag profile --stop-after 5 --plot peak.png train.py
        memdiag profile -m package.train --epochs 1
        torchrun --nproc-per-node 2 -m memdiag profile train.py
    """
    from memdiag.record.options import DEFAULT_MAX_EVENTS, PLANNED_STEP, Options

    if make_plan:
        _check_planned(PLANNED_STEP, steps, stop_after)
    script, outputs = prepare(
        target, args, is_module, output=output, plot=plot, json_file=json_file, text=not no_report, quiet=quiet,
        force=force)
    options = Options(
        max_events=DEFAULT_MAX_EVENTS if max_events is None else max_events,
        steps=steps,
        stop_after=stop_after,
        plan_step=PLANNED_STEP if make_plan else None,
        progress=outputs.shown,
    )
    return functools.partial(
        run, script, options, outputs, functools.partial(_tell, make_plan), functools.partial(_following, make_plan))


def _check_planned(step: int, steps: Steps, stop_after: int | None) -> None:
    """Refuses options under which the step that plans are made from cannot be recorded for them."""
    first, last = steps or (None, None)
    if (first or 0) > step or last is not None and last <= step:
        raise click.UsageError(f"--plan needs step {step} recorded in full, and --steps records others; "
                               f"with {min(first or 0, step)}:{max(last or 0, step + 1)} it is among them")
    if stop_after is not None and stop_after <= step:
        raise click.UsageError(f"--plan needs step {step}, counted from 0, to end, and --stop-after {stop_after} ends "
                               f"the script before; {step + 1} is enough")


def _tell(make_plan: bool, trace: Trace, outputs: Outputs) -> None:
    from memdiag.report import draw, render_text, summarize, to_json

    summary = summarize(trace)
    if outputs.text:
        with outputs.failing("the report"):
            outputs.say(render_text(summary))
    if outputs.text and make_plan:
        with outputs.failing("the plan"):
            from memdiag.plan import plans
            from memdiag.report.plans import beside_verdict, render_plans
            from memdiag.trace.view import View

            with outputs.working("planning"):
                planning = plans(View(trace))
            beside = beside_verdict(planning, summary.diagnosis.reachable_bytes)
            outputs.say(f"\n{render_plans(planning, trace.about)}\n{beside}")
    outputs.put_json(lambda: to_json(summary))
    outputs.put_picture(lambda path: draw(trace, path))


def _following(make_plan: bool, outputs: Outputs) -> str:
    run_file = str(outputs.run)
    if make_plan and not outputs.status:
        return shlex.join(["memdiag", "plan", run_file, "--json", "plan.json"]) + "    # for memdiag.apply_plan"
    return shlex.join(["memdiag", "report" if not outputs.text or outputs.plot else "plot", run_file])
