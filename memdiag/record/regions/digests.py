"""Checksums of tensors, bit for bit."""

from __future__ import annotations

import torch

from memdiag.record.facts import innermost

Digest = tuple[int, int]

_AT_ONCE = 1 << 18  # elements, so that what is made on the way stays at a few MiB
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SEED = 20_011  # any will do: two checksums are only compared where both were made with it


class Digests:
    """Two 64-bit sums over the bit pattern of a tensor: one plain, one with a weight for each place."""

    def __init__(self) -> None:
        self._weights: dict[torch.device, torch.Tensor] = {}

    def of(self, tensor: torch.Tensor) -> Digest | None:
        """None for what has no strided memory of its own: sparse, on the meta device, a wrapper of nothing.

        The caller sees to it that no dispatch mode and no override of the script's is asked.
        """
        tensor = innermost(tensor).detach()
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
            return None
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor.resolve_conj())
        flat = tensor.resolve_neg().contiguous().view(-1)
        flat = flat.view(_BITS[flat.element_size()])
        plain = weighted = 0
        weights = self._weights_on(flat.device)
        for number, part in enumerate(torch.split(flat, _AT_ONCE)):
            wide = part.to(torch.int64)
            sums = torch.stack((wide.sum(), (wide * weights[:len(part)]).sum())).tolist()
            plain += sums[0]
            weighted += sums[1] * (2 * number + 1)
        return plain & _ALL, weighted & _ALL

    def _weights_on(self, device: torch.device) -> torch.Tensor:
        found = self._weights.get(device)
        if found is None:
            generator = torch.Generator().manual_seed(_SEED)  # the script's own random state is not touched
            drawn = torch.randint(1 << 62, (_AT_ONCE,), generator=generator)
            found = self._weights[device] = (2 * drawn + 1).to(device)
        return found


_ALL = (1 << 64) - 1
