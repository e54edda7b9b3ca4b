"""Claims that are kept from step to step are those that would be made anew."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from memdiag.record.facts import Claim, claim
from memdiag.record.hooks.standing import Standing
from memdiag.trace import Role


class Asked:
    """Claims some tensors, and counts how often it had to be done anew."""

    def __init__(self, name: str | None = "weight") -> None:
        self.standing, self.times, self.name = Standing(), 0, name

    def __call__(self, *tensors: torch.Tensor) -> list[Claim]:
        def make() -> Iterator[Claim | None]:
            self.times += 1
            return (claim(tensor, Role.PARAMETERS, self.name, "a test") for tensor in tensors)

        return self.standing.of(tensors, tensors, make)


def test_what_stays_is_claimed_once() -> None:
    # GIVEN tensors that stay where they are
    asked, weight, bias = Asked(), nn.Parameter(torch.ones(5)), torch.zeros(3)
    # WHEN they are claimed again and again, and written to in place
    first = asked(weight, bias)
    bias.add_(1)
    again = asked(weight, bias)
    # THEN the claims are the same, made once
    assert again == first
    assert [made.address for made in first] == [t.untyped_storage().data_ptr() for t in (weight, bias)]
    assert asked.times == 1


def test_what_moves_is_claimed_anew() -> None:
    # GIVEN a claimed parameter
    asked, weight = Asked(), nn.Parameter(torch.ones(5))
    asked(weight)
    # WHEN its memory is another one, or another tensor takes its place, or one more comes
    old, weight.data = weight.data, torch.ones(7)
    moved = asked(weight)
    other = torch.ones(9)
    replaced = asked(other)
    more = asked(other, weight)
    # THEN each time the claims are those of what is there now
    assert [made.bytes for made in moved] == [7 * 4]
    assert [made.bytes for made in replaced] == [9 * 4]
    assert [made.bytes for made in more] == [9 * 4, 7 * 4]
    assert asked.times == 4
    del old


def test_what_has_no_name_yet_or_no_address_is_asked_each_time() -> None:
    # GIVEN a tensor whose module has not been called, and one whose layout has no single address
    nameless, sparse = Asked(name=None), Asked()
    index = torch.tensor([[0, 1]])
    # WHEN they are claimed twice
    for _ in range(2):
        nameless(torch.ones(3))
        made = sparse(torch.sparse_coo_tensor(index, torch.ones(2), (4,)))
    # THEN the claims are made twice: the first may get its name, the second has none to make
    assert nameless.times == sparse.times == 2
    assert made == []
