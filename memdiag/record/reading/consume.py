"""From a chunk of the profiler's event stream to rows of the trace."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

from torch._C._profiler import _TensorMetadata as TensorMetadata

from memdiag.record import marks as m
from memdiag.record.facts import ModuleCall, Saved, SaveTimes
from memdiag.record.marks import Entry
from memdiag.record.reading.failures import EVENT as OUT_OF_MEMORY
from memdiag.record.reading.failures import Request
from memdiag.record.reading.fold import Fold
from memdiag.record.reading.heap import Birth, Heap
from memdiag.record.reading.loopstate import ENTERS, LoopState
from memdiag.record.reading.rows import Rows
from memdiag.trace import NONE, Kind, Level, Role
from memdiag.trace.model import AUTOCAST_ENDED, GRAD_ON, OTHER_RANDOM, RECOMPUTE, SAVE_GRAD, SAVE_LEAF

# What an event's name says it is.
_MEMORY, _OOM, _MARK, _NODE, _ACCUMULATE, _OPERATOR, _CONTAINER = range(7)
_NODE_PREFIX = "autograd::engine::evaluate_function: "
_COPIES = frozenset({"aten::to", "aten::_to_copy", "aten::clone", "aten::contiguous", "aten::pin_memory"})
_GATHERS = frozenset({"aten::cat", "aten::concat", "aten::concatenate", "aten::stack"})
_MOST_SEQUENCES = 500_000  # operators whose line is kept for their backward
_ZEROES = frozenset({"aten::zero_", "aten::_foreach_zero_"})
# Operators that draw random numbers. Those around them (dropout) call one of these only where they draw.
_DRAWS = frozenset({f"aten::{name}" for name in (
    "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "multinomial", "native_dropout", "normal_",
    "poisson", "random_", "randperm", "rrelu_with_noise", "uniform_")})


class _Place:
    """Where in the nesting an event stands.

    Attributes:
        span: the innermost recorded span; NONE at the top, which is the current phase.
        operator: the operator around, which is what the script called; NONE outside any.
        line: of the user's code.
        node: name of the autograd node around.
        again: code of a forward that runs again in backward, for a checkpoint.
    """

    __slots__ = ("again", "line", "node", "operator", "span")

    def __init__(self, span: int, operator: int, line: int, node: int, again: bool = False) -> None:
        self.span, self.operator, self.line, self.node, self.again = span, operator, line, node, again


class Consumer:
    """Reads chunks in order and keeps what must be known across them: live memory, the step, the phase."""

    def __init__(
        self, rows: Rows, start_ns: int, accelerator: bool, failed_requests: Callable[[], list[Request]] = list
    ) -> None:
        self._rows = rows
        self._new_span = count().__next__
        self.heap = Heap(rows, failed_requests)
        self.loop = LoopState(rows, self._new_span, start_ns)
        self._accelerator = accelerator
        self._fold = Fold(rows, self.heap, self.loop, accelerator)
        self._codes: dict[str, tuple[int, int]] = {}
        self._dtypes: dict[Any, str] = {}
        self._forward: dict[int, tuple[int, int]] = {}  # autograd's sequence number -> operator span, line
        self._unpacked: dict[int, int] = {}
        self._own_thread = NONE
        self._graph_of_backward = False
        self._node = 0  # outermost nodes of backward so far
        self._random_set_in = NONE  # the last of them in which the random state was set
        self.events_read = 0
        self.planned = False  # what is read belongs to the step that a plan is made from
        self.keepable: frozenset[str] = frozenset()  # operators of that step that a checkpoint could keep
        self.writers: set[int] = set()  # lines, as numbers of their text, where the script writes to parameters

    def chunk(
        self, level: Level, roots: list[Any], entries: list[Entry], saves: SaveTimes,
        gone: list[tuple[int, int, int]],
    ) -> bool:
        """Reads a chunk.

        Args:
            level: how it was recorded.
            roots: the event tree; where it was recorded in full, its last mark is that of the cut.
            entries: what the marks stand for.
            saves: when autograd's tensors came and went.
            gone: (time, address, bytes) of memory that was freed without an event.

        Returns:
            Whether nothing was open at the cut.
        """
        self.heap.new_chunk()
        if level is Level.LIGHT:
            self.loop.level = level
            self._fold.chunk(roots, entries, saves.packed, gone)
            self.events_read += len(roots)
            closed = True
        else:
            self._fold.to_full()
            self.loop.level = level
            closed = self._walk(roots, entries, sorted(gone, reverse=True))
        event_at = self.heap.event_at
        self._unpacked.update((save, event_at(time)) for save, time in saves.unpacked)
        self._rows["save_ends"].extend(
            (save, self._unpacked.pop(save, NONE), event_at(time)) for save, time in saves.released)
        return closed

    @property
    def steady(self) -> bool:
        """Light steps do the same, again and again."""
        return self._fold.alike.steady

    def _walk(self, roots: list[Any], entries: list[Entry], gone: list[tuple[int, int, int]]) -> bool:
        heap, loop = self.heap, self.loop
        codes, accelerator = self._codes, self._accelerator
        keepable = self.keepable if self.planned else frozenset()
        root = _Place(NONE, NONE, NONE, NONE)
        elsewhere = _Place(NONE, NONE, NONE, NONE)  # for roots of other threads
        shelved: list[tuple[int, int, int]] = []
        closed = False
        read = 0
        mine, others = _by_thread(roots)
        self._own_thread = mine[0].start_tid if mine else NONE
        # Depth first in the order of time. An entry is an event, its place and the name of the innermost operator
        # around it. Where a span ends it has no place: it is the span's row, None and the time; or what to do then.
        todo: list[Any] = [(event, root, NONE) for event in mine]
        while todo or others:
            event, place, kernel = todo.pop() if todo else (others.pop(), elsewhere, NONE)
            if place is None:
                if event.__class__ is list:  # the row of a span
                    event[5], event[7] = heap.next_event, kernel
                else:
                    event()
                continue
            if others and others[-1].start_time_ns < event.start_time_ns:
                todo.append((event, place, kernel))
                event, place, kernel = others.pop(), elsewhere, NONE
            while gone and gone[-1][0] < event.start_time_ns:
                self._goes(gone.pop())
            read += 1
            name = event.name
            code, name_id = codes.get(name) or self._classify(name)
            if code == _MEMORY:
                fields = event.extra_fields
                size = fields.alloc_size
                if size > 0:
                    at = place.operator
                    if at == NONE:
                        at = place.span if place.span != NONE else loop.span
                    heap.allocated(
                        fields.ptr, size, fields.total_allocated, str(fields.device) if accelerator else "cpu",
                        event.start_time_ns, loop.step, Birth(at, place.line, kernel, place.span == NONE))
                else:
                    heap.freed(fields.ptr, size, fields.total_allocated, event.start_time_ns)
                continue
            if code == _OPERATOR:
                if name in keepable and not loop.in_backward:
                    self._keepable(event, name_id, todo)
                if place.operator == NONE:
                    self._operator(event, name, name_id, place, todo)
                elif children := event.children:
                    # Inside another operator: only the kernel's name is of interest.
                    todo.extend([(child, place, name_id) for child in reversed(children)])
                continue
            if code == _MARK:
                entry = entries[int(name[len(m.PREFIX):])]
                kind = entry[0]
                if kind == m.LINE:
                    if place.span == NONE and not loop.nested:
                        loop.code(entry[2], heap.next_event, event.start_time_ns)
                    line = self._rows.intern(entry[1])
                    if place.node != NONE and line == elsewhere.line:
                        line = place.line  # code of torch's, or that it made: what is undone says more than the call
                    # Hooks and backwards run without gradients, unless they are to be differentiated themselves.
                    again = loop.in_backward and entry[2] and not self._graph_of_backward
                    inner = _Place(place.span, place.operator, line, place.node, again)
                    todo.extend([(child, inner, kernel) for child in reversed(event.children)])
                elif kind == m.SAVE:
                    self._save(entry[1], place)
                    self.loop.saved(heap.next_event, event.start_time_ns)
                elif kind == m.MODULE:
                    inner = self._module(entry[1], event, place, todo)
                    todo.extend([(child, inner, NONE) for child in reversed(event.children)])
                elif kind == m.CUT:
                    closed = place is root
                elif kind == m.RANDOM_SET:
                    self._random_set_in = self._node
                elif kind == m.AUTOCAST_END:
                    self._rows["marks"].append((heap.next_event, self._rows.intern(AUTOCAST_ENDED), NONE, 0))
                elif kind == m.CLAIM:
                    heap.claim(entry[2], loop.step)
                elif kind == m.OUTPUTS:
                    heap.computed(entry[2])
                elif kind == m.WATCHED:
                    self._fold.watches(entry[2])
                elif kind in ENTERS:
                    # What follows on this level is not the module's own work until the matching end.
                    shelved.append((place.span, place.operator, place.line))
                    place.span = place.operator = NONE
                    place.line = elsewhere.line = self._rows.intern(entry[2])
                    if kind == m.BACKWARD_START:
                        self._graph_of_backward = entry[3]
                        if entry[3]:
                            loop.graph_backward(entry[1], entry[2])
                    loop.enter(ENTERS[kind], heap.next_event, event.start_time_ns, place.line)
                elif kind == m.STEP_END:
                    entry[2].read = not entry[2].closes
                    if entry[2].closes:
                        self._step_ends(entry[2], event.start_time_ns)
                else:
                    if shelved:
                        place.span, place.operator, place.line = shelved.pop()
                    elsewhere.line = NONE
                    loop.leave(heap.next_event, event.start_time_ns)
                continue
            if code == _OOM:
                at = place.operator if place.operator != NONE else place.span
                heap.out_of_memory(
                    event.start_time_ns, loop.step, loop.phase,
                    Birth(at if at != NONE else loop.span, place.line, kernel, place.span == NONE), elsewhere.line)
                continue
            self._container(code, name_id, event, place, kernel, todo)
        self.events_read += read
        for freed in reversed(gone):
            self._goes(freed)
        return closed

    def _goes(self, freed: tuple[int, int, int]) -> None:
        time, address, size = freed
        self.heap.is_gone(address, size, time)

    def _classify(self, name: str) -> tuple[int, int]:
        if name.startswith(m.PREFIX):
            return _MARK, NONE  # each has a name of its own: not worth keeping
        if name == "[memory]":
            code, text = _MEMORY, None
        elif name == OUT_OF_MEMORY:
            code, text = _OOM, None
        elif name.startswith(_NODE_PREFIX):
            code, text = _NODE, name[len(_NODE_PREFIX):]
        elif name == "torch::autograd::AccumulateGrad":
            code, text = _ACCUMULATE, name
        elif "::" in name and not name.startswith("torch::"):
            code, text = _OPERATOR, name
        else:
            code, text = _CONTAINER, name
        found = self._codes[name] = code, self._rows.intern(text)
        return found

    # --- what an event may be -----------------------------------------------------------------------------------

    def _operator(self, event: Any, name: str, name_id: int, place: _Place, todo: list[Any]) -> None:
        heap, loop = self.heap, self.loop
        fields = event.extra_fields
        # In an optimizer's step they are the parameters', and there are many.
        signature, read = (NONE, ()) if loop.in_optimizer and name not in _ZEROES else self._signature(fields.inputs)
        sequence = fields.sequence_number
        span = self._new_span()
        at_top = place.span == NONE
        if sequence >= 0 and (event.start_tid == self._own_thread or sequence not in self._forward):
            # Each thread numbers its own: what CUDA's backward threads recompute must not hide what it stands for.
            self._forward[sequence] = span, place.line
        start_ns = event.start_time_ns
        row = [
            span, loop.span if at_top else place.span, Kind.OPERATOR, name_id, heap.next_event, 0, start_ns, 0, 0,
            place.line, NONE, sequence, signature, RECOMPUTE * place.again, NONE,
        ]
        if place.again and self._random_set_in != self._node and _draws(event):
            row[-2] |= OTHER_RANDOM
        self._rows["spans"].append(row)
        todo.append((row, None, event.end_time_ns))
        if place.again or not loop.in_backward:
            heap.read(span, read)
        if at_top and read and not loop.in_backward:
            heap.gradients_touched(read, name, name in _ZEROES, loop.span)
            if name[-1] == "_" and not loop.nested:
                if heap.has_role(read[0], Role.PARAMETERS):
                    loop.parameter_written(heap.next_event, start_ns)
                    self.writers.add(place.line)
                heap.written(read[0], read[1:])
            since = heap.next_id
            todo.append((lambda: heap.made_from(since, read, name in _COPIES, name in _GATHERS), None, NONE))
        if place.again and read and name[-1] == "_":
            heap.replayed(read[0])
        if loop.in_backward and name.startswith("c10d::"):
            heap.exchanges_gradients(read, name)
        children = event.children
        if children:
            inner = _Place(place.span, span, place.line, place.node)
            todo.extend([(child, inner, name_id) for child in reversed(children)])

    def _keepable(self, event: Any, name_id: int, todo: list[Any]) -> None:
        row = [name_id, self.heap.next_event, 0, event.start_time_ns, event.end_time_ns]
        self._rows["keepable"].append(row)

        def end() -> None:
            row[2] = self.heap.next_event

        todo.append((end, None, NONE))

    def _signature(self, inputs: list[Any]) -> tuple[int, tuple[int, ...]]:
        """Dtypes and shapes of the tensors that went in, as text; and the addresses of their storages."""
        addresses: list[int] = []
        said: list[str] = []
        for value in inputs:
            for tensor in value if value.__class__ is list else (value,):
                if tensor.__class__ is not TensorMetadata:
                    continue  # a number, or nothing
                address = tensor.storage_data_ptr
                if address:
                    addresses.append(address)
                dtype = tensor.dtype
                text = self._dtypes.get(dtype)
                if text is None:
                    text = self._dtypes[dtype] = str(dtype).removeprefix("torch.")
                said.append(f"{text}{tensor.sizes}")
        return (self._rows.intern(", ".join(said)) if said else NONE), tuple(addresses)

    def _save(self, saved: Saved, place: _Place) -> None:
        live = self.heap.find_or_foreign(saved.address, saved.storage_bytes, saved.device, saved.foreign)
        if live is not None and (saved.requires_grad or not saved.leaf):
            live.saved = True
            live.history = live.history or not saved.leaf
            if saved.leaf and live.step < self.loop.step and not live.claims:
                self.heap.say(
                    live, Role.PARAMETERS, None, "wants gradients, has no history, and was there a step before")
        intern = self._rows.intern
        span = place.operator if place.operator != NONE else place.span
        self._rows["saves"].append((
            saved.id, NONE if live is None else live.id, self.loop.span if span == NONE else span,
            place.line if place.line != NONE else intern(saved.line),
            intern(str(list(saved.shape))), intern(str(list(saved.strides))), intern(saved.dtype), saved.bytes,
            self.heap.next_event, SAVE_GRAD * saved.requires_grad | SAVE_LEAF * saved.leaf,
        ))

    def _module(self, call: ModuleCall, event: Any, place: _Place, todo: list[Any]) -> _Place:
        if call.row is None:
            if place.span == NONE and not self.loop.nested:
                self.loop.module(call.grad, self.heap.next_event, event.start_time_ns)
            call.row = [
                self._new_span(), self.loop.span if place.span == NONE else place.span, Kind.MODULE,
                self._rows.intern(call.path), self.heap.next_event, 0, event.start_time_ns, 0, 0,
                self._rows.intern(call.line), call.call, NONE, NONE,
                GRAD_ON * call.grad | RECOMPUTE * call.recompute, NONE,
            ]
            if call.arguments:
                given = {live.id for address in call.arguments if (live := self.heap.find(address)) is not None}
                self._rows["arguments"].extend((call.row[0], allocation) for allocation in sorted(given - {NONE}))
        row = call.row
        end_ns = event.end_time_ns

        def end() -> None:
            if call.cut:  # the module goes on in the next chunk
                call.cut = False
                return
            row[5], row[7] = self.heap.next_event, end_ns
            self._rows["spans"].append(row)

        todo.append((end, None, NONE))
        return _Place(row[0], NONE, row[9], NONE, call.recompute)

    def _container(
        self, code: int, name_id: int, event: Any, place: _Place, kernel: int, todo: list[Any]
    ) -> None:
        """A node of the graph, a custom Function, a compiled region."""
        if code == _ACCUMULATE:
            for value in event.extra_fields.inputs:
                self.heap.gradient_arrives(getattr(value, "storage_data_ptr", None))
        children = event.children
        if code == _ACCUMULATE or name_id == place.node or code == _CONTAINER and place.operator != NONE:
            # A node makes two events, one inside the other; and some of torch's own operators a container.
            if name_id == place.node and self.planned:
                node = place.span
                todo.append((lambda: self._rows["node_ends"].append((node, self.heap.next_event)), None, NONE))
            todo.extend([(child, place, kernel) for child in reversed(children)])
            return
        sequence = event.extra_fields.sequence_number
        line, forward, node = place.line, NONE, NONE
        if code == _NODE:
            node = name_id
            self._node += place.node == NONE
            forward, line = self._forward_of(sequence, line)
        row = [
            self._new_span(), self.loop.span if place.span == NONE else place.span,
            Kind.NODE if code == _NODE else Kind.FUNCTION, name_id, self.heap.next_event, 0, event.start_time_ns, 0, 0,
            line, NONE, sequence, NONE, 0, forward,
        ]
        if code == _CONTAINER and sequence >= 0 and (
                event.start_tid == self._own_thread or sequence not in self._forward):
            self._forward[sequence] = row[0], line
        self._rows["spans"].append(row)
        todo.append((row, None, event.end_time_ns))
        inner = _Place(row[0], NONE, line, node)
        todo.extend([(child, inner, NONE) for child in reversed(children)])

    def _forward_of(self, sequence: int, line: int) -> tuple[int, int]:
        """The operator that a node undoes, and its line.

        An operator is known by the number it began with; those that it made inside itself have the next few.
        """
        if sequence >= 0:
            for number in range(sequence, max(sequence - 16, -1), -1):
                found = self._forward.get(number)
                if found is not None:
                    return found[0], found[1] if found[1] != NONE else line
        return NONE, line

    def _step_ends(self, end: Any, time_ns: int) -> None:
        step = self.loop.step
        self.loop.close_step(end, self.heap.live_bytes(), self.heap.next_event, time_ns)
        self._rows["device_stats"].extend(
            (step, self.heap.devices.index(device), self._rows.intern(name), value)
            for device, name, value in end.device_stats if device in self.heap.devices)
        if len(self._forward) > _MOST_SEQUENCES:
            for number in sorted(self._forward)[: _MOST_SEQUENCES // 2]:
                del self._forward[number]

    def skip_to(self, step: int, time_ns: int, gone: list[tuple[int, int, int]]) -> None:
        """Nothing was recorded for a while, but what is ``gone``; the next chunk begins with this step."""
        self.heap.new_chunk()
        for freed in sorted(gone):
            self._goes(freed)
        self.loop.skip_to(step, self.heap.next_event, time_ns)

    def finish(self, time_ns: int) -> Rows | None:
        """Closes what is open: the recording has ended.

        Returns:
            The events of the highest light step, as rows of a trace of its own; None where a full step was higher.
        """
        self._rows["save_ends"].extend((save, event, NONE) for save, event in self._unpacked.items())
        self._fold.finish()
        self.loop.finish(self.heap.next_event, time_ns)
        return self._fold.highest_step(self._rows)


def _draws(event: Any) -> bool:
    """Whether an operator draws random numbers, itself or in what it calls."""
    return event.name in _DRAWS or any(_draws(child) for child in event.children)


def _by_thread(roots: list[Any]) -> tuple[list[Any], list[Any]]:
    """Roots of the thread that closed the chunk, and those of others (CUDA's backward threads), last first."""
    if not roots:
        return [], []
    own = next((e.start_tid for e in reversed(roots) if e.name.startswith(m.PREFIX)), roots[-1].start_tid)
    roots = sorted(roots, key=lambda event: event.start_time_ns, reverse=True)
    return [e for e in roots if e.start_tid == own], [e for e in roots if e.start_tid != own]
