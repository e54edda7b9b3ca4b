"""Running a script under recording, and telling of it when it has ended: for the verbs that take a script."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TextIO

import click

from memdiag.cli import paths
from memdiag.cli.output import is_seen, working
from memdiag.errors import MemdiagError

if TYPE_CHECKING:
    from memdiag.record import Options, Recorder
    from memdiag.record.process.launch import Target
    from memdiag.trace import Trace


@dataclass
class Outputs:
    """What is left behind of a recorded script. Names are as a person wrote them.

    Attributes:
        folder: what they are relative to; the script may go elsewhere.
        json: a path, or "-" for standard output.
        text: whether something is printed of it.
        quiet: whether the names of the files and the next command are kept back.
        stdout, stderr: where to print, None where the process was started without; the script may replace or close
            its own.
        strayed: arguments of the script that are options of this command by name.
        status: of the first thing that went wrong after the script, or that it was asked for in vain; 0 for none.
    """

    run: Path
    plot: Path | None
    json: Path | str | None
    text: bool
    quiet: bool
    folder: Path
    stdout: TextIO | None
    stderr: TextIO | None
    strayed: list[str]
    status: int = 0

    def files(self) -> list[Path]:
        return [path for path in (self.run, self.plot, self.json) if isinstance(path, Path)]

    @property
    def shown(self) -> bool:
        """Whether a progress line has someone to see it."""
        return is_seen(self.stderr, self.quiet)

    def working(self, what: str) -> AbstractContextManager[None]:
        """Shows a line while something takes its time."""
        return working(what, self.stderr, self.quiet)

    def say(self, text: str) -> None:
        # Where the script closed it, or none was there, there is nowhere to say it.
        if self.stderr is not None:
            with contextlib.suppress(OSError, ValueError):
                self.stderr.write(text.rstrip("\n") + "\n")
                self.stderr.flush()

    def note(self, text: str) -> None:
        if not self.quiet:
            self.say(text)

    def fail(self, status: int, text: str | None = None) -> None:
        """Something went wrong; the first such status counts."""
        self.status = self.status or status
        if text is not None:
            self.say(f"memdiag: error: {text}")

    @contextlib.contextmanager
    def failing(self, what: str) -> Iterator[None]:
        """What goes wrong in it is said, and ends nothing else."""
        try:
            yield
        except MemdiagError as error:
            self.fail(error.exit_code, str(error))
        except Exception as error:  # a fault of ours must not take the script's exit status
            self.fail(1, f"{what} failed ({type(error).__name__}: {error}); the run is in {self.run}")

    def put_json(self, text: Callable[[], str]) -> None:
        """Writes it where it was asked for."""
        if self.json == "-":
            # Past the script's buffer: what cannot be written now must not fail again when the interpreter ends.
            with self.failing("the JSON"), open(os.dup(self._descriptor()), "w", encoding="utf-8") as stdout:
                stdout.write(text().rstrip("\n") + "\n")
        elif self.json:
            with self.failing("the JSON"):
                paths.write(self.folder / self.json, text())
                self.note(f"memdiag: wrote {self.json}")

    def put_picture(self, draw: Callable[[Path], None]) -> None:
        """Draws it where it was asked for."""
        if self.plot:
            with self.failing("the picture"):
                with paths.whole(self.folder / self.plot) as part:
                    draw(part)
                self.note(f"memdiag: wrote {self.plot}")

    def _descriptor(self) -> int:
        if self.stdout is None:
            raise MemdiagError("the JSON has no place to go: standard output is closed")
        return self.stdout.fileno()


def prepare(
    target: str, args: tuple[str, ...], is_module: bool, *, output: Path | None, plot: Path | None,
    json_file: str | None, text: bool, quiet: bool, force: bool,
) -> tuple[Target, Outputs]:
    """What to run, and where what is found goes, with the rank in its name where there are several.

    Raises:
        MemdiagError: it cannot be run, or a file must not be written. Nothing of the script's has run.
    """
    from memdiag.record.process.launch import Target, check

    rank = paths.rank()
    script = Target(module=target, args=args) if is_module else Target(path=target, args=args)
    check(script)
    outputs = Outputs(
        run=paths.run_file(script.stem, rank) if output is None else paths.with_rank(output, rank),
        plot=None if plot is None else paths.with_rank(plot, rank),
        json=_json(json_file, rank),
        text=text and not rank,
        quiet=quiet or bool(rank),
        folder=Path.cwd(),
        stdout=sys.stdout,
        stderr=sys.stderr,
        strayed=_strayed(args),
    )
    if outputs.plot is not None:
        paths.check_picture(outputs.plot)
    paths.check_apart(outputs.files(), inputs=[] if script.path is None else [Path(script.path)])
    for path in outputs.files():
        paths.check_new(path, force)
    return script, outputs


def _strayed(args: tuple[str, ...]) -> list[str]:
    """Arguments that would be options of the command at hand if they stood before the script."""
    ours = {name for option in click.get_current_context().command.params if isinstance(option, click.Option)
            for name in option.opts}
    names = [argument.partition("=")[0] for argument in args]
    return [name for name in dict.fromkeys(names) if name in ours]


def _json(name: str | None, rank: int | None) -> Path | str | None:
    if name == "-":
        return None if rank else "-"  # one report on standard output, not one of each rank
    return None if name is None else paths.with_rank(Path(name), rank)


def run(
    target: Target, options: Options, outputs: Outputs, tell: Callable[[Trace, Outputs], None],
    following: Callable[[Outputs], str], answers: bool = False,
) -> NoReturn:
    """Runs a script to its end, tells of it, and ends the process with the script's own status.

    Args:
        tell: prints and writes what is asked for; called where something was recorded, and asked for.
        following: the command that the closing line recommends.
        answers: what is told is what the command is for: where the script ended with 0, ``outputs.status`` is the
            process's status.
    """
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
        _tell(watch.recorder, watch.problem, outputs, tell, following, answers)
        if outputs.strayed and status not in (0, launch.INTERRUPTED):
            outputs.note(f"memdiag: {', '.join(outputs.strayed)} came after {target.path or target.module}, so the "
                         f"script got {'it' if len(outputs.strayed) == 1 else 'them'}; options of memdiag go before "
                         "the script")
    except (KeyboardInterrupt, SystemExit):  # of a handler of the script's, for a signal that came now
        outputs.say(f"memdiag: interrupted; the run is kept in {outputs.run}")
        outputs.fail(launch.INTERRUPTED)
    launch.leave(status or (outputs.status if answers else 0))


def _tell(
    recorder: Recorder | None, problem: str | None, outputs: Outputs, tell: Callable[[Trace, Outputs], None],
    following: Callable[[Outputs], str], answers: bool,
) -> None:
    """Tells of a run that has ended; whatever goes wrong is said, and changes nothing else."""
    if problem is not None:
        outputs.fail(1, problem)
    elif recorder is None:
        outputs.fail(2)
        (outputs.say if answers else outputs.note)("memdiag: nothing was recorded: the script never imported torch")
    if recorder is None:
        return
    if recorder.problem is not None:
        outputs.fail(1, recorder.problem)
    if outputs.text or outputs.plot or outputs.json:
        with outputs.failing("reading the run"):
            from memdiag.trace import load

            with outputs.working("reading the run"):
                trace = load(outputs.folder / outputs.run)
            if outputs.stdout is not None:
                with contextlib.suppress(OSError, ValueError):  # as it will be told when the interpreter ends
                    outputs.stdout.flush()
            tell(trace, outputs)
    if not outputs.quiet:
        others = "; the other ranks' files are beside it" if os.environ.get("WORLD_SIZE", "1") != "1" else ""
        outputs.say(f"memdiag: recorded in {outputs.run}{others}; next:")
        outputs.say(f"    {following(outputs)}")
