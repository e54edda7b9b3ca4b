"""What autograd keeps in light steps in which it was not watched: what it kept in a step that did the same."""

from __future__ import annotations

from collections.abc import Iterable

from memdiag.record.reading.heap import Heap, Live
from memdiag.trace import Phase, Role

SAVED = "saved by autograd for backward"
_SAVED_THEN = SAVED + " in step {step}, which made the same allocations in the same order"
_FREED = "made in the forward of its step and freed in its backward"

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
        self.steady = False

    def watched(self, step: int, events: Events) -> None:
        """A step has ended in which every save was noted."""
        made = [live for live, arrives, _ in events if arrives]
        sizes = [live.bytes for live in made]
        self.steady = sizes == self._sizes
        self._step, self._sizes = step, sizes
        self._kept = [
            (Role.SAVED_ACTIVATIONS in live.claims, live.history and Role.INPUTS not in live.claims) for live in made]

    def unwatched(self, events: Events, whole: bool = True) -> None:
        """Says what was saved in a step in which no save was noted.

        Args:
            whole: the step has ended; else it need only be like the beginning of the other.
        """
        events = list(events)
        made = [live for live, arrives, _ in events if arrives]
        sizes = [live.bytes for live in made]
        then = self._sizes if whole else self._sizes[:len(sizes)]
        self.steady = self.steady and sizes == then
        if _same_but_for_the_batch(then, sizes):
            proof = _SAVED_THEN.format(step=self._step)
            for live, (saved, computed) in zip(made, self._kept, strict=False):
                if computed:
                    live.claims.pop(Role.INPUTS, None)  # an alias without its history was an argument
                if saved:
                    self._heap.say(live, Role.SAVED_ACTIVATIONS, None, proof)
            return
        in_forward: set[int] = set()
        for live, arrives, phase in events:
            if arrives and phase is Phase.FORWARD:
                in_forward.add(id(live))
            elif not arrives and phase is Phase.BACKWARD and id(live) in in_forward and not live.claims:
                self._heap.say(live, Role.SAVED_ACTIVATIONS, None, _FREED)


def _same_but_for_the_batch(sizes: list[int], others: list[int]) -> bool:
    """Whether two steps made as many allocations, each of the same size in both or, where it depends on the batch,
    changed as all of its size are that change."""
    changed = {pair for pair in zip(sizes, others, strict=False) if pair[0] != pair[1]}
    return len(sizes) == len(others) and len(changed) == len({size for size, _ in changed})
