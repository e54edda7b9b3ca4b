"""What comes and goes inside a step: workspaces, scratch without gradients, temporaries of the optimizer."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from memdiag.diagnose.evidence import Evidence
from memdiag.diagnose.model import Advice, Class, Finding, Mask
from memdiag.trace import NONE, Role
from memdiag.trace.places import at
from memdiag.units import format_bytes


def temporary(found: Evidence) -> Iterable[Finding]:
    if found.matters(found.gathered):
        yield _gathered(found)
    everything = found.of(Class.WORKSPACE) & ~found.single
    if not found.matters(everything):
        return
    parts = {
        "optimizer_temporaries": everything & (found.role == Role.OPTIMIZER_TEMPORARIES),
        "scratch": everything & found.scratch,
        "workspace": everything & (found.role == Role.WORKSPACE),
    }
    kind = max(parts, key=lambda name: found.bytes_of(parts[name]))
    chosen = parts[kind]
    evidence = [
        f"{format_bytes(found.bytes_of(chosen))} of it are alive {found.when}, and gone soon after",
        found.origin(chosen),
        "nothing keeps it for a backward: checkpointing cannot lower it",
    ]
    title, advice = _WORDS[kind]
    if kind == "optimizer_temporaries" and _by_hand(found, chosen):
        advice = _IN_PLACE
    elif kind == "optimizer_temporaries" and not _in_lists(found, chosen):
        advice = _ONE_BY_ONE
    if kind == "scratch" and found.main_birth(chosen).module is not None:
        title, advice = _EVALUATION
    yield found.finding(
        Class.WORKSPACE, kind, title, chosen, evidence,
        [Advice(advice, found.saving(chosen), at_most=kind != "optimizer_temporaries" or advice is _IN_PLACE)])


def _gathered(found: Evidence) -> Finding:
    """Results of many batches, put together on the device: while that is done, old and new are there together."""
    mine = found.gathered
    cls = found.main_class(mine, Class.ACTIVATION, Class.WORKSPACE)
    return found.finding(
        cls, "gathered_results", "Results are put together on the device", mine,
        [f"{format_bytes(found.bytes_of(mine))} in {int((mine & found.alive).sum())} concatenations outside modules, "
         f"at {found.main_birth(mine).line}",
         "while one is made, what it is made of is there too; no backward needs it"],
        [Advice("keep of each result only what is needed (a class, a mean), or move it to the host as it comes",
                found.saving(mine))])


def _by_hand(found: Evidence, chosen: Mask) -> bool:
    """Whether the script has written most of it itself: of other optimizers the line is that which calls their step."""
    trace, nest = found.at.trace, found.at.nest
    called = at(trace["spans"]["line"], nest.of(nest.phase, found.at.born_in))
    line = trace["allocations"]["line"]
    written = chosen & (called != NONE) & (line != NONE) & (line != called)
    return 2 * found.bytes_of(written) > found.bytes_of(chosen)


def _in_lists(found: Evidence, chosen: Mask) -> bool:
    """Whether operators over lists of tensors made most of it, which is what ``foreach`` chooses."""
    trace = found.at.trace
    names = [number for number, text in enumerate(trace.text) if text is not None and text.startswith("aten::_foreach")]
    return 2 * found.bytes_of(chosen & np.isin(found.operators, names)) > found.bytes_of(chosen)


_IN_PLACE = "update one parameter after the other, and in place (`mul_`, `add_`, `lerp_`)"
_ONE_BY_ONE = "`fused=True` where the optimizer has it: it needs no temporaries"
_EVALUATION = (
    "A model's forward without gradients makes large temporaries", "smaller batches where gradients are off, or chunks")
_WORDS = {
    "optimizer_temporaries": (
        "The optimizer's step makes temporaries as large as the parameters",
        "`foreach=False`, or `fused=True` where the optimizer has it: one parameter at a time"),
    "scratch": (
        "Code that runs without gradients builds large temporaries",
        "compute it in chunks, or with an operator that does not build them"),
    "workspace": (
        "Operators take large workspaces", "an operator or algorithm with a smaller workspace, or chunks of the input"),
}
