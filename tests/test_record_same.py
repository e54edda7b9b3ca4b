"""A script is as it would be without the recording: results, graphs, warnings, overrides, tracebacks."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recording import GPT, Block, record
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from memdiag.record.process.tracebacks import clean


def both(run: Callable[[], Any]) -> tuple[Any, Any]:
    """What a function returns without and with the recording."""
    found: list[Any] = [run()]
    record(lambda: found.append(run()))
    return found[0], found[1]


class Branching(nn.Module):
    """Breaks the graph once, and has modules of its own and torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Block(), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.block(x)
        torch._dynamo.graph_break()
        return self.head(y).tanh()


class TestCompiled:
    @pytest.mark.parametrize("model", [Branching, Block, lambda: nn.Sequential(nn.Linear(16, 16), nn.ReLU(), Block())])
    def test_the_same_graphs_breaks_operators_and_gradients(self, model: Callable[[], nn.Module]) -> None:
        def run() -> tuple[Any, ...]:
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            torch.manual_seed(0)
            counter = CompileCounterWithBackend("aot_eager")
            net = model()
            compiled = torch.compile(net, backend=counter)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            for _ in range(3):
                optimizer.zero_grad()
                compiled(torch.randn(2, 5, 16)).square().sum().backward()
                optimizer.step()
            counters = torch._dynamo.utils.counters
            return (counter.frame_count, counter.op_count, dict(counters["graph_break"]), dict(counters["stats"]),
                    [p.grad.clone() for p in net.parameters()], [p.detach().clone() for p in net.parameters()])

        bare, recorded = both(run)
        assert bare[0] > 0
        assert recorded[:4] == bare[:4]
        for mine, theirs in zip(recorded[4] + recorded[5], bare[4] + bare[5], strict=True):
            assert torch.equal(mine, theirs)

    def test_a_compiled_function_does_not_break_at_the_hooks(self) -> None:
        def run() -> int:
            torch._dynamo.reset()
            counter = CompileCounterWithBackend("eager")

            @torch.compile(backend=counter, fullgraph=True)
            def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
                return F.softmax(x @ weight, dim=-1).sum()

            step(torch.randn(3, 4), torch.randn(4, 5, requires_grad=True)).backward()
            return counter.frame_count

        assert both(run) == (1, 1)


class TestResults:
    def test_the_fast_path_of_torchs_own_transformer(self) -> None:
        names: list[list[str]] = []

        def run() -> torch.Tensor:
            torch.manual_seed(0)
            layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
            called: list[str] = []

            original = torch._transformer_encoder_layer_fwd

            def watched(*args: Any, **kwargs: Any) -> Any:
                called.append("fast path")
                return original(*args, **kwargs)

            torch._transformer_encoder_layer_fwd = watched
            try:
                with torch.no_grad():
                    return layer(torch.randn(2, 5, 16))
            finally:
                torch._transformer_encoder_layer_fwd = original
                names.append(called)

        bare, recorded = both(run)
        assert torch.equal(bare, recorded)
        assert names == [["fast path"], ["fast path"]]

    def test_training_is_equal_to_the_bit(self) -> None:
        def run() -> list[torch.Tensor]:
            torch.manual_seed(0)
            model = GPT()
            optimizer = torch.optim.AdamW(model.parameters())
            for _ in range(3):
                tokens = torch.randint(50, (2, 7))
                optimizer.zero_grad()
                F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            return [p.detach() for p in model.parameters()] + [torch.get_rng_state()]

        bare, recorded = both(run)
        assert all(torch.equal(a, b) for a, b in zip(bare, recorded, strict=True))

    def test_arguments_of_a_checkpoint_that_are_one_tensor_are_one_when_it_runs_again(self) -> None:
        # GIVEN attention that goes another way where its key is its value, or its query too
        def run() -> list[torch.Tensor]:
            torch.manual_seed(0)
            attention = nn.MultiheadAttention(16, 2, batch_first=True)
            x = torch.randn(2, 5, 16, requires_grad=True)  # a leaf
            made, other = x * 2, x * 2  # equal, and two all the same
            asked: list[tuple[bool, ...]] = []

            def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
                asked.append((q is k, k is v))
                return attention(q, k, v, need_weights=False)[0]

            total = torch.zeros(())
            for q, k, v in ((x, made, made), (made, made, made), (x, x, x), (made, other, other), (x, made, other),
                            (x, x.detach(), x.detach())):
                total = total + checkpoint(attend, q, k, v, use_reentrant=False).square().mean()
            total.backward()
            # THEN what is one tensor is one, and what is not is not, at first and when it runs again
            assert sorted(asked[:6]) == sorted(asked[6:])
            assert x.grad is not None
            return [total.detach(), x.grad, *(p.grad for p in attention.parameters() if p.grad is not None)]

        bare, recorded = both(run)
        assert len(bare) == len(recorded) > 2
        assert all(torch.equal(a, b) for a, b in zip(bare, recorded, strict=True))

    def test_transforms_hooks_jit_and_vmap(self) -> None:
        def square(x: torch.Tensor) -> torch.Tensor:
            return (x**3).sum()

        def hooked() -> torch.Tensor:
            x = torch.linspace(0, 1, 5, requires_grad=True)
            seen: list[int] = []
            with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.numel()) or t.numpy(),
                                                          lambda a: torch.from_numpy(a)):
                y = x * x
            y.sum().backward()
            return torch.cat([x.grad, torch.tensor([float(sum(seen))])])

        def on_cpu() -> torch.Tensor:
            x = torch.linspace(0, 1, 5, requires_grad=True)
            with torch.autograd.graph.save_on_cpu():
                y = x.exp()
            y.sum().backward()
            return x.grad

        def own_hook() -> torch.Tensor:
            x = torch.linspace(0, 1, 5, requires_grad=True)
            y = x * x
            if hasattr(y.grad_fn._raw_saved_self, "data"):  # docs/limits.md: older versions refuse a second pair
                y.grad_fn._raw_saved_self.register_hooks(lambda t: t * 2, lambda t: t / 2)
            y.sum().backward()
            return x.grad

        def forbidden() -> torch.Tensor:
            x = torch.linspace(0, 1, 5, requires_grad=True)
            with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
                y = x.exp()
            y.sum().backward()
            return x.grad

        def jit() -> torch.Tensor:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(5, 4), nn.ReLU())
            x = torch.linspace(0, 1, 5)
            return torch.cat([torch.jit.trace(model, x)(x), torch.jit.script(model)(x)])

        def functional() -> torch.Tensor:
            torch.manual_seed(0)
            model = nn.Linear(5, 1)
            parameters = dict(model.named_parameters())

            def loss(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
                return torch.func.functional_call(model, p, (x,)).sum()

            per_sample = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, torch.randn(3, 5))
            return per_sample["weight"]

        x = torch.linspace(0, 1, 5)
        for run in (
            lambda: torch.func.grad(square)(x), lambda: torch.func.vjp(square, x)[1](torch.tensor(1.0))[0],
            lambda: torch.func.jacrev(lambda v: v**2)(x), lambda: torch.func.hessian(square)(x),
            lambda: torch.func.jvp(square, (x,), (x,))[1], lambda: torch.vmap(square)(torch.ones(3, 4)),
            hooked, on_cpu, own_hook, forbidden, jit, functional,
        ):
            bare, recorded = both(run)
            assert torch.equal(bare, recorded)


class TestWhatTheScriptSees:
    @staticmethod
    def _warns() -> Iterator[Callable[[], Any]]:
        yield lambda: nn.functional.mse_loss(torch.ones(3), torch.ones(1, 3))
        yield lambda: torch.optim.lr_scheduler.StepLR(torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1), 1).step()
        yield lambda: torch.ones(3, requires_grad=True).exp().grad
        yield lambda: nn.functional.softmax(torch.ones(2))

    @pytest.mark.parametrize("max_events", [10**6, 1])  # in full, and in light recording
    @pytest.mark.parametrize("number", range(4))
    def test_warnings_name_the_same_place(self, number: int, max_events: int) -> None:
        def run() -> list[tuple[str, str, int]]:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                list(self._warns())[number]()
            return [(str(w.message), w.filename, w.lineno) for w in caught]

        bare = run()
        found: list[Any] = []

        def train() -> None:
            model = nn.Linear(2, 2)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for _ in range(2):
                model(torch.ones(2)).sum().backward()
                optimizer.step()
                found.append(run())

        record(train, max_events=max_events)
        assert bare
        assert found == [bare, bare]

    def test_a_warning_shown_once_for_each_line_is_shown_once_for_each_line(self) -> None:
        def run() -> int:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("default")
                for _ in range(3):
                    F.mse_loss(torch.ones(3), torch.ones(1, 3))
                F.mse_loss(torch.ones(3), torch.ones(1, 3))
            globals().pop("__warningregistry__", None)
            return len(caught)

        bare, recorded = both(run)
        assert recorded == bare

    def test_subclasses_see_the_same_functions(self) -> None:
        calls: list[str] = []

        class Watching(torch.Tensor):
            @classmethod
            def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                calls.append(f"{func.__name__} {[t.__name__ for t in types]}")
                return super().__torch_function__(func, types, args, kwargs or {})

        def run() -> list[str]:
            calls.clear()
            torch.manual_seed(0)
            x = torch.randn(3, 4).as_subclass(Watching)
            model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4))
            y = F.softmax(model(x) @ x.t(), dim=-1) * 2
            y += 1
            y[0].sum().backward()
            str(y.shape), len(y), y.mean().item()
            return [type(y).__name__, *calls]

        bare, recorded = both(run)
        assert len(bare) > 8
        assert recorded == bare

    def test_modes_see_the_same_functions(self) -> None:
        from torch.overrides import TorchFunctionMode

        calls: list[str] = []

        class Watching(TorchFunctionMode):
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                calls.append(func.__name__)
                return func(*args, **(kwargs or {}))

        def run() -> list[str]:
            calls.clear()
            with Watching():
                y = F.softmax(nn.Linear(4, 4)(torch.ones(3, 4)) @ torch.ones(4, 2), dim=-1)
                (y * 2).sum().backward()
            return list(calls)

        bare, recorded = both(run)
        assert len(bare) > 4
        assert recorded == bare


class Wrong(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.fc(x), torch.zeros(9, dtype=torch.long))


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient @ torch.ones(99)


class TestTracebacks:
    @staticmethod
    def failing() -> dict[str, Callable[[], Any]]:
        def chained() -> None:
            try:
                nn.Linear(3, 3)(torch.ones(2, 4))
            except RuntimeError as error:
                raise ValueError("bad batch") from error

        def closure() -> None:
            model = nn.Linear(3, 1)

            def fail() -> torch.Tensor:
                return model(torch.ones(2, 4)).sum()

            torch.optim.LBFGS(model.parameters()).step(fail)

        def hook() -> None:
            def fail(_: torch.Tensor) -> None:
                raise ArithmeticError("no")

            x = torch.ones(3, requires_grad=True) * 2
            x.register_hook(fail)
            x.sum().backward()

        return {
            "module": lambda: Wrong()(torch.ones(2, 4)),
            "own module": lambda: nn.Sequential(nn.ReLU(), nn.Linear(3, 3))(torch.ones(2, 4)),
            "operator": lambda: torch.ones(3) @ torch.ones(4),
            "function": lambda: F.softmax(torch.ones(3), dim=7),
            "method": lambda: torch.ones(3).view(5),
            "backward": lambda: torch.ones(3).backward(),
            "twice": lambda: [y.backward() for y in [torch.ones(3, requires_grad=True).exp().sum()] * 2],
            "custom": lambda: FailsInBackward.apply(torch.ones(3, requires_grad=True)).sum().backward(),
            "chained": chained, "closure": closure, "hook": hook,
        }

    @pytest.mark.parametrize("name", ["module", "own module", "operator", "function", "method", "backward", "twice",
                                      "custom", "chained", "closure", "hook"])
    def test_they_are_equal(self, name: str) -> None:
        run = self.failing()[name]

        def text(cleaned: bool) -> list[str]:
            with pytest.raises((RuntimeError, ValueError, IndexError, ArithmeticError)) as caught:
                run()
            if cleaned:
                clean(caught.value)
            return traceback.format_exception(caught.value)

        bare = text(cleaned=False)
        found: list[list[str]] = []
        record(lambda: found.append(text(cleaned=True)))
        assert found == [bare]
