"""Which modules may be checkpoints: hazards are told, each with its line, and nothing else is in the way.

That a hazard is one is shown by putting the checkpoint there: the training goes otherwise, or fails.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hazards import (
    CLEAN,
    HAZARDS,
    WIDTH,
    Around,
    FromOutside,
    HiddenState,
    MoreOperatorsEachTime,
    hazard_line,
    training,
)
from planned import MODELS, PLANNED_STEP, sample, train
from recording import Seen, record
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from memdiag.plan.safety import _SAFE_WITH, _UNSAFE, NOT_PROBED, PRESERVED, Reason, Safety, Verdict, verdicts
from memdiag.trace import model

STEPS = PLANNED_STEP + 2


def same(one: list[Any], other: list[Any]) -> bool:
    """Whether two trainings came to the same, to the bit."""
    try:
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    except AssertionError:
        return False
    return True


@cache
def recorded(make: Callable[[], Around]) -> tuple[Seen, list[Any]]:
    """A training that is recorded for plans, and what it came to."""
    found: list[Any] = []
    seen = record(lambda: found.append(training(make, STEPS)), plan_step=PLANNED_STEP)
    return seen, found[0]


def verdict(make: Callable[[], Around], path: str = "part") -> Verdict:
    return verdicts(recorded(make)[0].trace)[path]


class TestHazards:
    @pytest.mark.parametrize("model", HAZARDS, ids=lambda model: model.__name__)
    def test_a_checkpoint_there_really_goes_wrong(self, model: type[Around]) -> None:
        bare = training(model, STEPS)
        # A checkpoint stops as soon as it has what it needs, which hides what it would do beyond.
        with set_checkpoint_early_stop(model is not MoreOperatorsEachTime):
            try:
                changed = not same(bare, training(model, STEPS, region=True))
            except RuntimeError:
                changed = True
        assert changed

    @pytest.mark.parametrize("model", HAZARDS, ids=lambda model: model.__name__)
    def test_it_is_told_with_its_line(self, model: type[Around]) -> None:
        found = verdict(model)
        assert found.safety is Safety.UNSAFE
        assert hazard_line(model) in [reason.line for reason in found.reasons], found.reasons
        # AND what stands beside it is not
        assert {verdict(model, path).safety for path in ("first", "last")} == {Safety.SAFE}

    @pytest.mark.parametrize("model", HAZARDS, ids=lambda model: model.__name__)
    def test_the_training_goes_on_as_without(self, model: type[Around]) -> None:
        if model in (FromOutside, HiddenState):
            pytest.skip("nobody can put that back")
        assert same(recorded(model)[1], training(model, STEPS))

    def test_dropout_whose_random_state_is_not_preserved_goes_wrong(self) -> None:
        class Dropping(Around):
            def __init__(self, preserve: bool) -> None:
                super().__init__(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Tanh()))
                self.how = {"use_reentrant": False, "preserve_rng_state": preserve}

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.last(checkpoint(self.part, self.first(x), **self.how))

        # GIVEN the same model, whose checkpoint sets back the random state or does not
        kept, lost = (training(lambda: Dropping(preserve), STEPS) for preserve in (True, False))  # noqa: B023
        assert not same(kept, lost)
        # THEN the condition is told
        assert verdict(CLEAN["dropout"]).conditions == (PRESERVED,)


class TestClean:
    @pytest.mark.parametrize("name", CLEAN)
    def test_it_may_be_a_checkpoint(self, name: str) -> None:
        found = verdict(CLEAN[name])
        assert found.safety in (Safety.SAFE, Safety.SAFE_WITH), found.reasons
        # AND a checkpoint there changes nothing, nor does the look at it
        if name != "after noise":
            bare = training(CLEAN[name], STEPS)
            assert same(bare, training(CLEAN[name], STEPS, region=True))
            assert same(bare, recorded(CLEAN[name])[1])

    @pytest.mark.parametrize(("name", "condition"), [
        ("values", "aten::_local_scalar_dense reads values off tensors, which waits for the device once more"),
        ("checkpoint inside", "the checkpoint inside it runs a third time")])
    def test_conditions(self, name: str, condition: str) -> None:
        assert verdict(CLEAN[name]).conditions == (condition,)

    @pytest.mark.parametrize(("name", "autocast"), sample([
        (name, autocast) for name in MODELS for autocast in (False, True) if name != "lstm" or not autocast]))
    def test_whole_models(self, name: str, autocast: bool) -> None:
        seen = record(lambda: train(name, autocast=autocast), plan_step=PLANNED_STEP)
        unsafe = {path: found for path, found in verdicts(seen.trace).items() if found.safety is Safety.UNSAFE}
        if name != "resnet":
            assert not unsafe, unsafe
            return
        # Batch norm, and what it is in, is not safe; all the rest is.
        model = MODELS[name][0]()
        norms = [path for path, part in model.named_modules() if isinstance(part, nn.BatchNorm2d)]
        assert set(unsafe) == {
            path or type(model).__name__ for path, _ in model.named_modules()
            if any(norm == path or not path or norm.startswith(f"{path}.") for norm in norms)}
        assert all(name in reason.text for path in norms for reason in unsafe[path].reasons
                   for name in ("num_batches_tracked", "running_mean", "running_var"))


class TestCompiled:
    def test_a_part_that_is_compiled_runs_on(self) -> None:
        def trained() -> list[torch.Tensor]:
            torch._dynamo.reset()
            torch.manual_seed(0)
            part = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 2))
            model = nn.Sequential(nn.Linear(8, 8), torch.compile(part, backend="aot_eager"))
            optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
            for _ in range(STEPS):
                loss = model(torch.randn(4, 8)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            return losses

        # WHEN its forwards run aside, where operators are looked at and nothing is compiled
        seen: list[torch.Tensor] = []
        record(lambda: seen.extend(trained()), plan_step=PLANNED_STEP)
        # THEN what was compiled before is compiled still, and the training is what it was
        assert same(trained(), seen)


class TestVerdicts:
    def test_a_module_that_has_not_run_twice_is_unsafe(self) -> None:
        seen, _ = recorded(CLEAN["layer norm"])
        facts = seen.trace["region_facts"]
        kept = facts["module"] != seen.trace.text.index("part")
        trace = replace(seen.trace, tables={
            **seen.trace.tables, "region_facts": {name: column[kept] for name, column in facts.items()}})
        found = verdicts(trace)["part"]
        assert (found.safety, found.reasons) == (Safety.UNSAFE, (Reason(NOT_PROBED, None),))

    def test_a_run_without_such_a_step_has_none(self) -> None:
        assert verdicts(record(lambda: training(CLEAN["layer norm"], 2)).trace) == {}

    def test_random_numbers_of_a_device_that_no_argument_is_on(self) -> None:
        seen, _ = recorded(CLEAN["dropout"])
        text = ["random elsewhere" if one == "random" else one for one in seen.trace.text]
        found = verdicts(replace(seen.trace, text=text))["part"]
        assert found.safety is Safety.UNSAFE
        assert "draws random numbers on cpu, whose state" in found.reasons[0].text

    def test_all_that_can_be_noted_is_judged_or_only_told(self) -> None:
        assert set(KINDS) == {*_UNSAFE, *_SAFE_WITH, model.PROBED, model.MOVES, model.FUNCTION}



# All that come, by a real recording or, for what needs several devices, in no test of these.
KINDS = (
    model.PROBED, model.BUFFER, model.ATTRIBUTE, model.VARIABLE, model.ARGUMENT, model.WRITES, model.WRITTEN_LATER,
    model.CHANGED_LATER, model.PYTHON_RANDOM, model.NUMPY_RANDOM, model.GENERATOR, model.RANDOM, model.RANDOM_ELSEWHERE,
    model.OTHER_COURSE, model.OTHER_VALUE, model.ROUNDING, model.READS_VALUE, model.MOVES, model.HOOK, model.CHECKPOINT,
    model.FUNCTION, model.UNPACKS_TWICE)
