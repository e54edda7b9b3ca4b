"""``--emit fsdp``: the wrapper of ``torch.distributed``, as models that are sharded have it."""

from __future__ import annotations

from collections.abc import Sequence

from memdiag.emit.pieces import NEEDS, PARTIAL, Region, imports, keeping

_WRAPPER = """\
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)"""


def fsdp(regions: Sequence[Region], head: str) -> str:
    """Wraps the modules of a plan, told by identity.

    Args:
        regions: of one module each.
        head: what the plan is, in a line.
    """
    lines = [f"# {head}",
             f"# Needs {NEEDS}. Once the model is built, as `model`, and before fully_shard().",
             "", *imports(regions, PARTIAL, _WRAPPER)]
    for keep in dict.fromkeys(region.keep for region in regions):
        paths = [region.modules[0] for region in regions if region.keep == keep]
        context = f", context_fn={keeping(keep)}" if keep else ""
        lines += ["", "chosen = {model.get_submodule(path) for path in (", *(f'    "{path}",' for path in paths), ")}",
                  "apply_activation_checkpointing(", "    model,",
                  "    checkpoint_wrapper_fn=partial(",
                  f"        checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT{context}),",
                  "    check_fn=lambda module: module in chosen,", ")"]
    return "\n".join(lines) + "\n"
