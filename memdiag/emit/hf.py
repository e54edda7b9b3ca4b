"""``--emit hf``: checkpoints of whole layers, as Transformers has them."""

from __future__ import annotations

from collections.abc import Sequence

from memdiag.emit.pieces import ONE_MODEL, Region, Roots, imports, keeping
from memdiag.emit.sites import Sites
from memdiag.errors import MemdiagError

_ENABLE, _EVERY = "5.23", "5.16"
"""The first versions whose source has activation_checkpointing_enable(), and every_n_layers."""


def hf(where: Sites, regions: Sequence[Region], head: str, roots: Roots = ONE_MODEL) -> str:
    """Switches on the checkpoints that layers of Transformers have.

    Its argument makes all layers checkpoints, or every n-th. A plan that is neither sets the switch of each layer.

    Args:
        regions: of one module each.
        head: what the plan is, in a line.
        roots: the models of the script.

    Raises:
        MemdiagError: it has other modules than layers, or of several models, or keeps different operators in different
            ones.
    """
    models = list(dict.fromkeys(roots.of(region.modules[0])[0] for region in regions))
    if len(models) > 1:
        raise MemdiagError(f"the plan has modules of {' and '.join(models)}, and Transformers switches checkpoints on "
                           "in one model; --emit code writes the plan, memdiag.apply_plan applies it")
    (model,) = models
    paths = [roots.of(region.modules[0])[1] for region in regions]
    layers = [below for root, below in map(roots.of, _layers(where)) if root == model]
    others = [path for path in paths if path not in layers]
    if others:
        raise MemdiagError(
            f"{', '.join(others)}: Transformers makes checkpoints of whole layers (items of a list of modules), and of "
            "nothing else; --emit code writes the plan, memdiag.apply_plan applies it")
    kept = {region.keep for region in regions}
    if len(kept) > 1:
        raise MemdiagError("the layers of the plan keep results of different operators, and Transformers has one "
                           "setting for all; --emit code writes the plan, memdiag.apply_plan applies it")
    keep = kept.pop()
    settings = '{"use_reentrant": False' + (f', "context_fn": {keeping(keep)}' if keep else "") + "}"
    lines = [f"# {head}"]
    every = _every(paths, layers)
    if every is None:
        lines += ["# Transformers' own argument makes all layers checkpoints, or every n-th: it cannot say this plan.",
                  "# So the layers are switched one by one; a Trainer's arguments must leave it to that.",
                  *_needs(model, ""), "", *imports(regions, _LAYER), "", _enable(model, settings, ""),
                  "chosen = {", *(f'    "{path}",' for path in paths), "}",
                  f"for name, layer in {model}.named_modules():",
                  "    if isinstance(layer, GradientCheckpointingLayer):",
                  "        layer.gradient_checkpointing = name in chosen",
                  "        chosen.discard(name)",
                  'assert not chosen, f"not layers of Transformers: {chosen}"']
    else:
        nth = "" if every == 1 else f", every_n_layers={every}"
        arguments = settings if every == 1 else f'{settings[:-1]}, "every_n_layers": {every}}}'
        lines += [*_needs(model, nth), "", *imports(regions), *([""] if keep else []),
                  _enable(model, settings, nth), "",
                  "# Or, with a Trainer, in its TrainingArguments:",
                  f"# activation_checkpointing=True, activation_checkpointing_kwargs={arguments}"]
    return "\n".join(lines) + "\n"


def _needs(model: str, nth: str) -> list[str]:
    return [f"# Needs a model of Transformers {_ENABLE} or later, as `{model}`. Before that the names in it begin with",
            f"# gradient_ in place of activation_{f', and before {_EVERY} it has no every_n_layers' if nth else ''}."]


def _enable(model: str, settings: str, nth: str) -> str:
    return f"{model}.activation_checkpointing_enable(activation_checkpointing_kwargs={settings}{nth})"


_LAYER = "from transformers.modeling_layers import GradientCheckpointingLayer"


def _every(paths: list[str], layers: list[str]) -> int | None:
    """Of which layers a plan has every n-th, beginning with the first."""
    lists = {layer.rpartition(".")[0] for layer in layers}
    if len(lists) > 1:  # it is counted through all of them, in an order that the run does not tell
        return 1 if paths == layers else None
    return next((by for by in range(1, len(layers) + 1) if paths == layers[::by]), None)


def _layers(where: Sites) -> list[str]:
    """Items of lists of modules, those inside others left out, in the order of the first calls."""
    items = [path for path in where.paths if path.rpartition(".")[2].isdecimal()]
    return [path for path in items if not any(path.startswith(f"{other}.") for other in items)]
