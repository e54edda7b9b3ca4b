"""Who holds a tensor: chains from variables, in the script's own words."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from recording import here
from torch.utils.data import TensorDataset

from memdiag import policy
from memdiag.record.hooks.saves import Saves
from memdiag.record.keepers.holders import Holder, walk
from memdiag.record.marks import Marks
from memdiag.trace.model import GARBAGE, GRADIENT_CYCLE, GRAPH_CYCLE


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
    return {holder.address: holder for holder in walk({address: address for address in addresses}).holders}


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


def test_a_local_variable_is_a_root_with_its_statement() -> None:
    # GIVEN a local variable, WHEN looked for, THEN its function is told, and the line that put it there
    kept = []
    kept.append(torch.ones(7))
    line = here() - 1
    (holder,) = found(kept[0].data_ptr()).values()
    assert holder.root == "kept in test_a_local_variable_is_a_root_with_its_statement()"
    assert holder.chain == "kept[*]"
    assert holder.line == f"{__file__}:{line}"


def test_what_nobody_holds_is_not_found() -> None:
    # GIVEN a tensor that is gone, WHEN its address is looked for, THEN nothing is made up
    gone = torch.ones(8)
    address = gone.data_ptr()
    del gone
    assert walk({address: 0}).holders == []


def test_what_holds_more_of_one_place_is_preferred() -> None:
    # GIVEN three tensors of one place in a list, one of which a variable refers to as well
    kept = [torch.ones(9) for _ in range(3)]
    last = kept[-1]
    # WHEN they are looked for together, THEN all are in the list, though the variable is nearer to one
    holders = walk({tensor.data_ptr(): "one place" for tensor in kept}).holders
    assert [holder.chain for holder in holders] == ["kept[*]"] * 3
    assert last is kept[-1]


def test_the_graph_leads_to_what_it_saved() -> None:
    # GIVEN a number whose graph saved a tensor that nothing else has, through hooks like the recording's
    saves = Saves(Marks(), lambda: True, lambda: None)
    saves.start()
    try:
        weight = torch.ones(1, requires_grad=True)
        addresses: list[int] = []
        total = weight.sum()
        for _ in range(2):
            constant = torch.ones(11)
            addresses.append(constant.data_ptr())
            total = total + (constant * weight).sum()
            line = here() - 1
        del constant
        # WHEN what it saved is looked for, THEN the chain leads through the graph, to the statement that extends it
        holders = walk(dict.fromkeys(addresses, "one place")).holders
    finally:
        saves.stop()
    assert [holder.chain for holder in holders] == ["total → its graph (AddBackward0 …) → saved tensor"] * 2
    assert {holder.line for holder in holders} == {f"{__file__}:{line}"}


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


def test_cycles_are_told_from_leaks() -> None:
    # GIVEN tensors that only cycles keep: of plain objects, of a custom Function's context and what was made of its
    # result, of a parameter and a gradient with a graph
    gc.collect()
    gc.disable()
    saves = Saves(Marks(), lambda: True, lambda: None)
    saves.start()
    try:
        plain = Bank()
        plain.rows["self"] = [plain]  # type: ignore[list-item]
        result = Double.apply(torch.ones(12, requires_grad=True))
        later = result.exp()
        result.grad_fn.later = later
        parameter = torch.ones(13, requires_grad=True)
        parameter.exp().sum().backward(create_graph=True)
        expected = {
            plain.rows["a"][0].data_ptr(): GARBAGE, later.data_ptr(): GRAPH_CYCLE,
            parameter.data_ptr(): GRADIENT_CYCLE}
        alive = [weakref.ref(tensor) for tensor in (plain.rows["a"][0], later, parameter)]
        del plain, result, later, parameter
        # WHEN they are looked for, THEN each is told as what it is
        holders = found(*expected)
        assert {address: holder.root for address, holder in holders.items()} == expected
        # and garbage is what a collection frees, and nothing else
        gc.collect()
        assert [reference() is None for reference in alive] == [True, False, False]
    finally:
        saves.stop()
        gc.enable()


def test_nothing_is_kept_by_looking() -> None:
    # GIVEN a graph and a list of tensors, and no garbage collection that would clean up
    gc.collect()
    gc.disable()
    saves = Saves(Marks(), lambda: True, lambda: None)
    saves.start()
    try:
        kept = [torch.ones(14), torch.ones(15)]
        weight = torch.ones(1, requires_grad=True)
        total = (torch.ones(16) * weight).exp().sum()
        gone = [weakref.ref(thing) for thing in (*kept, weight, total)]
        # WHEN they are looked for and then let go, THEN they are gone
        assert len(found(*(tensor.data_ptr() for tensor in (*kept, total)))) == 3
        del kept, weight, total
        assert [reference() for reference in gone] == [None] * 4
    finally:
        saves.stop()
        gc.enable()


def test_a_walk_that_must_stop_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN a tensor behind many objects, and time for none of them
    kept = Bank()
    monkeypatch.setattr(policy, "WALK_COMPARISONS", 1)
    # WHEN it is looked for, THEN nothing is made up, and the walk says that it stopped
    walked = walk({tensor.data_ptr(): 0 for tensor in kept.rows["a"]})
    assert walked.holders == []
    assert walked.stopped is not None


def test_a_graph_that_is_too_large_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN a graph, and time for two of its nodes, WHEN what it saved first is looked for, THEN the walk says so
    saves = Saves(Marks(), lambda: True, lambda: None)
    saves.start()
    monkeypatch.setattr(policy, "WALK_NODES", 2)
    try:
        first = torch.ones(17)
        total = (first * torch.ones(1, requires_grad=True)).exp().exp().exp().sum()
        address = first.data_ptr()
        del first
        walked = walk({address: 0})
    finally:
        saves.stop()
    assert walked.holders == []
    assert walked.stopped is not None
    assert total.requires_grad
