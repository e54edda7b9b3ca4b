"""Printing, and the JSON beside it, for the verbs that read; and what is shown while one waits."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

from memdiag.cli import paths
from memdiag.errors import MemdiagError

FAILED = 3
"""Exit status where all went well and the answer is no: a finding that ``--fail-on`` names, no plan within a budget."""


def show(text: str) -> None:
    """Prints to standard output, ending in one newline.

    Raises:
        MemdiagError: the process was started without.
    """
    if sys.stdout is None:
        raise MemdiagError("the output has no place to go: standard output is closed")
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that cannot show a sign still gets the figures
    sys.stdout.write(text.rstrip("\n") + "\n")
    sys.stdout.flush()


def json_path(name: str | None, inputs: Sequence[Path], force: bool) -> Path | None:
    """The file that ``--json`` names, checked before anything is read; None where it names none.

    Raises:
        MemdiagError: the file must not be written.
    """
    if name in (None, "-"):
        return None
    path = Path(str(name))
    paths.check_apart([path], inputs=inputs)
    paths.check_new(path, force)
    return path


def show_or_write(
    text: Callable[[], str], as_json: Callable[[], str], name: str | None, path: Path | None, quiet: bool = False
) -> None:
    """Prints the text, or the JSON alone where ``--json -`` asks for that; writes the JSON where it has a path, and
    says so unless it is to be quiet.

    Raises:
        MemdiagError: the file cannot be written.
    """
    show(as_json() if name == "-" else text())
    if path is not None:
        paths.write(path, as_json())
        if not quiet:
            show(f"wrote {path}")


@contextlib.contextmanager
def working(what: str, stream: TextIO | None, quiet: bool) -> Iterator[None]:
    """Shows what takes its time, in a line that goes when it has ended, where someone is there to see it."""
    if not is_seen(stream, quiet):
        yield
        return
    try:
        _write(stream, f"\rmemdiag: {what} ...\x1b[K")
        yield
    finally:
        _write(stream, "\r\x1b[K")


def is_seen(stream: TextIO | None, quiet: bool) -> bool:
    """Whether a line that comes and goes has someone to see it: on a terminal, unless it is to be quiet."""
    return not quiet and stream is not None and not stream.closed and stream.isatty()


def _write(stream: TextIO | None, text: str) -> None:
    if stream is not None:
        with contextlib.suppress(OSError, ValueError):  # the terminal has gone: there is nobody to tell
            stream.write(text)
            stream.flush()
