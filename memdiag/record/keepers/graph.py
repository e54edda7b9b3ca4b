"""Autograd's graph, seen from Python: which tensors lead to the nodes that keep others."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch

from memdiag.record.hooks.saves import Packed

_NEAREST, _FARTHEST = 4, 4  # tensors looked at among those that lead to a node


class Graph:
    """All that can be reached from the tensors that Python has.

    The garbage collector sees neither the nodes nor what they keep, so this stands in for it: a node is above those
    that it calls in backward, and above what it saved.

    Args:
        tensors: all of Python's.
        nodes: objects that Python has for nodes of the graph.
        packed: what nodes keep, whose nodes are wanted.
        most: nodes that are visited.

    Attributes:
        stopped: not all was visited.
        ours: containers that refer to what belongs to the script, and are to be overlooked among its referrers.
    """

    def __init__(
        self, tensors: Iterable[torch.Tensor], nodes: Iterable[Any], packed: Iterable[Packed], most: int
    ) -> None:
        self.stopped = False
        self._nodes: dict[int, Any] = {}
        self._above: dict[int, list[Any]] = {}
        self._heads: dict[int, list[Any]] = {}  # a node -> what Python has that keeps it
        self._node_of: dict[int, Any] = {}  # a Packed -> its node
        self._accumulators: dict[int, Any] = {}  # a parameter -> the node that accumulates its gradient
        self._gradients: dict[int, torch.Tensor] = {}  # a gradient with a graph -> its parameter
        self._wanted: dict[int, list[Packed]] = {}
        self._found: dict[int, list[Any]] = {}  # above a node
        self._numbered: dict[int, Any] = {}  # autograd's number of a node -> the node
        self.ours: list[Any] = [
            self._nodes, self._above, self._heads, self._node_of, self._accumulators, self._gradients, self._wanted,
            self._found, self._numbered]
        for thing in packed:
            self._list(self._wanted, thing.sequence).append(thing)
        self._find_heads(tensors)
        self._visit(list(self._nodes.values()), most)
        # No tensor leads to these: either somebody has the node's object, or nobody that Python shows.
        unseen = [node for node in nodes if id(node) not in self._nodes]
        self.ours.append(unseen)
        for node in unseen:
            self._head(node, node)
        self._visit(unseen, most)
        if self._wanted:
            self._match_functions()

    def _list(self, of: dict[int, list[Any]], key: int) -> list[Any]:
        found = of.get(key)
        if found is None:
            found = of[key] = []
            self.ours.append(found)
        return found

    def _find_heads(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            try:
                if not tensor.is_leaf:
                    self._head(tensor.grad_fn, tensor)
                elif tensor.requires_grad and (gradient := tensor.grad) is not None and gradient.grad_fn is not None:
                    self._gradients[id(gradient)] = tensor
                    self._head(gradient.grad_fn, gradient)
            except RuntimeError:  # a view that was changed in a way that its history cannot tell
                continue

    def _head(self, node: Any, thing: Any) -> None:
        if node is not None:
            self._nodes[id(node)] = node
            self._list(self._heads, id(node)).append(thing)

    def _visit(self, heads: list[Any], most: int) -> None:
        self.ours.append(heads)
        # The newest and the oldest first, should there be too many.
        todo = sorted(heads, key=_sequence)
        self.ours.append(todo)
        if todo:
            todo.append(todo.pop(0))
        for node in todo:
            self._match(node)
        while todo:
            node = todo.pop()
            for child, _ in node.next_functions:
                if child is None:
                    continue
                self._list(self._above, id(child)).append(node)
                if id(child) in self._nodes:
                    continue
                if len(self._nodes) >= most:
                    self.stopped = True
                    return
                self._nodes[id(child)] = child
                self._match(child)
                todo.append(child)

    def _match(self, node: Any) -> None:
        variable = getattr(node, "variable", None) if type(node).__name__ == "AccumulateGrad" else None
        if variable is not None:
            self._accumulators[id(variable)] = node
            return
        number = node._sequence_nr()
        self._numbered[number] = node
        for packed in self._wanted.get(number, ()):
            if id(packed) not in self._node_of and _keeps(node, packed):
                self._node_of[id(packed)] = node

    def _match_functions(self) -> None:
        """Custom Functions whose forward made nodes keep things under a number that is not theirs."""
        left = {id(p): p for listed in self._wanted.values() for p in listed if id(p) not in self._node_of}
        self.ours.append(left)
        if not left:
            return
        for node in self._nodes.values():
            if _is_function(node):
                for kept in _kept(node):
                    if id(kept) in left:
                        self._node_of[id(kept)] = node

    # --- up from something ------------------------------------------------------------------------------------------

    def node_of(self, thing: Any) -> Any:
        """The node that keeps a thing, or is it; None where none is known."""
        if isinstance(thing, Packed):
            return self._node_of.get(id(thing))
        return thing if id(thing) in self._nodes else self._accumulators.get(id(thing))

    def parameter_of(self, gradient: Any) -> torch.Tensor | None:
        """The parameter whose ``.grad`` a thing is, where it has a graph."""
        return self._gradients.get(id(gradient))

    def continued(self, number: int, since: int) -> bool:
        """Whether nodes that were made since lead to a node.

        Args:
            number: autograd's, of the node.
            since: the number of the last node that was there before.
        """
        node = self._numbered.get(number)
        return any(_sequence(parent) > since for parent in self._above.get(id(node), ()))

    def above(self, thing: Any) -> list[Any]:
        """What Python has that keeps a thing through the graph: tensors, or objects of nodes; nearest and farthest.

        The thing may be what a node keeps, a node, or a parameter that a node accumulates into.
        """
        start = self.node_of(thing)
        if start is None:
            return []
        if id(start) in self._found:
            return [head for head in self._found[id(start)] if head is not thing]
        found: list[Any] = []
        seen = {id(start)}
        todo = deque([start])
        self.ours += (found, todo)
        while todo:
            node = todo.popleft()
            for head in self._heads.get(id(node), ()):
                if head is not start:
                    found.append(head)
            for parent in self._above.get(id(node), ()):
                if id(parent) not in seen:
                    seen.add(id(parent))
                    todo.append(parent)
        if len(found) > _NEAREST + _FARTHEST:
            del found[_NEAREST:-_FARTHEST]
        self._found[id(start)] = found
        return [head for head in found if head is not thing]


def _is_function(node: Any) -> bool:
    """Whether a node is that of a custom Function."""
    return isinstance(node, torch.autograd.function.BackwardCFunction)


def _sequence(node: Any) -> int:
    return int(node._sequence_nr())


def _kept(node: Any) -> list[Any]:
    """What hooks returned for the tensors that a node saved, as far as this PyTorch shows it."""
    found: list[Any] = []
    for name in dir(type(node)):
        if name.startswith("_raw_saved_"):
            try:
                saved = getattr(node, name)
            except RuntimeError:  # it has let go of them
                continue
            for one in saved if isinstance(saved, (tuple, list)) else (saved,):
                found.append(getattr(one, "data", one))
    return found


def _keeps(node: Any, packed: Packed) -> bool:
    """Whether a node with the right number keeps it: another thread's nodes have the same numbers."""
    kept = _kept(node)
    shown = any(isinstance(one, Packed) for one in kept)
    return not shown or any(one is packed for one in kept)
