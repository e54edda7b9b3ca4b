"""Runs of a check that need not wait for Python and PyTorch to start: each is forked off a process that has started
them, and has done nothing else."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from memdiag.check.arms import Arms, Left
from memdiag.check.spec import OUTPUT, Regions
from memdiag.record.process.launch import Target


class Forked(Arms):
    """Starts runs as :class:`.Arms` does.

    Attributes:
        started: what each was for, and the script.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, lambda text: None)
        self.started: list[tuple[str, str]] = []
        self._parent = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONHASHSEED": "0"})

    def start(
        self, what: str, script: Target, regions: Regions | None, steps: int,
        wanted: tuple[tuple[int, str, str, int], ...] = (), told: str = "",
    ) -> Left:
        self.started.append((what, str(script)))
        return super().start(what, script, regions, steps, wanted, told)

    def _run(self, folder: Path) -> int:
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        self._parent.stdin.write(f"{folder}\n")
        self._parent.stdin.flush()
        return int(self._parent.stdout.readline())

    def end(self) -> None:
        assert self._parent.stdin is not None
        self._parent.stdin.close()
        self._parent.wait()


@contextmanager
def forked() -> Iterator[Forked]:
    """A place for runs, which is gone afterwards."""
    with TemporaryDirectory(prefix="memdiag-forked-", ignore_cleanup_errors=True) as folder:
        runs = Forked(Path(folder))
        try:
            yield runs
        finally:
            runs.end()


def _serve() -> None:
    """Forks a run for each folder that standard input names, and prints its status."""
    import torch._dynamo  # noqa: F401  # what the first optimizer would import

    import memdiag.check.recorded
    import memdiag.check.timed
    import memdiag.check.values
    import memdiag.check.watch  # noqa: F401
    from memdiag.check import arm

    gc.collect()
    gc.freeze()  # a child that ends does not go through all of it
    # Not by iteration: that reads ahead, and a child would have what is its brothers'.
    while line := sys.stdin.readline():
        child = os.fork()
        if not child:
            folder = Path(line.rstrip("\n"))
            nowhere, output = os.open(os.devnull, os.O_RDONLY), os.open(folder / OUTPUT, os.O_WRONLY | os.O_CREAT)
            os.dup2(nowhere, 0)
            for number in (1, 2):
                os.dup2(output, number)
            sys.argv = ["arm.py"]
            try:
                arm.main(folder)
            except SystemExit as error:
                sys.stdout.flush()
                os._exit(error.code if isinstance(error.code, int) else 0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    _serve()
