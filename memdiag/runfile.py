"""How a run file begins. Apart from what reads it, since a process that starts a script must not import NumPy first."""

from __future__ import annotations

import os

MAGIC = b"MEMDIAG\n"


def is_run_file(path: str | os.PathLike[str]) -> bool:
    """Whether the file begins as a run file does. Says nothing about the rest of it."""
    if not os.path.isfile(path):  # a pipe would be used up
        return False
    try:
        with open(path, "rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False
