"""Who holds a tensor: chains from variables, in the script's own words."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import TensorDataset

from memdiag.record.holders import Holder, walk


@pytest.fixture(autouse=True)
def seen_by_the_collector() -> Iterator[None]:
    """Other tests put all that there is out of the collector's sight; this module's variables must be in it."""
    gc.unfreeze()
    yield
    gc.freeze()


class Bank:
    def __init__(self) -> None:
        self.rows = {"a": [torch.ones(3), torch.ones(4)]}


near: torch.Tensor | None = None
far: TensorDataset | None = None
bank: Bank | None = None


def found(*addresses: int) -> dict[int, Holder]:
    """By address: tensors as arguments would be held by these."""
    return {holder.address: holder for holder in walk(set(addresses))}


def test_one_root_leads_to_tensors_near_and_far() -> None:
    # GIVEN module variables that hold one tensor themselves, and others through an object
    global near, far
    near, far = torch.ones(5), TensorDataset(torch.ones(6, 2), torch.ones(6, 1))
    try:
        # WHEN all are looked for at once, THEN each has its own chain from the same root
        at = [near.data_ptr(), *(tensor.data_ptr() for tensor in far.tensors)]
        holders = found(*at)
        assert [holders[address].chain for address in at] == ["near", "far.tensors[*]", "far.tensors[*]"]
        assert {holder.root for holder in holders.values()} == {f"a global of {__name__}"}
    finally:
        near = far = None


def test_containers_and_attributes_are_named() -> None:
    # GIVEN tensors in a list in a dictionary of an object, WHEN looked for, THEN the chain reads like the script
    global bank
    bank = Bank()
    try:
        holders = found(*(tensor.data_ptr() for tensor in bank.rows["a"]))
        assert [holder.chain for holder in holders.values()] == ["bank.rows['a'][*]"] * 2
    finally:
        bank = None


def test_a_local_variable_is_a_root_with_its_line() -> None:
    # GIVEN a local variable, WHEN looked for, THEN its function and its running line are told
    kept = [torch.ones(7)]
    (holder,) = found(kept[0].data_ptr()).values()
    assert holder.root == "kept in test_a_local_variable_is_a_root_with_its_line()"
    assert holder.chain == "kept[*]"
    assert holder.line is not None
    assert "test_holders.py:" in holder.line


def test_what_nobody_holds_is_not_found() -> None:
    # GIVEN a tensor that is gone, WHEN its address is looked for, THEN nothing is made up
    gone = torch.ones(8)
    address = gone.data_ptr()
    del gone
    assert walk({address}) == []
