"""Optimizers of many parameters: their steps are recorded without the shapes of what operators read, they alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest
import torch
from recording import Seen, record
from torch import nn

from memdiag.trace import NONE, Kind, Phase, Role

LAYERS, WIDTH = 20, 24
PARAMETERS = LAYERS * (WIDTH * WIDTH + WIDTH) * 4


def deep() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])


def with_shapes(seen: Seen, phase: Phase) -> tuple[int, int]:
    """Of the outermost operators of a phase that read tensors, those with shapes and those without."""
    spans, text = seen.trace["spans"], seen.trace.text
    around = seen.nest.phase
    of_phase = (spans["kind"] == Kind.OPERATOR) & (around != NONE)
    of_phase[of_phase] = spans["name"][around[of_phase]] == text.index(phase.label)
    reads = np.array([text[name] in ("aten::linear", "aten::mm", "aten::addmm") for name in spans["name"]])
    chosen = of_phase & reads
    known = spans["signature"][chosen] != NONE
    return int(known.sum()), int((~known).sum())


class Fails(torch.optim.SGD):
    """Fails in its second step, when it has gone through torch's."""

    done = 0

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        self.done += 1
        result = super().step(closure)
        if self.done == 2:
            raise ValueError("broken off")
        return result


@pytest.mark.parametrize("optimizers", [1, 2])
def test_forwards_and_backwards_have_their_shapes(optimizers: int) -> None:
    # GIVEN models of forty parameters, each with an optimizer of torch's
    def train() -> None:
        models = [deep() for _ in range(optimizers)]
        steppers = [torch.optim.Adam(model.parameters()) for model in models]
        for _ in range(3):
            for model, optimizer in zip(models, steppers, strict=True):
                optimizer.zero_grad()
                model(torch.randn(8, WIDTH)).sum().backward()
                optimizer.step()

    # WHEN they are trained
    seen = record(train)
    # THEN each step is one, in its phases, and the state is the optimizer's
    assert seen.steps == 3
    assert seen.phases(2) == ["forward", "backward", "optimizer"] * optimizers
    seen.closes()
    state = np.unique(seen.roles.allocation[seen.roles.role == Role.OPTIMIZER_STATE])
    # Two averages, and a count for each parameter.
    assert seen.trace["allocations"]["bytes"][state].sum() == (2 * PARAMETERS + 2 * LAYERS * 4) * optimizers
    # AND every operator outside an optimizer's step has its shapes
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        known, unknown = with_shapes(seen, phase)
        assert known >= 3 * LAYERS * optimizers
        assert unknown == 0
    # AND what an optimizer does is there too
    assert len(seen.spans(Kind.OPERATOR, "aten::addcdiv_")) == 3 * 2 * LAYERS * optimizers


def test_they_come_back_after_a_step_that_failed() -> None:
    # GIVEN an optimizer whose second step fails, of which the script makes nothing
    def train() -> None:
        model = deep()
        optimizer = Fails(model.parameters(), lr=1e-3)
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(8, WIDTH)).sum().backward()
            with suppress(ValueError):
                optimizer.step()

    # WHEN it is recorded THEN what comes after it has shapes
    seen = record(train)
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        known, unknown = with_shapes(seen, phase)
        assert known >= 4 * LAYERS
        assert unknown == 0
    seen.closes()


def test_a_closure_has_its_shapes() -> None:
    # GIVEN an optimizer that calls a closure of the script's
    def train() -> None:
        model = deep()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.randn(8, WIDTH)).sum()
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)

    # WHEN it is recorded THEN all that it runs has shapes
    seen = record(train)
    known, unknown = with_shapes(seen, Phase.FORWARD)
    assert known >= 3 * LAYERS
    assert unknown == 0
