"""Mistakes that a run shows in what it does, whatever its memory: each is told in a real run that has it, and not in
one that comes near."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from recording import record
from torch import nn
from torch.utils.checkpoint import checkpoint

from memdiag.diagnose import Class, Diagnosis, Severity, diagnose
from memdiag.trace.view import View

BACKWARDS = 4  # for each step of the optimizer


def diagnosis(train: Callable[[], Any]) -> Diagnosis:
    return diagnose(View(record(train).trace))


def titles(found: Diagnosis, kind: str) -> list[str]:
    return [finding.title for finding in found.findings if finding.kind == kind]


def mlp(inputs: int = 64, outputs: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 512), nn.ReLU(), nn.Linear(512, outputs))


class TestAccumulation:
    THROWN_AWAY = "Gradients are thrown away before the optimizer uses them"
    USED_AGAIN = "The optimizer uses gradients that it has used before"

    def train(self, zero: str, step: str = "last", *, to_none: bool = True, backwards: int = BACKWARDS,
              optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD, clip: bool = False,
              read: bool = False) -> None:
        """A loop of accumulation.

        Args:
            zero: where gradients are zeroed: at each "step" of the optimizer, at each "backward", after the "last"
                backward, or "never".
            step: where the optimizer steps: at each "backward", or after the "last".
        """
        model = mlp()
        stepping = optimizer(model.parameters(), lr=1e-3)
        for _ in range(3):
            for number in range(backwards):
                loss = model(torch.randn(64, 64)).square().mean() / backwards
                if zero == "backward" or zero == "step" and number == 0:
                    stepping.zero_grad(set_to_none=to_none)
                loss.backward()
                if read:
                    sum(p.grad.norm() for p in model.parameters()).item()
                if step == "backward":
                    stepping.step()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if step == "last":
                stepping.step()
            if zero == "last":
                stepping.zero_grad(set_to_none=to_none)

    def told(self, *arguments: Any, **options: Any) -> list[str]:
        return titles(diagnosis(partial(self.train, *arguments, **options)), "accumulation_error")

    @pytest.mark.parametrize("to_none", [True, False])
    def test_zeroed_at_each_micro_batch(self, to_none: bool) -> None:
        found = diagnosis(partial(self.train, "backward", to_none=to_none, optimizer=torch.optim.Adam))
        (finding,) = [finding for finding in found.findings if finding.kind == "accumulation_error"]
        assert (finding.title, finding.cls, finding.severity) == (self.THROWN_AWAY, None, Severity.HIGH)
        # Of three steps with four backwards each, three of the four are lost, with a gradient for each parameter.
        assert "3 steps of the optimizer had 12 backwards, of which 9 left nothing" in finding.evidence[0]
        assert "138.0 KiB" in finding.evidence[0]  # 4 (64 · 512 + 512 + 512 · 4 + 4) bytes

    @pytest.mark.parametrize("to_none", [True, False])
    @pytest.mark.parametrize(("zero", "step", "pairs"), [
        ("last", "backward", "between 9 of 11"),  # a step for each micro-batch, zeroed after the last
        ("never", "last", "between 2 of 2"),
    ])
    def test_used_again(self, zero: str, step: str, pairs: str, to_none: bool) -> None:
        found = diagnosis(partial(self.train, zero, step, to_none=to_none))
        (finding,) = [finding for finding in found.findings if finding.kind == "accumulation_error"]
        assert finding.title == self.USED_AGAIN
        assert pairs in finding.evidence[0]

    @pytest.mark.parametrize("options", [
        {"zero": "step"}, {"zero": "step", "to_none": False}, {"zero": "last"}, {"zero": "step", "backwards": 1},
        {"zero": "backward", "step": "backward", "to_none": False},
        {"zero": "step", "optimizer": torch.optim.Adam, "clip": True, "to_none": False},
        # Somebody looks at the gradients of each micro-batch before they go: they are not lost.
        {"zero": "backward", "read": True},
    ])
    def test_loops_that_are_right(self, options: dict[str, Any]) -> None:
        assert self.told(**options) == []

    @pytest.mark.parametrize(("way", "to_none"), [
        ("critic first", True), ("backwards first", False), ("three to one", True), ("on the input", True),
        ("of the input", False), ("by hand", True), ("by hand", False), ("once", True)])
    def test_gradients_that_are_let_go_on_purpose(self, way: str, to_none: bool) -> None:
        # GIVEN two models that send gradients through each other, gradients of inputs, sums that are made by hand, and
        # a backward before the loop
        made, critic = mlp(), mlp(4, 1)
        a, b = torch.optim.Adam(made.parameters()), torch.optim.Adam(critic.parameters())

        def of_critic() -> torch.Tensor:
            return (critic(torch.randn(64, 4)) - critic(made(torch.randn(64, 64)).detach())).mean()

        def of_made(x: torch.Tensor | None = None) -> torch.Tensor:
            return critic(made(torch.randn(64, 64) if x is None else x)).mean()

        def turn() -> None:
            x = torch.randn(64, 64, requires_grad=True)
            if way in ("critic first", "three to one"):
                for _ in range(3 if way == "three to one" else 1):
                    b.zero_grad(to_none)
                    of_critic().backward()
                    b.step()
            a.zero_grad(to_none)
            if way == "on the input":
                of_made(x).backward()
                assert x.grad is not None
                x = (x + x.grad.sign()).detach()
                a.zero_grad(to_none)
            elif way == "of the input":
                (slope,) = torch.autograd.grad(of_made(x), x)
                a.zero_grad(to_none)
                x = (x + slope).detach()
            elif way == "by hand":
                parts = []
                for _ in range(2):
                    a.zero_grad(to_none)
                    of_made().backward()
                    parts.append([p.grad.clone() for p in made.parameters() if p.grad is not None])
                for p, *gradients in zip(made.parameters(), *parts, strict=True):
                    p.grad = torch.stack(gradients).sum(0)
            if way != "by hand":
                of_made(x).backward()
            if way == "backwards first":
                b.zero_grad(to_none)
                of_critic().backward()
                b.step()
            a.step()

        def train() -> None:
            if way == "once":
                of_made().backward()
            for _ in range(5):
                turn()

        # THEN none of it is a mistake
        assert titles(diagnosis(train), "accumulation_error") == []


class Noisy(nn.Module):
    """A region with something random in it."""

    def __init__(self, random: str, preserve: bool, reentrant: bool, as_module: bool) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(64, 512), nn.Linear(512, 64), nn.Linear(64, 4)
        self.drop = nn.Dropout(0.1)
        self.random, self.options = random, {"use_reentrant": reentrant, "preserve_rng_state": preserve}
        self.region = _Region(self) if as_module else self.inner

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        if self.random == "seeded":
            torch.manual_seed(1)
        x = torch.tanh(self.up(x))
        if self.random in ("dropout", "seeded", "evaluation"):
            x = self.drop(x)
        elif self.random == "noise":
            x = x + torch.randn_like(x)
        return self.down(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(checkpoint(self.region, x, **self.options))


class _Region(nn.Module):
    def __init__(self, of: Noisy) -> None:
        super().__init__()
        self.of = [of]  # no submodule of it: it is one of this already

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.of[0].inner(x)


class TestRandomNumbers:
    OTHERS = "Recomputation draws other random numbers than forward did"

    def told(self, random: str, preserve: bool, reentrant: bool, as_module: bool = False) -> list[str]:
        def train() -> None:
            model = Noisy(random, preserve, reentrant, as_module)
            model.train(random != "evaluation")
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.randn(512, 64, requires_grad=True)).square().mean().backward()
                optimizer.step()

        return titles(diagnosis(train), "replay_hazard")

    @pytest.mark.parametrize(("random", "reentrant", "as_module"), [
        ("dropout", False, True), ("dropout", True, False), ("noise", False, False)])
    def test_other_masks_are_told(self, random: str, reentrant: bool, as_module: bool) -> None:
        assert self.told(random, False, reentrant, as_module) == [self.OTHERS]
        assert self.told(random, True, reentrant, as_module) == []

    @pytest.mark.parametrize(("random", "reentrant"), [("none", False), ("evaluation", True), ("seeded", False)])
    def test_what_draws_nothing_or_draws_the_same_is_not(self, random: str, reentrant: bool) -> None:
        assert self.told(random, False, reentrant) == []

    def test_where_they_were_drawn_is_said(self) -> None:
        def train() -> None:
            model = Noisy("dropout", False, False, False)
            model(torch.randn(512, 64)).square().mean().backward()

        (finding,) = [f for f in diagnosis(train).findings if f.kind == "replay_hazard"]
        assert "aten::dropout in drop" in finding.evidence[0]
        assert "test_mistakes.py" in finding.evidence[0]

    def test_the_random_state_is_as_without_us(self) -> None:
        # GIVEN a region that is run again, and what comes next in the script
        def script() -> list[float]:
            torch.manual_seed(3)
            model = Noisy("dropout", True, False, True)
            model(torch.randn(8, 64)).sum().backward()
            gradient = model.up.weight.grad
            assert gradient is not None
            return [*gradient[0, :3].tolist(), torch.rand(()).item()]

        # WHEN it is recorded THEN gradients and random numbers are those of a run alone
        recorded: list[float] = []
        record(lambda: recorded.extend(script()))
        assert recorded == script()


class TestStateDicts:
    def train(self, keep: str) -> None:
        model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 8))
        optimizer = torch.optim.Adam(model.parameters())
        kept: list[Any] = []
        for _ in range(6):
            optimizer.zero_grad()
            x = torch.randn(128, 128)
            out = model(x)
            out.square().mean().backward()
            optimizer.step()
            if keep in ("model", "last"):
                kept.append(copy.deepcopy(model.state_dict()))
            if keep == "optimizer":
                kept.append(copy.deepcopy(optimizer.state_dict()))
            if keep == "last" and len(kept) > 1:
                kept.pop(0)
            if keep == "activations":  # as large as the weight of the first layer, and its parameters are more
                kept.append(torch.randn(512, 128))

    @pytest.mark.parametrize(("keep", "copies"), [("model", 1), ("optimizer", 2)])
    def test_one_that_is_kept_with_every_step_is_told(self, keep: str, copies: int) -> None:
        found = diagnosis(partial(self.train, keep))
        first = found.findings[0]
        assert (first.kind, first.cls, found.verdict.cls) == ("model_copy", Class.LEAK, Class.LEAK)
        # Adam keeps two moments for each parameter.
        assert f" {copies} storage" in " ".join(first.evidence)
        assert "torch.save" in first.advice[0].text
        parameters = 128 * 512 + 512 + 512 * 256 + 256 + 256 * 8 + 8
        assert found.growth.bytes_per_step == pytest.approx(copies * 4 * parameters, rel=0.01)

    def test_the_last_one_alone_is_no_leak(self) -> None:
        found = diagnosis(partial(self.train, "last"))
        assert found.verdict.cls is not Class.LEAK
        assert all(finding.cls is not Class.LEAK for finding in found.findings)

    def test_a_tensor_of_one_parameters_size_is_no_copy(self) -> None:
        found = diagnosis(partial(self.train, "activations"))
        assert [finding.kind for finding in found.findings if finding.cls is Class.LEAK] == ["growth"]


class TestFairness:
    def train(self, sizes: list[int], *, train: bool = True) -> None:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for size in sizes:
            with torch.set_grad_enabled(train):
                loss = model(torch.randn(size, 64)).square().mean()
            if train:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    def told(self, train: Callable[[], Any]) -> list[str]:
        return titles(diagnosis(train), "unfair_comparison")

    def test_only_the_warm_up(self) -> None:
        assert self.told(partial(self.train, [2048])) == ["Only the warm-up was seen"]

    def test_a_run_that_does_not_train_has_none(self) -> None:
        assert self.told(partial(self.train, [4096], train=False)) == []

    def test_a_peak_in_the_warm_up(self) -> None:
        def train() -> None:
            torch.empty(32 << 20, dtype=torch.uint8)
            self.train([2048] * 4)

        assert self.told(train) == ["The peak is that of the warm-up"]

    def test_a_peak_with_other_inputs(self) -> None:
        # GIVEN a last step that is larger by so little that it is not the worst batch of all
        found = diagnosis(partial(self.train, [2048, 2048, 2048, 2900]))
        assert titles(found, "unfair_comparison") == ["The step of the peak has other inputs than most"]
        (finding,) = [finding for finding in found.findings if finding.kind == "unfair_comparison"]
        assert "[2900, 64]" in finding.evidence[0]
        assert "[2048, 64]" in finding.evidence[1]

    def test_turns_of_an_inner_loop_are_no_steps_of_their_own(self) -> None:
        # GIVEN gradients that are followed through several turns, without an optimizer, and larger ones at the end
        model = mlp()

        def train() -> None:
            for _ in range(3):
                weight = model[0].weight
                for size in (1024, 1024, 1024, 4096):
                    loss = model(torch.randn(size, 64)).square().mean() + (weight - model[0].weight).sum()
                    (gradient,) = torch.autograd.grad(loss, model[0].weight, create_graph=True)
                    weight = weight - 0.1 * gradient
                with torch.no_grad():
                    model[0].weight.copy_(weight)

        assert self.told(train) == []

    @pytest.mark.parametrize("sizes", [[2048, 2048, 2048, 512], [2048, 2100, 2000, 2050]])
    def test_steps_that_are_alike_and_a_smaller_last_one(self, sizes: list[int]) -> None:
        assert self.told(partial(self.train, sizes)) == []
