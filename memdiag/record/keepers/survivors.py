"""Which of what is alive at a step's end is worth a look for who keeps it: what grows, by where it was born."""

from __future__ import annotations

from collections import defaultdict

from memdiag import policy
from memdiag.record.reading.heap import Heap, Live
from memdiag.trace import NONE, Role

Site = tuple[int, int, int]
"""Where something was born: line, kernel, and size: the number of its bits, or of its bytes where no line is known."""

FIRST_LOOK = 2
"""Steps that have ended at the first look: what was born in the first of them, and still is there, has survived one."""
_OUTLIVED = 2  # steps that what else is renewed in each step must have outlived
_MOST_SITES = 16  # of one look: the largest
_EXPECTED = frozenset({Role.PARAMETERS, Role.BUFFERS, Role.GRADIENTS, Role.OPTIMIZER_STATE})


class Survivors:
    """Chooses some allocations of each place of birth whose live bytes have grown since they were last looked at."""

    def __init__(self) -> None:
        self._seen: dict[Site, int] = {}  # bytes when it was last looked at

    def due(self, heap: Heap, done: int) -> dict[int, tuple[Site, Live]]:
        """Allocations to look at, by address: of each place the oldest, the newest and one between them.

        Args:
            done: steps that have ended.
        """
        if done < FIRST_LOOK:
            return {}
        of: dict[Site, list[tuple[int, Live]]] = defaultdict(list)
        total: dict[Site, int] = defaultdict(int)
        for address, live in heap.everything():
            if live.id == NONE or not _EXPECTED.isdisjoint(live.claims) and not 0 < live.step < done - _OUTLIVED:
                continue
            birth = live.birth
            site = birth.line, birth.kernel, live.bytes if birth.line == NONE else live.bytes.bit_length()
            of[site].append((address, live))
            total[site] += live.bytes
        grown = [site for site in total if total[site] >= policy.LOOK_AGAIN * self._seen.get(site, 0)]
        grown = sorted(grown, key=lambda site: -total[site])[:_MOST_SITES]
        if sum(total[site] for site in grown) * policy.UNEXPLAINED_SHARE < heap.live_bytes():
            return {}
        if done == FIRST_LOOK and not any(_has_outlived(live, done) for site in grown for _, live in of[site]):
            return {}
        found: dict[int, tuple[Site, Live]] = {}
        for site in grown:
            if done > FIRST_LOOK:
                self._seen[site] = total[site]
            born = of[site]
            for at in {0, len(born) // 2, len(born) - 1}:
                found[born[at][0]] = site, born[at][1]
        return found


def _has_outlived(live: Live, done: int) -> bool:
    """Whether autograd still keeps what was saved a step before: only then is there a graph to be compared later."""
    return live.step < done - 1 and (live.saved or Role.SAVED_ACTIVATIONS in live.claims)
