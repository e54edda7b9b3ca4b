"""Bytes that autograd saves, by module, against closed forms: every formula is written out here, none was measured.

Each formula says what the operators of the model keep for their backward. A storage counts once, with the first that
saves it: a linear layer keeps its input, so what ``fc1`` made is in the row of what came after it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from recording import Block, Seen, convnet, mlp, record
from torch import nn

from memdiag.trace import Role

LONG = 8
BATCH, FEATURES, HIDDEN, CLASSES = 16, 20, 32, 4


def one_step(
    model: Callable[[], nn.Module], batch: Callable[[], torch.Tensor], classes: int, autocast: bool = False
) -> Seen:
    """One step of training, the loss outside of autocast."""

    def train() -> None:
        torch.manual_seed(0)
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        x = batch()
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            out = net(x)
        if classes:
            loss = F.cross_entropy(out.float(), torch.randint(classes, (len(x),)))
        else:
            loss = out.float().square().mean()
        loss.backward()
        optimizer.step()

    seen = record(train)
    seen.closes()
    return seen


def cross_entropy(batch: int, classes: int) -> int:
    """The log-probabilities, and the sum of the weights: one number."""
    return batch * classes * 4 + 4


def expected(modules: dict[str, int]) -> dict[str, int]:
    return {name: size for name, size in modules.items() if size}


class TestMLP:
    # 0 keeps its input, which is the batch; 1 its result, which 2 keeps too.

    def test_fp32(self) -> None:
        seen = one_step(mlp, lambda: torch.randn(BATCH, FEATURES), CLASSES)
        assert seen.saved(0) == expected({"1": BATCH * HIDDEN * 4, "": cross_entropy(BATCH, CLASSES)})
        assert seen.saved(0, Role.INPUTS) == {"0": BATCH * FEATURES * 4, "": BATCH * LONG}
        # The weight of 0 is not needed: the batch wants no gradient.
        assert seen.saved(0, Role.PARAMETERS) == {"2": HIDDEN * CLASSES * 4}

    def test_bf16_autocast(self) -> None:
        seen = one_step(mlp, lambda: torch.randn(BATCH, FEATURES), CLASSES, autocast=True)
        assert seen.saved(0) == expected({
            "0": BATCH * FEATURES * 2,  # a copy of the batch
            "1": BATCH * HIDDEN * 2,
            "2": HIDDEN * CLASSES * 2,  # a copy of its weight
            "": cross_entropy(BATCH, CLASSES),
        })


class TestConvolutionNet:
    IMAGE, CHANNELS = 8 * 8, 8
    POOLED = 4 * 4

    def batch(self) -> torch.Tensor:
        return torch.randn(BATCH, 3, 8, 8)

    def test_fp32(self) -> None:
        made = BATCH * self.CHANNELS * self.IMAGE * 4
        seen = one_step(convnet, self.batch, CLASSES)
        assert seen.saved(0) == expected({
            "1": made + 2 * self.CHANNELS * 4,  # the convolution's result; mean and deviation of each channel
            "2": made,  # the rectifier's result
            "3": BATCH * self.CHANNELS * self.POOLED * LONG,  # where each maximum was
            "5": BATCH * self.CHANNELS * self.POOLED * 4,  # the maxima, seen through a flat view
            "": cross_entropy(BATCH, CLASSES),
        })
        assert seen.saved(0, Role.INPUTS) == {"0": BATCH * 3 * self.IMAGE * 4, "": BATCH * LONG}
        assert seen.saved(0, Role.PARAMETERS) == {
            "0": 8 * 3 * 9 * 4, "1": self.CHANNELS * 4, "5": self.CHANNELS * self.POOLED * CLASSES * 4}
        assert seen.saved(0, Role.BUFFERS) == {"1": 2 * self.CHANNELS * 4}  # running mean and variance

    def test_bf16_autocast(self) -> None:
        made = BATCH * self.CHANNELS * self.IMAGE * 2
        seen = one_step(convnet, self.batch, CLASSES, autocast=True)
        assert seen.saved(0) == expected({
            "0": BATCH * 3 * self.IMAGE * 2 + 8 * 3 * 9 * 2,  # copies of the batch and of the weight
            "1": made + 2 * self.CHANNELS * 4,
            "2": made,
            "3": BATCH * self.CHANNELS * self.POOLED * LONG,
            "5": BATCH * self.CHANNELS * self.POOLED * 2 + self.CHANNELS * self.POOLED * CLASSES * 2,
            "": cross_entropy(BATCH, CLASSES),
        })


class TestBlockOfATransformer:
    B, T, WIDTH, HEADS = 3, 12, 16, 2
    TOKENS = B * T

    def batch(self) -> torch.Tensor:
        return torch.randn(self.B, self.T, self.WIDTH)

    def seen(self, fused: bool, autocast: bool = False) -> Seen:
        return one_step(lambda: Block(self.WIDTH, self.HEADS, fused), self.batch, 0, autocast)

    def around_attention(self) -> dict[str, int]:
        wide, norm = self.TOKENS * self.WIDTH * 4, self.TOKENS * 4
        return {
            "ln1": 2 * norm,  # mean and deviation of each token; what it normalised is the batch
            "qkv": wide,
            "ln2": wide + 2 * norm,
            "fc1": wide,
            "act": 4 * wide,
            "fc2": 4 * wide,
            "": wide,  # squared by the loss
        }

    def test_fused_attention_fp32(self) -> None:
        wide = self.TOKENS * self.WIDTH * 4
        seen = self.seen(fused=True)
        # Query, key and value, which are parts of what qkv made; the result, which proj keeps too, since it lies in
        # memory as a sequence of tokens; the logarithm of each row's sum.
        attention = 3 * wide + wide + self.B * self.HEADS * self.T * 4
        assert seen.saved(0) == self.around_attention() | {"Block": attention}
        assert seen.saved(0, Role.INPUTS) == {"ln1": wide}
        weight = self.WIDTH * self.WIDTH * 4
        assert seen.saved(0, Role.PARAMETERS) == {
            "ln1": self.WIDTH * 4 * 2, "qkv": 3 * weight, "proj": weight,
            "ln2": self.WIDTH * 4 * 2, "fc1": 4 * weight, "fc2": 4 * weight}

    def test_attention_written_out_fp32(self) -> None:
        wide = self.TOKENS * self.WIDTH * 4
        seen = self.seen(fused=False)
        # Copies of query, key and value, whose heads do not lie one after the other; the probabilities. (The factor of
        # the scores is a Python number: autograd keeps it out of sight of hooks.)
        attention = 3 * wide + self.B * self.HEADS * self.T * self.T * 4
        assert seen.saved(0) == self.around_attention() | {"Block": attention, "proj": wide}

    def test_fused_attention_bf16_autocast(self) -> None:
        wide, half, norm = self.TOKENS * self.WIDTH * 4, self.TOKENS * self.WIDTH * 2, self.TOKENS * 4
        weight = self.WIDTH * self.WIDTH * 2  # copies
        seen = self.seen(fused=True, autocast=True)
        assert seen.saved(0) == {
            "ln1": 2 * norm,
            "qkv": half + 3 * weight,
            "Block": 3 * half + half + self.B * self.HEADS * self.T * 4,
            "proj": weight,
            "ln2": wide + 2 * norm,  # the residual stream is fp32
            "fc1": half + 4 * weight,
            "act": 4 * half,
            "fc2": 4 * half + 4 * weight,
            "": wide,
        }


class TestEachStorageOnce:
    def test_views_and_transposes_are_what_they_are_views_of(self) -> None:
        class Odd(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.randn(7, 7))
                self.register_buffer("mask", torch.ones(9, 7))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                inner = (x @ self.weight.t()) * self.mask[2:]  # keeps the batch; a part of the mask
                inner = inner * x.t() * x[:]  # keeps the batch twice more
                return (inner.t()[1:] @ inner).exp()  # keeps `inner` twice, as two views; the result

        def train() -> None:
            Odd()(torch.randn(7, 7)).sum().backward()

        seen = record(train)
        seen.closes()
        matrix = 7 * 7 * 4
        assert seen.saved(0, Role.INPUTS) == {"Odd": matrix}
        assert seen.saved(0, Role.BUFFERS) == {"Odd": 9 * 7 * 4}
        assert seen.saved(0) == {"Odd": matrix + 6 * 7 * 4}

    def test_a_parameter_saved_as_it_is_and_transposed_is_one(self) -> None:
        def train() -> None:
            embedding = nn.Embedding(11, 6)
            head = nn.Linear(6, 11, bias=False)
            head.weight = embedding.weight
            model = nn.Sequential(embedding, nn.Tanh(), head, nn.Tanh(), nn.Linear(11, 2))
            model(torch.randint(11, (3, 5))).sum().backward()

        seen = record(train)
        assert seen.saved(0, Role.PARAMETERS) == {"2": 11 * 6 * 4, "4": 11 * 2 * 4}
        assert seen.saved(0, Role.INPUTS) == {"0": 3 * 5 * LONG}
        assert seen.saved(0) == {"1": 15 * 6 * 4, "3": 15 * 11 * 4}

    def test_masks_and_places_made_by_functions_outside_modules_are_saved_activations(self) -> None:
        # GIVEN a model written without modules, and a batch
        def train() -> None:
            weight = torch.randn(3, 4, requires_grad=True)
            x = torch.randn(10, 3)
            hidden = F.dropout(x @ weight, 0.5)  # keeps the batch, and a mask of its own
            F.max_pool1d(hidden[None], 2).sum().backward()

        seen = record(train)
        seen.closes()
        assert seen.saved(0, Role.INPUTS) == {"": 10 * 3 * 4}
        # The mask, which is scaled already; dropout's result; the places of the maxima.
        assert seen.saved(0) == {"": 10 * 4 * 4 + 10 * 4 * 4 + 10 * 2 * LONG}
