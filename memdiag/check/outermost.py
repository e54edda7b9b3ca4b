"""Outermost module calls of a script's run, and what their models are called."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from memdiag.apply import apply_plan
from memdiag.check.spec import Regions
from memdiag.errors import MemdiagError
from memdiag.modulenames import matching
from memdiag.record.facts import plain
from memdiag.record.frames import locals_of
from memdiag.record.hooks.modules import Names, tensors_in


class Outermost:
    """Finds the models of a script as their outermost modules are called, and puts checkpoints into them.

    Args:
        regions: what is made checkpoints; None for nothing.
        refused: called with the reason where they cannot be put in.
        parent: id of the process that has started this one.

    Attributes:
        names: of modules, as in a recording.
        put_in: regions that are in, by the names of the recording: modules and kept operators of each.
        examples: rows of the first tensors that models were given with gradients on, until the hooks were taken off.
        models: found so far.
        found: called with each, once its checkpoints are in.
    """

    def __init__(self, regions: Regions | None, refused: Callable[[str], None], parent: int) -> None:
        self._wanted = [] if regions is None else [(modules, keep) for modules, keep in regions.regions]
        self._patterns = {} if regions is None else dict.fromkeys(regions.patterns, 0)
        self._refused = refused
        self._there: list[str] = []  # names of modules
        self._thread, self._parent = threading.get_ident(), parent
        self._open: list[nn.Module] = []
        self._handles: list[Any] = []
        self.names = Names()
        self.put_in: list[tuple[tuple[str, ...], tuple[str, ...]]] = []
        self.examples = 0
        self.models: list[weakref.ref[nn.Module]] = []
        self.found: Callable[[nn.Module], None] = lambda root: None

    def start(self) -> None:
        self._handles = [
            torch_module.register_module_forward_pre_hook(self._before),
            torch_module.register_module_forward_hook(self._after, always_call=True)]

    def stop(self) -> None:
        """Takes the hooks off."""
        while self._handles:
            self._handles.pop().remove()

    def alone(self) -> None:
        """Ends the process where the check that has started it was killed: nobody waits for it any more."""
        if os.getppid() != self._parent:
            os._exit(1)

    def missing(self) -> list[str]:
        """Regions that no model had, and patterns that no module matched; each with names that are near."""
        lost = [", ".join(modules) for modules, _ in self._wanted] + [
            pattern for pattern, count in self._patterns.items() if not count]
        return [f"{name}: no module of this name was called; there is "
                f"{', '.join(get_close_matches(name, self._there, n=3) or self._there[:3]) or 'none at all'}"
                for name in lost]

    @plain
    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling() or threading.get_ident() != self._thread:
            return
        if not self._open:
            self.alone()
        if not self._open and module not in self.names:
            self.names.learn(module, sys._getframe(2))
            root = self.names.root_of(module)
            if root is not None:
                self._meet(root)
        if not self._open and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
            self.examples += rows_of((args, locals_of(sys._getframe(2)).get("kwargs") or {}))
        self._open.append(module)

    @plain
    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or threading.get_ident() != self._thread or module not in self._open:
            return
        while self._open.pop() is not module:
            pass

    def _meet(self, root: nn.Module) -> None:
        self.models.append(weakref.ref(root))
        try:
            self._put_in(root)
        except MemdiagError as error:
            self._refused(str(error))
        self.found(root)

    def _put_in(self, root: nn.Module) -> None:
        """The regions that are this model's."""
        here = {self.names.join(root, path): path for path, _ in root.named_modules(remove_duplicate=False) if path}
        self._there += here
        mine = [(modules, keep) for modules, keep in self._wanted if all(module in here for module in modules)]
        self._wanted = [region for region in self._wanted if region not in mine]
        for pattern in self._patterns:
            matched = [name for name in matching(pattern, here) if name in here]
            self._patterns[pattern] += len(matched)
            mine += [((name,), ()) for name in matched]
        if mine:
            apply_plan(root, {"schema_version": 1, "chosen": 0, "plans": [{"regions": [
                {"modules": [here[module] for module in modules], "kind": "selective" if keep else "full",
                 "keep": list(keep)} for modules, keep in mine]}]})
            self.put_in += mine


def rows_of(given: Any) -> int:
    """Examples in what a model is given: rows of the first tensor that has any."""
    return next((int(tensor.shape[0]) for tensor in tensors_in(given) if tensor.dim()), 0)
