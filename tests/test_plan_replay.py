"""The peak under a plan, as it is replayed and as it comes when the plan is put onto the model and run.

The other side of each comparison is a recording of its own, of a model whose forwards really are checkpoints.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from planned import MODELS, PLANNED_STEP, Block, random_choice, random_plan, sample, train
from recording import Seen, record
from torch import nn
from torch.utils.checkpoint import checkpoint
from traces import TraceBuilder

from memdiag.apply import apply_plan
from memdiag.apply.operators import Keep
from memdiag.errors import MemdiagError
from memdiag.plan import plans
from memdiag.plan.regions import Candidate, candidates
from memdiag.plan.replay import Region, peak_under
from memdiag.plan.safety import chains
from memdiag.plan.step import Call, Step, planned_step
from memdiag.trace import Phase
from memdiag.trace.view import View

KINDS = [(name, autocast) for name in MODELS for autocast in (False, True)
         if name != "lstm" or not autocast]  # oneDNN has none of that in half precision


def peak_of(seen: Seen) -> int:
    """The peak of the planned step, above what was there before the recording."""
    steps, line = seen.trace["steps"], seen.line
    (row,) = np.flatnonzero(steps["step"] == PLANNED_STEP)
    return int(line.live[steps["start_event"][row]:steps["end_event"][row]].max()) - line.start_bytes


@cache
def recorded(name: str, autocast: bool) -> tuple[Step, int]:
    """The step of a model's training, and what was there before the recording."""
    step, before, _ = recorded_with_choice(name, autocast)
    return step, before


@cache
def recorded_with_choice(name: str, autocast: bool) -> tuple[Step, int, list[Candidate]]:
    """The same, and all that may be a checkpoint there and that a plan can be put on."""
    seen = record(lambda: train(name, autocast=autocast), plan_step=PLANNED_STEP)
    step = planned_step(View(seen.trace))
    choice = [one for one in candidates(step, chains(seen.trace)) if not one.by_hand]
    return step, seen.line.start_bytes, choice


def choice_of(plan: Sequence[Candidate]) -> list[Region]:
    return [region for one in plan for region in one.regions]


def applied_peak(name: str, plan: list[str] | dict[str, Any], autocast: bool) -> int:
    """The peak of a model that is trained with a plan."""
    return peak_of(record(lambda: train(name, plan, autocast=autocast)))


def as_file(regions: Sequence[Candidate]) -> dict[str, Any]:
    """A plan of candidates, as files of plans have it."""
    return {"schema_version": 1, "chosen": 0, "plans": [{"regions": [
        {"modules": list(one.modules), "kind": "selective" if one.keep else "full", "keep": list(one.keep)}
        for one in regions]}]}


def regions(step: Step, plan: list[str]) -> list[Region]:
    return [Region((call,)) for call in step.calls if call.path in plan]


def inside(step: Step) -> list[str]:
    """Paths of all modules but the outermost."""
    return sorted({call.path for call in step.calls} - {call.path for call in step.calls if call.outermost})


class TestPeak:
    @pytest.mark.parametrize(("name", "autocast"), sample(KINDS))
    def test_it_is_that_of_the_plan_really_applied(self, name: str, autocast: bool) -> None:
        step, before = recorded(name, autocast)
        # GIVEN no checkpoint, and some drawn at random
        assert peak_under(step, []).bytes - before == applied_peak(name, [], autocast)
        plan = random_plan(inside(step), seed=len(name) + autocast)
        # THEN the peak is the one that comes, to the byte
        assert peak_under(step, regions(step, plan)).bytes - before == applied_peak(name, plan, autocast)

    @pytest.mark.parametrize(("name", "autocast"), sample(KINDS))
    @pytest.mark.parametrize("kind", ["keeps", "run"])
    def test_of_several_modules_in_one_and_of_operators_that_are_kept_too(
            self, name: str, autocast: bool, kind: str) -> None:
        step, before, among = recorded_with_choice(name, autocast)
        plan = random_choice(among, kind, seed=len(name) + autocast)
        assert peak_under(step, choice_of(plan)).bytes - before == applied_peak(name, as_file(plan), autocast)

    @pytest.mark.parametrize("summed", [False, True])
    @pytest.mark.parametrize("plan", [["blocks.0", "blocks.2"], ["blocks.1.mlp", "blocks.3"]])
    def test_of_several_forwards_in_a_step_too(self, plan: list[str], summed: bool) -> None:
        seen = record(lambda: train("gpt", batches=3, summed=summed), plan_step=PLANNED_STEP)
        step = planned_step(View(seen.trace))
        assert peak_under(step, regions(step, plan)).bytes - seen.line.start_bytes == peak_of(
            record(lambda: train("gpt", plan, batches=3, summed=summed)))

    @pytest.mark.parametrize("optimizer", [partial(torch.optim.LBFGS, max_iter=3), torch.optim.Adam])
    def test_of_forwards_in_an_optimizer_s_closure_too(self, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        # GIVEN an optimizer that runs forward and backward itself, once or several times in a step
        def run(plan: list[str]) -> None:
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Sequential(
                nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32), nn.Dropout(0.1)) for _ in range(4)))
            apply_plan(model, plan)
            stepping = optimizer(model.parameters())

            def closure() -> torch.Tensor:
                stepping.zero_grad()
                loss = model(torch.ones(512, 32)).square().mean()
                loss.backward()
                return loss

            for _ in range(PLANNED_STEP + 1):
                stepping.step(closure)

        seen = record(lambda: run([]), plan_step=PLANNED_STEP)
        step, plan = planned_step(View(seen.trace)), ["1", "2"]
        # THEN its step can be planned for, and the peak is the one that comes
        told = peak_under(step, regions(step, plan)).bytes
        assert told < peak_under(step, []).bytes
        assert told - seen.line.start_bytes == peak_of(record(lambda: run(plan)))
        # AND its own time is not that of the forwards and backwards that it calls
        times = seen.trace["step_times"]
        counts = [(times["phase"][times["step"] == PLANNED_STEP] == phase).sum()
                  for phase in (Phase.BACKWARD, Phase.OPTIMIZER)]
        forwards = len({call.first for call in step.calls if call.outermost})
        assert counts == [forwards, forwards + 1]

    @pytest.mark.parametrize(("name", "runs"), [
        ("resnet", [range(1, 4)]), ("resnet", [range(3, 6), range(0, 2)]), ("encoder-decoder", [range(2)])])
    def test_modules_of_a_chain_in_one_checkpoint(self, name: str, runs: list[range]) -> None:
        step, before = recorded(name, False)
        chain = "blocks" if name == "resnet" else "encoder"
        paths = [[f"{chain}.{number}" for number in run] for run in runs]
        plan = {"schema_version": 1, "chosen": 0, "plans": [
            {"regions": [{"modules": modules, "kind": "full", "keep": []} for modules in paths]}]}
        calls = {call.path: call for call in step.calls}
        peak = peak_under(step, [Region(tuple(calls[path] for path in modules)) for modules in paths])
        assert peak.bytes - before == peak_of(record(lambda: train(name, plan)))
        assert peak.bytes != peak_under(step, []).bytes

    def test_one_checkpoint_around_everything(self) -> None:
        step, before = recorded("gpt", False)
        whole = [Region((call,)) for call in step.calls if call.outermost]
        assert peak_under(step, whole).bytes - before == applied_peak("gpt", [""], False)

    def test_a_peak_between_two_frees_has_a_phase(self) -> None:
        # GIVEN a run of which the phase of each moment is wanted: what a checkpoint adds may come after a free
        run = TraceBuilder()
        with run.step(), run.phase(Phase.FORWARD):
            run.free(run.allocate(8), run.allocate(8))
        view = View(run.build())
        assert [view.phase_of(event) for event in range(4)] == ["forward"] * 4

    def test_a_region_that_saves_nothing_changes_nothing(self) -> None:
        step, _ = recorded("resnet", False)
        (call,) = (call for call in step.calls if call.path == "blocks.0.short")
        assert peak_under(step, [Region((call,))]) == peak_under(step, [])

    def test_modules_that_follow_each_other_in_one_checkpoint(self) -> None:
        # GIVEN a chain of equal layers, of which the middle ones are one region
        width = 64

        class Together(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(6))

            def forward(self, x: torch.Tensor, run: bool) -> torch.Tensor:
                def middle(x: torch.Tensor) -> torch.Tensor:
                    for layer in self.layers[1:5]:
                        x = layer(x)
                    return x

                x = self.layers[0](x)
                x = checkpoint(middle, x, use_reentrant=False) if run else middle(x)
                return self.layers[5](x)

        def loop(run: bool) -> None:
            model = Together()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            x = torch.randn(512, width)
            for _ in range(PLANNED_STEP + 1):
                model(x, run).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

        seen = record(lambda: loop(False), plan_step=PLANNED_STEP)
        step = planned_step(View(seen.trace))
        calls = {call.path: call for call in step.calls}
        peak = peak_under(step, [Region(tuple(calls[f"layers.{number}"] for number in range(1, 5)))])
        assert peak.bytes - seen.line.start_bytes == peak_of(record(lambda: loop(True)))
        # AND by hand: it saves nothing. All of it is there again when backward comes to it, and two copies of the
        # random state besides: the one that it keeps, and the one that is set back.
        assert peak.bytes == peak_under(step, []).bytes + 2 * torch.get_rng_state().nbytes


class HalfCheckpointed(nn.Module):
    """Every other block is a checkpoint already."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, 64), nn.Linear(64, 8)
        self.blocks = nn.ModuleList(Block(64) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if number % 2 else block(x)
        return self.head(x)


class TestPresentCheckpoints:
    def train(self, plan: Sequence[str] = ()) -> None:
        torch.manual_seed(0)
        model = HalfCheckpointed()
        optimizer = torch.optim.AdamW(model.parameters())
        apply_plan(model, list(plan))
        for _ in range(PLANNED_STEP + 1):
            model(torch.randn(4, 32, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    @pytest.mark.parametrize("plan", [[], ["blocks.0", "blocks.2"], ["blocks.2.mlp", "blocks.4.attention", "head"]])
    def test_the_peak_beside_them_is_the_one_that_comes(self, plan: list[str]) -> None:
        seen = record(self.train, plan_step=PLANNED_STEP)
        step = planned_step(View(seen.trace))
        assert peak_under(step, regions(step, plan)).bytes - seen.line.start_bytes == peak_of(
            record(lambda: self.train(plan)))

    def test_they_are_told_and_no_plan_touches_them(self) -> None:
        seen = record(self.train, plan_step=PLANNED_STEP)
        found = plans(View(seen.trace))
        assert sorted(one.what for one in found.step.present) == ["blocks.1", "blocks.3", "blocks.5"]
        # Each makes again what a block of the others saves.
        bare = {one.modules: one for one in candidates(found.step) if not one.keep}[("blocks.2",)]
        assert all(0 < one.bytes <= bare.saved_bytes for one in found.step.present)
        touched = {path.split(".")[1] for option in found.options for one in option.plan.chosen for path in one.modules
                   if path.startswith("blocks.")}
        assert touched <= {"0", "2", "4"}
        assert touched


def test_what_backward_goes_through_twice_is_in_no_plan() -> None:
    # GIVEN a model with a trunk that two losses go back through, one after the other, and a head for each
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
            self.heads = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU()) for _ in range(2))

        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            x = self.trunk(x)
            return [head(x).square().mean() for head in self.heads]

    def loop() -> None:
        model = Two()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(PLANNED_STEP + 1):
            first, second = model(torch.randn(128, 64))
            first.backward(retain_graph=True)
            second.backward()
            optimizer.step()
            optimizer.zero_grad()

    seen = record(loop, plan_step=PLANNED_STEP)
    paths = {path for one in candidates(planned_step(View(seen.trace))) for path in one.modules}
    assert {"heads.0", "heads.1"} <= paths
    assert not [path for path in paths if path.startswith("trunk")]


class TestKept:
    def test_what_could_be_kept_is_what_the_applier_takes(self) -> None:
        step, _, _ = recorded_with_choice("gpt", False)
        names = set(step.operators.name)
        assert {"aten::addmm", "aten::gelu", "aten::native_layer_norm"} <= names
        assert "aten::linear" not in names  # PyTorch makes it of others
        assert not {"aten::bernoulli_", "aten::native_dropout"} & names  # random
        Keep(tuple(sorted(names)))

    def test_what_autocast_casts_once_for_all_could_not(self) -> None:
        # GIVEN a block that is called four times, the weights of which are cast in the first: when another runs again,
        # it casts them anew, and finds nothing kept in their place
        step, _, among = recorded_with_choice("shared", True)
        assert "aten::addmm" in step.operators.name
        assert "aten::_to_copy" not in step.operators.name
        # AND nothing else may be kept in such a block, for PyTorch counts the casts as well
        assert not [one for one in among if one.keep]

    def test_what_is_written_to_later_could_not(self) -> None:
        # GIVEN a ReLU in the place of what a convolution has made
        def loop() -> None:
            model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(8 * 36, 4))
            for _ in range(PLANNED_STEP + 1):
                model(torch.randn(2, 3, 8, 8)).sum().backward()
                model.zero_grad()

        seen = record(loop, plan_step=PLANNED_STEP)
        names = set(planned_step(View(seen.trace)).operators.name)
        # THEN a checkpoint that kept it would fail: it is not among them
        assert "aten::addmm" in names
        assert "aten::convolution" not in names

    def test_attention_that_drops_out_could_not(self) -> None:
        class Attention(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(8, 8)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                x = self.linear(x)
                return nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1)

        def loop() -> None:
            model = Attention()
            for _ in range(PLANNED_STEP + 1):
                model(torch.randn(2, 2, 4, 8)).sum().backward()
                model.zero_grad()

        seen = record(loop, plan_step=PLANNED_STEP)
        names = set(planned_step(View(seen.trace)).operators.name)
        assert "aten::addmm" in names or "aten::mm" in names
        assert not [name for name in names if "attention" in name]


class TestSecondForward:
    """Running a forward once more leaves no trace."""

    def test_training_goes_on_as_without_it(self) -> None:
        class Counting(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inside, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)
                self.calls, self.log, self.last = 0, [0.0], deque([0], maxlen=3)
                self.seen: dict[str, float] = {}

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.calls += 1
                self.log.append(random.random())
                self.last.append(self.calls)
                self.seen[f"call {self.calls}"] = float(np.random.rand())
                self.result = self.drop(self.norm(self.inside(x)))
                return self.result

        def run() -> list[object]:
            torch.manual_seed(0)
            random.seed(0)
            np.random.seed(0)
            model = Counting()
            optimizer = torch.optim.Adam(model.parameters())
            losses = []
            for _ in range(4):
                loss = model(torch.randn(16, 8)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            state = {name: value.clone() for name, value in model.state_dict().items()}
            return [losses, state, torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist(),
                    model.calls, model.log, list(model.last), model.seen]

        bare, found = run(), []
        seen = record(lambda: found.append(run()), plan_step=PLANNED_STEP)
        torch.testing.assert_close(found[0], bare, rtol=0, atol=0)
        # AND the recording has it, and counts none of it as the run's
        assert seen.trace.rows("second_forwards") > 0
        assert seen.peak == record(run).peak

    def test_a_forward_that_cannot_run_twice_is_said_and_harms_nothing(self) -> None:
        class Once(nn.Linear):
            handles: ClassVar[list[str]] = []

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                again = torch.is_grad_enabled() and Once.handles and Once.handles.pop() == "last"
                if again:
                    raise ValueError("only once")
                return super().forward(x)

        model, losses = Once(4, 4), []

        def loop() -> None:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for number in range(PLANNED_STEP + 1):
                Once.handles[:] = ["last"] if number == PLANNED_STEP else []
                losses.append(model(torch.ones(2, 4)).sum())
                losses[-1].backward()
                optimizer.step()

        seen = record(loop, plan_step=PLANNED_STEP)
        assert len(losses) == PLANNED_STEP + 1
        assert any("cannot run a second time (ValueError: only once)" in text for text in seen.trace.about["not_seen"])
        with pytest.raises(MemdiagError, match="no step of this run was recorded for plans"):
            planned_step(View(seen.trace))

    def test_a_forward_that_does_something_else_the_second_time_has_no_plan(self) -> None:
        class Wider(nn.Linear):
            times = 0

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                Wider.times += 1
                return super().forward(x.repeat(Wider.times, 1))

        def loop() -> None:
            model = Wider(4, 4)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(PLANNED_STEP + 1):
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()

        seen = record(loop, plan_step=PLANNED_STEP)
        with pytest.raises(MemdiagError, match="does not do the same when it runs again"):
            planned_step(View(seen.trace))


def test_what_a_function_has_captured_is_kept_with_it() -> None:
    step, before = recorded("mixture", False)
    plan = ["experts.0.2", "experts.1.0", "experts.1.1", "experts.1.2"]  # each is given a function that has a tensor
    assert peak_under(step, regions(step, plan)).bytes - before == applied_peak("mixture", plan, False)


def test_calls_have_their_arguments() -> None:
    step, _ = recorded("encoder-decoder", False)
    calls: dict[str, Call] = {call.path: call for call in step.calls}
    # Both blocks of the decoder are given what the encoder made.
    shared = set(calls["decoder.0"].arguments.tolist()) & set(calls["decoder.1"].arguments.tolist())
    assert len(shared) == 1
    (memory,) = shared
    assert calls["encoder.1"].start <= step.born[memory] < calls["encoder.1"].end
