"""Runs of a script, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from memdiag.check.entries import Run, read_run
from memdiag.check.spec import OUTPUT, REFUSED, RESULT, SPEC, Regions, Spec
from memdiag.errors import MemdiagError
from memdiag.record.process.launch import Target


@dataclass(frozen=True)
class Left:
    """What a run has left.

    Attributes:
        folder: with its files.
        status: of the process.
    """

    folder: Path
    status: int

    @property
    def run(self) -> Run:
        return read_run(self.folder / RESULT)

    def last_lines(self, count: int = 6) -> str:
        """The end of what the script printed."""
        with (self.folder / OUTPUT).open(encoding="utf-8", errors="replace") as file:
            return "".join(deque(file, count)).rstrip()


class Arms:
    """Starts runs, in folders below one that is removed at the end.

    Args:
        say: called with what is done next.
    """

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._folder, self._say, self._count = folder, say, 0

    def start(
        self, what: str, script: Target, regions: Regions | None, steps: int,
        wanted: tuple[tuple[int, str, str, int], ...] = (), told: str = "",
    ) -> Left:
        """Runs a script to its end.

        Raises:
            MemdiagError: the checkpoints cannot be put into its models.
        """
        self._count += 1
        self._say(told)
        folder = self._folder / str(self._count)
        folder.mkdir()
        Spec(what, script.path, script.module, script.args, regions, steps, wanted).write(folder / SPEC)
        status = self._run(folder)
        refused = folder / REFUSED
        if refused.exists():
            raise MemdiagError(refused.read_text(encoding="utf-8"))
        return Left(folder, status)

    def _run(self, folder: Path) -> int:
        """One run, in a process of its own, whose status this is."""
        with (folder / OUTPUT).open("wb") as output:
            # Sets of strings are in one order in all of them.
            process = subprocess.Popen(
                [sys.executable, "-m", "memdiag.check.arm", str(folder)], stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, env={**os.environ, "PYTHONHASHSEED": "0"})
            try:
                return process.wait()
            except BaseException:  # Ctrl-C goes to both; nothing of ours stays behind
                process.kill()
                process.wait()
                raise


@contextmanager
def arms(say: Callable[[str], None]) -> Iterator[Arms]:
    """A place for runs, which is gone afterwards."""
    with TemporaryDirectory(prefix="memdiag-check-", ignore_cleanup_errors=True) as folder:
        yield Arms(Path(folder), say)
