"""One run of a check, in a process of its own: ``python -m memdiag.check.arm FOLDER``.

The folder has a :class:`.Spec`, and gets what the run leaves. The process ends with the script's own status.
"""

from __future__ import annotations

import os
import random
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from memdiag.check.spec import RECORDED, REFUSED, RESULT, SEED, SPEC, TIMES, VALUES, Spec
from memdiag.record.process import launch
from memdiag.record.process.late import WhenTorchIsThere
from memdiag.record.process.signals import SignalsKept


def main(folder: Path) -> None:
    """Runs the script as the folder's spec says; does not return."""
    parent = os.getppid()
    spec = Spec.read(folder / SPEC)
    target = launch.Target(path=spec.path, module=spec.module, args=spec.args)

    def refused(reason: str) -> None:
        (folder / REFUSED).write_text(reason, encoding="utf-8")
        os._exit(1)  # the script could catch an exception, and would go on without the checkpoints

    def make() -> AbstractContextManager[Any]:
        _seed_others()
        if spec.what in ("record", "probe"):
            from memdiag.check.recorded import Recorded

            return Recorded(spec, folder / RECORDED, target, refused, parent)
        if spec.what == "time":
            from memdiag.check.timed import Timed

            return Timed(spec, folder / TIMES, refused, parent)
        from memdiag.check.watch import Watch

        keep = None
        if spec.what == "values":
            from memdiag.check.values import Keeper

            keep = Keeper(folder / VALUES)
        return Watch(spec, folder / RESULT, refused, parent, keep)

    random.seed(SEED)
    watch: WhenTorchIsThere[Any] = WhenTorchIsThere(make)
    kept = SignalsKept()
    status = launch.run(target, watch, kept)
    if watch.problem is not None:
        refused(watch.problem)
    kept.release()
    launch.leave(status)


def _seed_others() -> None:
    """Of what has come with torch."""
    import numpy as np
    import torch

    np.random.seed(SEED)
    torch.manual_seed(SEED)


if __name__ == "__main__":
    folder = Path(sys.argv.pop(1))
    main(folder)
