"""Peak and live bytes of a recording against counts made without it.

The peak: a plain profiler's own running total, in a second run. Live bytes at the ends of steps: a dispatch mode
that holds a weak reference to every storage that an operator returns, in a third.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from recording import GPT, ROOT, Last, Seen, convnet, mlp, record, record_script
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

STEPS = 4
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "mlp": (mlp, lambda: torch.randn(16, 20)),
    "convnet": (convnet, lambda: torch.randn(8, 3, 8, 8)),
    "gpt": (GPT, lambda: torch.randint(50, (3, 12))),
    # Of so many parameters that an optimizer's step is recorded by itself.
    "deep": (lambda: nn.Sequential(*[nn.Linear(20, 20) for _ in range(20)]), lambda: torch.randn(16, 20)),
    "lstm": (Last, lambda: torch.randn(5, 7, 6)),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.001),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.01, max_iter=3, history_size=2),
}


def train(model_name: str, optimizer_name: str, at_step_end: Callable[[], None] | None = None) -> None:
    """A few steps, from nothing, and the same each time."""
    torch.manual_seed(0)
    make_model, make_batch = MODELS[model_name]
    model = make_model()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    if at_step_end is not None:
        optimizer.register_step_post_hook(lambda *_: at_step_end())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        return loss

    for _ in range(STEPS):
        batch = make_batch()
        if optimizer_name == "lbfgs":
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def peak_of_the_profiler(run: Callable[[], None]) -> int:
    """The most that the profiler's running total rose above where it began."""
    gc.collect()
    with torch.autograd.profiler.profile(profile_memory=True) as profiled:
        run()
    pending = list(profiled.kineto_results.experimental_event_tree())
    memory = []
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        if event.name == "[memory]":
            memory.append((event.start_time_ns, event.extra_fields.alloc_size, event.extra_fields.total_allocated))
    memory.sort()
    _, size, total = memory[0]
    return max(total for _, _, total in memory) - (total - size)


class Tracker(TorchDispatchMode):
    """Live bytes of all storages that operators have returned while it was on."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[weakref.ref[Any], int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes():
                storage = tensor.untyped_storage()
                if storage.is_shared():
                    continue  # what workers hand over: not the allocator's
                self.storages[storage._cdata] = weakref.ref(storage), storage.nbytes()
        return result

    def live(self) -> int:
        return sum(size for storage, size in self.storages.values() if storage() is not None)


@pytest.fixture(scope="module")
def recorded() -> Callable[[str, str], Seen]:
    known: dict[tuple[str, str], Seen] = {}

    def get(model: str, optimizer: str) -> Seen:
        if (model, optimizer) not in known:
            known[model, optimizer] = record(lambda: train(model, optimizer))
        return known[model, optimizer]

    return get


@pytest.mark.parametrize(("model", "optimizer"), [
    ("mlp", "sgd"), ("mlp", "lbfgs"), ("convnet", "sgd"), ("gpt", "adam"), ("gpt", "lbfgs"), ("lstm", "adam"),
    ("deep", "adam"), ("deep", "lbfgs"),
])
class TestAgainstIndependentCounts:
    def test_the_peak_is_that_of_a_plain_profiler(
        self, model: str, optimizer: str, recorded: Callable[[str, str], Seen]
    ) -> None:
        train(model, optimizer)  # whatever is made once in a process is there now
        assert recorded(model, optimizer).peak == peak_of_the_profiler(lambda: train(model, optimizer))

    def test_live_bytes_at_step_ends_are_those_of_a_dispatch_mode(
        self, model: str, optimizer: str, recorded: Callable[[str, str], Seen]
    ) -> None:
        gc.collect()
        counted: list[int] = []
        tracker = Tracker()
        with tracker:
            train(model, optimizer, lambda: counted.append(tracker.live()))
        assert recorded(model, optimizer).steps == STEPS
        assert recorded(model, optimizer).step_ends == counted

    def test_the_roles_sum_to_the_live_bytes_at_every_event(
        self, model: str, optimizer: str, recorded: Callable[[str, str], Seen]
    ) -> None:
        recorded(model, optimizer).closes()


SCRIPT = """
import json
import sys
import threading

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Numbers(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.full((300,), float(index)), torch.tensor(float(index))


def train(at_step_end):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 70), nn.Tanh(), nn.Linear(70, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    for inputs, wanted in DataLoader(Numbers(), 8, num_workers=WORKERS):
        loss = (model(inputs).squeeze(1) - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        at_step_end()


def counted():
    # The peak first: what is made once in a process counts in it, as in the recording.
    from test_record_peak import Tracker, peak_of_the_profiler

    peak = peak_of_the_profiler(lambda: train(lambda: None))
    ends, tracker = [], Tracker()
    with tracker:
        train(lambda: ends.append(tracker.live()))
    print(json.dumps([peak, ends]))


work = counted if len(sys.argv) > 1 else lambda: train(lambda: None)
if __name__ == "__main__":
    if IN_A_THREAD:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    else:
        work()
"""


@pytest.mark.parametrize(("workers", "in_a_thread"), [(2, False), (2, True)])
class TestScripts:
    """Batches that worker processes make, and a training loop on another thread than the first."""

    def test_the_peak_and_the_step_ends_are_those_counted_without_us(
        self, workers: int, in_a_thread: bool, tmp_path: Path
    ) -> None:
        source = SCRIPT.replace("WORKERS", str(workers)).replace("IN_A_THREAD", str(in_a_thread))

        seen = record_script(tmp_path, source)
        done = subprocess.run(
            [sys.executable, str(tmp_path / "script.py"), "count"], capture_output=True, text=True, check=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)])})
        peak, ends = json.loads(done.stdout)
        assert seen.steps == 5
        assert seen.line.peak_bytes == peak  # nothing was there when the script began
        assert [int(b) for b in seen.trace["steps"]["end_bytes"]] == ends
        assert not any("module calls with gradients on other threads" in said for said in seen.trace.not_seen)


def by_transforms() -> None:
    """Training with torch.func: parameters are replaced in each step, so none may be kept."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(200, 300), nn.Tanh(), nn.Linear(300, 200))
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return (torch.func.functional_call(model, parameters, (x,)) - x).square().mean()

    for _ in range(8):
        gradients = torch.func.grad(loss)(parameters, torch.randn(40, 200))
        parameters = {name: parameters[name] - 0.1 * gradients[name] for name in parameters}


def test_what_transforms_make_is_not_kept_by_the_recording() -> None:
    by_transforms()
    seen = record(by_transforms)
    assert seen.peak == peak_of_the_profiler(by_transforms)
    assert any("torch.func" in said for said in seen.trace.not_seen)


def test_steps_of_functional_calls_can_be_chosen() -> None:
    # GIVEN a loop whose only module calls are functional, with weights of its own
    def train() -> None:
        model = nn.Linear(20, 20)
        weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
        for _ in range(6):
            out = torch.func.functional_call(model, weights, (torch.randn(5, 20),))
            gradients = torch.autograd.grad(out.square().mean(), list(weights.values()))
            weights = {name: (w - 0.1 * g).detach().requires_grad_()
                       for (name, w), g in zip(weights.items(), gradients, strict=True)}

    # WHEN only the first step is wanted in full THEN the others are light
    seen = record(train, steps=(0, 1))
    assert list(seen.trace["steps"]["level"]) == [0, 1, 1, 1, 1, 1]
