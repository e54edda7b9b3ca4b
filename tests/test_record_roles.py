"""Roles: one allocation of a known size for each, and three that fit none."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recording import Seen, record, record_script
from torch import nn

from memdiag.trace import Role

# Every size is an odd number of bytes, or of floats, that nothing else has.
SCRIPT = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.dlpack import to_dlpack

N = 1009

class Widen(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        scratch = torch.empty(700_001, dtype=torch.uint8)    # other activation: in the model, gone with the call
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        first = torch.empty(710_003, dtype=torch.uint8)      # workspace of its node
        second = first[:5].clone()
        return gradient * 2

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(20_011))       # parameter, gradient and state of 80,044 bytes
        self.register_buffer("table", torch.ones(30_011))    # buffer of 120,044 bytes
        self.seen = None

    def inner(self, x):
        return (x[:15_013] * 3).sin().sum()                  # recomputed: 60,052 bytes, twice, in forward and again

    def forward(self, x):
        kept = (x[:11_003] * self.weight[0]).exp()           # saved: 44,012 bytes
        self.seen = torch.empty(720_007, dtype=torch.uint8)  # other activation: made by the model, kept by it
        again = checkpoint(self.inner, x * self.weight[1], use_reentrant=False)
        return Widen.apply(kept.sum()) + again + self.table[0] * self.weight.sum()

class Adam(torch.optim.Adam):
    @torch.no_grad()
    def step(self, closure=None):
        result = super().step(closure)
        scratch = torch.empty(730_003, dtype=torch.uint8)    # optimizer temporary
        lost.append(to_dlpack(torch.empty(830_003, dtype=torch.uint8)))
        scratch.sum()
        return result

torch.manual_seed(0)
lost = []
net = Net()
optimizer = Adam(net.parameters(), lr=1e-3, foreach=False)
bank = torch.empty(740_011, dtype=torch.uint8)               # held
history = {"best": [torch.empty(750_019, dtype=torch.uint8)]}
weights = torch.rand(10_007)
for step in range(3):
    x = torch.randn(25_013)                                  # input of 100,052 bytes
    if step == 1:
        lost.append(to_dlpack(torch.empty(810_003, dtype=torch.uint8)))
    loss = net(x)
    if step == 1:
        loss.register_hook(lambda g: lost.append(to_dlpack(torch.empty(820_003, dtype=torch.uint8))))
    torch.sort(weights)                                      # workspace: 80,056 bytes for places among it
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 1:
        del optimizer.__class__.step                         # nothing more is lost
"""


@pytest.fixture(scope="module")
def all_roles(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return record_script(tmp_path_factory.mktemp("roles"), SCRIPT)


COPIES = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(100, 201, bias=False)
buffer, kept = None, []
for step in range(4):
    model.weight.grad = None
    model(torch.randn(3, 100)).sum().backward()
    kept = [model.weight.grad.clone(), torch.stack([model.weight.grad.flatten(), model.weight.grad.flatten()])]
    with torch.no_grad():
        if buffer is None:
            buffer = model.weight.grad.to(torch.float64)
        else:
            buffer.mul_(0.9).add_(model.weight.grad)
        model.weight.sub_(buffer, alpha=1e-3)
"""


def test_copies_of_gradients_are_gradients_and_a_momentum_made_from_one_is_state(tmp_path: Path) -> None:
    # GIVEN gradients that are copied and stacked, and a hand-written momentum that begins as one
    seen = record_script(tmp_path, COPIES)
    # WHEN recorded, THEN each is what it is
    size = 100 * 201 * 4
    assert {role for row in seen.rows(2 * size) for role in seen.role_of(row)} == {
        Role.GRADIENTS, Role.OPTIMIZER_STATE, Role.WORKSPACE}  # the last for a gradient that is added in double
    assert [seen.role_of(row) for row in seen.rows(2 * size)].count([Role.OPTIMIZER_STATE]) == 1
    assert {role for row in seen.rows(size) for role in seen.role_of(row)} <= {
        Role.PARAMETERS, Role.GRADIENTS, Role.WORKSPACE}


MASTER = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(100, 203, bias=False).bfloat16()
master = model.weight.detach().float().clone()
first, second = torch.zeros_like(master), torch.zeros_like(master)
for step in range(4):
    model.weight.grad = None
    model(torch.randn(3, 100).bfloat16()).float().square().sum().backward()
    with torch.no_grad():
        gradient = model.weight.grad.float()
        first.lerp_(gradient, 0.1)
        second.mul_(0.99).addcmul_(gradient, gradient, value=0.01)
        master.addcdiv_(first, second.sqrt() + 1e-8, value=-1e-3)
        model.weight.copy_(master)
"""


def test_moments_behind_a_copy_in_full_precision_are_state(tmp_path: Path) -> None:
    # GIVEN a hand-written Adam for parameters in half precision, which updates a copy of them in full
    seen = record_script(tmp_path, MASTER)
    # WHEN recorded, THEN the copy and both moments are the optimizer's state
    roles = [seen.role_of(row) for row in seen.rows(100 * 203 * 4)]
    assert roles.count([Role.OPTIMIZER_STATE]) == 3


class TestOneOfEach:
    def test_parameters_buffers_gradients_and_state(self, all_roles: Seen) -> None:
        found = [all_roles.role_of(row) for row in all_roles.rows(20_011 * 4)]
        assert found[0] == [Role.PARAMETERS]
        assert found.count([Role.OPTIMIZER_STATE]) == 2
        assert sum(Role.GRADIENTS in roles for roles in found) == 3  # one in each step
        assert all_roles.role(30_011 * 4) == [Role.BUFFERS]

    def test_names_of_what_has_one(self, all_roles: Seen) -> None:
        trace, roles = all_roles.trace, all_roles.roles
        names = {trace.string(int(roles.name[i])) for i in range(len(roles.role))
                 if trace["allocations"]["bytes"][roles.allocation[i]] == 20_011 * 4}
        assert {"weight", "weight.exp_avg", "weight.exp_avg_sq"} <= names

    def test_inputs(self, all_roles: Seen) -> None:
        found = [all_roles.role_of(row) for row in all_roles.rows(25_013 * 4)]
        assert found.count([Role.INPUTS]) == 3  # others of that size are the model's

    def test_saved_and_other_activations(self, all_roles: Seen) -> None:
        saved = [row for row in all_roles.rows(11_003 * 4) if all_roles.role_of(row)[0] is Role.SAVED_ACTIVATIONS]
        assert len(saved) == 3
        for size in (700_001, 720_007):
            assert {role for row in all_roles.rows(size) for role in all_roles.role_of(row)} == {Role.OTHER_ACTIVATIONS}

    def test_recomputed_activations(self, all_roles: Seen) -> None:
        rows = all_roles.rows(15_013 * 4)
        again = [row for row in rows if all_roles.phase_of(row) == "backward"]
        assert {all_roles.role_of(row)[0] for row in rows if row not in again} <= {
            Role.OTHER_ACTIVATIONS, Role.WORKSPACE}
        assert any(all_roles.role_of(row) == [Role.RECOMPUTED_ACTIVATIONS] for row in again)

    def test_temporaries(self, all_roles: Seen) -> None:
        # The gradients of the saved exponential's argument go from node to node.
        passed_on = [all_roles.role_of(row) for row in all_roles.rows(11_003 * 4)
                     if all_roles.phase_of(row) == "backward"]
        assert [Role.BACKWARD_TEMPORARIES] in passed_on
        assert {role for roles in passed_on for role in roles} <= {Role.BACKWARD_TEMPORARIES, Role.WORKSPACE}
        assert [all_roles.role_of(row) for row in all_roles.rows(730_003)] == [[Role.OPTIMIZER_TEMPORARIES]] * 2

    def test_workspace(self, all_roles: Seen) -> None:
        assert [all_roles.role_of(row) for row in all_roles.rows(710_003)] == [[Role.WORKSPACE]] * 3  # of its node
        # torch.sort makes values and places, and works in scratch memory of its own where it needs any.
        scratch = [r for r in range(len(all_roles.life.born)) if all_roles.role_of(r) == [Role.WORKSPACE]]
        assert scratch
        for row in scratch:
            spans, span = all_roles.trace["spans"], all_roles._span(row)
            unit = all_roles.nest.unit[span]
            assert spans["start_event"][unit] <= all_roles.life.born[row]
            assert all_roles.life.died[row] < spans["end_event"][unit]

    def test_what_python_holds(self, all_roles: Seen) -> None:
        assert all_roles.role(740_011)[-1] is Role.HELD
        assert all_roles.role(750_019)[-1] is Role.HELD
        chains = {all_roles.trace.string(int(c)) for c in all_roles.trace["holders"]["chain"]}
        assert {"bank", "history['best'][*]"} <= chains

    def test_three_fit_none_and_nothing_else_does(self, all_roles: Seen) -> None:
        unknown = sorted(
            int(all_roles.trace["allocations"]["bytes"][all_roles.roles.allocation[i]])
            for i in range(len(all_roles.roles.role)) if all_roles.roles.role[i] == Role.UNKNOWN)
        assert unknown == [810_003, 820_003, 830_003, 830_003]

    def test_they_sum_to_the_live_bytes_at_every_event(self, all_roles: Seen) -> None:
        all_roles.closes()


@st.composite
def trainings(draw: st.DrawFn) -> dict[str, object]:
    return {
        "seed": draw(st.integers(0, 2**16)),
        "layers": draw(st.lists(st.sampled_from(["linear", "relu", "norm", "dropout", "conv", "checkpoint"]),
                                min_size=1, max_size=4)),
        "optimizer": draw(st.sampled_from(["SGD", "Adam", "RMSprop", None])),
        "accumulate": draw(st.integers(1, 2)),
        "steps": draw(st.integers(1, 3)),
        "evaluate": draw(st.booleans()),
        "keep": draw(st.booleans()),
        "max_events": draw(st.sampled_from([10**6, 150])),
    }


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)


def layer(kind: str) -> nn.Module:
    make = {
        "linear": lambda: nn.Linear(12, 12), "relu": nn.ReLU, "norm": lambda: nn.BatchNorm1d(4),
        "dropout": nn.Dropout, "conv": lambda: nn.Conv1d(4, 4, 3, padding=1),
        "checkpoint": lambda: Checkpointed(nn.Sequential(nn.Linear(12, 12), nn.Tanh())),
    }
    return make[kind]()


class TestOnTrainingsOfAnyKind:
    @settings(max_examples=12)
    @given(training=trainings())
    def test_roles_close_and_leave_nothing_unknown(self, training: dict[str, object]) -> None:
        kept: list[torch.Tensor] = []

        def train() -> None:
            torch.manual_seed(training["seed"])
            random.seed(training["seed"])
            model = nn.Sequential(nn.Linear(12, 12), *[layer(kind) for kind in training["layers"]])
            optimizer = training["optimizer"] and getattr(torch.optim, training["optimizer"])(
                model.parameters(), lr=1e-3)
            for _ in range(training["steps"]):
                for _ in range(training["accumulate"]):
                    loss = model(torch.randn(random.randint(2, 5), 4, 12)).square().mean()
                    loss.backward()
                    if training["keep"]:
                        kept.append(loss.detach())
                if optimizer:
                    optimizer.step()
                    optimizer.zero_grad()
            if training["evaluate"]:
                with torch.no_grad():
                    model(torch.randn(3, 4, 12))

        seen = record(train, max_events=training["max_events"])
        seen.closes()
        if training["max_events"] > 150:  # light recording has fewer proofs
            assert Role.UNKNOWN not in seen.roles.role[seen.roles.start >= 0]
        if seen.trace.peak_step is not None:
            Seen(seen.trace.peak_step).closes()


BUFFERS = """
import torch
from torch import nn

model = nn.Linear(211, 307, bias=False)                                # 259,108 bytes
summed, before = torch.zeros_like(model.weight), torch.zeros_like(model.weight)
momentum, average = torch.zeros_like(model.weight), model.weight.detach().clone()
for step in range(6):
    summed.zero_()
    for _ in range(2):
        model.weight.grad = None
        model(torch.randn(5, 211)).square().mean().backward()
        summed.add_(model.weight.grad, alpha=0.5)
    with torch.no_grad():
        before.copy_(summed)
        momentum.mul_(0.9).add_(model.weight.grad)
        change = 0.01 * momentum
        model.weight.sub_(change)
        average.lerp_(model.weight, 0.1)
"""


def test_buffers_of_the_scripts_own_are_what_is_written_into_and_read_from_them(tmp_path: Path) -> None:
    # GIVEN a sum of gradients, a copy of it, a momentum, and an average of the weights: all of one size, all by hand
    seen = record_script(tmp_path, BUFFERS)
    # THEN each is what the script does with it, and the average is no more than held
    in_order = [seen.role_of(row)[0] for row in seen.rows(211 * 307 * 4)[:5]]
    assert in_order == [Role.PARAMETERS, Role.GRADIENTS, Role.GRADIENTS, Role.OPTIMIZER_STATE, Role.HELD]


@pytest.mark.parametrize("steps", [":", "90:"], ids=["full", "light"])
def test_what_a_module_made_is_no_input_of_the_next(steps: str, tmp_path: Path) -> None:
    # GIVEN two models, the second of which is given what the first made without its history; real data beside it,
    # and an augmentation that is a module itself
    seen = record_script(tmp_path, """
        import torch
        from torch import nn

        class Noise(nn.Module):
            def forward(self, x):
                return x + torch.randn_like(x)                # an input: 211 * 40 * 4 bytes, thrice a step

        first, second = nn.Linear(30, 50), nn.Linear(50, 7)
        third, noise = nn.Linear(40, 7), Noise()
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters(), *third.parameters()], lr=0.1)
        for step in range(6):
            z = first(torch.randn(203, 30))                   # 203 * 50 * 4 bytes: saved by what follows
            passed = second(z.detach()).square().mean()
            h = torch.tanh(torch.randn(307, 1) * first.bias)  # 307 * 50 * 4 bytes: saved by tanh
            passed = passed + second(h.detach()).square().mean()
            with torch.no_grad():
                x = noise(torch.randn(211, 40))
            (passed + third(x).square().mean() + z.square().mean() + h.mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
        """, "--steps", steps)
    # THEN it is an activation, and the data and what the augmentation made of them are inputs
    light = steps == "90:"
    if light:
        assert seen.trace.peak_step is not None
        seen = Seen(seen.trace.peak_step)  # the highest light step
    found = {size: [seen.role_of(row)[0] for row in seen.rows(size)]
             for size in (203 * 30 * 4, 203 * 50 * 4, 307 * 50 * 4, 211 * 40 * 4)}
    turns = 1 if light else 6
    assert found[203 * 30 * 4].count(Role.INPUTS) == turns
    assert found[211 * 40 * 4].count(Role.INPUTS) == 2 * turns
    for size in (203 * 50 * 4, 307 * 50 * 4):
        assert found[size].count(Role.SAVED_ACTIVATIONS) >= turns
        assert Role.INPUTS not in found[size]
