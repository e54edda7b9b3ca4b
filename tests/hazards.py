"""Models with a part whose forward must not run twice, each for another reason, and models where it may.

In every model the region is ``part``. The line that makes it unsafe ends in ``# hazard``.
"""

from __future__ import annotations

import inspect
import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memdiag.apply import apply_plan

WIDTH = 8
Tensor = torch.Tensor


class Around(nn.Module):
    """Layers around a part."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.first, self.part, self.last = nn.Linear(WIDTH, WIDTH), part, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.part(self.first(x)))

    def loss(self, x: Tensor) -> Tensor:
        return self(x).square().mean()

    def beside(self) -> Any:
        """What else the script can see of a training."""
        return None


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(WIDTH, WIDTH)


# --- what is given, or captured, and written to later -----------------------------------------------------------------


class Shifted(Part):
    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return (self.inside(x) + shift).sin()


class KeywordWrittenLater(Around):
    def __init__(self) -> None:
        super().__init__(Shifted())

    def forward(self, x: Tensor) -> Tensor:
        shift = torch.ones(WIDTH)
        y = self.part(self.first(x), shift=shift)
        shift.zero_()  # hazard
        return self.last(y)


class WrittenLaterByTheLoop(Around):
    def __init__(self) -> None:
        super().__init__(Shifted())

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return self.last(self.part(self.first(x), shift=shift))

    def loss(self, x: Tensor) -> Tensor:
        shift = torch.ones(WIDTH)
        y = self(x, shift=shift)
        shift[:4] = 0  # hazard
        return y.square().mean()


class MadeInsideWrittenLaterByTheLoop(Around):
    def __init__(self) -> None:
        super().__init__(Shifted())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shift = torch.ones(WIDTH)
        return self.last(self.part(self.first(x), shift=shift)), shift

    def loss(self, x: Tensor) -> Tensor:
        y, shift = self(x)
        shift.mul_(0)  # hazard
        return y.square().mean()


class Turned(Part):
    def forward(self, x: Tensor, turn: Callable[[Tensor], Tensor]) -> Tensor:
        return turn(self.inside(x)).sin()


class ClosureWrittenLater(Around):
    def __init__(self) -> None:
        super().__init__(Turned())

    def forward(self, x: Tensor) -> Tensor:
        shift = torch.ones(WIDTH)
        y = self.part(self.first(x), lambda h: h + shift)
        shift.data.zero_()  # hazard
        return self.last(y)


class CapturedBoundAnew(Around):
    """A function reads the variable of a loop, which is another one when it runs again."""

    def __init__(self) -> None:
        super().__init__(Turned())

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for factor in (2.0, 3.0):  # hazard
            if factor == 2.0:
                x = self.part(x, lambda h: h * factor)  # noqa: B023
        return self.last(x)


class Added(Part):
    def forward(self, x: Tensor, terms: list[float]) -> Tensor:
        return (self.inside(x) * sum(terms)).sin()  # hazard


class GivenListGrowsLater(Around):
    def __init__(self) -> None:
        super().__init__(Added())

    def forward(self, x: Tensor) -> Tensor:
        terms = [1.0, 2.0]
        x = self.part(self.first(x), terms)
        terms.append(3.0)
        return self.last(x)


class PositionalWrittenLater(Around):
    def __init__(self) -> None:
        super().__init__(Shifted())

    def forward(self, x: Tensor) -> Tensor:
        shift = torch.ones(WIDTH)
        y = self.part(self.first(x), shift)
        shift += 1  # hazard
        return self.last(y)


class InPlaceOnItsArgument(Around):
    class Inside(Part):
        def forward(self, x: Tensor) -> Tensor:
            return self.inside(x.add_(1)).tanh()  # hazard

    def __init__(self) -> None:
        super().__init__(self.Inside())


class InPlaceOnCaptured(Around):
    class Inside(Part):
        def __init__(self) -> None:
            super().__init__()
            self.seen = torch.zeros(WIDTH)  # no buffer, no parameter

        def forward(self, x: Tensor) -> Tensor:
            self.seen += 1  # hazard
            return (self.inside(x) * float(self.seen[0])).sin()

    def __init__(self) -> None:
        super().__init__(self.Inside())


class WritesToAParameter(Around):
    class Inside(Part):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.inside.bias.mul_(0.5)  # hazard
            return self.inside(x).sin()

    def __init__(self) -> None:
        super().__init__(self.Inside())


# --- random numbers ---------------------------------------------------------------------------------------------------


class OwnGenerator(Around):
    class Inside(Part):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator().manual_seed(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.inside(x) * torch.rand(x.shape, generator=self.generator)  # hazard

    def __init__(self) -> None:
        super().__init__(self.Inside())


class PythonsRandom(Around):
    class Inside(Part):
        def forward(self, x: Tensor) -> Tensor:
            return (self.inside(x) * random.random()).sin()  # hazard

    def __init__(self) -> None:
        super().__init__(self.Inside())


class NumPysRandom(Around):
    class Inside(Part):
        def forward(self, x: Tensor) -> Tensor:
            y = self.inside(x)
            return y * torch.from_numpy(np.random.rand(WIDTH).astype(np.float32))  # hazard

    def __init__(self) -> None:
        super().__init__(self.Inside())


class GeneratorOfNumPy(Around):
    class Inside(Part):
        def __init__(self) -> None:
            super().__init__()
            self.numbers = np.random.default_rng(3)

        def forward(self, x: Tensor) -> Tensor:
            return (self.inside(x) * float(self.numbers.random())).sin()  # hazard

    def __init__(self) -> None:
        super().__init__(self.Inside())


class DroppedAtRandom(Around):
    class Inside(Part):
        def forward(self, x: Tensor) -> Tensor:
            if random.random() < 0.5:  # hazard
                return x.sin()
            return self.inside(x).sin().tanh()

    def __init__(self) -> None:
        super().__init__(self.Inside())


# --- state ------------------------------------------------------------------------------------------------------------


class BatchNorm(Around):
    class Inside(Part):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.inside(x))  # hazard

    def __init__(self) -> None:
        super().__init__(self.Inside())


COUNT = {"calls": 0}


class GlobalState(Around):
    class Inside(Part):
        def forward(self, x: Tensor) -> Tensor:
            COUNT["calls"] += 1  # hazard
            return self.inside(x) * COUNT["calls"]

    def __init__(self) -> None:
        super().__init__(self.Inside())
        COUNT["calls"] = 0


class HiddenState(Around):
    """State where nobody looks: an attribute of a class."""

    class Inside(Part):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            type(self).calls += 1
            return self.inside(x) * self.calls  # hazard

    def __init__(self) -> None:
        super().__init__(self.Inside())
        self.Inside.calls = 0


class KeepsItsResult(Around):
    class Inside(Part):
        def forward(self, x: Tensor) -> Tensor:
            y = self.inside(x).sin()
            self.result = y  # hazard
            return (y * y).sin()

    def __init__(self) -> None:
        super().__init__(self.Inside())
        self.kept: list[bool] = []

    def loss(self, x: Tensor) -> Tensor:
        y = self(x).square().mean()
        self.before = self.part.result
        return y

    def beside(self) -> Any:
        return self.before is self.part.result


class Counts(Around):
    class Inside(Part):
        def __init__(self) -> None:
            super().__init__()
            self.log: list[float] = []

        def forward(self, x: Tensor) -> Tensor:
            y = self.inside(x).sin()
            self.log.append(y.mean().item())  # hazard
            return (y * y).sin()

    def __init__(self) -> None:
        super().__init__(self.Inside())

    def beside(self) -> Any:
        return len(self.part.log)


class HookInside(Around):
    class Inside(Part):
        def forward(self, x: Tensor) -> Tensor:
            return self.inside(x).sin().sin()

    def __init__(self) -> None:
        super().__init__(self.Inside())
        self.means: list[float] = []

        def note(module: nn.Module, args: Any, output: Tensor) -> None:  # hazard
            self.means.append(output.mean().item())

        self.part.inside.register_forward_hook(note)

    def beside(self) -> Any:
        return len(self.means)


class SetByTheCaller(Around):
    class Inside(Part):
        scale = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return (self.inside(x) * self.scale).sin()

    def __init__(self) -> None:
        super().__init__(self.Inside())

    def forward(self, x: Tensor) -> Tensor:
        self.part.scale = 2.0
        y = self.part(self.first(x))
        self.part.scale = 3.0  # hazard
        return self.last(y)


class GrowingCache(Around):
    class Inside(Part):
        def forward(self, x: Tensor, cache: list[Tensor]) -> Tensor:
            cache.append(self.inside(x))  # hazard
            return torch.cat(cache).sin()[: len(x)]

    def __init__(self) -> None:
        super().__init__(self.Inside())

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.part(self.first(x), []))


class MoreOperatorsEachTime(Around):
    class Inside(Part):
        runs = 0

        def forward(self, x: Tensor) -> Tensor:
            type(self).runs += 1
            y = self.inside(x).sin()
            for _ in range(self.runs):
                torch.cos(y)  # hazard
            return y

    def __init__(self) -> None:
        super().__init__(self.Inside())
        self.Inside.runs = 0


class OtherShapesEachTime(Around):
    class Inside(Part):
        runs = 0

        def forward(self, x: Tensor) -> Tensor:
            type(self).runs += 1
            return self.inside(x.repeat(self.runs, 1)).sin()[: len(x)]  # hazard

    def __init__(self) -> None:
        super().__init__(self.Inside())
        self.Inside.runs = 0


class FromOutside(Around):
    class Inside(Part):
        def forward(self, x: Tensor) -> Tensor:
            noise = torch.tensor([*os.urandom(WIDTH)]) / 256  # hazard
            return self.inside(x) * noise

    def __init__(self) -> None:
        super().__init__(self.Inside())


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * ctx.saved_tensors[0].cos() + 0 * x  # hazard


class UnpacksTwice(Around):
    class Inside(Part):
        def forward(self, x: Tensor) -> Tensor:
            return Twice.apply(self.inside(x))

    def __init__(self) -> None:
        super().__init__(self.Inside())


HAZARDS: list[type[Around]] = [
    KeywordWrittenLater, WrittenLaterByTheLoop, MadeInsideWrittenLaterByTheLoop, ClosureWrittenLater,
    CapturedBoundAnew, GivenListGrowsLater, PositionalWrittenLater, InPlaceOnItsArgument, InPlaceOnCaptured,
    WritesToAParameter, OwnGenerator, PythonsRandom,
    NumPysRandom, GeneratorOfNumPy, DroppedAtRandom, BatchNorm, GlobalState, HiddenState, KeepsItsResult, Counts,
    HookInside, SetByTheCaller, GrowingCache, MoreOperatorsEachTime, OtherShapesEachTime, FromOutside, UnpacksTwice]


# --- where nothing is wrong -------------------------------------------------------------------------------------------


class Clean(Around):
    """A part of torch's own modules."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(nn.Sequential(*layers))


class FrozenBatchNorm(Clean):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH).eval())


class WithoutGradients(Around):
    class Inside(Part):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                scale = self.inside(x).abs().amax()
            return self.inside(x) / scale + x.detach()

    def __init__(self) -> None:
        super().__init__(self.Inside())


class WritesToItsOwn(Around):
    """In place, on what it has made itself: results of operators, and room that it has asked for."""

    class Inside(Part):
        def forward(self, x: Tensor) -> Tensor:
            y = self.inside(x).sin_().add_(1)
            room = torch.empty(x.shape)
            room[:, ::2] = 1
            room[:, 1::2] = 2
            return y * room

    def __init__(self) -> None:
        super().__init__(self.Inside())


class KnowsALot(Around):
    """State that stays as it is: a table, settings, an object, a global."""

    class Inside(Part):
        def __init__(self) -> None:
            super().__init__()
            self.settings, self.steps = {"scale": 2.0, "names": ["a", "b"]}, [1, 2]
            self.numbers, self.random = np.arange(WIDTH, dtype=np.float32), random.Random(3)
            self.register_buffer("angles", torch.arange(WIDTH) / WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            y = self.inside(x) * self.settings["scale"] + self.angles.cos()
            return y + torch.from_numpy(self.numbers) * WIDTH

    def __init__(self) -> None:
        super().__init__(self.Inside())


class ReadsValues(Around):
    class Inside(Part):
        def forward(self, x: Tensor) -> Tensor:
            return self.inside(x) / x.detach().abs().max().item()

    def __init__(self) -> None:
        super().__init__(self.Inside())


class CheckpointInside(Around):
    class Inside(Part):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inside, x, use_reentrant=False).sin()

    def __init__(self) -> None:
        super().__init__(self.Inside())


class CatchesAnError(Around):
    class Inside(Part):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Linear(2 * WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            try:
                return self.wide(x)
            except RuntimeError:
                return self.inside(x).sin()

    def __init__(self) -> None:
        super().__init__(self.Inside())


class AfterNoise(Around):
    """What comes before it is not the same twice; it is."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.part(self.first(x) * torch.tensor([*os.urandom(WIDTH)])))


def _normed() -> nn.Module:
    return torch.nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))


def _old_normed() -> nn.Module:
    return torch.nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))


CLEAN: dict[str, Callable[[], Around]] = {
    "layer norm": lambda: Clean(nn.LayerNorm(WIDTH)), "group norm": lambda: Clean(nn.GroupNorm(2, WIDTH)),
    "dropout": lambda: Clean(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)), "frozen batch norm": FrozenBatchNorm,
    "no gradients": WithoutGradients, "in place on its own": WritesToItsOwn, "state that stays": KnowsALot,
    "values": ReadsValues, "checkpoint inside": CheckpointInside, "weight norm": lambda: Clean(_normed()),
    "old weight norm": lambda: Clean(_old_normed()), "after noise": AfterNoise,
    "caught error": CatchesAnError,
    "in-place activation": lambda: Clean(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True)),
    "instance norm": lambda: Clean(nn.Linear(WIDTH, WIDTH), nn.Unflatten(1, (2, 4)), nn.InstanceNorm1d(2),
                                   nn.Flatten()),
}


def hazard_line(model: type[Around]) -> str:
    """``file.py:12`` of the line that makes the part of a model unsafe."""
    classes = [model, *{UnpacksTwice: [Twice], GivenListGrowsLater: [Added]}.get(model, [])]
    found = []
    for one in classes:
        lines, first = inspect.getsourcelines(one)
        found += [first + at for at, line in enumerate(lines) if line.rstrip().endswith("# hazard")]
    (line,) = found
    return f"{os.path.abspath(__file__)}:{line}"


def training(make: Callable[[], Around], steps: int, region: bool = False) -> list[Any]:
    """What a training comes to: losses, gradients, parameters, buffers, random states, and what is seen beside.

    Raises:
        RuntimeError: a checkpoint around the part does not work.
    """
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    model = make()
    if region:
        apply_plan(model, ["part"])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    found: list[Any] = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model.loss(torch.randn(4, WIDTH))
        loss.backward()
        optimizer.step()
        found += [loss.detach(), [None if p.grad is None else p.grad.clone() for p in model.parameters()]]
    parameters = [p.detach().clone() for p in model.parameters()]
    numpys = np.random.get_state()[1]
    return [*found, parameters, [b.clone() for b in model.buffers()], torch.get_rng_state(), random.getstate(),
            numpys.tolist(), model.beside()]
