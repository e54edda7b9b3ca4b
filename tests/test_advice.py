"""What an advice says that it would free, against a run in which it was followed."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from recording import record
from torch import nn

from memdiag.diagnose import diagnose
from memdiag.trace.view import View

Run = Callable[[bool], None]


def perceptron(width: int = 256, layers: int = 4) -> nn.Sequential:
    return nn.Sequential(*[part for _ in range(layers) for part in (nn.Linear(width, width), nn.Tanh())])


def loader(batches: int) -> Iterator[torch.Tensor]:
    for _ in range(batches):
        yield torch.stack([torch.randn(256) for _ in range(2000)])


def kept_batches(mended: bool) -> None:
    """All batches are there before the first step."""
    model = nn.Linear(256, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batches = loader(8)
    if not mended:
        batches = list(batches)  # type: ignore[assignment]
    for x in batches:
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()


def dense_embedding(mended: bool) -> None:
    """A table of which a step reads a few rows, twice."""
    table, head = nn.Embedding(50_000, 32, sparse=mended), nn.Linear(32, 1)
    optimizer = torch.optim.SGD([*table.parameters(), *head.parameters()], lr=1e-3)
    for _ in range(4):
        optimizer.zero_grad()
        (head(table(torch.randint(50_000, (64,)))) - head(table(torch.randint(50_000, (64,))))).mean().backward()
        optimizer.step()


def late_zeroing(mended: bool) -> None:
    """Gradients are let go between forward and backward: they are there in the forward, where the peak is."""
    model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(4):
        if mended:
            optimizer.zero_grad()
        with torch.no_grad():
            torch.randn(1_500_000).sin()
        loss = model(torch.randn(4, 512)).mean()
        optimizer.zero_grad()
        loss.backward()
        del loss
        optimizer.step()


def gathered_results(mended: bool) -> None:
    """An evaluation concatenates what it has with what it gets."""
    model = nn.Linear(64, 1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(64, 64)).mean().backward()
        optimizer.step()
    results = None
    with torch.no_grad():
        for _ in range(8):
            logits = model(torch.randn(500, 64))
            if mended:
                logits = logits.argmax(-1)
            results = logits if results is None else torch.cat([results, logits])


def gathered_leak(mended: bool) -> None:
    """Each step leaves its result, and the end puts them together."""
    model = perceptron(64, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    kept = []
    for _ in range(8):
        x = torch.randn(8000, 64)
        result = model(x)
        optimizer.zero_grad()
        result.square().mean().backward()
        optimizer.step()
        kept.append(result.detach().mean(0) if mended else result.detach() + 1)
    torch.cat(kept).argmax(-1)


def unread_graphs(mended: bool) -> None:
    """A validation's loss is kept with its graph, of the last step too."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    curve = []

    def validate() -> torch.Tensor:
        with torch.no_grad() if mended else nullcontext():
            return model(torch.randn(1500, 256)).mean()

    for _ in range(8):
        optimizer.zero_grad()
        model(torch.randn(1500, 256)).mean().backward()
        optimizer.step()
        curve.append(validate())


def last_validation(mended: bool) -> None:
    """The run ends with a validation that builds a graph."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(64, 256)).mean().backward()
        optimizer.step()
    with torch.no_grad() if mended else nullcontext():
        model(torch.randn(4000, 256)).mean()


def averaged_copy(mended: bool) -> None:
    """A copy of the model, averaged over the steps."""
    model = nn.Sequential(nn.Linear(700, 700), nn.Tanh(), nn.Linear(700, 700))
    average = None if mended else copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(8, 700)).mean().backward()
        optimizer.step()
        if average is not None:
            with torch.no_grad():
                for old, new in zip(average.parameters(), model.parameters(), strict=True):
                    old.mul_(0.99).add_(new, alpha=0.01)


def summed_losses(mended: bool) -> None:
    """Four micro-batches, and one backward for the sum of their losses."""
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(4):
        optimizer.zero_grad()
        losses = []
        for _ in range(4):
            loss = model(torch.randn(1000, 256)).mean()
            if mended:
                loss.backward()
            else:
                losses.append(loss)
        if losses:
            torch.stack(losses).sum().backward()
        del loss, losses
        optimizer.step()


class Looking(nn.Module):
    """Stores scores that no backward needs."""

    def __init__(self, store: bool) -> None:
        super().__init__()
        self.key = nn.Linear(32, 32)
        self.store = store

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.key(x) @ x.transpose(1, 2) + 1
        if self.store:
            self.scores = scores
        return x + F.softmax(scores, -1) @ x


def stored_scores(mended: bool) -> None:
    model = nn.Sequential(*[Looking(not mended) for _ in range(4)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(2, 500, 32)).mean().backward()
        optimizer.step()


class Noting(nn.Module):
    """Keeps copies of its hidden states."""

    def __init__(self, note: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(5))
        self.note = note

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.hidden: list[torch.Tensor] = []
        for layer in self.layers:
            x = torch.tanh(layer(x))
            if self.note:
                self.hidden.append(x.detach().clone())
        return x


def stored_copies(mended: bool) -> None:
    model = Noting(not mended)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(2000, 256)).mean().backward()
        optimizer.step()


def broadcast_loss(mended: bool) -> None:
    """Predictions are a column, targets a row."""
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(4):
        x = torch.randn(1200, 16)
        found = model(x)
        optimizer.zero_grad()
        ((found.squeeze(-1) if mended else found) - x.sum(1)).square().mean().backward()
        optimizer.step()


def written_softmax(mended: bool) -> None:
    """A cross entropy over all pairs of a batch, in single operators."""
    model = nn.Linear(32, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(4):
        z, right = F.normalize(model(torch.randn(1500, 32)), dim=1), torch.arange(1500)
        similar = z @ z.t() / 0.1
        if mended:
            loss = F.cross_entropy(similar, right)
        else:
            weights = similar.exp() * (1 - torch.eye(1500))
            part = weights / weights.sum(1, keepdim=True)
            loss = -(part + 1e-8).log().diag().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        del similar, loss


def growing_bank(mended: bool) -> None:
    """Each step's results are put to those before, with their graphs, and compared with all of them."""
    model = nn.Linear(200, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    bank = torch.zeros(0, 64)
    for _ in range(9):
        x = torch.randn(2000, 200)
        z = model(x)
        (z[:100] @ bank.detach().t()).sigmoid().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        bank = torch.cat([bank, z.detach()])[-2000:] if mended else torch.cat([bank, model(x)])


def per_sample(mended: bool) -> None:
    """The gradients of each sample by itself."""
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def loss_of(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.func.functional_call(model, weights, (x,))
        return found.square().mean()

    for _ in range(4):
        x = torch.randn(128, 64)
        weights = {name: p.detach() for name, p in model.named_parameters()}
        if mended:
            found = torch.func.grad(loss_of)(weights, x)
        else:
            single = torch.func.vmap(torch.func.grad(loss_of), (None, 0))(weights, x)
            found = {name: value.mean(0) for name, value in single.items()}
            del single
        for name, p in model.named_parameters():
            p.grad = found[name]
        optimizer.step()


def teacher_with_gradients(mended: bool) -> None:
    """A teacher's forward builds a graph, and gradients, that nobody trains it with."""
    teacher, student = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 16)), nn.Linear(256, 16)
    optimizer = torch.optim.SGD(student.parameters(), lr=1e-3)
    for _ in range(4):
        x = torch.randn(1500, 256)
        with torch.no_grad() if mended else nullcontext():
            wanted = teacher(x)
        optimizer.zero_grad()
        (student(x) - wanted).square().mean().backward()
        optimizer.step()


def kept_optimizers(mended: bool) -> None:
    """Every epoch has an optimizer of its own, and a list keeps them all."""
    model = nn.Linear(500, 500)
    optimizers = []
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(8):
        if not mended:
            optimizer = torch.optim.Adam(model.parameters())
            optimizers.append(optimizer)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(8, 500)).mean().backward()
            optimizer.step()


def filling_buffer(mended: bool) -> None:
    """The last hundred batches are kept, and there are fewer yet."""
    model = nn.Linear(64, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    last: deque[torch.Tensor] = deque(maxlen=100)
    for _ in range(10):
        x = torch.randn(4000, 64)
        if not mended:
            last.append(x)
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("train", "kind"),
    [(kept_batches, "kept_batches"), (dense_embedding, "dense_embedding"), (late_zeroing, "gradients"),
     (gathered_results, "gathered_results"), (gathered_leak, "growth"), (unread_graphs, "growth"),
     (stored_scores, "hidden_states"), (last_validation, "evaluation_graph"), (averaged_copy, "model_copy"),
     (summed_losses, "retained_graph"), (stored_copies, "hidden_states"), (broadcast_loss, "broadcast"),
     (written_softmax, "written_softmax"), (growing_bank, "growth"), (per_sample, "per_sample_gradients"),
     (teacher_with_gradients, "unstepped_gradients"), (kept_optimizers, "growth"),
     (filling_buffer, "filling_container")],
    ids=lambda value: value.__name__ if callable(value) else "")
def test_the_peak_falls_by_what_the_advice_said(train: Run, kind: str) -> None:
    # GIVEN a training with a fault, and the same one mended
    before, after = record(partial(train, False)), record(partial(train, True))
    # WHEN the first is diagnosed
    (finding,) = [finding for finding in diagnose(View(before.trace)).findings if finding.kind == kind]
    said = max(advice.bytes or 0 for advice in finding.advice)
    # THEN its peak lies above the other's by what was said
    assert said == pytest.approx(before.peak - after.peak, rel=0.1)
    if train is stored_copies:
        assert finding.holder is not None
        assert finding.holder.chain == ["model.hidden[*]"]
    # AND the mended one has no such finding
    assert kind not in [finding.kind for finding in diagnose(View(after.trace)).findings]
