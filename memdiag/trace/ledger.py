"""What every byte is: roles with their proofs, and their sums at every event.

Two kinds of proof exist. A *claim* was made while the run went on, from a live object: this storage is the parameter
``fc.weight``. The other roles follow from where an allocation was born, whether autograd saved it and when it
died; they are computed here, so every source of traces gets the same rules. What neither proves is ``unknown``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memdiag.trace.model import NONE, SAVE_GRAD, SAVE_LEAF, SAVED, Kind, Phase, Role, Trace
from memdiag.trace.nesting import Nesting, nesting, span_rows
from memdiag.trace.timeline import Lives, event_count, lives, of_device

Mask = NDArray[np.bool_]
Ints = NDArray[np.int64]

_LAST = np.iinfo(np.int64).max  # an event beyond all others

# Where several claims name one allocation from its birth on, the first role here is what it is.
_STRENGTH = (
    Role.PARAMETERS, Role.BUFFERS, Role.OPTIMIZER_STATE, Role.GRADIENTS, Role.INPUTS, Role.HELD,
)


@dataclass(frozen=True)
class Roles:
    """Role intervals: ``allocation`` is ``role`` from event ``start`` up to, not including, ``end``.

    The intervals of an allocation follow each other without a gap from its birth to its death. ``start`` is NONE for
    memory from before the recording. ``name`` indexes ``trace.text`` or is NONE; ``proof`` indexes ``proofs``.
    """

    allocation: Ints
    start: Ints
    end: Ints
    role: NDArray[np.uint8]
    name: NDArray[np.int32]
    proof: NDArray[np.int32]
    proofs: list[str]

    def at(self, event: int) -> Mask:
        """The intervals in force after an event."""
        return (self.start <= event) & (self.end > event)

    def of(self, allocations: Ints, events: Ints) -> NDArray[np.uint8]:
        """What each allocation was after the event given with it: its first role before its birth, its last after
        its death."""
        first = np.searchsorted(self.allocation, allocations)
        span = int(self.end.max(initial=0)) + 2
        key = self.allocation * span + self.start + 1
        row = np.searchsorted(key, allocations * span + np.clip(events, -1, span - 2) + 1, side="right") - 1
        return self.role[np.maximum(row, first)]


def roles(trace: Trace, of_run: Roles | None = None) -> Roles:
    """Every allocation's roles over its life. Rules: ``docs/roles.md``.

    Args:
        of_run: those of the run, where ``trace`` is its highest light step: there what was born in full steps has none
            of what it was known by.
    """
    life = lives(trace)
    derived, derived_proof, proofs = _derived(trace, life)
    if of_run is not None:
        continuing, row = trace["continues"]["allocation"], trace["continues"]["row"]
        was = of_run.of(row, np.full(len(row), _LAST))
        told = (derived[continuing] == Role.UNKNOWN) & (was != Role.UNKNOWN)
        derived[continuing[told]] = was[told]
        derived_proof[continuing[told]] = len(proofs)
        proofs.append("what it was when steps were recorded in full")
    claims = trace["claims"]
    count = len(life.born)
    whole = np.arange(count, dtype=np.int64)

    role = derived.copy()
    name = np.full(count, NONE, dtype=np.int32)
    proof = derived_proof.copy()
    claim_proofs, claim_proof = np.unique(claims["proof"], return_inverse=True)
    claim_proof = (claim_proof + len(proofs)).astype(np.int32)
    proofs = proofs + [trace.string(int(i)) or "" for i in claim_proofs]

    # That a variable leads to it proves what it is from its birth where nothing else does: a result that the next turn
    # of the loop replaces is no possession. Later on, too, a saved tensor comes back only with its graph.
    otherwise = derived[claims["allocation"]]
    saved = np.isin(otherwise, (Role.SAVED_ACTIVATIONS, Role.RECOMPUTED_ACTIVATIONS))
    strong = (claims["role"] != Role.HELD) | np.where(claims["event"] == NONE, otherwise == Role.UNKNOWN, ~saved)
    from_birth = np.flatnonzero(strong & (claims["event"] == NONE))
    strength = np.full(256, len(_STRENGTH), dtype=np.int64)
    strength[list(_STRENGTH)] = np.arange(len(_STRENGTH))
    # Weakest first, so that the strongest claim is written last; of equals, the last made wins: it has the name.
    order = from_birth[np.lexsort((from_birth, -strength[claims["role"][from_birth]]))]
    target = claims["allocation"][order]
    role[target] = claims["role"][order]
    name[target] = claims["name"][order]
    proof[target] = claim_proof[order]

    later = np.flatnonzero(strong & (claims["event"] != NONE))
    starts = np.maximum(claims["event"][later] - 1, life.born[claims["allocation"][later]])
    later = later[starts < life.died[claims["allocation"][later]]]
    released, released_from = _outlives_graph(trace, life, role)

    allocation = np.concatenate([whole, claims["allocation"][later], released])
    start = np.concatenate([life.born, np.maximum(claims["event"][later] - 1, life.born[claims["allocation"][later]]),
                            released_from])
    proofs.append("saved for backward, and kept by Python after the graph let go")
    columns = {
        "role": np.concatenate([role, claims["role"][later],
                                np.full(len(released), Role.OTHER_ACTIVATIONS, dtype=np.uint8)]),
        "name": np.concatenate([name, claims["name"][later], np.full(len(released), NONE, dtype=np.int32)]),
        "proof": np.concatenate([proof, claim_proof[later],
                                 np.full(len(released), len(proofs) - 1, dtype=np.int32)]),
    }
    order = np.lexsort((np.arange(len(start)), start, allocation))
    allocation, start = allocation[order], start[order]
    same = np.append(allocation[1:] == allocation[:-1], False)
    end = np.where(same, np.append(start[1:], 0), life.died[allocation])
    kept = end > start  # two claims at one event: the later one is what it is
    role, name, proof = (columns[column][order][kept] for column in ("role", "name", "proof"))
    return Roles(allocation[kept], start[kept], end[kept], role, name, proof, proofs)


def _outlives_graph(trace: Trace, life: Lives, role: NDArray[np.uint8]) -> tuple[Ints, Ints]:
    """Saved allocations that live on after their last release, and from which event."""
    saves, ends = trace["saves"], trace["save_ends"]
    count = len(life.born)
    if not len(saves["id"]):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    release = np.full(int(saves["id"].max()) + 1, event_count(trace), dtype=np.int64)
    let_go = ends["released_event"] != NONE
    release[ends["save"][let_go]] = ends["released_event"][let_go]
    held = saves["allocation"] != NONE
    last = np.full(count, NONE, dtype=np.int64)
    np.maximum.at(last, saves["allocation"][held], release[saves["id"][held]])
    over = np.flatnonzero((last != NONE) & (last < life.died) & (last > life.born) & np.isin(
        role, (Role.SAVED_ACTIVATIONS, Role.RECOMPUTED_ACTIVATIONS)))
    return over, last[over]


def _derived(trace: Trace, life: Lives) -> tuple[NDArray[np.uint8], NDArray[np.int32], list[str]]:
    nest = nesting(trace)
    where = span_rows(trace, trace["allocations"]["span"])
    facts = _Facts(trace, life, nest, where)
    count = len(life.born)
    role = np.full(count, Role.UNKNOWN, dtype=np.uint8)
    proof = np.zeros(count, dtype=np.int32)
    proofs = ["no proof: neither an owner nor a birth that says what it is"]
    # First rule that holds wins.
    for wanted, holds, text in facts.rules():
        chosen = holds & (role == Role.UNKNOWN)
        role[chosen] = wanted
        proof[chosen] = len(proofs)
        proofs.append(text)
    return role, proof, proofs


class _Facts:
    """What is known of each allocation's birth and death, as masks."""

    def __init__(self, trace: Trace, life: Lives, nest: Nesting, where: Ints) -> None:
        spans = trace["spans"]
        self.trace, self.life = trace, life
        self.recompute = nest.of(nest.recompute.astype(np.int64), where) > 0
        self.in_module = nest.of(nest.module, where) != NONE
        self.in_node = nest.of(nest.node, where) != NONE
        phase = nest.of(nest.phase, where)
        labels = {label: i for i, label in enumerate(trace.text)}
        self.phase = {
            p: (phase != NONE) & (spans["name"][phase] == labels.get(p.label, NONE - 1)) for p in Phase
        } if len(spans["id"]) else {p: np.zeros(len(where), dtype=bool) for p in Phase}
        self.unit = nest.of(nest.unit, where)
        self.phase_row, self.step_row = phase, nest.of(nest.step, where)
        # A result of one turn of the loop is often replaced only by that of the next.
        steps = np.flatnonzero(spans["kind"] == 0)
        following = np.full(len(spans["id"]), NONE, dtype=np.int64)
        following[steps[:-1]] = steps[1:]
        self.next_step = nest.of(following, self.step_row)
        self.broken_off = self._broken_off(nest)

    def _broken_off(self, nest: Nesting) -> Mask:
        """Born in the step that ended the run for want of memory, and never freed: the exception keeps its frames."""
        failures, events = self.trace["out_of_memory"], event_count(self.trace)
        if not self.trace.about.get("ended_out_of_memory") or not len(failures["event"]):
            return np.zeros(len(self.life.born), dtype=bool)
        step = nest.of(nest.step, span_rows(self.trace, failures["span"][-1:]))[0]
        found: Mask = (
            (self.step_row == step) & (self.step_row != NONE) & (self.life.died == events)
            & (self.life.born < failures["event"][-1]))
        return found

    def before_end_of(self, rows: Ints) -> Mask:
        """Whether each allocation died before the end of the span given for it; False where there is none."""
        known = rows != NONE
        result = np.zeros(len(rows), dtype=bool)
        result[known] = self.life.died[known] < self.trace["spans"]["end_event"][rows[known]]
        return result

    def _saved(self) -> tuple[Mask, Mask]:
        """Saved by autograd at all; and only ever as a constant without history, that something else had made."""
        saves = self.trace["saves"]
        saved = np.zeros(len(self.life.born), dtype=bool)
        with_history = saved.copy()
        known = saves["allocation"] != NONE
        saved[saves["allocation"][known]] = True
        # What the saver itself made, such as a mask or the places of maxima, has no history and is no constant.
        spans, saver = self.trace["spans"], span_rows(self.trace, saves["span"])
        by_product = known & (saver != NONE)
        by_product[by_product] &= ~np.isin(spans["kind"][saver[by_product]], (Kind.STEP, Kind.PHASE))
        made, saver = saves["allocation"][by_product], saver[by_product]
        by_product[by_product] = self.life.born[made] >= spans["start_event"][saver]
        history = known & ((saves["flags"] & SAVE_GRAD != 0) | (saves["flags"] & SAVE_LEAF == 0) | by_product)
        with_history[saves["allocation"][history]] = True
        return saved, saved & ~with_history

    def rules(self) -> list[tuple[Role, Mask, str]]:
        saved, constant = self._saved()
        forward = self.phase[Phase.FORWARD] | self.phase[Phase.EVALUATION] | self.phase[Phase.OTHER]
        passing = self.before_end_of(self.step_row) | self.before_end_of(self.next_step)
        return [
            (Role.WORKSPACE, ~saved & self.before_end_of(self.unit),
             "born and freed inside one operator"),
            (Role.OPTIMIZER_TEMPORARIES, ~saved & self.phase[Phase.OPTIMIZER] & ~self.in_module & ~self.in_node
             & self.before_end_of(self.step_row), "born in the optimizer's step and gone by its end"),
            (Role.INPUTS, constant & ~self.in_module & ~self.in_node,
             "a constant that autograd saved, born outside the model"),
            (Role.RECOMPUTED_ACTIVATIONS, self.recompute, "born while a checkpointed region ran again"),
            (Role.SAVED_ACTIVATIONS, saved, SAVED),
            (Role.BACKWARD_TEMPORARIES, self.phase[Phase.BACKWARD] & self.before_end_of(self.phase_row),
             "born in backward and gone by its end"),
            (Role.BACKWARD_TEMPORARIES, self.phase[Phase.BACKWARD] & self.in_node & passing,
             "born in a node of backward, gone by the end of the next step"),
            (Role.OTHER_ACTIVATIONS, self.in_module & ~self.in_node, "born inside a module's forward, not saved"),
            (Role.OTHER_ACTIVATIONS, forward & passing, "born outside the model, gone by the end of the next step"),
            (Role.OPTIMIZER_TEMPORARIES, self.broken_off & self.phase[Phase.OPTIMIZER],
             "born in the optimizer's step that ran out of memory"),
            (Role.BACKWARD_TEMPORARIES, self.broken_off & self.phase[Phase.BACKWARD],
             "born in the backward of the step that ran out of memory"),
            (Role.OTHER_ACTIVATIONS, self.broken_off & forward,
             "born outside the model in the step that ran out of memory"),
        ]


def ledger(trace: Trace, assigned: Roles, device: str, at: Ints | None = None) -> NDArray[np.int64]:
    """Bytes of each role after each event; each column sums to the live bytes.

    Args:
        at: only after these events, ascending; every event where None. NONE is before the first event.

    Returns:
        Shape ``(len(Role), len(at))``, or ``(len(Role), events)``.
    """
    mine = of_device(trace, device)[assigned.allocation]
    size = trace["allocations"]["bytes"][assigned.allocation[mine]]
    start, end, row = assigned.start[mine], assigned.end[mine], assigned.role[mine].astype(np.int64)
    if at is None:
        columns = event_count(trace)
        start, end = np.maximum(start, 0), np.minimum(end, columns)
    else:
        columns = len(at)
        start, end = np.searchsorted(at, start), np.searchsorted(at, end)
    delta = np.zeros((len(Role), columns + 1), dtype=np.int64)
    # Flat, because NumPy is some twenty times slower at adding by two indices than by one.
    np.add.at(delta.reshape(-1), row * (columns + 1) + start, size)
    np.subtract.at(delta.reshape(-1), row * (columns + 1) + end, size)
    np.cumsum(delta, axis=1, out=delta)
    return delta[:, :columns]
