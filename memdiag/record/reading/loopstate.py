"""Steps and phases, followed along the stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from memdiag.record import marks as m
from memdiag.record.facts import StepEnd
from memdiag.record.reading.rows import Rows
from memdiag.trace import NONE, Kind, Level, Phase

ENTERS = {m.BACKWARD_START: Phase.BACKWARD, m.OPTIMIZER_START: Phase.OPTIMIZER, m.CLOSURE_START: Phase.FORWARD}
"""The phase that each kind of mark begins."""

_MOST_GRAPH_BACKWARDS = 10_000  # changes of line that are kept


class LoopState:
    """The current step and phase, and the spans that they become.

    Rules: docs/how-it-works.md. Everything belongs to some step and phase: what comes before the first step
    closes is in step 0, what comes after the last is in a step that has a span but no row in ``steps``.
    """

    def __init__(self, rows: Rows, new_span: Callable[[], int], start_ns: int) -> None:
        self._rows = rows
        self._new = new_span
        self.step = 0
        self.phase = Phase.FORWARD
        self._step_span = self._new()
        self._step_start = (0, start_ns)
        self.span = self._new()
        self._phase_start = (0, start_ns)
        self._after_backward = False
        self._updating = False  # the script's own optimizer is at work
        self._grad = self._update_grad = True  # gradients were on in the last line, and in the update's
        self._line = NONE  # that called what the phase is of
        self._enclosing: list[tuple[Phase, int]] = []
        self.level = Level.FULL
        self._graph_backwards: deque[tuple[int, str | None]] = deque(maxlen=_MOST_GRAPH_BACKWARDS)

    def graph_backward(self, ns: int, line: str | None) -> None:
        """A backward begins that makes a graph of its own."""
        if not self._graph_backwards or self._graph_backwards[-1][1] != line:
            self._graph_backwards.append((ns, line))

    def graph_backward_before(self, ns: int) -> str | None:
        """The line of the last backward before a moment that made a graph."""
        return next((line for start, line in reversed(self._graph_backwards) if start <= ns), None)

    @property
    def nested(self) -> bool:
        """Inside a backward call or an optimizer's step."""
        return bool(self._enclosing)

    @property
    def in_backward(self) -> bool:
        return self.phase is Phase.BACKWARD

    @property
    def in_optimizer(self) -> bool:
        """Inside the step of an optimizer, which the script did not write."""
        return self.phase is Phase.OPTIMIZER and bool(self._enclosing)

    def set(self, phase: Phase, event: int, ns: int) -> None:
        if phase is not self.phase:
            self._close_phase(event, ns)
            self.phase = phase

    def enter(self, phase: Phase, event: int, ns: int, line: int = NONE) -> None:
        """A backward call, an optimizer's step or its closure begins; the line is that of the call."""
        self._updating = False
        self._enclosing.append((self.phase, self._line))
        self.set(phase, event, ns)
        self._line = line

    def leave(self, event: int, ns: int) -> None:
        """It ends: outermost ones leave to ``other``, since what follows is neither forward nor the same again."""
        if not self._enclosing:
            return
        ended, (before, line) = self.phase, self._enclosing.pop()
        if ended is Phase.BACKWARD:
            self._after_backward = True
        self.set(before if self._enclosing else Phase.OTHER, event, ns)
        self._line = line if self._enclosing else NONE

    def module(self, grad: bool, event: int, ns: int) -> None:
        """An outermost module call, outside backward and the optimizer."""
        self._updating = False
        if grad:
            self._after_backward = False
        self.set(Phase.FORWARD if grad else Phase.EVALUATION, event, ns)

    def code(self, grad: bool, event: int, ns: int) -> None:
        """A torch function called by the script outside modules, backward and the optimizer."""
        self._grad = grad
        if self._updating:
            if self._update_grad or not grad:
                return
            self._updating = False  # it left the block without gradients that the update was in
        if grad:
            self.set(Phase.FORWARD, event, ns)
        elif self.phase is Phase.FORWARD:
            self.set(Phase.OTHER, event, ns)

    def saved(self, event: int, ns: int) -> None:
        """Autograd kept something for a backward: the script's own update is over, though no module was called."""
        if self._updating:
            self._updating = self._after_backward = False
            self.set(Phase.FORWARD, event, ns)

    def parameter_written(self, event: int, ns: int) -> None:
        """The script itself wrote to a parameter in place: between a backward and the next forward that is its
        optimizer, and so is what it did without gradients just before."""
        if not self._after_backward or self._updating:
            return
        self._updating = True
        self._update_grad = self._grad
        if self.phase is Phase.OTHER:
            self.phase = Phase.OPTIMIZER
        else:
            self.set(Phase.OPTIMIZER, event, ns)

    def close_step(self, end: StepEnd, end_bytes: int, event: int, ns: int) -> None:
        self._close_phase(event, ns)
        self._span_row(self._step_span, NONE, Kind.STEP, str(self.step), self._step_start, event, ns)
        self._rows["steps"].append((
            self.step, self.level, self._step_start[0], event, self._step_start[1], ns, end_bytes, end.host_rss,
            self._rows.intern(end.input_shapes), self.step == 0,
        ))
        self._begin(self.step + 1, event, ns)

    def skip_to(self, step: int, event: int, ns: int) -> None:
        """A gap in the recording ends, where a step begins. What was open when it began closes, and is no step."""
        self.finish(event, ns)
        self._enclosing.clear()
        self._begin(step, event, ns)

    def _begin(self, step: int, event: int, ns: int) -> None:
        self.step = step
        self._step_span = self._new()
        self._step_start = (event, ns)
        self.span, self._phase_start = self._new(), (event, ns)
        self.phase = Phase.FORWARD
        self._after_backward = self._updating = False

    def finish(self, event: int, ns: int) -> None:
        """The recording ends: what is open closes, and is no step."""
        self._close_phase(event, ns)
        self._span_row(self._step_span, NONE, Kind.STEP, str(self.step), self._step_start, event, ns)

    def _close_phase(self, event: int, ns: int) -> None:
        self._span_row(
            self.span, self._step_span, Kind.PHASE, self.phase.label, self._phase_start, event, ns, self._line)
        self.span, self._phase_start, self._line = self._new(), (event, ns), NONE

    def _span_row(self, span: int, parent: int, kind: Kind, name: str, start: tuple[int, int], event: int,
                  ns: int, line: int = NONE) -> None:
        if self.level is Level.LIGHT:
            return  # a row per phase and step is all that light recording keeps
        self._rows["spans"].append((
            span, parent, kind, self._rows.intern(name), start[0], event, start[1], ns, 0, line, NONE, NONE, NONE, 0,
            NONE,
        ))
