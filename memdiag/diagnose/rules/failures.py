"""Requests that failed, were caught, and left their step alive."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from memdiag.diagnose.evidence import Evidence
from memdiag.diagnose.holders import last_looks, who_holds_most
from memdiag.diagnose.model import Advice, Class, Finding, Holder, Ints, Mask
from memdiag.trace import NONE
from memdiag.units import format_bytes

TRACEBACK = "__traceback__"
"""A part of the chain to what the frames of a caught exception hold."""


def failures(found: Evidence) -> Iterable[Finding]:
    """A caught failure whose exception still lives: its traceback has the frames of the step that failed, and they have
    what that step made."""
    trace, life = found.run.trace, found.run.life
    table = trace["out_of_memory"]
    if found.at is not found.run or not len(table["event"]):
        return
    since = np.full(len(life.born), NONE, dtype=np.int64)
    ends = trace["steps"]["end_event"]
    for event, step in zip(table["event"].tolist(), table["step"].tolist(), strict=True):
        end = int(ends[np.searchsorted(ends, event)]) if len(ends) and ends[-1] >= event else NONE
        if end != NONE:  # what is let go before is let go by the script
            since[(life.born < event) & (found.run.born_step == step) & (life.died >= end)] = event
    holder, held = _holder(found, since)
    kept = (since != NONE) & ~held & (found.of(Class.ACTIVATION) | found.of(Class.INPUT_BATCHES))
    if holder is None or not found.matters(kept):
        return
    yield found.finding(
        Class.ACTIVATION, "kept_failure", "An exception that was caught keeps the step that failed", kept,
        [f"{found.when} {format_bytes(found.bytes_of(kept))} were there that a step had made before it ran out of "
         "memory",
         holder.sentence],
        [Advice("try again after the `except` block, not in it, and keep the text of the exception (`str(error)`), not "
                "the exception", found.saving(kept, since))], holder=holder, since=since)


def _holder(found: Evidence, since: Ints) -> tuple[Holder | None, Mask]:
    """Who holds most of what was looked at of it through a traceback; and what is known to be held otherwise."""
    trace = found.run.trace
    looks = {allocation: look for allocation, look in last_looks(trace).items() if since[allocation] != NONE}
    through = {allocation for allocation, look in looks.items() if TRACEBACK in (trace.string(look.chain) or "")}
    otherwise = np.zeros(len(since), dtype=bool)
    otherwise[[allocation for allocation in looks if allocation not in through]] = True
    return who_holds_most(trace, {allocation: looks[allocation] for allocation in through}), otherwise
