"""``memdiag plan``: where to put activation checkpoints, for a script that is run or from a run file."""

from __future__ import annotations

import functools
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from memdiag.cli import paths
from memdiag.cli.output import FAILED, json_path, show, show_or_write, working
from memdiag.cli.running import Outputs, prepare, run
from memdiag.emit import FORMS
from memdiag.errors import MemdiagError
from memdiag.plan import names
from memdiag.runfile import is_run_file
from memdiag.units import parse_bytes

if TYPE_CHECKING:
    from memdiag.plan import Planning
    from memdiag.trace import Trace


@dataclass(frozen=True)
class _Wish:
    """Which plan is asked for.

    Attributes:
        budget, set_aside: bytes; of the first, the second is kept back.
        minimum: the lowest peak.
        name: the plan of this name.
        allow: unsafe modules that may be in plans.
    """

    budget: int | None
    set_aside: int | None
    minimum: bool
    name: str | None
    allow: tuple[str, ...]

    def planning(self, trace: Trace) -> Planning:
        from memdiag.plan import plans
        from memdiag.trace.view import View

        return plans(View(trace), self.budget, self.minimum, name=self.name, allow=self.allow,
                     set_aside=self.set_aside)

    @property
    def options(self) -> list[str]:
        """The same on a command line."""
        said = [] if self.budget is None else ["--budget", str(self.budget)]
        said += [] if self.set_aside is None else ["--set-aside", str(self.set_aside)]
        said += ["--minimum"] * self.minimum + ([] if self.name is None else ["--choose", self.name])
        return said + [word for path in self.allow for word in ("--allow", path)]


class _ScriptOrRun(click.Command):
    """A command whose options may follow a run file; all that follows a script is the script's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        found, _, _ = self.make_parser(ctx).parse_args(args=list(args))
        target = found.get("target")
        ctx.allow_interspersed_args = isinstance(target, str) and not found.get("is_module") and _is_run(target)
        return super().parse_args(ctx, args)


def _is_run(target: str) -> bool:
    """Whether a target is a run file, or has the name of one."""
    return target.endswith(".mdiag") or is_run_file(target)


def _size(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    try:
        return None if value is None else parse_bytes(value)
    except MemdiagError as error:
        raise click.BadParameter(str(error)) from None


_LEAST_BUDGET = 2**16  # bytes: a number below it without a unit was not meant so


def _budget(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    size = _size(context, parameter, value)
    if value is not None and value.strip().isdecimal() and int(value) < _LEAST_BUDGET:
        raise click.BadParameter(f"{value} is in bytes; with a unit it is, say, {value}GiB")
    return size


@click.command(cls=_ScriptOrRun, context_settings={"allow_interspersed_args": False})
@click.option("-m", "is_module", is_flag=True, help="TARGET is a module, as for `python -m`.")
@click.option("--budget", metavar="SIZE", callback=_budget, help="Choose the cheapest plan that fits in SIZE.")
@click.option(
    "--set-aside", metavar="SIZE", callback=_size,
    help="Keep SIZE of the budget back for what is not among the allocated bytes of a plan. Without this, what "
    "the run's own device tells.")
@click.option("--minimum", is_flag=True, help="Choose the lowest peak, to a thousandth of the present one.")
@click.option("--choose", "name", metavar="NAME", help="Choose a plan by its name in the table.")
@click.option(
    "--allow", metavar="MODULE", multiple=True,
    help="Let an unsafe module be in plans; may be given again and again. 'blocks.0-3' and 'blocks.*.mlp' are several.")
@click.option("--json", "json_file", metavar="FILE", help="Also write the plan file; with -, to standard output.")
@click.option("--emit", "form", type=click.Choice(FORMS), help="Of a run file: print only what to write by hand.")
@click.option("--plot", metavar="FILE", type=click.Path(path_type=Path), help="Also draw the plans: peak against time.")
@click.option("-o", "--output", metavar="FILE", type=click.Path(path_type=Path), help="Of a script: the run file.")
@click.option("-f", "--force", is_flag=True, help="Replace files that exist.")
@click.option("-q", "--quiet", is_flag=True, help="No progress line, and no lines that name the files.")
@click.argument("target")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def plan(
    is_module: bool, budget: int | None, set_aside: int | None, minimum: bool, name: str | None,
    allow: tuple[str, ...], json_file: str | None, form: str | None, plot: Path | None, output: Path | None,
    force: bool, quiet: bool, target: str, args: tuple[str, ...],
) -> Callable[[], int]:
    """Say where activation checkpoints would pay.

    TARGET is a script, with its own arguments after it: it runs under
    recording until its third step has ended, which is then replayed under
    each plan. Or it is the run file of such a run, or of `memdiag profile
    --plan`. A script's own exit status comes first; else it is 3 where no plan
    fits the budget, and 2 where no plan can be made.

    \b
        memdiag plan train.py --batch-size 8
        memdiag plan --budget 20GiB --json plan.json train.py
        memdiag plan memdiag-train.12345.mdiag --choose every_2nd_block
    """
    if sum((budget is not None, minimum, name is not None)) > 1:
        raise click.UsageError("--budget, --minimum and --choose choose different plans; give one of them")
    if name == names.WITHIN_BUDGET:
        raise click.UsageError(f"{name} is the plan that --budget SIZE chooses; give that instead")
    if set_aside is not None and budget is None:
        raise click.UsageError("--set-aside is taken off a budget; give --budget too")
    if form is not None and (json_file is not None or plot is not None):
        raise click.UsageError("--emit prints the plan alone; give --json and --plot in a command of their own")
    if plot is not None:
        paths.check_picture(plot)
    wish = _Wish(budget, set_aside, minimum, name, allow)
    if not is_module and target.endswith(".json"):
        raise click.UsageError(f"{target} is no script; plans are made from a script or a run file, and a plan file is "
                               "for memdiag.apply_plan")
    if is_module or not _is_run(target):
        if form is not None:
            raise click.UsageError("--emit reads a run file: plan the script first, then its run file with --emit")
        if name is not None and not names.may_be(name):
            raise click.UsageError(f"{name}: no plan has this name; there may be {names.listed()}")
        return _script(wish, target, args, is_module, output, plot, json_file, force, quiet)
    if args:
        raise click.UsageError(f"{target} is a run file, and {args[0]} is one argument too many")
    if output is not None:
        raise click.UsageError(f"-o names the file that a script is recorded in, and {target} is one already")
    if form is not None:
        return functools.partial(_emit, wish, Path(target), form, quiet)
    return functools.partial(_run_file, wish, Path(target), plot, json_file, force, quiet)


def _emit(wish: _Wish, run_file: Path, form: str, quiet: bool) -> int:
    from memdiag.emit.emit import emit
    from memdiag.trace.view import View

    trace, planning = _planned(wish, run_file, quiet)
    show(emit(form, planning, View(trace)))
    return 0


def _planned(wish: _Wish, run_file: Path, quiet: bool) -> tuple[Trace, Planning]:
    with working("planning", sys.stderr, quiet):
        from memdiag.trace import load

        trace = load(run_file)
        return trace, wish.planning(trace)


def _run_file(
    wish: _Wish, run_file: Path, plot: Path | None, json_file: str | None, force: bool, quiet: bool
) -> int:
    destination = json_path(json_file, [run_file], force)
    if plot is not None:
        paths.check_apart([plot], inputs=[run_file, *([] if destination is None else [destination])])
        paths.check_new(plot, force)
    trace, planning = _planned(wish, run_file, quiet)
    show_or_write(
        lambda: _text(planning, trace), lambda: _json(planning, trace), json_file, destination, quiet)
    if plot is not None:
        with paths.whole(plot) as part:
            _draw(planning, trace, part)
        if not quiet and json_file != "-":
            show(f"wrote {plot}")
    return FAILED if planning.chosen is None else 0


def _script(
    wish: _Wish, target: str, args: tuple[str, ...], is_module: bool, output: Path | None, plot: Path | None,
    json_file: str | None, force: bool, quiet: bool,
) -> Callable[[], NoReturn]:
    from memdiag.record.options import PLANNED_STEP, Options

    script, outputs = prepare(
        target, args, is_module, output=output, plot=plot, json_file=json_file, text=True, quiet=quiet, force=force)
    options = Options(stop_after=PLANNED_STEP + 1, plan_step=PLANNED_STEP, progress=outputs.shown)
    told: list[str] = []
    return functools.partial(
        run, script, options, outputs, functools.partial(_tell, wish, told), functools.partial(_following, wish, told),
        answers=True)


def _tell(wish: _Wish, told: list[str], trace: Trace, outputs: Outputs) -> None:
    """Args:
        told: gets what ``apply_plan`` is given in the script.
    """
    with outputs.failing("the plan"):
        with outputs.working("planning"):
            planning = wish.planning(trace)
        told.append(_models(planning, trace))
        if planning.chosen is None:
            outputs.fail(FAILED)
        if outputs.text:
            outputs.say(_text(planning, trace))
        outputs.put_json(lambda: _json(planning, trace))
        outputs.put_picture(lambda path: _draw(planning, trace, path))


def _models(planning: Planning, trace: Trace) -> str:
    from memdiag.emit.pieces import Roots
    from memdiag.trace.models import model_of, models

    known = models(trace.about)
    regions = [] if planning.chosen is None else planning.options[planning.chosen].plan.chosen
    owners = [model_of(one.modules[0], known) for one in regions]
    return Roots(known).given([None if one is None else one.name for one in owners])


def _following(wish: _Wish, told: list[str], outputs: Outputs) -> str:
    run_file = str(outputs.run)
    if outputs.status == FAILED:
        return shlex.join(["memdiag", "diagnose", run_file])
    if outputs.status:
        return shlex.join(["memdiag", "report", run_file])
    if isinstance(outputs.json, Path):
        return f"memdiag.apply_plan({told[0]}, {str(outputs.json)!r})    # in the script"
    return shlex.join(["memdiag", "plan", run_file, *wish.options, "--json", "plan.json"])


def _text(planning: Planning, trace: Trace) -> str:
    from memdiag.diagnose import diagnose
    from memdiag.report.plans import render_plans
    from memdiag.trace.view import View

    return render_plans(planning, trace.about, None if planning.floor is None else diagnose(View(trace)))


def _json(planning: Planning, trace: Trace) -> str:
    from memdiag.report.plans import plans_to_json

    return plans_to_json(planning, trace.about)


def _draw(planning: Planning, trace: Trace, path: Path) -> None:
    from memdiag.report.frontier import draw_plans

    draw_plans(planning, trace.about, path)
