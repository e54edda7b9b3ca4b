"""Which phase each event of a record is in, as stacks and annotations tell it.

Backward and an optimizer's step show in their own stacks, or in the annotation that ``torch.optim`` makes around a
step. What lies between them has no mark of its own: it is forward where modules are called and before a backward, and
else it is other code. Whether a forward was made for a backward at all, a stack does not tell.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from memdiag.snapshot.data import Event, Frame
from memdiag.snapshot.frames import Place, is_python, place
from memdiag.trace import Phase

_STEP = "Optimizer.step#"
_MODULE_CALLS = frozenset(("_call_impl", "_wrapped_call_impl", "forward"))


@dataclass(frozen=True)
class Seen:
    """What the stack of an event tells, and whether it was inside a module's call; ``empty`` where it has no frame."""

    place: Place
    module: bool
    empty: bool


class Stacks:
    """What stacks tell, each read once however many events share it. Keeps no stack alive."""

    def __init__(self) -> None:
        self._seen: dict[int, Seen] = {}

    def of(self, frames: Sequence[Frame]) -> Seen:
        """Of a stack that lives at least as long as this."""
        found = self._seen.get(id(frames))
        if found is None:
            module = any(frame["name"] in _MODULE_CALLS and is_python(frame) for frame in frames)
            found = self._seen[id(frames)] = Seen(place(frames), module, not frames)
        return found


@dataclass(frozen=True)
class Stretch:
    """Events ``start`` to ``end``, the last not included, of one phase; None where nothing tells which."""

    start: int
    end: int
    phase: Phase | None


def stretches(events: Sequence[Event], seen: Sequence[Seen], annotations: Sequence[dict[str, Any]]) -> list[Stretch]:
    """The phases of a record, one after the other without a gap.

    Args:
        seen: what the stack of each event tells.
    """
    if not events:
        return []
    steps = _Steps(annotations)
    marked: list[tuple[int, Phase | None]] = []  # where a stretch begins, and BACKWARD, OPTIMIZER or None
    known = False
    for number, (event, one) in enumerate(zip(events, seen, strict=True)):
        if one.place.backward:
            mark: Phase | None = Phase.BACKWARD
        elif one.place.optimizer or not one.module and steps.around(event.get("time_us")):
            mark = Phase.OPTIMIZER
        elif one.empty and known:
            continue  # the phase goes on: threads of autograd have no Python frame
        else:
            mark = None
        known = known or not one.empty
        if not marked or marked[-1][1] is not mark:
            marked.append((number, mark))
    ends = [number for number, _ in marked[1:]] + [len(events)]
    found: list[Stretch] = []
    for at, ((start, mark), end) in enumerate(zip(marked, ends, strict=True)):
        if mark is not None:
            found.append(Stretch(start, end, mark))
            continue
        follows = marked[at + 1][1] if at + 1 < len(marked) else None
        found += _between(seen, start, end, marked[at - 1][1] if at else None, follows)
    return found


def _between(seen: Sequence[Seen], start: int, end: int, before: Phase | None, follows: Phase | None) -> list[Stretch]:
    """What a stretch is that is neither backward nor an optimizer's step."""
    first = next((number for number in range(start, end) if seen[number].module), None)
    if first is None:
        if follows is Phase.BACKWARD and before is not Phase.BACKWARD:
            return [Stretch(start, end, Phase.FORWARD)]
        told = any(not seen[number].empty for number in range(start, end))
        return [Stretch(start, end, Phase.OTHER if told else None)]
    if follows is Phase.BACKWARD or first == start:
        return [Stretch(start, end, Phase.FORWARD)]
    return [Stretch(start, first, Phase.OTHER), Stretch(first, end, Phase.FORWARD)]


class _Steps:
    """The times of optimizers' steps, where they were annotated."""

    def __init__(self, annotations: Sequence[dict[str, Any]]) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        begun: int | None = None
        for one in sorted(annotations, key=lambda one: int(one["time_us"])):
            if not one["name"].startswith(_STEP):
                continue
            if one["stage"] == "START" and begun is None:
                begun = one["time_us"]
            elif one["stage"] == "END" and begun is not None:
                self._starts.append(begun)
                self._ends.append(one["time_us"])
                begun = None
        if begun is not None:  # the record ended in it
            self._starts.append(begun)
            self._ends.append(1 << 63)

    def around(self, time_us: int | None) -> bool:
        if time_us is None:
            return False
        at = bisect_right(self._starts, time_us) - 1
        return at >= 0 and time_us <= self._ends[at]
