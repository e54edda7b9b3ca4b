"""Checksums of tensors, and pictures of what Python code keeps."""

from __future__ import annotations

import itertools
import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from memdiag.record.regions.digests import Digests
from memdiag.record.regions.state import keep, picture

TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128, torch.int64,
         torch.int8, torch.uint8, torch.bool)


class TestDigests:
    @pytest.mark.parametrize("dtype", TYPES, ids=str)
    def test_equal_bits_and_only_these(self, dtype: torch.dtype) -> None:
        one = torch.randn(1000, dtype=torch.float64).mul(100).to(dtype)
        one[:2] = torch.tensor([0, 1]).to(dtype)
        digests = Digests()
        assert digests.of(one) == digests.of(one.clone())
        # One place changed, and two swapped, which a plain sum does not see.
        changed, swapped = one.clone(), one.clone()
        changed[500] = (one[500] == 0).to(dtype)
        swapped[:2] = one[:2].flip(0)
        assert len({digests.of(one), digests.of(changed), digests.of(swapped)}) == 3

    def test_in_parts_too(self) -> None:
        digests, one = Digests(), torch.zeros(600_000)
        moved = one.clone()
        one[3], moved[3 + 2**18] = 1, 1
        assert digests.of(one) != digests.of(moved)
        # AND strides do not matter, nor whether a value is a number
        square = torch.full((3, 5), torch.nan)
        assert digests.of(square.t()) == digests.of(square.t().contiguous())
        assert digests.of(torch.tensor(0.0)) != digests.of(torch.tensor(-0.0))

    def test_what_has_no_bits(self) -> None:
        assert Digests().of(torch.empty(3, device="meta")) is None
        assert Digests().of(torch.eye(3).to_sparse()) is None

    def test_the_random_state_stays(self) -> None:
        before = torch.get_rng_state()
        Digests().of(torch.ones(3))
        assert torch.equal(before, torch.get_rng_state())


class Cache:
    def __init__(self) -> None:
        self.layers: list[Any] = [SimpleNamespace(keys=torch.ones(2))]


def _add(holder: Any) -> None:
    holder.append(1)


CHANGES: dict[str, tuple[Any, Any]] = {
    "list": ([1, 2], _add), "deque": (deque([1], maxlen=1), lambda d: d.append(2)),
    "dict": ({"a": 1}, lambda d: d.update(a=2)), "set": ({1}, lambda s: s.add(2)),
    "inside": ({"a": [[1]]}, lambda d: d["a"][0].append(2)),
    "object": (Cache(), lambda c: setattr(c.layers[0], "keys", torch.zeros(2))),
    "random": (random.Random(1), lambda r: r.random()), "numpy": (np.random.default_rng(1), lambda g: g.random()),
    "old numpy": (np.random.RandomState(1), lambda g: g.rand()), "array": (np.zeros(3), lambda a: a.fill(1)),
    "generator": (torch.Generator(), lambda g: torch.rand(1, generator=g)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen_and_put_back(name: str) -> None:
    thing, change = CHANGES[name]
    before = picture(thing)
    assert picture(thing) == before
    undo: list[Any] = []
    keep(thing, undo, set())
    change(thing)
    assert picture(thing) != before
    for back in reversed(undo):
        back()
    assert picture(thing) == before


def test_a_counter_is_seen() -> None:
    counter = itertools.count()
    before = picture(counter)
    next(counter)
    assert picture(counter) != before


def test_what_leads_to_itself_ends() -> None:
    around: list[Any] = []
    around.append(around)
    assert picture(around) == picture(around)
