"""What autograd saved, as rules ask of it: shapes, whether a backward ever read it, and whose forward it came from."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from memdiag.diagnose.model import Ints, Mask
from memdiag.trace import NONE
from memdiag.trace.model import GRAD_ON
from memdiag.trace.nesting import span_rows
from memdiag.trace.places import operator_names
from memdiag.trace.view import View

Shape = tuple[int, ...]

# Softmax, and the loss over classes: as ATen calls them.
_SOFTMAX = ("aten::softmax", "aten::_softmax")
_LOG_SOFTMAX = ("aten::log_softmax", "aten::_log_softmax", "aten::cross_entropy_loss", "aten::nll_loss")
_MASK = 1  # bytes of an item
_ITEM_SIZES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


class Matrices(NamedTuple):
    """Allocations that operators of a kind saved, and the shapes of these saves."""

    saved: Mask
    shapes: list[Shape]


class Saves:
    """The saves of a view whose allocation is known."""

    def __init__(self, view: View) -> None:
        trace = view.trace
        saves = trace["saves"]
        rows = np.flatnonzero(saves["allocation"] != NONE)
        self._view = view
        self._count = len(trace["allocations"]["bytes"])
        self._id = saves["id"][rows]
        self._allocation = saves["allocation"][rows]
        self._span = span_rows(trace, saves["span"][rows])
        self._step = view.nest.of(view.span_steps, self._span)
        self._packed = saves["packed_event"][rows]
        self._shape = saves["shape"][rows]
        self._operator = operator_names(trace, view.nest, self._span)

    # --- shapes -------------------------------------------------------------------------------------------------

    @cached_property
    def softmaxes(self) -> Matrices:
        return self._matrices(_SOFTMAX)

    @cached_property
    def class_losses(self) -> Matrices:
        """What losses over classes saved."""
        return self._matrices(_LOG_SOFTMAX)

    @cached_property
    def written_softmaxes(self) -> Matrices:
        """Exponentials that are divided in a further operator, as a softmax's are by their sum."""
        divided = set(self._matrices(("aten::div",)).shapes)
        return self._matrices(("aten::exp",), divided)

    def _matrices(self, operators: Sequence[str], of: Collection[Shape] | None = None) -> Matrices:
        """What operators saved of two dimensions or more, and of these shapes where some are given."""
        mine = np.isin(self._operator, self._view.trace.numbers(*operators))
        texts = {int(text): self._dimensions(int(text)) for text in np.unique(self._shape[mine])}
        texts = {text: shape for text, shape in texts.items() if len(shape) >= 2 and (of is None or shape in of)}
        mine &= np.isin(self._shape, list(texts))
        saved = np.zeros(self._count, dtype=bool)
        saved[self._allocation[mine]] = True
        return Matrices(saved, list(texts.values()))

    def alike(self, shapes: Sequence[Shape]) -> Mask:
        """Allocations that have as many elements as one of the shapes, as a mask or in a precision that is in use."""
        dtypes = {self._view.trace.string(int(text)) for text in np.unique(self._view.trace["saves"]["dtype"])}
        items = {_MASK, *(size for dtype, size in _ITEM_SIZES.items() if dtype in dtypes)}
        sizes = sorted({math.prod(shape) * item for shape in shapes for item in items})
        return np.isin(self._view.trace["allocations"]["bytes"], sizes)

    def shapes_of(self, chosen: Mask) -> tuple[Ints, list[Shape]]:
        """Of chosen allocations, those that were saved, each with the shape of its first save."""
        allocations, first = np.unique(self._allocation, return_index=True)
        mine = chosen[allocations]
        return allocations[mine], [self._dimensions(int(text)) for text in self._shape[first[mine]]]

    def _dimensions(self, text: int) -> Shape:
        return tuple(int(n) for n in re.findall(r"\d+", self._view.trace.string(text) or ""))

    # --- backward -----------------------------------------------------------------------------------------------

    @cached_property
    def _unpacked(self) -> Ints:
        """When backward read each save, for the last time; NONE where it never did."""
        ends = self._view.trace["save_ends"]
        event = np.full(int(self._view.trace["saves"]["id"].max(initial=-1)) + 1, NONE, dtype=np.int64)
        event[ends["save"]] = ends["unpacked_event"]
        return event[self._id]

    @cached_property
    def never_read(self) -> Mask:
        """Allocations that were saved for a backward which never came, though their step is over, or the run.

        Where a step ran out of memory its backward could not come.
        """
        about = self._view.trace.about
        over = np.isin(self._step, self._view.trace["steps"]["step"]) | (self._step == NONE)
        if "ended_by" in about and about["ended_by"] is None:  # nothing comes any more
            over[:] = True
        failures = self._view.trace["out_of_memory"]
        for step in np.unique(failures["step"]).tolist():
            over &= (self._step != step) | (self._packed > failures["event"][failures["step"] == step].max())
        waiting = np.zeros(self._count, dtype=bool)
        waiting[self._allocation[~over]] = True
        return self.unread & ~waiting

    @cached_property
    def saved(self) -> Mask:
        """Allocations that were saved for a backward."""
        found = np.zeros(self._count, dtype=bool)
        found[self._allocation] = True
        return found

    @cached_property
    def unread(self) -> Mask:
        """Allocations that were saved, and not read by a backward so far."""
        read = np.zeros(self._count, dtype=bool)
        read[self._allocation[self._unpacked != NONE]] = True
        return self.saved & ~read

    @cached_property
    def last_saved(self) -> Ints:
        """For each allocation, the event at which the last operator that saved it ended; NONE where none did.

        Operators save what they read, or made: without a graph, a forward needs it until then.
        """
        last = np.full(self._count, NONE, dtype=np.int64)
        known = self._span != NONE
        np.maximum.at(last, self._allocation[known], self._view.trace["spans"]["end_event"][self._span[known]])
        return last

    @cached_property
    def last_read(self) -> Ints:
        """For each allocation, when backward last read it; NONE where it never did."""
        last = np.full(self._count, NONE, dtype=np.int64)
        np.maximum.at(last, self._allocation, self._unpacked)
        return last

    def calls(self, step: int) -> list[Mask]:
        """What each outermost call saved that was made in a step, with gradients, of the module that was called most.

        In order; masks are over allocations.
        """
        trace = self._view.trace
        spans = trace["spans"]
        outer = self._view.nest.of(self._view.nest.outer_module, self._span)
        inside = (outer != NONE) & (self._step == step)
        inside[inside] = spans["flags"][outer[inside]] & GRAD_ON != 0
        rows = np.unique(outer[inside])
        if not len(rows):
            return []
        names, number = np.unique(spans["name"][rows], return_counts=True)
        masks = []
        for row in rows[spans["name"][rows] == names[number.argmax()]]:
            mask = np.zeros(self._count, dtype=bool)
            mask[self._allocation[inside & (outer == row)]] = True
            masks.append(mask)
        return masks
