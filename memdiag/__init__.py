"""memdiag: where the memory of a PyTorch training step goes, and what to do about it."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from memdiag.version import __version__

__all__ = ["__version__", "apply_plan", "load", "profile"]

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch import nn

    from memdiag.apply import Applied, Plan
    from memdiag.record import Recorder
    from memdiag.trace import Trace


def profile(
    path: str | os.PathLike[str], *, max_events: int | None = None,
    steps: tuple[int | None, int | None] | None = None, force: bool = False,
) -> Recorder:
    """Records what runs inside a ``with`` block, on the thread that enters it.

    What was on the devices before is counted, and told apart as far as its owners are seen. On the CPU, PyTorch
    prints a line to standard error when memory from before the block is freed inside it.

    Args:
        path: of the run file.
        max_events: budget of full recording, in profiler events; light recording follows. None: the default.
        steps: record only these steps ``(first, last + 1)`` in full; None on either side is open.
        force: replace an existing file.

    Returns:
        A context manager. After the block, ``.trace()`` reads the run back, and ``.problem`` says what kept it from
        being whole.

    Raises:
        MemdiagError: the file exists and ``force`` is not given, or it cannot be created.

    Example::

        with memdiag.profile("run.mdiag") as run:
            train()
        print(memdiag.load("run.mdiag").about["steps"])
    """
    from memdiag.errors import MemdiagError
    from memdiag.record import Options, Recorder

    if os.path.exists(path) and not force:
        raise MemdiagError(f"{path}: exists already; pass force=True to replace it")
    if not os.access(os.path.dirname(os.path.abspath(path)), os.W_OK):
        raise MemdiagError(f"{path}: its folder does not exist or cannot be written to")
    options = Options(steps=steps) if max_events is None else Options(steps=steps, max_events=max_events)
    return Recorder(path, options, argv=sys.argv, script=getattr(sys.modules["__main__"], "__file__", None))


def load(path: str | os.PathLike[str]) -> Trace:
    """Reads a run file.

    Raises:
        MemdiagError: it is missing, foreign, cut short, damaged, or of a newer major version.
    """
    from memdiag.trace import load

    return load(path)


def apply_plan(
    model: nn.Module | Mapping[str, nn.Module], plan: Plan, *, allow_unsafe: Collection[str] = ()
) -> Applied:
    """Makes the regions of a plan run as checkpoints, by ``torch.utils.checkpoint.checkpoint(use_reentrant=False)``.

    The model is changed in place: the modules get a ``forward`` of their own. Where gradients are off they run as
    before. Keys of the state dict, names of modules and hooks stay; copies and pickles of the model are checkpointed
    too, and ``torch.compile`` and ``DistributedDataParallel`` take it as it is.

    Args:
        model: whose ``named_modules()`` the plan names; of a plan for several models each of them by its name in the
            script that was planned.
        plan: path of a plan file, of which the chosen plan is applied; what such a file holds; or module paths, each
            of which becomes a region. Ranges (``blocks.0-11``) and patterns (``blocks.*.mlp``) are as many regions as
            they match modules.
        allow_unsafe: modules that are made regions even though the plan says that it is unsafe.

    Returns:
        ``.regions``, those applied, and ``.undo()``, the way back.

    Raises:
        MemdiagError: it is not a plan, or it does not go onto this model. Nothing is changed then.

    Example::

        model = Model()
        memdiag.apply_plan(model, "plan.json")
        memdiag.apply_plan({"g": g, "d": d}, "plan.json")  # modules of both are in the plan
    """
    from memdiag.apply import apply_plan

    return apply_plan(model, plan, allow_unsafe=allow_unsafe)
