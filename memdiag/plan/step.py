"""One step of a run, as a plan of checkpoints is made from it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memdiag.errors import MemdiagError
from memdiag.trace import NONE, Kind
from memdiag.trace.model import AUTOCAST_ENDED, CACHED, GRAD_ON, RECOMPUTE
from memdiag.trace.nesting import span_rows
from memdiag.trace.places import at
from memdiag.trace.view import View

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Call:
    """A module call of the step, with gradients on.

    Attributes:
        row: of its span.
        path: of the module; ``number`` counts its calls in the run.
        start, end: memory events before it, and when it is over.
        first, last: ids of the spans that it encloses, itself included.
        arguments: allocations that it was given.
    """

    row: int
    path: str
    number: int
    start: int
    end: int
    first: int
    last: int
    arguments: Ints


class Step:
    """The facts of one step in full recording.

    Attributes:
        first, last: its memory events are ``first`` to ``last - 1``.
        size, born, died: of all allocations: bytes (0 where they are of another device), events of birth and death.
        let_go: the slot in which Python lets go of each allocation (see :data:`SLOT`); NONE where that is not known,
            or comes after the forward.
        calls: of modules, in the order in which they began.
        forwards: the outermost of them.

    Raises:
        MemdiagError: nothing of what a plan needs was recorded, or the forward is not the same when it runs again.
    """

    def __init__(self, run: View) -> None:
        trace = self._trace = run.trace
        second = trace["second_forwards"]
        if not len(second["step"]):
            raise MemdiagError("no step was recorded for a plan: `memdiag plan SCRIPT` records one")
        self.number = int(second["step"][0])
        row = np.flatnonzero(trace["steps"]["step"] == self.number)
        if not len(row):
            raise MemdiagError(f"step {self.number}, which a plan is made from, did not come to its end")
        self.first, self.last = (int(trace["steps"][name][row[0]]) for name in ("start_event", "end_event"))
        self.size: Ints = np.where(run.mine, trace["allocations"]["bytes"], 0)
        self.born, self.died = run.life.born, run.life.died
        self.live: Ints = run.line.live[self.first : self.last]
        self.before = int(run.line.live[self.first - 1]) if self.first else run.line.start_bytes
        self._saves()
        self.calls = self._calls(run)
        outermost = run.nest.outer_module
        self.forwards = [call for call in self.calls if outermost[call.row] in (NONE, call.row)]
        self.let_go = self._let_go()

    def _saves(self) -> None:
        trace = self._trace
        saves, ends = trace["saves"], trace["save_ends"]
        mine = (saves["packed_event"] >= self.first) & (saves["packed_event"] <= self.last)
        unpacked, released = (np.full(int(saves["id"].max(initial=-1)) + 1, NONE, dtype=np.int64) for _ in range(2))
        unpacked[ends["save"]], released[ends["save"]] = ends["unpacked_event"], ends["released_event"]
        self.saved: Ints = saves["allocation"][mine]
        self.saver: Ints = saves["span"][mine]
        self.packed: Ints = saves["packed_event"][mine]
        self.unpacked: Ints = unpacked[saves["id"][mine]]
        self.released: Ints = released[saves["id"][mine]]

    def _calls(self, run: View) -> list[Call]:
        trace, spans = self._trace, self._trace["spans"]
        last = _last_inside(spans["id"], spans["parent"])
        within = (spans["start_event"] >= self.first) & (spans["end_event"] <= self.last)
        wanted = (spans["kind"] == Kind.MODULE) & within & (spans["flags"] & GRAD_ON != 0)
        wanted &= spans["flags"] & RECOMPUTE == 0
        arguments = trace["arguments"]
        order = np.argsort(arguments["span"], kind="stable")
        of, given = arguments["span"][order], arguments["allocation"][order]
        found = []
        for row in np.flatnonzero(wanted).tolist():
            span = int(spans["id"][row])
            low, high = np.searchsorted(of, (span, span + 1))
            found.append(Call(
                row, trace.text[spans["name"][row]], int(spans["call"][row]), int(spans["start_event"][row]),
                int(spans["end_event"][row]), span, int(last[row]), given[low:high]))
        return sorted(found, key=lambda call: call.first)

    def _let_go(self) -> Ints:
        trace = self._trace
        second = trace["second_forwards"]
        devices, marks = trace["allocations"]["device"], trace["marks"]
        ended = np.sort(marks["event"][np.isin(marks["kind"], trace.numbers(AUTOCAST_ENDED))])
        found = np.full(len(self.size), NONE, dtype=np.int64)
        for number, call in enumerate(self.forwards):
            mine = second["forward"] == number
            rows = np.flatnonzero((self.born >= call.start) & (self.born < call.end))
            rows = rows[np.argsort(self.born[rows])]
            size = trace["allocations"]["bytes"][rows]
            same = (
                len(rows) == mine.sum() and np.array_equal(size, second["bytes"][mine])
                and np.array_equal(devices[rows], second["device"][mine]))
            if not same:
                raise MemdiagError(
                    f"`{call.path}` does not do the same when it runs again on the same inputs: no plan can be made")
            died = second["died"][mine]
            gone = died >= 0
            found[rows[gone]] = 2 * self.born[rows[died[gone] - 1]] + 2
            cached = rows[died == CACHED]
            following = np.searchsorted(ended, self.born[cached], side="right")
            known = following < len(ended)
            found[cached[known]] = 2 * ended[following[known]]
        return found


def _last_inside(ids: Ints, parents: Ints) -> Ints:
    """The last id inside each span: ids are given out where spans begin."""
    order = np.argsort(ids)
    last = ids.copy()
    position = {int(ids[row]): row for row in order.tolist()}
    for row in order[::-1].tolist():
        parent = position.get(int(parents[row]))
        if parent is not None and last[row] > last[parent]:
            last[parent] = last[row]
    return last
