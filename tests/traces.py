"""Traces written by hand, for tests: a small training run told event by event.

A test reads like the run that it describes::

    run = TraceBuilder()
    weight = run.existing(400)
    run.claim(weight, Role.PARAMETERS, "fc.weight")
    with run.step(warm_up=True):
        with run.phase(Phase.FORWARD), run.module("fc"), run.operator("aten::linear"):
            out = run.allocate(256)
            kept = run.save(out, shape=(8, 8))
        with run.phase(Phase.BACKWARD), run.node("AddmmBackward0"):
            run.release(kept)
            run.free(out)
    trace = run.build()

Every call moves the clock on by one microsecond (``run.wait`` moves it further), so times are exact too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from memdiag.trace import NONE, Kind, Level, Phase, Pool, Role, Trace, Writer
from memdiag.trace.file import PEAK_STEP
from memdiag.trace.model import RECOMPUTE, SAVE_GRAD, SAVE_LEAF, SCHEMA, as_table

EPOCH_NS = 1_700_000_000_000_000_000
TICK_NS = 1_000


class TraceBuilder:
    """Writes a trace row by row. Ids that it returns are those of the trace's tables."""

    def __init__(self, devices: Sequence[str] = ("cpu",), script: str = "/project/train.py", **about: Any) -> None:
        self.about: dict[str, Any] = {"devices": list(devices), "script": script, **about}
        self._devices = list(devices)
        self._text: list[str] = []
        self._numbers: dict[str, int] = {}
        self._rows: dict[str, list[dict[str, Any]]] = {name: [] for name in SCHEMA}
        self._open: list[dict[str, Any]] = []
        self._spans = 0
        self._calls: dict[str, int] = {}
        self._live: dict[int, tuple[int, str, Pool]] = {}
        self._peak_step: TraceBuilder | None = None
        self.events = 0
        self.now = EPOCH_NS

    # ---- memory

    def existing(self, size: int, *, device: str | None = None, pool: Pool = Pool.ALLOCATOR) -> int:
        """An allocation from before the recording."""
        return self._allocation(size, device, pool, event=NONE, time_ns=NONE, span=NONE, line=None, kernel=None)

    def allocate(self, size: int, *, line: str | None = None, kernel: str | None = None,
                 device: str | None = None, pool: Pool = Pool.ALLOCATOR) -> int:
        """One memory event: an allocation, born in the innermost open span."""
        span = self._open[-1]["id"] if self._open else NONE
        number = self._allocation(size, device, pool, event=self.events, time_ns=self._tick(), span=span, line=line,
                                  kernel=kernel)
        self.events += 1
        return number

    def free(self, *allocations: int) -> None:
        """One memory event for each: a free."""
        for allocation in allocations:
            del self._live[allocation]
            self._rows["frees"].append({"allocation": allocation, "event": self.events, "time_ns": self._tick()})
            self.events += 1

    def took(self, phase: Phase, ns: int) -> None:
        """A backward, or an optimizer's step, of the step that is open was timed."""
        self._rows["step_times"].append({"step": self.next_step(), "phase": phase, "ns": ns})

    def live_bytes(self, device: str | None = None, pool: Pool = Pool.ALLOCATOR) -> int:
        """What is alive now, counted apart from the trace's own arithmetic."""
        place = (device or self._devices[0], pool)
        return sum(size for size, *where in self._live.values() if tuple(where) == place)

    def alive(self) -> list[int]:
        return list(self._live)

    # ---- what the program was doing

    @contextmanager
    def step(self, *, warm_up: bool = False, shapes: str | None = None, rss: int = NONE) -> Iterator[int]:
        """A step recorded in full."""
        number = len(self._rows["steps"])
        first_event, first_ns = self.events, self.now
        with self._span(Kind.STEP, str(number)):
            yield number
        self._rows["steps"].append({
            "step": number, "level": Level.FULL, "start_event": first_event, "end_event": self.events,
            "start_ns": first_ns, "end_ns": self.now, "end_bytes": self.live_bytes(), "host_rss": rss,
            "input_shapes": self.text(shapes), "warm_up": warm_up,
        })

    def next_step(self) -> int:
        """The number of the step that comes next."""
        return len(self._rows["steps"])

    @contextmanager
    def unfinished_step(self, number: int | None = None) -> Iterator[None]:
        """What a recorder leaves after the last step that closed: a span, and no row among the steps."""
        with self._span(Kind.STEP, str(self.next_step() if number is None else number)):
            yield

    def highest_light_step(self) -> TraceBuilder:
        """The events of the highest light step, to be told apart: they become the trace's ``peak_step``.

        Memory from before the step is ``existing`` there; the step itself is an ``unfinished_step`` with its number.
        """
        self._peak_step = TraceBuilder(self._devices)
        self._peak_step.about, self._peak_step.now = self.about, self.now
        self._peak_step._text, self._peak_step._numbers = self._text, self._numbers
        return self._peak_step

    def light_step(self, peaks: Mapping[Phase, int], *, end_bytes: int, lasts_ns: int = 1_000_000,
                   rss: int = NONE) -> int:
        """A step of which only the peaks of its phases are left."""
        number = self.next_step()
        start = self.now
        self.wait(lasts_ns)
        self.folded_rest(peaks)
        self._rows["steps"].append({
            "step": number, "level": Level.LIGHT, "start_event": self.events, "end_event": self.events,
            "start_ns": start, "end_ns": self.now, "end_bytes": end_bytes, "host_rss": rss, "input_shapes": NONE,
            "warm_up": False,
        })
        return number

    def folded_rest(self, peaks: Mapping[Phase, int]) -> None:
        """Peaks of a stretch of light recording that no step's end has closed yet."""
        for phase, peak in peaks.items():
            self._rows["phase_peaks"].append(
                {"step": self.next_step(), "phase": phase, "event": self.events, "bytes": peak})

    @contextmanager
    def phase(self, phase: Phase, **span: Any) -> Iterator[int]:
        with self._span(Kind.PHASE, phase.label, **span) as number:
            yield number

    @contextmanager
    def module(self, name: str, **span: Any) -> Iterator[int]:
        call = self._calls[name] = self._calls.get(name, -1) + 1
        with self._span(Kind.MODULE, name, call=call, **span) as number:
            yield number

    @contextmanager
    def operator(self, name: str, **span: Any) -> Iterator[int]:
        with self._span(Kind.OPERATOR, name, **span) as number:
            yield number

    @contextmanager
    def node(self, name: str, **span: Any) -> Iterator[int]:
        with self._span(Kind.NODE, name, **span) as number:
            yield number

    @contextmanager
    def function(self, name: str, **span: Any) -> Iterator[int]:
        with self._span(Kind.FUNCTION, name, **span) as number:
            yield number

    def wait(self, nanoseconds: int) -> None:
        self.now += nanoseconds

    # ---- what was seen of the memory

    def read(self, *allocations: int) -> None:
        """The innermost open operator is given these."""
        for allocation in allocations:
            self._rows["reads"].append({"span": self._open[-1]["id"], "allocation": allocation})

    def save(self, allocation: int, *, shape: Sequence[int] = (1,), dtype: str = "float32", bytes: int | None = None,
             grad: bool = True, leaf: bool = False, line: str | None = None) -> int:
        """Autograd keeps a tensor, in the innermost open span. ``leaf``: the tensor has no history."""
        number = len(self._rows["saves"])
        own = bytes if bytes is not None else (
            self._rows["allocations"][allocation]["bytes"] if allocation != NONE else 0)
        strides = [1] * len(shape)
        self._rows["saves"].append({
            "id": number, "allocation": allocation, "span": self._open[-1]["id"] if self._open else NONE,
            "line": self.text(line), "shape": self.text(str(list(shape))), "strides": self.text(str(strides)),
            "dtype": self.text(dtype), "bytes": own, "packed_event": self.events,
            "flags": SAVE_GRAD * grad | SAVE_LEAF * leaf,
        })
        return number

    def release(self, *saves: int) -> None:
        """The graph lets go of saved tensors."""
        for save in saves:
            self._rows["save_ends"].append(
                {"save": save, "unpacked_event": self.events, "released_event": self.events})

    def claim(self, allocation: int, role: Role, name: str | None = None, *, proof: str = "seen by the test",
              from_birth: bool = True) -> None:
        """A live object owns this allocation: from its birth, or from now on."""
        self._rows["claims"].append({
            "allocation": allocation, "event": NONE if from_birth else self.events, "role": role,
            "name": self.text(name), "proof": self.text(proof),
        })

    def statistic(self, name: str, value: int, *, step: int = NONE, device: str | None = None) -> None:
        self._rows["device_stats"].append({
            "step": step, "device": self._devices.index(device or self._devices[0]), "name": self.text(name),
            "value": value,
        })

    def mark(self, kind: str, text: str, *, bytes: int = NONE) -> None:
        self._rows["marks"].append(
            {"event": self.events, "kind": self.text(kind), "text": self.text(text), "bytes": bytes})

    def out_of_memory(self, size: int, *, device: str | None = None, line: str | None = None,
                      caller: str | None = None, reserved: int = NONE, light: tuple[int, Phase] | None = None) -> None:
        """A request fails, in the innermost open span; in a step of light recording that ``light`` names."""
        step, phase = light or (self.next_step(), Phase.FORWARD)
        device = device or self._devices[0]
        self._rows["out_of_memory"].append({
            "event": self.events, "time_ns": self._tick(), "device": self._devices.index(device), "bytes": size,
            "allocated": self.live_bytes(device), "reserved": reserved, "step": step, "phase": phase,
            "span": self._open[-1]["id"] if self._open and light is None else NONE, "line": self.text(line),
            "kernel": NONE, "caller": self.text(caller),
        })

    # ---- the result

    def text(self, string: str | None) -> int:
        """The number of an interned text; NONE for None."""
        if string is None:
            return NONE
        if string not in self._numbers:
            self._numbers[string] = len(self._text)
            self._text.append(string)
        return self._numbers[string]

    def build(self) -> Trace:
        assert not self._open, "a span is still open"
        tables = {
            name: as_table(name, {column: [row[column] for row in rows] for column in SCHEMA[name]})
            for name, rows in self._rows.items() if rows
        }
        peak_step = None if self._peak_step is None else self._peak_step.build()
        return Trace(dict(self.about), list(self._text), tables, peak_step=peak_step)

    # ---- inside

    def _tick(self) -> int:
        self.now += TICK_NS
        return self.now

    def _allocation(self, size: int, device: str | None, pool: Pool, *, event: int, time_ns: int, span: int,
                    line: str | None, kernel: str | None) -> int:
        number = len(self._rows["allocations"])
        device = device or self._devices[0]
        self._live[number] = (size, device, pool)
        self._rows["allocations"].append({
            "device": self._devices.index(device), "pool": pool, "address": 0x7F00_0000_0000 + 4096 * number,
            "bytes": size, "event": event, "time_ns": time_ns, "span": span, "line": self.text(line),
            "kernel": self.text(kernel), "stream": NONE,
        })
        return number

    @contextmanager
    def _span(self, kind: Kind, name: str, *, line: str | None = None, call: int = NONE, sequence: int = NONE,
              flags: int = 0, forward: int = NONE) -> Iterator[int]:
        row = {
            "id": self._spans, "parent": self._open[-1]["id"] if self._open else NONE, "kind": kind,
            "name": self.text(name), "start_event": self.events, "start_ns": self._tick(), "thread": 0,
            "line": self.text(line), "call": call, "sequence": sequence, "signature": NONE, "flags": flags,
            "forward": forward,
        }
        self._spans += 1
        self._open.append(row)
        yield row["id"]
        self._open.pop()
        # A table holds spans in the order in which they closed, as a recorder writes them.
        self._rows["spans"].append({**row, "end_event": self.events, "end_ns": self._tick()})


def write(trace: Trace, path: str | os.PathLike[str], *, rows_per_block: int = 100_000, close: bool = True) -> None:
    """Writes a trace as a run file, in several blocks where it is long; ``close=False``: as a killed process would."""
    writer = Writer(path, trace.about)
    writer.text(trace.text)
    for part, of in ((trace, None), (trace.peak_step, PEAK_STEP)):
        for name in SCHEMA if part is not None else ():
            for start in range(0, part.rows(name), rows_per_block):
                rows = {column: values[start:start + rows_per_block] for column, values in part[name].items()}
                writer.table(name, rows, of)
    if close:
        writer.close()
    else:
        writer.abandon()


def training_run(steps: int = 3, *, layers: int = 2, width: int = 64 * 1024, script: str = "/project/train.py",
                 **about: Any) -> TraceBuilder:
    """A plain training loop: equal blocks and a head under Adam, and an evaluation at the end. CPU only.

    With ``L = layers + 1`` weights of ``width / 2`` bytes, which were there before the recording: forward saves an
    output of ``width`` and a mask of ``width / 4`` bytes per weight, backward frees them one by one for a gradient
    of ``width / 2`` bytes and a scratch of ``width / 8`` that lives inside one node; the first step makes ``width``
    bytes of optimizer state per weight. So every step peaks in backward's first node, and the first one lower than
    the others by the state.
    """
    run = TraceBuilder(script=script, **about)
    folder = os.path.dirname(script)
    model_line, data_line, optimizer_line = f"{folder}/model.py:12", f"{folder}/data.py:7", f"{script}:30"
    names = [f"blocks.{i}.fc" for i in range(layers)] + ["head"]
    weights = {name: run.existing(width // 2) for name in names}
    for name, weight in weights.items():
        run.claim(weight, Role.PARAMETERS, f"{name}.weight", proof="a parameter of the model")

    def forward(name: str) -> tuple[str, int, list[int], list[int]]:
        shape = (8, width // 32)
        with run.module(name), run.operator("aten::linear", line=model_line) as operator:
            out = run.allocate(width, line=model_line, kernel="aten::addmm")
            mask = run.allocate(width // 4, line=model_line, kernel="aten::gt")
            kept = [
                run.save(out, shape=shape, line=model_line),
                run.save(mask, shape=shape, dtype="bool", line=model_line),
                run.save(weights[name], shape=(32, width // 256), leaf=True, line=model_line),
            ]
        return name, operator, [out, mask], kept

    def backward(name: str, operator: int, tensors: list[int], kept: list[int]) -> int:
        with run.node("AddmmBackward0", line=model_line, forward=operator):
            gradient = run.allocate(width // 2, line=model_line, kernel="aten::mm")
            run.claim(gradient, Role.GRADIENTS, f"{name}.weight.grad", proof="accumulated into a parameter's .grad")
            scratch = run.allocate(width // 8, line=model_line, kernel="aten::mm")
            run.free(scratch)
            for save, tensor in zip(kept, tensors, strict=False):
                run.release(save)
                run.free(tensor)
            run.release(kept[-1])
        return gradient

    for number in range(steps):
        with run.step(warm_up=number == 0, shapes="[[8, 32]]", rss=(500 + number) * 2**20):
            batch = run.allocate(width // 8, line=data_line)
            run.claim(batch, Role.INPUTS, "input 0", proof="an argument of the outermost module")
            with run.phase(Phase.FORWARD), run.module("Net"):
                saved = [forward(name) for name in names]
            with run.phase(Phase.BACKWARD):
                gradients = [backward(*kept) for kept in reversed(saved)]
            with run.phase(Phase.OPTIMIZER):
                for name in names:
                    for moment in ("exp_avg", "exp_avg_sq") if number == 0 else ():
                        state = run.allocate(width // 2, line=optimizer_line)
                        run.claim(state, Role.OPTIMIZER_STATE, f"{name}.weight {moment}",
                                  proof="in the optimizer's state")
                    run.free(run.allocate(width // 2, line=optimizer_line, kernel="aten::sqrt"))
            run.free(*gradients, batch)
    with run.phase(Phase.EVALUATION), run.module("Net"), run.module("head"), run.operator("aten::linear"):
        run.free(run.allocate(width, line=model_line, kernel="aten::addmm"))
    return run


@dataclass
class AnyRun:
    """A run that hypothesis made, and what was alive after each of its events, counted while it was made."""

    trace: Trace
    live: list[int]


@st.composite
def any_runs(draw: st.DrawFn, max_actions: int = 40) -> AnyRun:
    """Runs of any order: nested spans of all kinds, allocations in every pool, frees, saves, releases and claims."""
    run = TraceBuilder(devices=("cpu", "cuda:0"))
    live: list[int] = []
    saves: list[int] = []
    number = st.integers(0, 1000)

    def one_alive() -> int | None:
        alive = run.alive()
        return alive[draw(number) % len(alive)] if alive else None

    for _ in range(draw(st.integers(0, 3))):
        run.existing(draw(st.integers(1, 9)))
    with ExitStack() as everything:
        open_spans: list[ExitStack] = []
        for action in draw(st.lists(st.sampled_from(
                ["allocate", "allocate", "free", "save", "release", "claim", "open", "open", "close"]),
                max_size=max_actions)):
            if action == "allocate":
                device, pool = draw(st.sampled_from(
                    [("cpu", Pool.ALLOCATOR)] * 3 + [("cuda:0", Pool.ALLOCATOR), ("cpu", Pool.MAPPED)]))
                run.allocate(draw(st.integers(1, 100)), device=device, pool=pool)
                live.append(run.live_bytes())
            elif action == "open":
                span = everything.enter_context(ExitStack())
                span.enter_context(_any_span(run, draw, outermost=not open_spans))
                open_spans.append(span)
            elif action == "close" and open_spans:
                open_spans.pop().close()
            elif action == "release" and saves:
                run.release(saves.pop(draw(number) % len(saves)))
            elif (allocation := one_alive()) is not None:
                if action == "free":
                    run.free(allocation)
                    live.append(run.live_bytes())
                elif action == "save":
                    saves.append(run.save(allocation, grad=draw(st.booleans()), leaf=draw(st.booleans())))
                elif action == "claim":
                    run.claim(allocation, draw(st.sampled_from(Role)), draw(st.sampled_from([None, "a", "b"])),
                              from_birth=draw(st.booleans()))
        while open_spans:
            open_spans.pop().close()
    return AnyRun(run.build(), live)


def _any_span(run: TraceBuilder, draw: st.DrawFn, outermost: bool) -> Any:
    kinds = ["phase", "module", "operator", "node", "function", *(["step"] if outermost else [])]
    kind = draw(st.sampled_from(kinds))
    if kind == "step":
        return run.step()
    if kind == "phase":
        return run.phase(draw(st.sampled_from(Phase)))
    if kind == "module":
        return run.module(draw(st.sampled_from(["a", "a.0", "a.1"])), flags=draw(st.sampled_from([0, RECOMPUTE])))
    return {"operator": run.operator, "node": run.node, "function": run.function}[kind](f"any {kind}")
