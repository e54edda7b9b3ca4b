"""What autograd keeps in light steps in which it was not watched: what it kept in a step that did the same."""

from __future__ import annotations

from collections.abc import Iterable

from memdiag.record.reading.heap import Heap, Live
from memdiag.trace import NONE, Phase, Role
from memdiag.trace.model import SAVED

_SAVED_THEN = SAVED + " in step {step}, which made the same allocations in the same order"
_FREED = "made in the forward of its step and freed in its backward"

_MOST_UNLIKE = 50_000  # allocations that are remembered, some 15 MB

# An allocation or a free, in order: whose, whether it arrives, and in which phase.
Events = Iterable[tuple[Live, bool, Phase]]


class Alike:
    """Compares steps by the sizes of what they allocate, in order: the same ones, or others in the same places.

    Attributes:
        steady: the last two steps that were watched did the same, and so did all others since.
    """

    def __init__(self, heap: Heap) -> None:
        self._heap = heap
        self._step = 0
        self._sizes: list[int] = []
        self._kept: list[tuple[bool, bool]] = []  # of each: saved, computed and no input
        self._unlike: list[list[Live]] = []  # allocations of steps since that one which were not as it
        self.steady = False

    def watched(self, step: int, made: list[Live]) -> None:
        """A step has ended in which every save was noted.

        Args:
            made: its allocations, in order.
        """
        sizes = [live.bytes for live in made]
        self.steady = sizes == self._sizes
        self._step, self._sizes = step, sizes
        self._kept = [
            (Role.SAVED_ACTIVATIONS in live.claims, live.history and Role.INPUTS not in live.claims) for live in made]
        for others in self._unlike:
            if [live.bytes for live in others] == sizes:  # the first of those that do something new was not watched
                self._as_then(others)
        self._unlike = []

    def unwatched(self, made: list[Live], events: Events, whole: bool = True) -> None:
        """Says what was saved in a step in which no save was noted.

        Args:
            made: its allocations, in order.
            events: its allocations and frees.
            whole: the step has ended; else it need only be like the beginning of the other.
        """
        sizes = [live.bytes for live in made]
        then = self._sizes if whole else self._sizes[:len(sizes)]
        self.steady = self.steady and sizes == then
        if _same_but_for_the_batch(then, sizes):
            self._as_then(made)
            return
        if sum(map(len, self._unlike)) + len(made) <= _MOST_UNLIKE:
            self._unlike.append(made)
        in_forward: set[int] = set()
        for live, arrives, phase in events:
            if arrives and phase is Phase.FORWARD:
                in_forward.add(id(live))
            elif not arrives and phase is Phase.BACKWARD and id(live) in in_forward and not live.claims:
                self._heap.say(live, Role.SAVED_ACTIVATIONS, None, _FREED)

    def _as_then(self, made: list[Live]) -> None:
        """What was saved, of allocations that are those of the step that was watched."""
        proof = _SAVED_THEN.format(step=self._step)
        for live, (saved, computed) in zip(made, self._kept, strict=False):
            if computed and live.id == NONE:
                live.claims.pop(Role.INPUTS, None)  # an alias without its history was an argument
            if saved:
                self._heap.say(live, Role.SAVED_ACTIVATIONS, None, proof)


def _same_but_for_the_batch(sizes: list[int], others: list[int]) -> bool:
    """Whether two steps made as many allocations, those that depend on the batch all larger in one of the two, or each
    changed as all of its size are that change."""
    if len(sizes) != len(others):
        return False
    changed = {pair for pair in zip(sizes, others, strict=True) if pair[0] != pair[1]}
    return len({size < other for size, other in changed}) <= 1 or len(changed) == len({size for size, _ in changed})
