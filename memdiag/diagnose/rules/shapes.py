"""What the saved tensors at the peak look like: shapes, operators, and whose forward they came from."""

from __future__ import annotations

import math
import re
from functools import cached_property

import numpy as np

from memdiag.diagnose.evidence import Evidence
from memdiag.diagnose.model import Mask
from memdiag.trace import NONE
from memdiag.trace.model import GRAD_ON
from memdiag.trace.nesting import span_rows
from memdiag.trace.places import operator_names

# Softmax over the last dimension of a matrix, and the loss over classes: as ATen calls them.
_SOFTMAX = ("aten::softmax", "aten::_softmax")
_LOG_SOFTMAX = ("aten::log_softmax", "aten::_log_softmax", "aten::cross_entropy_loss", "aten::nll_loss")
_ITEM_SIZES = (1, 2, 4, 8)  # a mask, half, single and double precision


class Saves:
    """The saves of the run, and of the step of the peak."""

    def __init__(self, found: Evidence) -> None:
        self._found = found
        trace, nest = found.at.trace, found.at.nest
        saves = trace["saves"]
        self._span = span_rows(trace, saves["span"])
        names = operator_names(trace, nest, self._span)
        self._operator = [trace.string(int(number)) or "" for number in names]
        self._shape = [[int(n) for n in re.findall(r"\d+", trace.string(int(text)) or "")]
                       for text in saves["shape"]]

    @cached_property
    def attention(self) -> list[list[int]]:
        """Shapes of softmaxes over square matrices with at least one dimension more."""
        return [shape for operator, shape in zip(self._operator, self._shape, strict=True)
                if operator in _SOFTMAX and len(shape) >= 3 and shape[-1] == shape[-2]]

    @cached_property
    def logits(self) -> list[list[int]]:
        """Shapes of what goes into a loss over classes."""
        return [shape for operator, shape in zip(self._operator, self._shape, strict=True)
                if operator in _LOG_SOFTMAX and len(shape) >= 2]

    def alike(self, shapes: list[list[int]]) -> Mask:
        """Allocations of the trace that have as many elements as one of the shapes, in a usual precision."""
        sizes = {math.prod(shape) * item for shape in shapes for item in _ITEM_SIZES}
        return np.isin(self._found.at.trace["allocations"]["bytes"], sorted(sizes))

    def shown(self, shapes: list[list[int]]) -> str:
        largest = max(shapes, key=math.prod)
        return " × ".join(str(size) for size in largest)

    @cached_property
    def never_read(self) -> Mask:
        """Allocations whose saves were all let go, and none ever unpacked."""
        trace = self._found.at.trace
        saves, ends = trace["saves"], trace["save_ends"]
        count = len(trace["allocations"]["bytes"])
        unread = np.zeros(int(saves["id"].max(initial=-1)) + 1, dtype=bool)
        unread[ends["save"][(ends["unpacked_event"] == NONE) & (ends["released_event"] != NONE)]] = True
        known = saves["allocation"] != NONE
        some, read = np.zeros(count, dtype=bool), np.zeros(count, dtype=bool)
        some[saves["allocation"][known]] = True
        read[saves["allocation"][known & ~unread[saves["id"]]]] = True
        return some & ~read

    @cached_property
    def outer_calls(self) -> list[Mask]:
        """For the module that was called outermost most often: what each of its calls in this step saved."""
        trace, nest = self._found.at.trace, self._found.at.nest
        spans, saves = trace["spans"], trace["saves"]
        outer = nest.of(nest.outer_module, self._span)
        step = nest.of(self._found.at.span_steps, self._span)
        inside = (outer != NONE) & (step == self._found.step) & (saves["allocation"] != NONE)
        inside[inside] = spans["flags"][outer[inside]] & GRAD_ON != 0
        calls: dict[int, set[int]] = {}
        for row in np.unique(outer[inside]).tolist():
            calls.setdefault(int(spans["name"][row]), set()).add(row)
        if not calls:
            return []
        rows = max(calls.values(), key=len)
        masks = []
        for row in sorted(rows):
            mask = np.zeros(len(trace["allocations"]["bytes"]), dtype=bool)
            mask[saves["allocation"][inside & (outer == row)]] = True
            masks.append(mask)
        return masks
