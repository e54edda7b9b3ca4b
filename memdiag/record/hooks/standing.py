"""Claims that are made at every step of things that stay where they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from memdiag.record.facts import Claim

_PLAIN = {torch.Tensor, nn.Parameter}
_address: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr


class Standing:
    """The claims of a list of tensors, kept for the next time.

    A model's parameters, their gradients and their optimizer's state are where they were a step ago nearly always.
    To ask each for its address is a tenth of the work of claiming it.
    """

    def __init__(self) -> None:
        self._seen: list[int] | None = None
        self._claims: list[Claim] = []

    def of(
        self, owners: Sequence[Any], tensors: Sequence[Any], make: Callable[[], Iterable[Claim | None]]
    ) -> list[Claim]:
        """The claims of tensors: as they were, if the owners are the same objects and the tensors at the same place.

        Args:
            make: makes the claims anew.
        """
        seen = _places(owners, tensors)
        if seen is None or seen != self._seen:
            self._claims = [claim for claim in make() if claim is not None]
            # A thing may yet get its name: from the first call of its module.
            self._seen = None if any(claim.name is None for claim in self._claims) else seen
        return self._claims


def _places(owners: Sequence[Any], tensors: Sequence[Any]) -> list[int] | None:
    """What changes when something is replaced or moves; None where a tensor does not say where it is."""
    if not _PLAIN.issuperset(map(type, tensors)):
        return None
    try:
        return [*map(id, owners), *map(_address, tensors)]
    except (NotImplementedError, RuntimeError):  # sparse tensors, fake ones: their claims are made each time
        return None
