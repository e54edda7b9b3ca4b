"""``memdiag profile``: runs a script, records it, reports on it."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TextIO

import click

from memdiag.cli import paths
from memdiag.errors import MemdiagError

if TYPE_CHECKING:
    from memdiag.record import Options, Recorder
    from memdiag.record.process.launch import Target


@dataclass(frozen=True)
class Outputs:
    """What a profile leaves behind. Names are as a person wrote them.

    Attributes:
        folder: what they are relative to; the script may go elsewhere.
        json: a path, or "-" for standard output.
        text: whether the report is printed.
        plan: whether plans of checkpoints are printed after it.
        quiet: whether the names of the files and the next command are kept back.
        stdout, stderr: where to print, None where the process was started without; the script may replace or close
            its own.
    """

    run: Path
    plot: Path | None
    json: Path | str | None
    text: bool
    plan: bool
    quiet: bool
    folder: Path
    stdout: TextIO | None
    stderr: TextIO | None

    def files(self) -> list[Path]:
        return [path for path in (self.run, self.plot, self.json) if isinstance(path, Path)]

    def say(self, text: str) -> None:
        # Where the script closed it, or none was there, there is nowhere to say it.
        if self.stderr is not None:
            with contextlib.suppress(OSError, ValueError):
                self.stderr.write(text.rstrip("\n") + "\n")
                self.stderr.flush()

    def note(self, text: str) -> None:
        if not self.quiet:
            self.say(text)


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
    from memdiag.record.process.launch import Target, check

    rank = paths.rank()
    script = Target(module=target, args=args) if is_module else Target(path=target, args=args)
    check(script)
    outputs = Outputs(
        run=paths.run_file(script.stem, rank) if output is None else paths.with_rank(output, rank),
        plot=None if plot is None else paths.with_rank(plot, rank),
        json=_json(json_file, rank),
        text=not no_report and not rank,
        plan=make_plan and not no_report and not rank,
        quiet=quiet or bool(rank),
        folder=Path.cwd(),
        stdout=sys.stdout,
        stderr=sys.stderr,
    )
    if outputs.plot is not None:
        paths.check_picture(outputs.plot)
    paths.check_apart(outputs.files(), inputs=[] if script.path is None else [Path(script.path)])
    for path in outputs.files():
        paths.check_new(path, force)
    options = Options(
        max_events=DEFAULT_MAX_EVENTS if max_events is None else max_events,
        steps=steps,
        stop_after=stop_after,
        plan_step=PLANNED_STEP if make_plan else None,
        progress=not outputs.quiet and outputs.stderr is not None and outputs.stderr.isatty(),
    )
    return functools.partial(_run, script, options, outputs)


def _json(name: str | None, rank: int | None) -> Path | str | None:
    if name == "-":
        return None if rank else "-"  # one report on standard output, not one of each rank
    return None if name is None else paths.with_rank(Path(name), rank)


def _run(target: Target, options: Options, outputs: Outputs) -> NoReturn:
    from memdiag.record.process import launch
    from memdiag.record.process.late import WhenTorchIsThere
    from memdiag.record.process.signals import SignalsKept

    def recorder() -> Recorder:
        from memdiag.record import Recorder

        script = getattr(sys.modules["__main__"], "__file__", None)
        return Recorder(outputs.folder / outputs.run, options, target.argv, script)

    watch: WhenTorchIsThere[Recorder] = WhenTorchIsThere(recorder)
    kept = SignalsKept()
    status = launch.run(target, watch, kept)
    try:
        kept.release()
        kept.deliver()
        _tell(watch.recorder, watch.problem, outputs)
    except (KeyboardInterrupt, SystemExit):  # of a handler of the script's, for a signal that came now
        outputs.say(f"memdiag: interrupted; the run is kept in {outputs.run}")
    launch.leave(status)


def _tell(recorder: Recorder | None, problem: str | None, outputs: Outputs) -> None:
    """Reports on a run that has ended; whatever goes wrong is said, and changes nothing else."""
    if problem is not None:
        outputs.say(f"memdiag: error: {problem}")
    elif recorder is None and not outputs.quiet:
        outputs.say("memdiag: nothing was recorded: the script never imported torch")
    if recorder is None:
        return
    if recorder.problem is not None:
        outputs.say(f"memdiag: error: {recorder.problem}")
    if outputs.text or outputs.plan or outputs.plot or outputs.json:
        _report(outputs)
    if not outputs.quiet:
        verb = "report" if not outputs.text or outputs.plot else "plot"
        others = "; the other ranks' files are beside it" if os.environ.get("WORLD_SIZE", "1") != "1" else ""
        outputs.say(f"memdiag: recorded in {outputs.run}{others}; next:")
        outputs.say(f"    memdiag {verb} {shlex.quote(str(outputs.run))}")


def _report(outputs: Outputs) -> None:
    failed = functools.partial(_failure_is_said, outputs)
    with failed("reading the run"):
        from memdiag.report import draw, render_text, summarize, to_json
        from memdiag.trace import load

        trace = load(outputs.folder / outputs.run)
        summary = summarize(trace)
        if outputs.stdout is not None:
            with contextlib.suppress(OSError, ValueError):  # as it will be told when the interpreter ends
                outputs.stdout.flush()
        if outputs.text:
            with failed("the report"):
                outputs.say(render_text(summary))
        if outputs.plan:
            with failed("the plan"):
                from memdiag.plan import plans
                from memdiag.report.plans import render_plans
                from memdiag.trace.view import View

                outputs.say("\n" + render_plans(plans(View(trace)), trace.about))
        if outputs.json == "-":
            # Past the script's buffer: what cannot be written now must not fail again when the interpreter ends.
            with failed("the JSON"), open(os.dup(_descriptor(outputs.stdout)), "w", encoding="utf-8") as stdout:
                stdout.write(to_json(summary).rstrip("\n") + "\n")
        elif outputs.json:
            with failed("the JSON"):
                paths.write(outputs.folder / outputs.json, to_json(summary))
                outputs.note(f"memdiag: wrote {outputs.json}")
        if outputs.plot:
            with failed("the picture"):
                with paths.whole(outputs.folder / outputs.plot) as part:
                    draw(trace, part)
                outputs.note(f"memdiag: wrote {outputs.plot}")


def _descriptor(stdout: TextIO | None) -> int:
    if stdout is None:
        raise MemdiagError("the JSON has no place to go: standard output is closed")
    return stdout.fileno()


@contextlib.contextmanager
def _failure_is_said(outputs: Outputs, what: str) -> Iterator[None]:
    try:
        yield
    except MemdiagError as error:
        outputs.say(f"memdiag: error: {error}")
    except Exception as error:  # a fault of ours must not take the script's exit status
        outputs.say(f"memdiag: error: {what} failed ({type(error).__name__}: {error}); the run is in {outputs.run}")
