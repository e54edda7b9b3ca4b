"""What blocks of a record are, so far as their births, deaths, stacks and sizes show it; each with its proof.

A snapshot has no owners: what is a parameter follows from what its gradient shows. Rules, the first that holds:

1. *workspace*: the stack of its birth is that of cuBLAS or cuDNN asking for room to work in; or it was there before,
   is never freed, and has the size of the workspace that PyTorch gives cuBLAS by default.
2. *optimizer state*: born in an optimizer's step and alive after it, with a gradient's size; or freed in such a step
   that made as many of its size that stay; or allocated in such a step before the record, and never freed.
3. *gradients*: born in backward, and alive when the next optimizer's step begins, or where no step follows when
   backward ends.
4. *saved activations*: born in forward, and freed while backward ran.
5. *parameters*: never freed, born before every forward or before the record, one for each gradient of that size. Of two
   or more for each, the others are optimizer state where an optimizer's step is in the record. Which is which among
   those of one size is not shown: their sum is.
6. *other activations*: born inside a module's call in forward, and alive beyond the operator.

The rest is left to the rules that hold for every trace (:mod:`memdiag.trace.ledger`), and is unknown where these tell
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from memdiag.trace import NONE, Phase, Role

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

CUBLAS_DEFAULT = 8_519_680
"""Bytes of cuBLAS's workspace by PyTorch's default, ``:4096:2:16:8`` (in KiB): 2 of 4096 and 8 of 16."""

_OTHER_COPIES = 3
"""Blocks for each parameter beyond itself up to which they are taken for optimizer state: Adam with ``amsgrad``."""


@dataclass(frozen=True)
class Births:
    """Blocks by row, in events of the record.

    Attributes:
        born: NONE where it was there before; ``died``: the count of events where it is never freed.
        stretch: number of the stretch that each event is in, one more for the end.
        phases: of each stretch.
        unit: the end of the operator's run of events that it was born in.
        module: whether it was born inside a module's call; ``workspace``: the library that asked for it, if one did;
            optimizer: whether an optimizer's step did.
    """

    bytes: Ints
    requested: Ints
    born: Ints
    died: Ints
    stretch: Ints
    phases: Sequence[Phase | None]
    unit: Ints
    module: Mask
    workspace: Sequence[str | None]
    optimizer: Mask


@dataclass(frozen=True)
class Known:
    """The role of some blocks, with the proof.

    Attributes:
        since: of each block, the event after which it is that; from birth on where None.
    """

    rows: Ints
    role: Role
    proof: str
    since: Ints | None = None


def known(blocks: Births) -> list[Known]:
    """What is shown of the blocks of a device. A later one of a block goes on from where it is said to begin."""
    return _Rules(blocks).found()


class _Rules:
    def __init__(self, blocks: Births) -> None:
        self._b = blocks
        self._events = len(blocks.stretch) - 1
        self._left = np.ones(len(blocks.born), dtype=bool)
        self._known: list[Known] = []
        number = np.array([NONE if phase is None else int(phase) for phase in blocks.phases] or [NONE])
        born_in = np.where(blocks.born == NONE, NONE, blocks.stretch[np.maximum(blocks.born, 0)])
        died_in = np.where(blocks.died == self._events, NONE, blocks.stretch[blocks.died])
        self._born_in = born_in
        self._born = np.where(born_in == NONE, NONE, number[born_in])
        self._died = np.where(died_in == NONE, NONE, number[died_in])
        self._died_in = died_in
        self._outlives = (born_in != NONE) & (died_in != born_in)  # the stretch it was born in
        self._stays = blocks.died == self._events
        self._optimizers = [at for at, phase in enumerate(blocks.phases) if phase is Phase.OPTIMIZER]
        self._starts = np.searchsorted(blocks.stretch, np.arange(len(blocks.phases) + 1))

    def found(self) -> list[Known]:
        b = self._b
        asked = np.array([library is not None for library in b.workspace], dtype=bool)
        self._take(asked, Role.WORKSPACE, "asked for by cuBLAS or cuDNN to work in")
        self._take((b.born == NONE) & self._stays & (b.requested == CUBLAS_DEFAULT), Role.WORKSPACE,
                   "there before the record and never freed, of the size of cuBLAS's default workspace")
        self._take((b.born == NONE) & self._stays & b.optimizer, Role.OPTIMIZER_STATE,
                   "allocated in an optimizer's step before the record, and never freed")
        gradients = self._gradients()
        sizes, number = np.unique(b.requested[gradients], return_counts=True)
        self._state(sizes)
        self._take(gradients, Role.GRADIENTS, "born in backward, and alive when it was over"
                   + (" and the optimizer's step began" if self._optimizers else ""))
        self._take((self._born == Phase.FORWARD) & (self._died == Phase.BACKWARD), Role.SAVED_ACTIVATIONS,
                   "born in forward, and freed while backward ran")
        self._parameters(sizes, number)
        self._take(b.module & (self._born == Phase.FORWARD) & (b.died >= b.unit), Role.OTHER_ACTIVATIONS,
                   "born inside a module's call: kept for a backward that is not in the record, or by a variable")
        return self._known

    def _take(self, rows: Mask, role: Role, proof: str) -> None:
        chosen = np.flatnonzero(rows & self._left)
        if len(chosen):
            self._left[chosen] = False
            self._known.append(Known(chosen, role, proof))

    def _gradients(self) -> Mask:
        """Born in backward and alive when what follows it needs them.

        Where the record ends in a backward, what is alive then may be anything: it is no gradient by that.
        """
        b = self._b
        found: Mask = self._left & (self._born == Phase.BACKWARD) & self._outlives
        last = len(b.phases) - 1
        if last >= 0 and b.phases[last] is Phase.BACKWARD:
            found &= self._born_in != last
        if self._optimizers:
            following = np.searchsorted(self._optimizers, self._born_in)
            there = following < len(self._optimizers)
            begins = self._starts[np.array([*self._optimizers, len(b.phases)])[following]]
            found &= ~there | (b.died > begins)
        return found

    def _state(self, sizes: Ints) -> None:
        b = self._b
        if not self._optimizers:
            return
        made = self._left & (self._born == Phase.OPTIMIZER) & self._outlives & np.isin(b.requested, sizes)
        # A variable of the optimizer's loop outlives the step too, once: state is there for every gradient.
        kept, count = np.unique(b.requested[made], return_counts=True)
        gradient = dict(zip(*(values.tolist() for values in np.unique(
            b.requested[self._gradients()], return_counts=True)), strict=True))
        enough = [size for size, times in zip(kept.tolist(), count.tolist(), strict=True) if times >= gradient[size]]
        made &= np.isin(b.requested, enough)
        replaced = self._left & (self._died == Phase.OPTIMIZER) & (self._born_in != self._died_in)
        replaced &= (b.born == NONE) & np.isin(b.requested, enough)
        # What takes the place of another is the state once that is gone: both together would be more than there is.
        waiting = [(mine[:len(old)], np.sort(b.died[old])[:len(mine)]) for size in enough
                   for mine, old in [(np.flatnonzero(made & (b.requested == size)),
                                      np.flatnonzero(replaced & (b.requested == size)))]]
        rows = np.concatenate([rows for rows, _ in waiting] or [np.empty(0, np.int64)])
        since = np.concatenate([since for _, since in waiting] or [np.empty(0, np.int64)])
        early = b.born[rows] < since
        rows, since = rows[early], since[early]
        instead = np.zeros_like(made)
        instead[rows] = True
        self._take(made & ~instead, Role.OPTIMIZER_STATE,
                   "born in an optimizer's step, of a gradient's size, and not freed by it")
        self._take(instead, Role.OPTIMIZER_TEMPORARIES, "new state, while that which it replaces is still there")
        if len(rows):
            self._known.append(Known(rows, Role.OPTIMIZER_STATE, "in the place of state that is gone", since))
        self._take(replaced, Role.OPTIMIZER_STATE,
                   "freed in an optimizer's step that put another of its size in its place")

    def _parameters(self, sizes: Ints, number: Ints) -> None:
        b = self._b
        forwards = [at for at, phase in enumerate(b.phases) if phase in (Phase.FORWARD, Phase.BACKWARD)]
        first = forwards[0] if forwards else len(b.phases)
        lasting = self._left & self._stays & (self._born_in < first)
        parameters, state = np.zeros_like(lasting), np.zeros_like(lasting)
        for size, times in zip(sizes.tolist(), number.tolist(), strict=True):
            mine = np.flatnonzero(lasting & (b.requested == size))  # by birth, and by address those from before
            copies = min(len(mine) // times, 1 + _OTHER_COPIES)
            if copies:
                parameters[mine[:times]] = True
                state[mine[times:copies * times]] = True
        self._take(parameters, Role.PARAMETERS,
                   "never freed, and there before the first forward: one for each gradient of that size")
        if self._optimizers:
            self._take(state, Role.OPTIMIZER_STATE, "never freed, and there before the first forward: another for each "
                       "gradient of that size, beside the parameter")
