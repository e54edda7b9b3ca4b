"""Where files go: their names, what is checked before anything starts, and writing them whole."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from memdiag.errors import MemdiagError

PICTURES = (".png", ".svg", ".pdf")


def rank() -> int | None:
    """This process's place among the ranks of a distributed run; None where a launcher set none."""
    for variable in ("RANK", "LOCAL_RANK"):
        value = os.environ.get(variable, "")
        if value.isdecimal():
            return int(value)
    return None


def with_rank(path: Path, number: int | None) -> Path:
    """``out.json`` of rank 3 is ``out.rank3.json``."""
    return path if number is None else path.with_name(f"{path.stem}.rank{number}{path.suffix}")


def run_file(script: str, number: int | None) -> Path:
    """The run file's name where none is asked for: of the script, the rank if there is one, and the process."""
    place = "" if number is None else f".rank{number}"
    return Path(f"memdiag-{script}{place}.{os.getpid()}.mdiag")


def check_new(path: Path, force: bool) -> None:
    """Says now what would stop a file from being written later.

    Raises:
        MemdiagError: where it exists already (unless ``force``) or is something that must not be replaced, and where
            its folder does not exist or cannot be written to.
    """
    folder = path.absolute().parent
    if path.is_dir():
        raise MemdiagError(f"{path}: is a folder; give a file name")
    if path.exists() and not path.is_file():
        raise MemdiagError(f"{path}: is not a regular file; give the name of a new file")
    if path.exists() and not force:
        raise MemdiagError(f"{path}: exists already; add --force to replace it, or give another name")
    if not folder.is_dir():
        raise MemdiagError(f"{path}: its folder does not exist; create it first, or give another name")
    try:
        # Tried, because permissions alone say nothing of a read-only disk or of a superuser.
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise MemdiagError(f"{path}: its folder cannot be written to ({error.strerror}); give another name") from None


def check_picture(path: Path) -> None:
    """
    Raises:
        MemdiagError: where the name does not end as a picture's does.
    """
    if path.suffix.lower() not in PICTURES:
        raise MemdiagError(f"{path}: a picture's name ends in {', '.join(PICTURES[:-1])} or {PICTURES[-1]}")


def check_apart(outputs: Sequence[Path], inputs: Sequence[Path] = ()) -> None:
    """
    Raises:
        MemdiagError: where two outputs are one file, or an output is what is read.
    """
    seen = {os.path.realpath(path) for path in inputs}
    for path in outputs:
        real = os.path.realpath(path)
        if real in seen:
            raise MemdiagError(f"{path}: is used twice in this command; give another name")
        seen.add(real)


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A temporary name to write to, with the same suffix; what is there becomes the file in one move.

    Raises:
        MemdiagError: when it cannot be written. What was at ``path`` before is still there.
    """
    final = Path(os.path.realpath(path))  # through a link, not over it
    part = final.with_name(f".{final.stem}.{os.getpid()}{final.suffix}")
    try:
        yield part
        os.replace(part, final)
    except OSError as error:
        raise MemdiagError(f"{path}: cannot be written ({error.strerror or error})") from error
    finally:
        part.unlink(missing_ok=True)


def write(path: Path, text: str) -> None:
    """Writes a text file whole, ending in one newline.

    Raises:
        MemdiagError: when it cannot be written.
    """
    with whole(path) as part:
        part.write_text(text.rstrip("\n") + "\n", encoding="utf-8")
