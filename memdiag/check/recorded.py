"""The memory of a run, with checkpoints put into its models or as they are."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from memdiag.check.outermost import Outermost
from memdiag.check.spec import Spec
from memdiag.record import Options, Recorder
from memdiag.record.options import PLANNED_STEP
from memdiag.record.process.launch import Target


class Recorded:
    """A recorder, entered after what puts in the checkpoints.

    Args:
        refused: called where they cannot be put in; ends the run.
        parent: id of the process that has started this one.
    """

    def __init__(
        self, spec: Spec, path: Path, target: Target, refused: Callable[[str], None], parent: int
    ) -> None:
        script = getattr(sys.modules["__main__"], "__file__", None)
        options = Options(stop_after=spec.steps, plan_step=PLANNED_STEP if spec.what == "probe" else None)
        self._recorder = Recorder(path, options, target.argv, script)
        self._outermost = Outermost(spec.regions, refused, parent)

    def __enter__(self) -> Recorded:
        self._outermost.start()
        self._recorder.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._recorder.__exit__(kind, error, trace)
        self._outermost.stop()
