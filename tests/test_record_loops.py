"""Steps and phases of training loops of many kinds. Marks of odd sizes lie at known places and are looked up.

Each loop below names its marks where it makes them; ``i`` in a mark's size is the turn of the loop.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recording import Seen, mark, record
from torch import nn

from memdiag.trace import Kind, Role

# Sizes of marks; far enough apart for a turn number to be added.
DATA, INSIDE, BACK, BETWEEN, UPDATE, AFTER, EVALUATE = (1_000_003 + 10_000 * i for i in range(7))
F_B_O = ["forward", "backward", "optimizer"]


class Net(nn.Module):
    """Two layers, with a mark in forward and, made by a hook, one in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 5), nn.Linear(5, 3)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.fc1(x).relu()
        mark(INSIDE + self.calls)
        if hidden.requires_grad:
            number = self.calls
            hidden.register_hook(lambda _: passing(BACK + number))
        self.calls += 1
        return self.fc2(hidden)


def passing(size: int) -> None:
    """A mark from a hook, whose result would be taken for something."""
    mark(size)


def data() -> torch.Tensor:
    return torch.randn(4, 6)


def marking(optimizer: torch.optim.Optimizer, size: int = UPDATE) -> torch.optim.Optimizer:
    """Has an optimizer leave a mark at the end of each step, inside it."""
    turn = iter(range(100))
    optimizer.register_step_post_hook(lambda *_: passing(size + next(turn)))
    return optimizer


def sgd(model: nn.Module, size: int = UPDATE) -> torch.optim.Optimizer:
    return marking(torch.optim.SGD(model.parameters(), lr=0.01), size)


def assert_marks(seen: Seen, size: int, wanted: Iterable[tuple[int, str]]) -> None:
    """The n-th mark of a kind lies in the n-th (step, phase), and there are no more."""
    wanted = list(wanted)
    assert [(seen.step(size + i), seen.phase(size + i)) for i in range(len(wanted))] == wanted
    assert not seen.rows(size + len(wanted))


def each_step(steps: int, phase: str, times: int = 1) -> list[tuple[int, str]]:
    return [(step, phase) for step in range(steps) for _ in range(times)]


def test_plain_loop() -> None:
    def train() -> None:
        model = Net()
        optimizer = sgd(model)
        for i in range(3):
            mark(DATA + i)
            optimizer.zero_grad()
            model(data()).sum().backward()
            with torch.no_grad():
                mark(BETWEEN + i)
            optimizer.step()
            mark(AFTER + i)

    seen = record(train)
    assert seen.steps == 3
    for step in range(3):
        assert seen.phases(step) == ["forward", "backward", "other", "optimizer"]
    assert_marks(seen, DATA, each_step(3, "forward"))
    assert_marks(seen, INSIDE, each_step(3, "forward"))
    assert_marks(seen, BACK, each_step(3, "backward"))
    assert_marks(seen, BETWEEN, each_step(3, "other"))
    assert_marks(seen, UPDATE, each_step(3, "optimizer"))
    # A step closes with its optimizer: what follows is the next one's. The last is a stretch that is no step.
    assert_marks(seen, AFTER, [(1, "forward"), (2, "forward"), (3, "forward")])


def test_no_phase_begins_with_what_makes_nothing() -> None:
    def train() -> None:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)  # its step begins a span of the profiler's, too
        for _ in range(3):
            optimizer.zero_grad()
            with torch.profiler.record_function("forward"):
                loss = model(data()).sum()
            loss.backward()
            with torch.profiler.record_function("update"), torch.no_grad():
                pass
            optimizer.step()

    trace = record(train).trace
    spans = trace["spans"]
    phases = [trace.text[name] for name in spans["name"][spans["kind"] == Kind.PHASE]]
    assert phases == ["forward", "backward", "other", "optimizer", "other"] * 3 + ["forward"]


def test_gradient_accumulation() -> None:
    def train() -> None:
        model = Net()
        optimizer = sgd(model)
        for i in range(6):
            (model(data()).sum() / 3).backward()
            if i % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()

    seen = record(train)
    assert seen.steps == 2
    for step in range(2):
        assert seen.phases(step) == ["forward", "backward"] * 3 + ["optimizer"]
    assert_marks(seen, INSIDE, each_step(2, "forward", 3))
    assert_marks(seen, BACK, each_step(2, "backward", 3))
    assert_marks(seen, UPDATE, each_step(2, "optimizer"))


@pytest.mark.parametrize("critic_steps", [1, 3])
def test_two_optimizers_are_one_step_when_both_have_stepped(critic_steps: int) -> None:
    cycles = 4

    def train() -> None:
        critic, generator = Net(), nn.Linear(2, 6)
        critic_optimizer = marking(torch.optim.Adam(critic.parameters()))
        generator_optimizer = marking(torch.optim.Adam(generator.parameters()), AFTER)
        for _ in range(cycles):
            for _ in range(critic_steps):
                fake = generator(torch.randn(4, 2)).detach()
                critic_optimizer.zero_grad()
                (critic(data()).mean() - critic(fake).mean()).backward()
                critic_optimizer.step()
            generator_optimizer.zero_grad()
            critic(generator(torch.randn(4, 2))).mean().backward()
            generator_optimizer.step()

    seen = record(train)
    assert seen.steps == cycles
    assert_marks(seen, UPDATE, each_step(cycles, "optimizer", critic_steps))
    assert_marks(seen, AFTER, each_step(cycles, "optimizer"))
    for step in range(cycles):
        assert seen.phases(step) == F_B_O * (critic_steps + 1)


def test_a_closure_has_phases_of_its_own_inside_the_optimizers_step() -> None:
    def train() -> None:
        model = Net()
        optimizer = marking(torch.optim.LBFGS(model.parameters(), max_iter=2, tolerance_change=0, tolerance_grad=0))
        turn = iter(range(100))
        for _ in range(3):
            x = data()

            def closure(x: torch.Tensor = x) -> torch.Tensor:
                optimizer.zero_grad()
                mark(DATA + next(turn))
                loss = model(x).square().sum()
                loss.backward()
                return loss

            optimizer.step(closure)

    seen = record(train)
    assert seen.steps == 3
    calls = len([r for size in range(DATA, DATA + 100) for r in seen.rows(size)])
    assert calls >= 4  # max_iter=2: two calls in the step, one of them first
    for step in range(3):
        inner = seen.phases(step)
        # The data are drawn before the step; in it, the closure's phases and the optimizer's own work take turns.
        assert inner[0] == "forward"
        assert inner[-1] == "optimizer"
        assert inner.count("backward") >= 1
    assert {seen.phase(DATA + i) for i in range(calls)} == {"forward"}
    assert {seen.phase(BACK + i) for i in range(calls)} == {"backward"}
    assert_marks(seen, UPDATE, each_step(3, "optimizer"))


def test_a_hand_written_update_after_torch_autograd_grad() -> None:
    def train() -> None:
        model = Net()
        parameters = list(model.parameters())
        for i in range(3):
            loss = model(data()).sum()
            gradients = torch.autograd.grad(loss, parameters)
            with torch.no_grad():
                for p, g in zip(parameters, gradients, strict=True):
                    p -= 0.1 * g
                mark(UPDATE + i)

    seen = record(train)
    assert seen.steps == 3
    # Without an optimizer of torch's a step ends where the next model call begins: the next data come before.
    assert [seen.phases(step) for step in range(3)] == [[*F_B_O, "forward"], [*F_B_O, "forward"], F_B_O]
    assert_marks(seen, BACK, each_step(3, "backward"))
    assert_marks(seen, UPDATE, each_step(3, "optimizer"))


def test_functional_weights_without_any_module() -> None:
    def train() -> None:
        weight = torch.randn(6, 3, requires_grad=True)
        for i in range(3):
            mark(DATA + i)
            loss = (data() @ weight).square().sum()
            loss.backward()
            with torch.no_grad():
                weight.add_(weight.grad, alpha=-0.01)
                weight.grad = None
                mark(UPDATE + i)

    seen = record(train)
    # Without a module call nothing tells where a turn begins: a step ends where the next backward begins.
    assert seen.steps == 3
    assert [seen.phase(DATA + i) for i in range(3)] == ["forward"] * 3
    # That the weight is one is known when a step has ended and it is still there.
    assert [seen.phase(UPDATE + i) for i in range(1, 3)] == ["optimizer"] * 2
    assert seen.role_of(seen.rows(6 * 3 * 4)[0]) == [Role.PARAMETERS]


def test_weights_that_autograd_saves_are_parameters_though_no_module_has_them() -> None:
    def train() -> None:
        first, second = torch.randn(6, 9, requires_grad=True), torch.randn(9, 3, requires_grad=True)
        for _ in range(3):
            x = data().requires_grad_()  # new in each step: not a parameter, though it wants gradients
            ((x @ first).relu() @ second).sum().backward()
            with torch.no_grad():
                for weight in (first, second):
                    weight -= 0.1 * weight.grad
                    weight.grad = None

    seen = record(train)
    seen.closes()
    assert seen.role_of(seen.rows(6 * 9 * 4)[0]) == [Role.PARAMETERS]
    assert seen.role_of(seen.rows(9 * 3 * 4)[0]) == [Role.PARAMETERS]
    assert all(Role.PARAMETERS not in seen.role_of(row) for row in seen.rows(4 * 6 * 4))


def test_an_update_through_data_with_gradients_on_and_no_module() -> None:
    def train() -> None:
        first, second = torch.randn(6, 9, requires_grad=True), torch.randn(9, 3, requires_grad=True)
        for i in range(4):
            hidden = (data() @ first).relu()
            mark(INSIDE + i)
            (hidden @ second).sum().backward()
            for weight in (first, second):
                weight.data -= 0.1 * weight.grad
                weight.grad = None
            mark(UPDATE + i)

    seen = record(train)
    assert seen.steps == 4
    assert [seen.phase(INSIDE + i) for i in range(4)] == ["forward"] * 4
    assert [seen.phase(UPDATE + i) for i in range(1, 4)] == ["optimizer"] * 3


def test_a_penalty_on_gradients_with_create_graph() -> None:
    def train() -> None:
        model = Net()
        optimizer = sgd(model)
        for i in range(3):
            x = data().requires_grad_()
            out = model(x).tanh().sum()
            (gradient,) = torch.autograd.grad(out, x, create_graph=True)
            mark(BETWEEN + i)
            (out + gradient.square().sum()).backward()
            optimizer.step()
            optimizer.zero_grad()

    seen = record(train)
    assert seen.steps == 3
    for step in range(3):
        assert seen.phases(step) == ["forward", "backward", "forward", "backward", "optimizer"]
    assert_marks(seen, BETWEEN, each_step(3, "forward"))
    # Run by both backwards: two marks of one size.
    assert [seen.phase_of(r) for i in range(3) for r in seen.rows(BACK + i)] == ["backward"] * 6


@pytest.mark.filterwarnings("ignore")
def test_a_step_that_the_gradient_scaler_skips_is_a_step_without_an_optimizer() -> None:
    def train() -> None:
        model = Net()
        optimizer = sgd(model)
        scaler = torch.amp.GradScaler("cpu")
        for i in range(4):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(data()).float().sum()
            if i == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    seen = record(train)
    assert seen.steps == 4
    assert [phase in seen.phases(step) for step in range(4) for phase in ["optimizer"]] == [True, False, True, True]
    assert_marks(seen, INSIDE, each_step(4, "forward"))
    assert_marks(seen, BACK, each_step(4, "backward"))
    assert_marks(seen, UPDATE, [(0, "optimizer"), (2, "optimizer"), (3, "optimizer")])


class HandWritten:
    """Momentum, as a person might write it."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self.parameters = list(parameters)
        self.velocity: list[torch.Tensor] = []
        self.turns = 0

    @torch.no_grad()
    def step(self) -> None:
        if not self.velocity:
            self.velocity = [torch.zeros_like(p) for p in self.parameters]
        for p, v in zip(self.parameters, self.velocity, strict=True):
            v.mul_(0.9).add_(p.grad)
            p.add_(v, alpha=-0.01)
        mark(UPDATE + self.turns)
        self.turns += 1


def test_a_hand_written_optimizer() -> None:
    def train() -> None:
        model = Net()
        optimizer = HandWritten(model.parameters())
        for _ in range(4):
            for p in model.parameters():
                p.grad = None
            model(data()).sum().backward()
            optimizer.step()

    seen = record(train)
    assert seen.steps == 4
    assert [seen.phases(step) for step in range(4)] == [[*F_B_O, "forward"]] * 3 + [F_B_O]
    assert_marks(seen, UPDATE, each_step(4, "optimizer"))
    # Its state has the sizes of the parameters, is born in the first update, and is what it is.
    sizes = {30 * 4, 5 * 4, 15 * 4, 3 * 4}
    born = [row for size in sizes for row in seen.rows(size)
            if seen.phase_of(row) == "optimizer" and seen.role_of(row)[-1] is Role.OPTIMIZER_STATE]
    assert len(born) == 4


def test_without_any_optimizer_a_backward_is_a_step() -> None:
    def train() -> None:
        model = Net()
        for i in range(3):
            mark(DATA + i)
            model(data()).sum().backward()

    seen = record(train)
    assert seen.steps == 3
    assert_marks(seen, INSIDE, each_step(3, "forward"))
    assert_marks(seen, BACK, each_step(3, "backward"))


def test_several_forwards_for_one_backward() -> None:
    def train() -> None:
        model = Net()
        optimizer = sgd(model)
        for _ in range(2):
            anchor, positive, negative = model(data()), model(data()), model(data())
            F.triplet_margin_loss(anchor, positive, negative).backward()
            optimizer.step()

    seen = record(train)
    assert seen.steps == 2
    for step in range(2):
        assert seen.phases(step) == F_B_O
    assert_marks(seen, INSIDE, each_step(2, "forward", 3))
    assert_marks(seen, BACK, [(0, "backward")] * 3 + [(1, "backward")] * 3)


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_evaluation_between_epochs(guard: Any) -> None:
    def train() -> None:
        model = Net()
        optimizer = sgd(model)
        for epoch in range(2):
            model.train()
            for _ in range(2):
                optimizer.zero_grad()
                model(data()).sum().backward()
                optimizer.step()
            model.eval()
            with guard():
                for _ in range(2):
                    model(data())
                mark(EVALUATE + epoch)

    seen = record(train)
    assert seen.steps == 4
    assert_marks(seen, INSIDE, [(0, "forward"), (1, "forward"), (2, "evaluation"), (2, "evaluation"),
                                (2, "forward"), (3, "forward"), (4, "evaluation"), (4, "evaluation")])
    assert_marks(seen, EVALUATE, [(2, "evaluation"), (4, "evaluation")])
    assert seen.phases(2)[-3:] == F_B_O


def test_clipping_and_a_moving_average() -> None:
    def train() -> None:
        model = Net()
        average = copy.deepcopy(model)
        optimizer = sgd(model)
        for i in range(3):
            optimizer.zero_grad()
            model(data()).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            with torch.no_grad():
                mark(BETWEEN + i)
            optimizer.step()
            with torch.no_grad():
                for old, new in zip(average.parameters(), model.parameters(), strict=True):
                    old.lerp_(new, 0.1)
                mark(AFTER + i)

    seen = record(train)
    assert seen.steps == 3
    assert_marks(seen, BETWEEN, each_step(3, "other"))
    assert_marks(seen, UPDATE, each_step(3, "optimizer"))
    assert_marks(seen, AFTER, [(1, "other"), (2, "other"), (3, "other")])
    for step in (1, 2):
        assert seen.phases(step) == ["other", "forward", "backward", "other", "optimizer"]


def test_a_step_that_raises_and_is_caught() -> None:
    class Fragile(torch.optim.SGD):
        turn = 0

        def step(self, closure: Any = None) -> Any:
            self.turn += 1
            if self.turn == 2:
                mark(UPDATE + 50)
                raise ArithmeticError("diverged")
            return super().step(closure)

    def train() -> None:
        model = Net()
        optimizer = marking(Fragile(model.parameters(), lr=0.01))
        for i in range(4):
            optimizer.zero_grad()
            model(data()).sum().backward()
            try:
                optimizer.step()
            except ArithmeticError:
                mark(AFTER)
            mark(DATA + i)

    seen = record(train)
    seen.closes()
    # The step that failed did not close: what it did and the next turn are one.
    assert seen.steps == 3
    assert (seen.step(UPDATE + 50), seen.phase(UPDATE + 50)) == (1, "optimizer")
    assert_marks(seen, INSIDE, [(0, "forward"), (1, "forward"), (1, "forward"), (2, "forward")])
    assert_marks(seen, BACK, [(0, "backward"), (1, "backward"), (1, "backward"), (2, "backward")])


def test_an_exception_in_backward_ends_the_phase() -> None:
    def fail(_: torch.Tensor) -> None:
        mark(BACK + 50)
        raise ArithmeticError("no")

    def train() -> None:
        model = Net()
        optimizer = sgd(model)
        for i in range(3):
            out = model(data())
            if i == 1:
                out.register_hook(fail)
            try:
                out.sum().backward()
            except ArithmeticError:
                with torch.no_grad():
                    mark(AFTER)
                continue
            optimizer.step()

    seen = record(train)
    seen.closes()
    assert seen.steps == 2
    assert seen.phase(AFTER) == "other"
    assert seen.phases(1) == ["forward", "backward", "other", "forward", "backward", "optimizer"]


def test_an_optimizer_that_does_not_step_for_long_does_not_hold_up_the_steps() -> None:
    def train(turns: int, joins: int) -> None:
        first, second = nn.Linear(3, 3), nn.Linear(3, 3)
        one, other = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second))
        for i in range(turns):
            first(torch.ones(3)).sum().backward()
            one.step()
            if i >= joins:
                second(torch.ones(3)).sum().backward()
                other.step()

    def one_after_the_other() -> None:
        train(20, joins=99)
        train(20, joins=99)

    joined = record(lambda: train(20, joins=12))
    assert (joined.steps, joined.trace.about["steps"]) == (20, 20)
    apart = record(one_after_the_other)
    assert (apart.steps, apart.trace.about["steps"]) == (40, 40)
