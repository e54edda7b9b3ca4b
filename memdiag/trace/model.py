"""What a trace holds: tables of columns, interned text, and the meaning of each.

A *memory event* is one allocation or one free, numbered from 0 in the order in which they happened. Everything
else is placed by event number: a span that starts at event 10 and ends at event 14 encloses the memory events
10, 11, 12 and 13, and "before the first event" is 0. Sizes are bytes, times are nanoseconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Column = NDArray[Any]
Table = dict[str, Column]

NONE = -1
"""In any column that refers to something: there is none, or it is not known."""


class Pool(IntEnum):
    """Where memory comes from."""

    ALLOCATOR = 0  # PyTorch's allocator of the device: the only pool in its totals
    MAPPED = 1  # shared memory and mapped files: seen by PyTorch, not in the allocator's total
    NUMPY = 2  # storages that belong to NumPy or another library: no allocator event at all


class Kind(IntEnum):
    """What a span is."""

    STEP = 0
    PHASE = 1
    MODULE = 2
    OPERATOR = 3
    NODE = 4  # a node of autograd's graph, running in backward
    FUNCTION = 5  # a custom autograd Function or a compiled region: a container, not an operator


class Phase(IntEnum):
    """What the training loop is doing. A phase span's name is the member's name in lower case."""

    FORWARD = 0
    BACKWARD = 1
    OPTIMIZER = 2
    EVALUATION = 3
    OTHER = 4

    @property
    def label(self) -> str:
        return self.name.lower()


class Role(IntEnum):
    """What an allocation is, at a moment of its life. The order is the order of reports and plots."""

    PARAMETERS = 0
    BUFFERS = 1
    GRADIENTS = 2
    OPTIMIZER_STATE = 3
    OPTIMIZER_TEMPORARIES = 4
    INPUTS = 5
    SAVED_ACTIVATIONS = 6
    OTHER_ACTIVATIONS = 7
    RECOMPUTED_ACTIVATIONS = 8
    HELD = 9
    BACKWARD_TEMPORARIES = 10
    WORKSPACE = 11
    ALLOCATOR_ROUNDING = 12
    UNKNOWN = 13

    @property
    def label(self) -> str:
        return self.name.lower()


class Level(IntEnum):
    """How a step was recorded."""

    FULL = 0  # operators, modules, saves and lines
    LIGHT = 1  # memory and phases only, folded to one row per phase


GRAD_ON = 1
"""Span flag: autograd was recording when the span started."""
RECOMPUTE = 2
"""Span flag: a module call, or an operator, that runs again inside backward, for a checkpoint."""
OTHER_RANDOM = 4
"""Span flag: an operator that runs again and draws random numbers, though nobody has set the random state back."""

SCHEMA: dict[str, dict[str, str]] = {
    # One row per allocation; its row number is its id. `event` is NONE for memory that was there before the
    # recording; `span` is the innermost span it was born in, `kernel` the innermost operator.
    "allocations": {
        "device": "i2", "pool": "u1", "address": "u8", "bytes": "i8", "event": "i8", "time_ns": "i8",
        "span": "i8", "line": "i4", "kernel": "i4", "stream": "i8",
    },
    # An allocation without a row here was alive when the recording ended.
    "frees": {"allocation": "i8", "event": "i8", "time_ns": "i8"},
    # Nested by `parent`. `call` counts the calls of one module, `sequence` is autograd's number of an operator
    # and of the node that undoes it, `signature` the shapes and dtypes that went in (not in an optimizer's step),
    # `forward` the span of the operator that a node of backward undoes.
    "spans": {
        "id": "i8", "parent": "i8", "kind": "u1", "name": "i4", "start_event": "i8", "end_event": "i8",
        "start_ns": "i8", "end_ns": "i8", "thread": "i4", "line": "i4", "call": "i4", "sequence": "i8",
        "signature": "i4", "flags": "u1", "forward": "i8",
    },
    # What an operator was given, save by backward and by an optimizer's step.
    "reads": {"span": "i8", "allocation": "i8"},
    # One row per tensor that autograd kept; `span` is the operator (or module) that saved it. `bytes` are the
    # tensor's own, its allocation may be larger and may be saved many times.
    "saves": {
        "id": "i8", "allocation": "i8", "span": "i8", "line": "i4", "shape": "i4", "strides": "i4", "dtype": "i4",
        "bytes": "i8", "packed_event": "i8", "flags": "u1",
    },
    "save_ends": {"save": "i8", "unpacked_event": "i8", "released_event": "i8"},
    # Of the step that plans are made from: the storages that each module call was given.
    "arguments": {"span": "i8", "allocation": "i8"},
    # Of that step's forwards, run once more without keeping a graph: their allocations in order. `forward` counts them,
    # `died` is how many allocations of the forward came before each went (NONE: it was there at the end; CACHED:
    # autocast kept it).
    "second_forwards": {"step": "i8", "forward": "i4", "device": "i2", "bytes": "i8", "died": "i8"},
    # Module calls of those second forwards, in the order in which they began: when each began and ended, by the clock
    # of `step_times`.
    "second_calls": {"step": "i8", "forward": "i4", "module": "i4", "start_ns": "i8", "end_ns": "i8"},
    # Up to that step, how long each backward and each step of an optimizer took: in processor time of the process on
    # the CPU, in time of the day where CUDA is in use. `phase` is one of Phase.
    "step_times": {"step": "i8", "phase": "u1", "ns": "i8"},
    # What was seen of each module call of such a forward when it ran twice more, from the same state: `kind` is a word
    # below, `call` counts the calls of the module in that forward, `line` is of the statement that it is about.
    "region_facts": {
        "step": "i8", "forward": "i4", "module": "i4", "call": "i4", "kind": "i4", "text": "i4", "line": "i4",
    },
    # Of that step's forwards: the operators whose results a selective checkpoint could keep, as PyTorch dispatches them
    # (`aten::addmm`, inside the span of `aten::linear`).
    "keepable": {"name": "i4", "start_event": "i8", "end_event": "i8", "start_ns": "i8", "end_ns": "i8"},
    # Of that step's nodes of backward: the event at which each had run. Its results are then made to fit (summed over
    # what was broadcast), and last it lets go of what it saved; what a checkpoint had made for it is gone before.
    "node_ends": {"span": "i8", "event": "i8"},
    # What an allocation was seen to be, from `event` on (NONE: from its birth), with the proof.
    "claims": {"allocation": "i8", "event": "i8", "role": "u1", "name": "i4", "proof": "i4"},
    "steps": {
        "step": "i8", "level": "u1", "start_event": "i8", "end_event": "i8", "start_ns": "i8", "end_ns": "i8",
        "end_bytes": "i8", "host_rss": "i8", "input_shapes": "i4", "warm_up": "u1",
    },
    # Peak of each phase of a folded step: the only thing kept of most of them.
    "phase_peaks": {"step": "i8", "phase": "u1", "event": "i8", "bytes": "i8"},
    # What is left of folded steps when the recording ends, by the step it was born in.
    "survivors": {"born_step": "i8", "bytes": "i8", "count": "i8"},
    # The device's own statistics at the end of a step; `name` is the statistic's.
    "device_stats": {"step": "i8", "device": "i2", "name": "i4", "value": "i8"},
    # Of the highest light step, told apart: allocations that have a row among the run's own.
    "continues": {"allocation": "i8", "row": "i8"},
    # Something that happened to the recording or the allocator: `kind` is its word, `text` says it in full.
    "marks": {"event": "i8", "kind": "i4", "text": "i4", "bytes": "i8"},
    # A request that an allocator had no memory for: `bytes` were asked for while it held `allocated`, and `reserved` of
    # the device. `span`, `line` and `kernel` are those that the allocation would have had (NONE in light recording),
    # `caller` the line of the backward call or optimizer step around it.
    "out_of_memory": {
        "event": "i8", "time_ns": "i8", "device": "i2", "bytes": "i8", "allocated": "i8", "reserved": "i8",
        "step": "i8", "phase": "u1", "span": "i8", "line": "i4", "kernel": "i4", "caller": "i4",
    },
    # Who keeps what survives: `chain` from a root to the tensor, and the statement that put it there. An allocation
    # that was looked at again and found elsewhere has several rows; the last is the one that counts. Rows without an
    # allocation (NONE) are about memory beside tensors: `bytes` is what was kept in the container at the chain's end.
    "holders": {"allocation": "i8", "step": "i8", "root": "i4", "chain": "i4", "line": "i4", "bytes": "i8"},
}

MIRRORS = "the script writes gradients into it"
"""Proof in a claim: of buffers that hold gradients a second time."""

STEPPED = "a parameter of an optimizer"
"""Proof in a claim: an optimizer that has stepped lists it."""

SAVED = "saved by autograd for backward"
"""Proof of a saved activation."""

STATE = "in the state of optimizer {}"
"""Proof in a claim, with the number of the optimizer."""

GRAD, ACCUMULATED = "the .grad of a parameter", "handed to AccumulateGrad"
"""Proofs in a claim: of a parameter's own gradient."""

RETURNED = "returned by torch.autograd.grad"
"""Proof in a claim: of gradients that the script asked for."""

COPIED = "a copy of gradients"
"""Proof in a claim: of what the script made by copying gradients, or by putting them together."""

COMMUNICATION = "communication buffer"
"""Name in a claim: what a collective works on in backward, beside the gradients themselves."""

GARBAGE = "only a reference cycle: freed by the next garbage collection"
GRADIENT_CYCLE = "a cycle that nothing frees: a gradient with a graph, and its parameter"
GRAPH_CYCLE = "a cycle that nothing frees: a tensor, and the graph that leads to it"
UNCOLLECTED = "a cycle that outlived a garbage collection: something outside Python has a part in it"
"""Roots of holders where no variable leads to an allocation. What is only garbage is no leak."""

ITS_GRAPH = "its graph"
"""In the chain of a holder: what follows is kept by autograd's graph."""

BOUNDED_ITEM = "[* of {}]"
"""In the chain of a holder: an item of a container that keeps no more than so many (a deque's ``maxlen``)."""

RESERVED_PEAK = "reserved_bytes.all.peak"
"""Device statistic: the most that the allocator has held so far, free blocks included."""
OUTSIDE_PYTORCH = "outside_pytorch_bytes"
"""Device statistic: memory of the device in use by others than PyTorch's allocator."""

COMPILED = "Torch-Compiled Region"
"""How PyTorch's name for the span of a compiled region begins."""

SNAPSHOT = "snapshot"
"""``about["source"]`` of a trace that was made from a memory snapshot of PyTorch's."""

UNSEEN = "unseen"
"""The kind of a mark that tells of memory that changed without an event."""

AUTOCAST_ENDED = "autocast ended"
"""The kind of a mark: the weights that were cast for a block of autocast are let go."""

CACHED = -2
"""In ``second_forwards``: until its block of autocast ends."""

PROBED, CHAIN, WRAPPED = "probed", "chain", "wrapped"
BUFFER, ATTRIBUTE, VARIABLE, ARGUMENT = "buffer", "attribute", "variable", "argument"
WRITES, WRITTEN_LATER, CHANGED_LATER = "writes", "written later", "changed later"
PYTHON_RANDOM, NUMPY_RANDOM, GENERATOR = "python random", "numpy random", "generator"
RANDOM, RANDOM_ELSEWHERE = "random", "random elsewhere"
OTHER_COURSE, OTHER_VALUE, ROUNDING = "other course", "other value", "rounding"
READS_VALUE, MOVES, HOOK, CHECKPOINT, FUNCTION, UNPACKS_TWICE = (
    "reads value", "moves", "hook", "checkpoint", "function", "unpacks twice")
"""Kinds in ``region_facts``. The text of PROBED is empty: the call ran twice. CHAIN: the module runs the modules in it
one after the other, and nothing else. WRAPPED: it is the model itself, inside a wrapper of PyTorch's, so that what is
there as its path is its class.

It leaves changed: a BUFFER, an ATTRIBUTE of a module (``path.name``), a VARIABLE outside the function, something in an
ARGUMENT (its name). It WRITES in place to what was there before (the operator, and which parameter). Before
backward, what it was given or has read is WRITTEN_LATER, an attribute or a variable is CHANGED_LATER. It draws random
numbers: with PYTHON_RANDOM or NUMPY_RANDOM, with a GENERATOR of its own, or with the state of a device (RANDOM;
RANDOM_ELSEWHERE where no positional argument is on it). The second time it takes an OTHER_COURSE (the operator, and
after ``|`` the one that ran at first), reads an OTHER_VALUE, or gets other results from the same operands (ROUNDING).
It READS_VALUEs off tensors, MOVES tensors between devices, has in it a HOOK of the script's own, a CHECKPOINT, a custom
FUNCTION, one that UNPACKS_TWICE what it saved.
"""

CALL, SAVE = "call ", "save"
"""In ``region_facts``, in the place of an operator's name: before the path of a module that is called, and for a tensor
that autograd saves."""

REPLAYED = "replayed"
"""The kind of a mark that tells of state which a recomputation wrote to: a buffer's name."""

ZEROED = "gradients zeroed"
USED = "gradients used"
"""Kinds of marks that tell of an operator of the script's own, outside backward and optimizers: it zeroed gradients, of
so many bytes; or it read them or wrote to them otherwise. The text is the operator's name; of one that uses them in
the same phase again only the first is told. An optimizer that zeroes them in its step is told too."""

SAVE_GRAD = 1
"""Save flag: the tensor requires gradients."""
SAVE_LEAF = 2
"""Save flag: the tensor has no history (a parameter, an input, a constant)."""


def empty_table(name: str) -> Table:
    return {column: np.empty(0, dtype) for column, dtype in SCHEMA[name].items()}


@dataclass
class Trace:
    """What one process did with memory, in order.

    Attributes:
        about: versions, device, argv and other facts of the run, as JSON-able values.
        text: interned text; columns named ``name``, ``line``, ``proof``… hold indices into it.
        tables: one dictionary of equally long NumPy columns per name in :data:`SCHEMA`.
        peak_step: the events of the highest step, where that step was folded in this trace; memory from before the
            step has no event there.
        cut_short: why the file holds only a part of the run; None where it holds all.
    """

    about: dict[str, Any]
    text: list[str]
    tables: dict[str, Table] = field(default_factory=dict)
    cut_short: str | None = None
    peak_step: Trace | None = None

    def __post_init__(self) -> None:
        for name in SCHEMA:
            self.tables.setdefault(name, empty_table(name))
        spans = self.tables["spans"]
        if len(spans["id"]):
            order = np.argsort(spans["id"], kind="stable")
            self.tables["spans"] = {column: values[order] for column, values in spans.items()}

    def __getitem__(self, table: str) -> Table:
        return self.tables[table]

    def rows(self, table: str) -> int:
        return len(next(iter(self.tables[table].values())))

    def string(self, index: int) -> str | None:
        """The interned text, or None for NONE."""
        return None if index < 0 else self.text[index]

    def numbers(self, *texts: str) -> list[int]:
        """The numbers of those texts that the trace has."""
        return [self.text.index(text) for text in texts if text in self.text]

    def span_row(self, span_id: int) -> int:
        """Row of a span in the span table, or NONE where it is not there."""
        ids = self.tables["spans"]["id"]
        row = int(np.searchsorted(ids, span_id))
        return row if 0 <= row < len(ids) and int(ids[row]) == span_id else NONE

    def ancestors(self, span_id: int) -> Iterable[int]:
        """Rows of a span and of all that enclose it, innermost first."""
        row = self.span_row(span_id) if span_id != NONE else NONE
        while row != NONE:
            yield row
            parent = int(self.tables["spans"]["parent"][row])
            row = self.span_row(parent) if parent != NONE else NONE

    @property
    def not_seen(self) -> list[str]:
        """What the recording could not see, in the recorder's own words, each once."""
        said: Sequence[str] = self.about.get("not_seen", ())
        marks = self.tables["marks"]
        unseen = [
            self.text[text] for kind, text in zip(marks["kind"], marks["text"], strict=True)
            if self.string(kind) == UNSEEN and text >= 0
        ]
        end = [] if self.cut_short is None else [f"the end of the run: {self.cut_short}"]
        return list(dict.fromkeys([*said, *unseen, *end]))

    @property
    def complete(self) -> bool:
        """Whether the file holds the whole run."""
        return self.cut_short is None


def as_table(name: str, rows: Mapping[str, Sequence[Any]]) -> Table:
    """Columns of the right type from plain lists, in the order of the schema."""
    return {column: np.asarray(rows[column], dtype=dtype) for column, dtype in SCHEMA[name].items()}
