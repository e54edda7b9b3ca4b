"""``--emit fsdp``: the wrapper of ``torch.distributed``, as models that are sharded have it."""

from __future__ import annotations

from collections.abc import Sequence

from memdiag.emit.pieces import NEEDS, ONE_MODEL, PARTIAL, Region, Roots, imports, keeping

_WRAPPER = """\
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)"""


def fsdp(regions: Sequence[Region], head: str, roots: Roots = ONE_MODEL) -> str:
    """Wraps the modules of a plan, told by identity.

    Args:
        regions: of one module each.
        head: what the plan is, in a line.
        roots: the models of the script.
    """
    places = [(*roots.of(region.modules[0]), region.keep) for region in regions]
    built = roots.built(region.modules[0] for region in regions)
    lines = [f"# {head}", f"# Needs {NEEDS}. {built}, and before fully_shard().",
             "", *imports(regions, PARTIAL, _WRAPPER)]
    for root, keep in dict.fromkeys((root, keep) for root, _, keep in places):
        paths = [path for its, path, kept in places if (its, kept) == (root, keep)]
        context = f", context_fn={keeping(keep)}" if keep else ""
        lines += ["", f"chosen = {{{root}.get_submodule(path) for path in (",
                  *(f'    "{path}",' for path in paths), ")}",
                  "apply_activation_checkpointing(", f"    {root},",
                  "    checkpoint_wrapper_fn=partial(",
                  f"        checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT{context}),",
                  "    check_fn=lambda module: module in chosen,", ")"]
    return "\n".join(lines) + "\n"
