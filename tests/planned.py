"""Models of many shapes for plans of checkpoints, a training loop for them, and plans drawn at random."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from memdiag.apply import Plan, apply_plan
from memdiag.plan.regions import Candidate
from memdiag.record.options import PLANNED_STEP

T = TypeVar("T")
Batch = tuple[tuple[torch.Tensor, ...], torch.Tensor]


def sample(everything: Sequence[T]) -> Sequence[T]:
    """Every third, or all with ``MEMDIAG_VARIATIONS=all``."""
    return everything if os.environ.get("MEMDIAG_VARIATIONS") == "all" else everything[::3]


class Norm(nn.Module):
    """Root mean square, as Llama has it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt() * self.weight


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None,
        turn: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        if turn is not None:
            q, k = turn(q), turn(k)
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=self.dropout if self.training else 0.0, is_causal=mask is None)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """A block of a GPT."""

    def __init__(self, width: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, 4)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.drop(self.attention(self.norm1(x), mask=mask))
        return x + self.drop(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    def __init__(self, width: int = 64, blocks: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class BERT(nn.Module):
    """Sees both ways, and is told which tokens are there by a mask that all blocks are given."""

    def __init__(self, width: int = 48, blocks: int = 4) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(256, width), nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = (tokens != 0)[:, None, None, :]
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x, mask=mask)
        return self.head(x)


class LlamaBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = Norm(width), Norm(width)
        self.attention = Attention(width, 4)
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: torch.Tensor, *, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        cos, sin = angles

        def turn(part: torch.Tensor) -> torch.Tensor:
            first, second = part.chunk(2, dim=-1)
            return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

        x = x + self.attention(self.norm1(x), turn=turn)
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Rotary places come by keyword, in a tuple, and go on in a closure."""

    def __init__(self, width: int = 64, blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(LlamaBlock(width) for _ in range(blocks))
        self.norm, self.head = Norm(width), nn.Linear(width, 256, bias=False)
        self.half = width // 8

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        angle = torch.arange(tokens.shape[1])[:, None] * 1e4 ** (-torch.arange(self.half) / self.half)
        angles = angle.cos(), angle.sin()
        for block in self.blocks:
            x = block(x, angles=angles)
        return self.head(self.norm(x))


class Residual(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outside), nn.BatchNorm2d(outside)
        self.short: nn.Module = nn.Identity()
        if stride > 1:
            self.short = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(self.norm2(self.conv2(y)) + self.short(x), inplace=True)


class ResNet(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 1, 1)
        self.blocks = nn.Sequential(
            Residual(width, width, 1), Residual(width, width, 1), Residual(width, 2 * width, 2),
            Residual(2 * width, 2 * width, 1), Residual(2 * width, 4 * width, 2), Residual(4 * width, 4 * width, 1))
        self.head = nn.Linear(4 * width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(F.relu(self.stem(x))).mean((2, 3)))


class Level(nn.Module):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(inside, outside, 3, 1, 1), nn.Conv2d(outside, outside, 3, 1, 1)
        self.norm = nn.GroupNorm(4, outside)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self.conv2(F.silu(self.norm(self.conv1(x)))))


class UNet(nn.Module):
    """What goes down is used again on the way up."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down = nn.ModuleList((Level(3, width), Level(width, 2 * width), Level(2 * width, 4 * width)))
        self.middle = Level(4 * width, 4 * width)
        self.up = nn.ModuleList((Level(8 * width, 2 * width), Level(4 * width, width), Level(2 * width, width)))
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for level in self.down:
            x = level(x)
            kept.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for level in self.up:
            x = level(torch.cat((F.interpolate(x, scale_factor=2), kept.pop()), dim=1))
        return self.head(x).mean((2, 3))


class Crossing(nn.Module):
    """A decoder's block: it is given the encoder's result, as all others are."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.own, self.cross = Block(width), nn.MultiheadAttention(width, 4, batch_first=True)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        x = self.own(x)
        found, _ = self.cross(self.norm(x), memory, memory, need_weights=False)
        return x + found


class EncoderDecoder(nn.Module):
    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(256, width), nn.Embedding(256, width)
        self.encoder = nn.Sequential(Block(width), Block(width))
        self.decoder = nn.ModuleList((Crossing(width), Crossing(width)))
        self.head = nn.Linear(width, 256)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        memory, x = self.encoder(self.source(source)), self.target(target)
        for block in self.decoder:
            x = block(x, memory)
        return self.head(x)


class Recurrent(nn.Module):
    """Layers with several results."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(3))
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            y, (_, cell) = layer(x)
            x = x + y * cell[-1][:, None].sigmoid()
        return self.head(x)


class Shared(nn.Module):
    """One block that is called again and again."""

    def __init__(self, width: int = 64, times: int = 4) -> None:
        super().__init__()
        self.times = times
        self.embed, self.block = nn.Embedding(256, width), Block(width, dropout=0.0)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for _ in range(self.times):
            x = self.block(x)
        return self.head(x)


class Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inside, self.outside = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(
        self, x: torch.Tensor, *, weight: torch.Tensor, scale: Callable[[torch.Tensor], torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        hidden = scale(self.inside(x))
        with torch.no_grad():
            load = (hidden > 0).float().mean()
        return {"out": self.outside(hidden) * weight, "load": load}


def sharpened(by: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda h: F.gelu(h) * by


class Mixture(nn.Module):
    """Experts that are given weights by keyword and a closure, and return dictionaries; a skip from end to end."""

    def __init__(self, width: int = 48, experts: int = 3, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.routers = nn.ModuleList(nn.Linear(width, experts) for _ in range(layers))
        self.experts = nn.ModuleList(nn.ModuleList(Expert(width) for _ in range(experts)) for _ in range(layers))
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = first = self.embed(tokens)
        for router, experts in zip(self.routers, self.experts, strict=True):
            weights = router(x).softmax(-1)
            sharp = weights.detach().amax(-1, keepdim=True)
            made = [expert(x, weight=weights[..., number, None], scale=sharpened(sharp))
                    for number, expert in enumerate(experts)]
            x = x + sum(one["out"] for one in made)
        return self.head(x + first)


def tokens(batch: int = 4, length: int = 32) -> Batch:
    return (torch.randint(1, 256, (batch, length)),), torch.randint(256, (batch * length,))


def pairs() -> Batch:
    (source,), target = tokens()
    return (source, torch.randint(1, 256, (4, 32))), target


def images(classes: int) -> Callable[[], Batch]:
    return lambda: ((torch.randn(4, 3, 32, 32),), torch.randint(classes, (4,)))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {
    "gpt": (GPT, tokens), "bert": (BERT, tokens), "llama": (Llama, tokens), "resnet": (ResNet, images(10)),
    "unet": (UNet, images(2)), "encoder-decoder": (EncoderDecoder, pairs), "lstm": (Recurrent, tokens),
    "shared": (Shared, tokens), "mixture": (Mixture, tokens),
}


def train(name: str, plan: Plan = (), autocast: bool = False, batches: int = 1, summed: bool = False) -> None:
    """Trains a model for a few steps, under a plan.

    Args:
        batches: of a step.
        summed: one backward for all of them, not one for each.
    """
    torch.manual_seed(0)
    make, batch = MODELS[name]
    model = make()
    apply_plan(model, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(PLANNED_STEP + 1):
        total = torch.zeros(())
        for _ in range(batches):
            inputs, target = batch()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = F.cross_entropy(model(*inputs).flatten(0, -2), target)
            if summed:
                total = total + loss
            else:
                loss.backward()
        if summed:
            total.backward()
        optimizer.step()
        optimizer.zero_grad()


def random_plan(paths: Sequence[str], seed: int) -> list[str]:
    """Some of these modules, none inside another: single blocks, parts of blocks, many or few."""
    choose = random.Random(seed)
    left, plan = list(paths), []
    share = choose.choice((0.2, 0.5, 1.0))
    while left:
        path = choose.choice(left)
        left = [other for other in left if other != path]
        if choose.random() < share:
            plan.append(path)
            left = [other for other in left
                    if not other.startswith(f"{path}.") and not path.startswith(f"{other}.")]
    return sorted(plan)


def random_choice(among: Sequence[Candidate], kind: str, seed: int) -> list[Candidate]:
    """Some of these, none inside another: first those of a kind, ``keeps`` operators or a ``run`` of modules."""
    choose = random.Random(f"{kind} {seed}")
    share = choose.choice((0.1, 0.3, 1.0))
    left = [one for one in among if choose.random() < share]
    choose.shuffle(left)
    left.sort(key=lambda one: not one.keep if kind == "keeps" else len(one.modules) < 2)
    plan: list[Candidate] = []
    for one in left:
        if not any(overlap(one, other) for other in plan):
            plan.append(one)
    return plan


def overlap(a: Candidate, b: Candidate) -> bool:
    """Whether one runs inside the other."""
    return any(
        one.first <= other.last and other.first <= one.last
        for mine in a.regions for theirs in b.regions for one in mine.calls for other in theirs.calls)
