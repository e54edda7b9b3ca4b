"""Modules whose forward runs as a checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Checkpointed:
    """A module's forward, as a checkpoint. It is an attribute of the module, and is copied and pickled with it."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = type(self._module).forward
        if not torch.is_grad_enabled():
            return forward(self._module, *args, **kwargs)
        return checkpoint(forward, self._module, *args, use_reentrant=False, **kwargs)


def checkpointed(module: nn.Module) -> None:
    """Makes a module's forward a checkpoint."""
    module.forward = Checkpointed(module)
