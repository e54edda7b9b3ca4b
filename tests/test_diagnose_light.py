"""What a diagnosis says where the peak is in a light step, against runs without the fault."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from recording import GPT, Seen, record
from torch import nn

from memdiag.diagnose import Class, Diagnosis, diagnose
from memdiag.trace import Level, Role
from memdiag.trace.ledger import ledger
from memdiag.trace.peak import worst
from memdiag.trace.view import View

STEPS = 14
LEVELS = pytest.mark.parametrize(
    "options", [{"max_events": 0}, {"steps": (1, 3)}, {"steps": (0, 6)}],
    ids=["none in full", "two in full", "enough in full"])


def train(keep: Callable[[torch.Tensor, torch.Tensor], Any], lengths: Callable[[int], int] = lambda _: 800) -> None:
    """Steps of a perceptron; what a step keeps of its input and its loss stays in a list."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1))
    optimizer = torch.optim.Adam(model.parameters())
    kept = []
    for step in range(STEPS):
        x = torch.randn(lengths(step), 64)
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        optimizer.step()
        kept.append(keep(x, loss))


def graphs(mended: bool) -> None:
    train(lambda x, loss: loss.item() if mended else loss)


def batches(mended: bool) -> None:
    train(lambda x, loss: None if mended else x)


def batches_of_many_lengths(mended: bool) -> None:
    train(lambda x, loss: None if mended else x, lambda step: 800 + 37 * step * step % 400)


def now_and_then(mended: bool) -> None:
    count = iter(range(STEPS))
    train(lambda x, loss: x if next(count) % 3 == 2 and not mended else None)


def late(mended: bool) -> None:
    count = iter(range(STEPS))
    train(lambda x, loss: x if next(count) > 7 and not mended else None)


def as_large_as_the_state(mended: bool) -> None:
    """Snapshots of a weight: Adam's moments have its size."""
    torch.manual_seed(0)
    model = nn.Linear(512, 256)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    kept = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(16, 512)).square().mean().backward()
        kept.append(None if mended else model.weight.detach().clone())
        optimizer.step()


def peak(seen: Seen) -> int:
    return worst(seen.trace, seen.line).bytes


def diagnosis(seen: Seen) -> Diagnosis:
    assert Level.LIGHT in seen.trace["steps"]["level"]
    assert seen.trace.peak_step is not None
    return diagnose(View(seen.trace))


class TestLeaks:
    @LEVELS
    @pytest.mark.parametrize(("leak", "per_step"), [
        (graphs, 800 * (64 + 128 + 1) * 4 + 4), (batches, 800 * 64 * 4), (batches_of_many_lengths, None),
        (now_and_then, 800 * 64 * 4 / 3), (late, 800 * 64 * 4), (as_large_as_the_state, 512 * 256 * 4),
    ])
    def test_the_peak_falls_by_what_was_said(
        self, options: dict[str, Any], leak: Callable[[bool], None], per_step: float | None
    ) -> None:
        # GIVEN a run that leaks, its highest step in light, and the same one mended
        before, after = record(partial(leak, False), **options), record(partial(leak, True), **options)
        # WHEN it is diagnosed
        found = diagnosis(before)
        # THEN it is a leak, of as many bytes a step as are kept
        assert found.verdict.cls is Class.LEAK
        finding = found.findings[0]
        assert finding.kind == "growth"
        if per_step is not None:
            assert found.growth.bytes_per_step == pytest.approx(per_step, rel=0.01)
        # AND without it the peak is that of the mended run
        (advice,) = finding.advice
        assert advice.bytes == pytest.approx(peak(before) - peak(after), rel=0.1)
        assert found.runner_up is not None
        assert found.runner_up.without == "without finding 1"
        assert (".item()" in advice.text) == (leak is graphs)
        # AND what leaked is no shortage of another kind, nor is the mended run's rest
        rest = {Class.ACTIVATION, Class.OPTIMIZER_STATE, None}
        assert {other.cls for other in found.findings[1:]} <= rest
        assert diagnose(View(after.trace)).verdict.cls is not Class.LEAK

    def test_one_that_begins_when_no_step_is_recorded_in_full_any_more(self) -> None:
        kept: list[torch.Tensor] = []

        def late(x: torch.Tensor, loss: torch.Tensor) -> None:
            kept.append(x if len(kept) > 6 else torch.zeros(1))

        found = diagnosis(record(lambda: train(late), steps=(0, 6)))
        assert found.verdict.cls is Class.LEAK
        assert found.growth.bytes_per_step == pytest.approx(800 * 64 * 4, rel=0.01)

    @LEVELS
    @pytest.mark.parametrize("ends", ["stops", "is cleared", "keeps the last"])
    def test_what_grew_while_steps_were_recorded_in_full_and_ended_is_none(
        self, options: dict[str, Any], ends: str
    ) -> None:
        kept: list[torch.Tensor] = []
        count = iter(range(STEPS))

        def keep(x: torch.Tensor, loss: torch.Tensor) -> None:
            step = next(count)
            if ends == "is cleared" and step % 7 == 6:
                kept.clear()
            if ends == "keeps the last" and len(kept) == 6:
                kept.pop(0)
            if ends != "stops" or step < 6:
                kept.append(x)

        found = diagnose(View(record(lambda: train(keep), **options).trace))
        assert found.verdict.cls is not Class.LEAK
        assert found.growth.bytes_per_step == 0

    @LEVELS
    def test_what_fills_and_ends_is_none(self, options: dict[str, Any]) -> None:
        last: deque[torch.Tensor] = deque(maxlen=1000)
        cache: dict[int, torch.Tensor] = {}

        def keep(x: torch.Tensor, loss: torch.Tensor) -> None:
            last.append(x)
            cache.setdefault(len(last) % 4, x[:, :1].clone())

        assert diagnosis(record(lambda: train(keep), **options)).verdict.cls is not Class.LEAK


class TestRoles:
    def test_what_full_steps_left_is_known_at_the_peak(self) -> None:
        # GIVEN graphs that steps keep, the later ones in light
        seen = record(partial(graphs, False), steps=(0, 6))
        view = View(seen.trace)
        at = view.of_peak
        assert at is not None
        assert at is not view
        # THEN those of the first steps are known for what they are
        sums = ledger(at.trace, at.roles, at.device)[:, view.worst.event]
        assert int(sums.sum()) == view.worst.bytes
        assert sums[Role.UNKNOWN] < 0.01 * view.worst.bytes
        # AND activations are what so many steps keep: the hidden layer, its output and the loss
        step = 800 * (128 + 1) * 4
        assert sums[Role.SAVED_ACTIVATIONS] == pytest.approx(STEPS * step, rel=0.1)


def gpt() -> None:
    torch.manual_seed(0)
    model = GPT(width=64, blocks=6)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    for _ in range(8):
        optimizer.zero_grad()
        model(torch.randint(50, (16, 32))).square().mean().backward()
        optimizer.step()


@pytest.fixture(scope="module")
def full() -> Diagnosis:
    return diagnose(View(record(gpt).trace))


class TestSavings:
    """What a finding would free, where some steps were folded: as in the same run recorded in full."""

    def test_the_peak_is_in_a_full_step_and_others_come_after(self, full: Diagnosis) -> None:
        found = diagnose(View(record(gpt, steps=(0, 4)).trace))
        assert full.reachable_bytes
        assert found.reachable_bytes == pytest.approx(full.reachable_bytes, rel=0.01)
        assert found.runner_up is not None
        assert full.runner_up is not None
        assert found.runner_up.allocated_bytes == pytest.approx(full.runner_up.allocated_bytes, rel=0.01)

    def test_the_peak_is_in_a_light_step(self, full: Diagnosis) -> None:
        found = diagnose(View(record(gpt, max_events=0).trace))
        # Light steps know no modules: it is a bound, and never lower.
        assert full.reachable_bytes
        assert found.reachable_bytes is not None
        assert full.reachable_bytes <= found.reachable_bytes < 1.2 * full.reachable_bytes
        assert found.verdict.cls is full.verdict.cls is Class.ACTIVATION
        assert "not the answer" not in " ".join(found.findings[0].evidence)

    def test_what_one_light_step_does_leaves_the_others_as_they_are(self) -> None:
        """A validation at the end that builds a graph, four times as large as a step's."""
        def run(validates: bool) -> None:
            layers = [layer for _ in range(5) for layer in (nn.Linear(512, 512), nn.ReLU())]
            model = nn.Sequential(*layers, nn.Linear(512, 1))
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            for _ in range(8):
                optimizer.zero_grad()
                model(torch.randn(1000, 512)).square().mean().backward()
                optimizer.step()
            if validates:
                model(torch.randn(4000, 512)).square().mean()

        before, after = (record(partial(run, validates), steps=(0, 4)) for validates in (True, False))
        assert peak(after) < 0.8 * peak(before)
        # THEN no advice promises more than the other steps let it
        found = diagnosis(before)
        assert found.reachable_bytes is not None
        promised = [advice.bytes or 0 for finding in found.findings for advice in finding.advice]
        assert 0 < max([found.reachable_bytes, *promised]) <= 1.01 * (peak(before) - peak(after))
