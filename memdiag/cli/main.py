"""``memdiag``: the verbs together, and what ends a command."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

import click

from memdiag import __version__
from memdiag.cli.check import check
from memdiag.cli.compare import compare
from memdiag.cli.diagnose import diagnose
from memdiag.cli.plan import plan
from memdiag.cli.plot import plot
from memdiag.cli.profile import profile
from memdiag.cli.report import report
from memdiag.cli.snapshot import snapshot
from memdiag.errors import MemdiagError

# A verb parses inside click and returns what is then done outside it, so that a profiled script has neither click's
# frames below it nor its handling of interrupts and pipes around it.
Job = Callable[[], int]


@click.group(invoke_without_command=True, context_settings={"max_content_width": 80})
@click.version_option(__version__, message="memdiag %(version)s")
@click.pass_context
def cli(context: click.Context) -> None:
    """Where the memory of a PyTorch training step goes.

    Put `memdiag profile` before a training script, unchanged:

    \b
        memdiag profile train.py --batch-size 8
        memdiag profile -m package.train
        torchrun --nproc-per-node 2 -m memdiag profile train.py

    It runs as always, and at its end a report says how high the memory went,
    at which line, and what every byte was. The run is kept in a file, which
    the other commands read.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
        context.exit(2)


cli.add_command(profile)
cli.add_command(report)
cli.add_command(diagnose)
cli.add_command(compare)
cli.add_command(plan)
cli.add_command(check)
cli.add_command(plot)
cli.add_command(snapshot)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status. Where it is interrupted, the process dies of that (130 in a shell)."""
    try:
        job: Job | int = cli.main(
            args=list(sys.argv[1:] if arguments is None else arguments), prog_name="memdiag", standalone_mode=False
        )
        if isinstance(job, int):  # --help, --version
            return job
        status = job()
        if sys.stdout is not None:  # the process may have been started without
            sys.stdout.flush()
        return status
    except MemdiagError as error:
        return _refuse(str(error), error.exit_code)
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "memdiag"
        return _refuse(f"{error.format_message().rstrip('.')}; see `{command} --help`", 2)
    except (KeyboardInterrupt, click.Abort):  # the second is what click makes of the first
        from memdiag.record.process import launch

        launch.leave(launch.INTERRUPTED)
    except BrokenPipeError:
        # Whoever reads has seen enough. What is still buffered must not fail again when the interpreter ends.
        _let_stdout_go()
        return 0
    except OSError as error:
        _let_stdout_go()
        return _refuse(f"the output cannot be written ({error.strerror})", 1)


def _let_stdout_go() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _refuse(message: str, status: int) -> int:
    click.echo(f"memdiag: error: {message}", err=True)
    return status
