"""Tensors that autograd keeps: when, by whom, and what becomes of a script that depends on it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from recording import Seen, record
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from memdiag.trace import NONE, Kind, Role


def saved(seen: Seen, size: int) -> list[tuple[int, int]]:
    """(allocation, save) of all saves of allocations of this size."""
    of = seen.trace["saves"]["allocation"]
    return [(row, save) for row in seen.rows(size) for save in range(len(of)) if of[save] == row]


def assert_in_order(seen: Seen, size: int) -> None:
    """Packed in forward, unpacked in backward after it, released after that, freed no sooner."""
    found = saved(seen, size)
    assert found
    for row, save in found:
        packed, unpacked, released = seen.ends(save)
        assert packed <= unpacked <= released
        assert seen.life.born[row] < packed
        assert seen.in_phase(packed) in ("forward", "backward")  # the last save may stand where the phases meet
        assert seen.in_phase(unpacked) == "backward"
        assert released <= seen.life.died[row] + 1


class TestOrder:
    def test_packed_unpacked_released(self) -> None:
        def train() -> None:
            weight = torch.randn(31, requires_grad=True)
            first = weight.expand(3, 31).exp()  # 372 bytes
            second = torch.cat([first, first]).exp()  # 744
            second.sum().backward()

        seen = record(train)
        assert_in_order(seen, 3 * 31 * 4)
        assert_in_order(seen, 6 * 31 * 4)
        # Kept by their own nodes, and by no one else: torch.cat needs sizes only.
        assert len(saved(seen, 3 * 31 * 4)) == len(saved(seen, 6 * 31 * 4)) == 1

    def test_a_retained_graph_is_unpacked_but_not_released(self) -> None:
        kept: list[torch.Tensor] = []

        def train() -> None:
            weight = torch.randn(31, requires_grad=True)
            out = weight.repeat(7).exp()
            kept.append(out)
            out.sum().backward(retain_graph=True)

        seen = record(train)
        ((row, save),) = saved(seen, 7 * 31 * 4)
        packed, unpacked, released = seen.ends(save)
        # The recording ended with the graph alive: read by the backward, no release, and no end is made up.
        assert released == NONE
        assert 0 <= packed < unpacked
        assert seen.in_phase(packed) == "forward"
        assert seen.in_phase(unpacked) == "backward"
        assert seen.role_of(row) == [Role.SAVED_ACTIVATIONS]

    def test_a_graph_that_never_runs_is_released_when_it_goes(self) -> None:
        def train() -> None:
            weight = torch.randn(31, requires_grad=True)
            out = weight.repeat(7).exp()
            del out
            torch.zeros(5)

        seen = record(train)
        ((row, save),) = saved(seen, 7 * 31 * 4)
        _, unpacked, released = seen.ends(save)
        assert unpacked == NONE
        assert released < seen.life.born[seen.row(5 * 4)] + 1
        # AND it does not outlive its graph: saving its own result must not keep it for good
        assert seen.life.died[row] < seen.life.born[seen.row(5 * 4)]


class Keeps(torch.autograd.Function):
    """Keeps one tensor as autograd wants it, and one as an attribute."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        proper = x.repeat(5)
        ctx.save_for_backward(proper)
        ctx.hidden = x.repeat(11)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (proper,) = ctx.saved_tensors
        return gradient * 2 + proper[0] * 0 + ctx.hidden[0] * 0


class Region(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(13, 17)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x).exp()


class Whole(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.first, self.region, self.reentrant = nn.Linear(7, 13), Region(), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        if self.reentrant is None:
            return self.region(hidden)
        return checkpoint(self.region, hidden, use_reentrant=self.reentrant)


def train_whole(reentrant: bool | None) -> None:
    torch.manual_seed(0)
    model = Whole(reentrant)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(19, 7)).sum().backward()
        optimizer.step()


class TestInsideOthers:
    def test_a_custom_function(self) -> None:
        def train() -> None:
            fc = nn.Linear(23, 29)
            for _ in range(2):
                Keeps.apply(fc(torch.randn(23))).sum().backward()

        seen = record(train)
        seen.closes()
        proper = [r for r in seen.rows(5 * 29 * 4) if seen.phase_of(r) == "forward"]
        hidden = [r for r in seen.rows(11 * 29 * 4) if seen.phase_of(r) == "forward"]
        assert {tuple(seen.role_of(r)) for r in proper} == {(Role.SAVED_ACTIVATIONS,)}
        # No hook sees an attribute: it is an activation, alive until the graph goes, and not called saved.
        assert {tuple(seen.role_of(r)) for r in hidden} == {(Role.OTHER_ACTIVATIONS,)}
        function = seen.spans(Kind.FUNCTION)
        assert function
        assert {seen.trace.text[seen.trace["spans"]["name"][r]] for r in function} == {"Keeps"}

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_a_checkpointed_region(self, reentrant: bool) -> None:
        plain, seen = record(lambda: train_whole(None)), record(lambda: train_whole(reentrant))
        seen.closes()
        region = 19 * 17 * 4  # what the region's layer makes, and its exponential
        result = [r for r in plain.rows(region) if plain.phase_of(r) == "forward"
                  and plain.role_of(r)[0] is Role.SAVED_ACTIVATIONS]
        assert len(result) == 2
        # THEN no tensor of that size is saved in forward, and it comes again in backward
        assert not [r for r in seen.rows(region) if seen.phase_of(r) == "forward"
                    and seen.role_of(r)[0] is Role.SAVED_ACTIVATIONS]
        assert len([r for r in seen.rows(region) if seen.phase_of(r) == "backward"
                    and seen.role_of(r)[0] is Role.RECOMPUTED_ACTIVATIONS]) >= 2
        # AND the region's input is, once in each step
        assert len([r for r in seen.rows(19 * 13 * 4) if seen.role_of(r)[0] is Role.SAVED_ACTIVATIONS]) == 2

    def test_a_compiled_region(self) -> None:
        def train() -> None:
            torch.manual_seed(0)
            torch._dynamo.reset()
            model = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 3))
            compiled = torch.compile(model, backend="aot_eager")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(2):
                compiled(torch.randn(19, 7)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

        seen = record(train)
        seen.closes()
        assert seen.steps == 2
        # What crosses its boundary: the tangent's result, which both need. Inside, modules are not told apart.
        assert [r for r in seen.rows(19 * 13 * 4) if seen.role_of(r)[0] is Role.SAVED_ACTIVATIONS]


class TestTheCheckForChangesInPlace:
    @staticmethod
    def cases() -> dict[str, Callable[[], None]]:
        def result() -> None:
            a = torch.randn(3, requires_grad=True)
            b = a.exp()
            b.add_(1)
            b.sum().backward()

        def leaf() -> None:
            a, b = torch.randn(3, 2), torch.randn(3, 2, requires_grad=True)
            c = a * b
            a.mul_(2)
            c.sum().backward()

        def second() -> None:
            a = torch.randn(4, 6, requires_grad=True)
            values, _ = (a * 2).sort(dim=1)
            d = values.square()
            values.zero_()
            values.zero_()
            d.sum().backward()

        def view() -> None:
            a = torch.randn(4, requires_grad=True)
            b = a * 1
            part = b[:2]
            c = part.sin()
            with torch.no_grad():
                b[3] = 0
            c.sum().backward()

        def double() -> None:
            a = torch.randn(3, dtype=torch.float64, requires_grad=True)
            b = torch.tanh(a * 2)
            b *= 2
            b.sum().backward()

        return {"result": result, "leaf": leaf, "second": second, "view": view, "double": double}

    @pytest.mark.parametrize("case", ["result", "leaf", "second", "view", "double"])
    def test_it_raises_the_same(self, case: str) -> None:
        run = self.cases()[case]
        said: list[str] = []

        def attempt() -> None:
            with pytest.raises(RuntimeError) as caught:
                run()
            said.append(str(caught.value))

        attempt()
        record(attempt)
        assert "modified by an inplace operation" in said[0]
        assert said[1] == said[0]

    def test_what_is_allowed_stays_allowed(self) -> None:
        def train() -> None:
            a = torch.randn(3, requires_grad=True)
            b = a * 2
            c = b.detach().clone()
            d = (b * c).sum()
            d.backward()
            c.zero_()

        record(train)


@pytest.mark.parametrize("planned", [{}, {"plan_step": 1}])
def test_a_selective_checkpoint_finds_no_hooks_of_the_scripts(planned: dict[str, int]) -> None:
    # GIVEN a region that keeps the results of an operator, and would warn of hooks of the script's around it
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

        def forward(self, x: torch.Tensor) -> Any:
            return checkpoint(self.layer, x, use_reentrant=False, context_fn=contexts)

    def train() -> None:
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    # WHEN it is recorded THEN it does not
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        record(train, **planned)
    assert not [str(one.message) for one in said]
