"""Rules on small real trainings: a pattern is found where it is, with its closed-form bytes, and only there."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from recording import record
from torch import nn
from torch.utils.checkpoint import checkpoint

from memdiag.diagnose import Class, Diagnosis, Finding, diagnose
from memdiag.diagnose.evidence import Evidence
from memdiag.trace import NONE
from memdiag.trace.view import View


def diagnosis(train: Callable[[], None]) -> Diagnosis:
    return diagnose(View(record(train).trace))


def kinds(found: Diagnosis) -> list[str]:
    return [finding.kind for finding in found.findings]


def of_kind(found: Diagnosis, kind: str) -> Finding:
    (finding,) = [finding for finding in found.findings if finding.kind == kind]
    return finding


def steps(model: nn.Module, loss: Callable[[nn.Module], torch.Tensor], number: int = 5) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for _ in range(number):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()


class Attention(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.qkv = nn.Linear(32, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        if self.fused:
            return nn.functional.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]
        return (q @ k.transpose(1, 2) / 32**0.5).softmax(-1) @ v


class TestPersistent:
    def test_an_average_of_the_model_that_each_step_makes_anew_is_a_copy_of_it(self) -> None:
        def train() -> None:
            model = nn.Sequential(*[nn.Linear(400, 400) for _ in range(4)])
            average: dict[str, torch.Tensor] = {}
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            for _ in range(5):
                optimizer.zero_grad()
                model(torch.randn(8, 400)).square().mean().backward()
                optimizer.step()
                for name, parameter in model.named_parameters():
                    average[name] = average.get(name, 0) * 0.9 + parameter.detach() * 0.1

        found = diagnosis(train)
        finding = of_kind(found, "model_copy")
        assert finding.cls is Class.PARAMETERS
        assert finding.bytes >= 4 * (400 * 400 + 400) * 4
        assert "activation" not in kinds(found)

    def test_an_optimizer_of_the_scripts_own_cannot_be_fused(self) -> None:
        # GIVEN an optimizer that makes all updates before it applies the first, with two temporaries for each
        class Sign(torch.optim.Optimizer):
            @torch.no_grad()
            def step(self, closure: None = None) -> None:  # type: ignore[override]
                mine = self.param_groups[0]["params"]
                updates = [(p.grad * 0.9).sign() for p in mine]
                for p, update in zip(mine, updates, strict=True):
                    p.sub_(update, alpha=1e-4)

        def train(make: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
            model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
            optimizer = make(model)
            for _ in range(3):
                model(torch.randn(4, 512)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

        own = diagnosis(lambda: train(lambda model: Sign(model.parameters(), {})))
        torchs = diagnosis(lambda: train(lambda model: torch.optim.Adam(model.parameters(), foreach=False)))
        # THEN it is advised what can be done about it, and torch's own is told as before
        finding = of_kind(own, "optimizer_temporaries")
        assert finding.bytes >= 4 * 512 * 512 * 4
        (advice,) = finding.advice
        assert "in place" in advice.text
        assert "fused" not in advice.text
        # Without the list at most the temporaries of one parameter are left.
        assert advice.bytes is not None
        assert advice.bytes >= 2 * 512 * 512 * 4
        assert "in place" not in str(torchs.findings)

    def test_gradients_that_were_asked_for_and_summed_up_are_there_twice(self) -> None:
        # GIVEN a script that sums what `torch.autograd.grad` returns, hands the sum over and keeps the last
        def train(keep: bool) -> None:
            model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, foreach=False)
            for _ in range(3):
                sums = [torch.zeros_like(p) for p in model.parameters()]
                for _ in range(2):
                    gradients = torch.autograd.grad(model(torch.randn(4, 512)).sum(), list(model.parameters()))
                    for total, gradient in zip(sums, gradients, strict=True):
                        total += gradient
                    if not keep:
                        del gradients, gradient
                for p, total in zip(model.parameters(), sums, strict=True):
                    p.grad = total
                scratch = torch.empty(2 << 20)  # the peak is here
                del scratch, total, sums
                optimizer.step()
                optimizer.zero_grad()

        parameters = 4 * (512 * 512 + 512) * 4
        finding = of_kind(diagnosis(lambda: train(keep=True)), "gradient_buffers")
        assert finding.bytes == 2 * parameters
        assert finding.advice[0].bytes == parameters
        assert f"{parameters / 2**20:.1f} MiB of it was returned by `torch.autograd.grad`" in finding.evidence[1]
        assert "gradient_buffers" not in kinds(diagnosis(lambda: train(keep=False)))

    def test_the_history_of_lbfgs_is_named(self) -> None:
        def train(history: int) -> None:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 1))
            optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, history_size=history)
            x, y = torch.randn(64, 300), torch.randn(64, 1)

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = (model(x) - y).square().mean()
                loss.backward()
                return loss

            for _ in range(6):
                optimizer.step(closure)

        before, after = (record(lambda history=history: train(history)) for history in (10, 1))
        finding = of_kind(diagnose(View(before.trace)), "optimizer_state")
        advice = finding.advice[0]
        assert "history_size" in advice.text
        assert advice.bytes is not None
        assert before.peak - after.peak <= advice.bytes <= finding.bytes


class TestActivations:
    def test_an_attention_matrix_is_named_with_its_bytes(self) -> None:
        found = diagnosis(lambda: steps(Attention(False), lambda m: m(torch.randn(2, 700, 32)).square().mean()))
        finding = of_kind(found, "attention_matrix")
        # The softmax is saved; gradients of the same size are alive beside it when backward comes by.
        matrix = 2 * 700 * 700 * 4
        assert finding.bytes >= matrix
        assert finding.bytes % matrix == 0
        assert found.verdict.cls is Class.ACTIVATION

    def test_a_fused_attention_has_none(self) -> None:
        found = diagnosis(lambda: steps(Attention(True), lambda m: m(torch.randn(2, 3000, 32)).square().mean()))
        assert "attention_matrix" not in kinds(found)

    def test_attention_between_two_sequences_has_one_too(self) -> None:
        class Across(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.q, self.kv = nn.Linear(32, 32), nn.Linear(32, 64)

            def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
                k, v = self.kv(y).chunk(2, dim=-1)
                return torch.einsum("bqk,bkd->bqd", torch.einsum("bqd,bkd->bqk", self.q(x), k).softmax(-1), v)

        found = diagnosis(lambda: steps(
            Across(), lambda m: m(torch.randn(2, 900, 32), torch.randn(2, 500, 32)).square().mean()))
        finding = of_kind(found, "attention_matrix")
        assert finding.bytes % (2 * 900 * 500 * 4) == 0
        assert "square" not in " ".join(finding.evidence)

    def test_layers_as_large_as_the_matrix_are_none(self) -> None:
        # GIVEN an MLP of which each result has as many elements as the attention's matrix
        batch, length, width = 4, 64, 64
        mlp = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(width, width), nn.GELU())])
        model = nn.Sequential(nn.Linear(width, 32), Attention(False), nn.Linear(32, width), mlp)
        seen = record(lambda: steps(model, lambda m: m(torch.randn(batch, length, width)).square().mean()))
        found = Evidence(view := View(seen.trace), view)
        # WHEN it is asked what belongs to its softmax
        mine = found.around(found.saves.softmaxes, between_products=True)
        # THEN that is, in each forward: the product, its scaling, the softmax; and no result of the MLP
        size = batch * length * length * 4
        assert batch * length * width * 4 == size
        forward = mine & (view.nest.of(view.nest.node, view.born_in) == NONE)
        assert forward.sum() == 5 * 3
        assert set(found.size[forward]) == {size}
        # AND in each backward, the gradients of the three
        assert (mine & ~forward).sum() == 5 * 3
        assert "attention_matrix" not in kinds(diagnose(view))

    def test_layers_as_large_as_the_logits_are_none(self) -> None:
        # GIVEN as many classes as a layer has features
        batch, width = 512, 96
        model = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(width, width), nn.GELU())])
        head = nn.Linear(width, width)
        target = torch.zeros(batch, dtype=torch.long)
        seen = record(lambda: steps(nn.Sequential(model, head), lambda m: nn.functional.cross_entropy(
            m(torch.randn(batch, width)) * 0.5, target)))
        found = Evidence(view := View(seen.trace), view)
        mine = found.around(found.saves.class_losses)
        # THEN what belongs to the loss is, in each forward: the logits, half of them, their softmax
        forward = mine & (view.nest.of(view.nest.node, view.born_in) == NONE)
        assert forward.sum() == 5 * 3
        assert set(found.size[forward]) == {batch * width * 4}
        assert "logits" not in kinds(diagnose(view))

    @pytest.mark.parametrize(("first", "second", "advice"), [
        ((900, 1), (1, 700), "chunks"), ((900, 1), (1, 900), "same shape"), ((900, 1), (900,), "same shape"),
        ((900, 1, 2), (700, 2), "chunks")])
    def test_differences_of_each_from_each_are_named(
        self, first: tuple[int, ...], second: tuple[int, ...], advice: str
    ) -> None:
        model = nn.Linear(4, math.prod(first))

        def loss(model: nn.Module) -> torch.Tensor:
            return (model(torch.randn(4)).view(first) - torch.randn(second)).abs().mean()

        finding = of_kind(diagnosis(lambda: steps(model, loss)), "broadcast")
        result = math.prod(torch.broadcast_shapes(first, second)) * 4
        assert finding.bytes >= 2 * result
        assert finding.bytes % result == 0
        assert advice in finding.advice[0].text

    @pytest.mark.filterwarnings("ignore:Using a target size")
    @pytest.mark.parametrize("name", ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"])
    def test_the_losses_broadcast_too(self, name: str) -> None:
        def train(mended: bool) -> None:
            model = nn.Linear(8, 1)

            def loss(model: nn.Module) -> torch.Tensor:
                found = model(torch.randn(900, 8))
                return getattr(nn.functional, name)(found.squeeze(-1) if mended else found, torch.randn(900))

            steps(model, loss)

        before, after = (record(lambda mended=mended: train(mended)) for mended in (False, True))
        finding = of_kind(diagnose(View(before.trace)), "broadcast")
        assert "[900, 1] and [900] become [900, 900]" in finding.evidence[0]
        assert finding.advice[0].bytes == pytest.approx(before.peak - after.peak, rel=0.1)
        assert "broadcast" not in kinds(diagnose(View(after.trace)))

    def test_an_exponential_that_is_divided_by_no_sum_is_no_softmax(self) -> None:
        def loss(model: nn.Module) -> torch.Tensor:
            e = model(torch.randn(2000, 64)).exp()
            return (e / (1 + e)).square().sum() / 1000

        assert "written_softmax" not in kinds(diagnosis(lambda: steps(nn.Linear(64, 64), loss)))

    def test_the_logits_are_bounded_with_a_teachers_and_what_the_loss_makes(self) -> None:
        # GIVEN more tokens than the model is wide, a multiple of it, so that gradients of logits have sizes that
        # those of single samples could have
        def train(chunked: bool) -> None:
            student, teacher = nn.Linear(16, 2000), nn.Linear(16, 2000).requires_grad_(False)
            target = torch.zeros(256, dtype=torch.long)

            def loss(model: nn.Module) -> torch.Tensor:
                x = torch.randn(256, 16)
                total = torch.zeros(())
                parts = x.split(16) if chunked else [x]
                for part, wanted in zip(parts, target.split(len(parts[0])), strict=True):
                    logits = model(part)
                    of_labels = nn.functional.cross_entropy(logits, wanted, label_smoothing=0.1)
                    of_teacher = nn.functional.kl_div(
                        logits.log_softmax(-1), teacher(part).log_softmax(-1), log_target=True, reduction="batchmean")
                    both = (of_labels + of_teacher) / len(parts)
                    if chunked:
                        both.backward()
                    total = total + (both.detach() if chunked else both)
                return total.requires_grad_() if chunked else total

            steps(student, loss)

        before, after = (record(lambda chunked=chunked: train(chunked)) for chunked in (False, True))
        found = diagnose(View(before.trace))
        finding = of_kind(found, "logits")
        assert "per_sample_gradients" not in kinds(found)
        assert finding.advice[0].at_most
        assert finding.advice[0].bytes is not None
        assert finding.advice[0].bytes >= before.peak - after.peak > 0

    def test_a_bias_that_is_subtracted_is_no_such_difference(self) -> None:
        def loss(model: nn.Module) -> torch.Tensor:
            return (model(torch.randn(4000, 64)) - torch.randn(64)).abs().mean()

        assert "broadcast" not in kinds(diagnosis(lambda: steps(nn.Linear(64, 64), loss)))

    def test_attention_weights_that_the_script_keeps(self) -> None:
        # GIVEN weights that a list holds from step to step, so that of the attention only gradients are activations
        kept: list[torch.Tensor] = []

        class Telling(Attention):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                q, k, v = self.qkv(x).chunk(3, dim=-1)
                weights = (q @ k.transpose(1, 2) / 32**0.5).softmax(-1)
                kept.append(weights)
                return weights @ v

        found = diagnosis(lambda: steps(Telling(False), lambda m: m(torch.randn(2, 500, 32)).square().mean()))
        assert found.verdict.cls is Class.LEAK

    def test_similarities_that_weigh_nothing_are_no_attention(self) -> None:
        """A contrastive loss has a softmax over the product of two tensors, of which only the loss is taken."""
        encoder = nn.Linear(32, 32)

        def loss(model: nn.Module) -> torch.Tensor:
            x = model(torch.randn(1500, 32))
            return -(x @ x.T / 8).softmax(-1).diagonal().log().mean()

        assert "attention_matrix" not in kinds(diagnosis(lambda: steps(encoder, loss)))

    def test_logits_are_named(self) -> None:
        def loss(model: nn.Module) -> torch.Tensor:
            return nn.functional.cross_entropy(model(torch.randn(64, 16)), torch.zeros(64, dtype=torch.long))

        found = diagnosis(lambda: steps(nn.Linear(16, 20_000), loss))
        assert of_kind(found, "logits").bytes % (64 * 20_000 * 4) == 0

    def test_a_teacher_with_a_graph_is_named_and_one_without_is_not(self) -> None:
        def train(grad: bool) -> None:
            teacher = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.Tanh())])
            x = torch.randn(1024, 256)

            def loss(student: nn.Module) -> torch.Tensor:
                with torch.set_grad_enabled(grad):
                    target = teacher(x)
                return (student(x) - target.detach()).square().mean()

            steps(nn.Linear(256, 256), loss)

        finding = of_kind(diagnosis(lambda: train(True)), "evaluation_graph")
        assert finding.bytes == 8 * 1024 * 256 * 4  # the outputs of tanh, each the input of the next layer too
        assert "evaluation_graph" not in kinds(diagnosis(lambda: train(False)))

    def test_summed_micro_batches_are_named_and_pairs_are_not(self) -> None:
        def train(batches: int) -> None:
            model = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 8))

            def loss(model: nn.Module) -> torch.Tensor:
                return torch.stack([model(torch.randn(512, 256)).square().mean() for _ in range(batches)]).sum()

            steps(model, loss)

        found = diagnosis(lambda: train(6))
        finding = of_kind(found, "retained_graph")
        # What is freed is what five of the six keep: the output of tanh, and inputs that nothing else holds.
        (advice,) = finding.advice
        assert advice.bytes == pytest.approx(5 * 512 * (512 + 256) * 4, rel=0.01)
        assert "retained_graph" not in kinds(diagnosis(lambda: train(2)))

    def test_one_long_batch_is_named(self) -> None:
        lengths = iter([64, 64, 64, 1024, 64, 64])
        model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 4))
        found = diagnosis(lambda: steps(model, lambda m: m(torch.randn(2, next(lengths), 64)).square().mean(), 6))
        assert "worst_batch" in kinds(found)


class TestScaling:
    def test_it_is_measured_where_batches_differ(self) -> None:
        sizes = iter([256, 512, 1024, 768, 1280, 1024])
        model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 4))
        found = diagnosis(lambda: steps(model, lambda m: m(torch.randn(next(sizes), 64)).square().mean(), 6))
        (row,) = [row for row in found.scaling if row.role == "saved_activations"]
        assert (row.by, row.source) == ("batch", "measured")
        # Of each row the output of tanh is kept, and four outputs for the loss.
        assert row.bytes_per_unit == pytest.approx((512 + 4) * 4, rel=0.01)
        assert row.fixed_bytes == pytest.approx(0, abs=64 * 1024)

    def test_it_is_told_by_shapes_where_they_do_not(self) -> None:
        model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 4))
        found = diagnosis(lambda: steps(model, lambda m: m(torch.randn(1024, 64)).square().mean()))
        (row,) = found.scaling
        assert (row.by, row.source) == ("batch", "shapes")
        assert row.bytes_per_unit == pytest.approx((512 + 4) * 4, rel=0.01)


class Checkpointed(nn.Module):
    def __init__(self, parts: list[nn.Module], chosen: set[int], reentrant: bool = False) -> None:
        super().__init__()
        self.parts, self.chosen, self.reentrant = nn.ModuleList(parts), chosen, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, part in enumerate(self.parts):
            x = checkpoint(part, x, use_reentrant=self.reentrant) if number in self.chosen else part(x)
        return x


class TestCheckpoints:
    def test_statistics_that_move_twice_are_named(self) -> None:
        def train(chosen: set[int]) -> None:
            model = Checkpointed([nn.Linear(256, 256), nn.BatchNorm1d(256), nn.Linear(256, 256)], chosen)
            steps(model, lambda m: m(torch.randn(2048, 256)).square().mean())

        finding = of_kind(diagnosis(lambda: train({0, 1})), "replay_hazard")
        assert "parts.1.num_batches_tracked" in finding.evidence[0]
        assert "replay_hazard" not in kinds(diagnosis(lambda: train({0, 2})))

    def test_a_reentrant_checkpoint_without_a_gradient_is_named(self) -> None:
        def train(wants: bool) -> None:
            model = Checkpointed([nn.Linear(256, 256), nn.Linear(256, 256)], {0}, reentrant=True)
            steps(model, lambda m: m(torch.randn(2048, 256, requires_grad=wants)).square().mean())

        with pytest.warns(UserWarning, match="requires_grad=True"):
            assert "reentrant_pitfall" in kinds(diagnosis(lambda: train(False)))
        assert "reentrant_pitfall" not in kinds(diagnosis(lambda: train(True)))

    def test_checkpoints_that_free_nothing_are_named(self) -> None:
        def train(chosen: set[int]) -> None:
            mlp = [nn.Sequential(nn.Linear(128, 1024), nn.Tanh(), nn.Linear(1024, 128)) for _ in range(3)]
            steps(Checkpointed([*mlp, nn.Linear(128, 4)], chosen), lambda m: m(torch.randn(1024, 128)).square().mean())

        assert "checkpoint_frees_nothing" in kinds(diagnosis(lambda: train({3})))
        assert "checkpoint_frees_nothing" not in kinds(diagnosis(lambda: train({0, 1, 2})))
