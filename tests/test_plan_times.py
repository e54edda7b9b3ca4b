"""How long a plan takes: the arithmetic, by a clock that goes on only where the test says so."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from recording import record
from torch import nn
from traces import TraceBuilder

from memdiag.apply.regions import checkpoint_ns
from memdiag.errors import MemdiagError
from memdiag.plan.planning import _noise
from memdiag.plan.regions import candidates
from memdiag.plan.replay import Peak
from memdiag.plan.safety import chains
from memdiag.plan.search import Plan
from memdiag.plan.step import Step, planned_step
from memdiag.record.options import PLANNED_STEP
from memdiag.record.regions import rehearsal, second
from memdiag.trace import Phase, Trace
from memdiag.trace.view import View

BEFORE, BETWEEN, AFTER, BACKWARD, OPTIMIZER = 10, 20, 40, 700, 500
BLOCKS = 3


class Clock:
    """Goes on where it is told to."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


CLOCK = Clock()


class Block(nn.Module):
    """Its last save is in the layer before the end."""

    def __init__(self, factor: int) -> None:
        super().__init__()
        self.factor, self.inside, self.last = factor, nn.Linear(16, 16), nn.Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        CLOCK.now += BEFORE * self.factor
        x = self.inside(x)
        CLOCK.now += BETWEEN * self.factor
        x = self.last(x)
        CLOCK.now += AFTER * self.factor
        return x


class Optimizer(torch.optim.SGD):
    def step(self, closure: None = None) -> None:
        super().step(closure)
        CLOCK.now += OPTIMIZER


def late(gradient: torch.Tensor) -> None:
    CLOCK.now += BACKWARD


def loop() -> None:
    torch.manual_seed(0)
    # The last block takes ten times as long as the others; they are of one kind.
    model = nn.Sequential(*(Block(10 if number == BLOCKS - 1 else 1) for number in range(BLOCKS)))
    optimizer = Optimizer(model.parameters(), lr=0.1)
    for _ in range(PLANNED_STEP + 1):
        y = model(torch.randn(8, 16))
        y.register_hook(late)
        y.sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@cache
def timed() -> Trace:
    with pytest.MonkeyPatch.context() as patch:
        for module in (second, rehearsal):
            patch.setattr(module, "worked_ns", CLOCK)
        return record(loop, plan_step=PLANNED_STEP).trace


FREE = {"checkpoint_ns": 0, "checkpointed_save_ns": 0}


def step(**changed: int) -> Step:
    return replace(planned_step(View(timed())), **changed)


def more_time(**costs: int) -> dict[tuple[str, ...], int]:
    """What each candidate that keeps nothing takes longer, where a checkpoint has these costs."""
    free, more = (
        {one.modules: one.again_ns for one in candidates(step(**{**FREE, **given}), chains(timed())) if not one.keep}
        for given in ({}, costs))
    return {modules: more[modules] - free[modules] for modules in free}


class TestTimes:
    def test_of_the_step_are_those_of_the_forward_that_ran_once_more_of_backward_and_optimizer(self) -> None:
        forward = (BLOCKS - 1 + 10) * (BEFORE + BETWEEN + AFTER)
        assert step().work_ns == forward + BACKWARD + OPTIMIZER

    def test_of_a_block_end_with_its_last_save_and_are_those_of_the_middle_one(self) -> None:
        found = {one.modules: one.again_ns for one in candidates(step(**FREE)) if not one.keep}
        assert [found[(str(number),)] for number in range(BLOCKS)] == [BEFORE + BETWEEN] * BLOCKS

    def test_of_a_run_are_whole_but_for_the_last(self) -> None:
        found = {one.modules: one.again_ns for one in candidates(step(**FREE), chains(timed()))}
        runs = {modules: again for modules, again in found.items() if len(modules) > 1}
        assert runs
        for modules, again in runs.items():
            assert again == (len(modules) - 1) * (BEFORE + BETWEEN + AFTER) + BEFORE + BETWEEN

    def test_of_a_checkpoint_itself_are_added_once_for_each(self) -> None:
        assert set(more_time(checkpoint_ns=1000).values()) == {1000}

    def test_of_what_is_saved_in_a_checkpoint_are_added_for_each_tensor(self) -> None:
        more = more_time(checkpointed_save_ns=1000)
        # Of each block what enters it, its weight where the input needs a gradient, and the result of its last layer.
        saved = [2, *[3] * (BLOCKS - 1)]
        for modules, again in more.items():
            if all("." not in module for module in modules):
                assert again == 1000 * sum(saved[int(module)] for module in modules)

    def test_of_a_checkpoint_itself_are_measured(self) -> None:
        about = timed().about
        assert step().checkpoint_ns == about["checkpoint_ns"] > 0
        assert step().checkpointed_save_ns == about["checkpointed_save_ns"] > 0
        # AND it leaves no trace
        state = torch.get_rng_state()
        assert min(checkpoint_ns()) > 0
        assert torch.equal(torch.get_rng_state(), state)

    def test_that_an_older_memdiag_did_not_take_are_missed(self) -> None:
        trace = timed()
        tables = {**trace.tables, "second_calls": {name: np.empty_like(column, shape=0)
                                                   for name, column in trace["second_calls"].items()}}
        with pytest.raises(MemdiagError, match="record it again"):
            planned_step(View(replace(trace, tables=tables)))


class TestNoise:
    @staticmethod
    def of(*steps: tuple[int, int]) -> int | None:
        """What a plan of 1000 ns is told to be off by, after a warm-up and steps of backward and optimizer."""
        run = TraceBuilder()
        for number, (backward, optimizer) in enumerate(((9000, 9000), *steps)):
            with run.step(warm_up=not number):
                run.took(Phase.BACKWARD, backward)
                run.took(Phase.OPTIMIZER, optimizer)
                run.free(run.allocate(8))
        return _noise(View(run.build()), Plan((), Peak(0, 0, None), 1000))

    def test_is_the_share_by_which_steps_differed(self) -> None:
        assert self.of((300, 100), (360, 140)) == 1000 * (500 - 400) // 500

    def test_is_none_where_one_was_seen(self) -> None:
        assert self.of((300, 100)) is None
