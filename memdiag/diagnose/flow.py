"""What was made from what, element by element: tensors of one size, from the multiplication that makes the first of
them to the one that takes the last."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from memdiag.diagnose.model import Ints, Mask
from memdiag.trace import NONE
from memdiag.trace.nesting import span_rows
from memdiag.trace.places import at
from memdiag.trace.view import View

# Operators that multiply two tensors that were both computed. What goes in has nothing of what comes out.
_PRODUCTS = (
    "aten::matmul", "aten::mm", "aten::bmm", "aten::baddbmm", "aten::addbmm", "aten::einsum", "aten::__matmul__",
    "aten::tensordot", "aten::inner")
# The same, with weights.
_LAYERS = (
    "aten::linear", "aten::addmm", "aten::conv1d", "aten::conv2d", "aten::conv3d", "aten::convolution",
    "aten::conv_transpose1d", "aten::conv_transpose2d", "aten::conv_transpose3d", "aten::bilinear",
    "aten::embedding", "aten::embedding_bag", "aten::rnn_tanh", "aten::gru", "aten::lstm",
    "aten::scaled_dot_product_attention")


class Flow:
    """Which allocations the operators of a view were given, and which they made, themselves or undone in backward.

    Known limitations: a tensor that an operator makes of two, of which it has the size, is joined with both. Of what
    compiled code does inside nothing is known.
    """

    def __init__(self, view: View) -> None:
        trace, nest = view.trace, view.nest
        self._count = len(trace["allocations"]["bytes"])
        self._trace, self._names = trace, trace["spans"]["name"]
        self._product = self._named(*_PRODUCTS)
        self._multiplies = self._product | self._named(*_LAYERS)
        self._reader = span_rows(trace, trace["reads"]["span"])
        self._read = trace["reads"]["allocation"]
        known = (self._reader != NONE) & (self._read != NONE)
        self._reader, self._read = self._reader[known], self._read[known]
        born = view.born_in
        node = nest.of(nest.node, born)
        again = np.zeros(len(born), dtype=bool)
        again[born != NONE] = nest.recompute[born[born != NONE]]
        operator = nest.of(nest.operator, born)
        self._maker: Ints = np.where((node == NONE) | again, operator, NONE)  # of each allocation
        self._undone: Ints = np.where(  # by the node that made it
            (node != NONE) & ~again, span_rows(trace, at(trace["spans"]["forward"], node)), NONE)

    @cached_property
    def _links(self) -> tuple[Ints, Ints]:
        """Operators, and what they were given or made; each pair once, save for what an operator reads twice."""
        made = np.flatnonzero(self._maker != NONE)
        return np.append(self._reader, self._maker[made]), np.append(self._read, made)

    def together(self, seeds: Mask, alike: Mask, between_products: bool = False) -> Mask:
        """What is of one making with ``seeds``, and alike: made of each other by operators that do not multiply.

        Args:
            between_products: only where the first is a product of two tensors, and one is a factor of a product.

        Returns:
            Which they are, with the seeds, and with what backward makes for them.
        """
        wanted = seeds | alike
        operator, allocation = self._links
        inside = wanted[allocation] & ~self._multiplies[operator]
        group = _joined(operator[inside], allocation[inside], self._count, len(self._multiplies))
        chosen = np.zeros(self._count, dtype=bool)
        chosen[group[seeds]] = True  # by the number of the group
        if between_products:
            for some in (np.flatnonzero(wanted & self._at(self._product, self._maker)),
                         self._read[wanted[self._read] & self._product[self._reader]]):
                there = np.zeros(self._count, dtype=bool)
                there[group[some]] = True
                chosen &= there
        mine: Mask = wanted & chosen[group]
        # A product takes gradients of its size; all others take and give them.
        undone = self._readers(mine)
        makers = self._maker[mine & (self._maker != NONE)]
        undone[makers[~self._multiplies[makers]]] = True
        return mine | alike & self._at(undone, self._undone)

    def made_in(self, spans: Mask) -> Mask:
        """What these operators made in forward."""
        return self._at(spans, self._maker)

    def divided_by_sums(self, alike: Mask) -> Mask:
        """What is divided by something that a sum has made, or that was made from it in one operator (`+ eps`).

        Args:
            alike: what is not taken for such a sum.
        """
        sums = self.made_in(self._named("aten::sum"))
        sums |= ~alike & self.made_in(self._readers(sums) & ~self._multiplies)
        found = np.zeros(self._count, dtype=bool)
        found[self._read[(self._readers(sums) & self._named("aten::div"))[self._reader]]] = True
        return found

    def _named(self, *operators: str) -> Mask:
        found: Mask = np.isin(self._names, self._trace.numbers(*operators))
        return found

    def _readers(self, chosen: Mask) -> Mask:
        """Operators that were given some of these."""
        found = np.zeros(len(self._names), dtype=bool)
        found[self._reader[chosen[self._read]]] = True
        return found

    def _at(self, operators: Mask, rows: Ints) -> Mask:
        found: Mask = at(operators, rows) == 1
        return found


def _joined(operator: Ints, allocation: Ints, allocations: int, operators: int) -> Ints:
    """Of each allocation, the first that operators lead to from it, directly or not: the number of its group."""
    group = np.arange(allocations, dtype=np.int64)
    lowest = np.full(operators, allocations, dtype=np.int64)
    while True:
        np.minimum.at(lowest, operator, group[allocation])
        now = group.copy()
        np.minimum.at(now, allocation, lowest[operator])
        now = now[now]  # the first's own first: a chain of a thousand takes ten rounds
        if np.array_equal(now, group):
            return group
        group = now
