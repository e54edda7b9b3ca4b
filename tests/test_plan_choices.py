"""What is told beside plans: choices that are poor, what of a budget is set aside, and the picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from planned import PLANNED_STEP, train
from recording import Seen, record
from test_plan_replay import applied_peak, peak_of
from torch import nn
from traces import TraceBuilder

from memdiag.apply import Plan, apply_plan
from memdiag.plan import MOST_SAVED, OUTSIDE, UNUSED, WHOLE_MODEL, Planning, plans
from memdiag.plan.aside import known_aside
from memdiag.plan.safety import Safety
from memdiag.policy import PLAN_TOLERANCE
from memdiag.report.frontier import draw_plans, plans_figure
from memdiag.report.plans import render_plans
from memdiag.trace.view import View

ABOUT = {"script": "/home/me/train.py"}


@cache
def recorded(name: str) -> tuple[View, int]:
    """A model's training, and what was there before the recording."""
    seen = record(lambda: train(name), plan_step=PLANNED_STEP)
    return View(seen.trace), seen.line.start_bytes


@cache
def planning(name: str, budget: int | None = None, set_aside: int | None = None) -> Planning:
    return plans(recorded(name)[0], budget, set_aside=set_aside)


class TestPoor:
    @pytest.mark.parametrize("name", ["unet", "lstm"])
    def test_the_whole_model_is_told_with_the_peak_that_comes(self, name: str) -> None:
        found = planning(name)
        whole = next(poor for poor in found.poor if poor.name == WHOLE_MODEL)
        # WHEN the model really is one checkpoint THEN its peak is the one that was told
        assert whole.peak_bytes - recorded(name)[1] == applied_peak(name, [""], False)
        # AND what is better is as low, and costs less
        better = next(one for one in found.options if one.name == whole.better)
        assert better.plan.peak.bytes <= whole.peak_bytes + PLAN_TOLERANCE * found.bare.peak.bytes
        assert better.plan.again_ns < whole.again_ns

    def test_a_module_that_saves_most_and_lowers_the_peak_by_nothing(self) -> None:
        # GIVEN a net whose last level saves most, and whose backward comes first
        found = planning("unet")
        most = next(poor for poor in found.poor if poor.name == MOST_SAVED)
        assert most.module == "up.2"
        # THEN what it saves is, in float32 at a batch of 4: what comes in (16 channels of 32 × 32), what both
        # convolutions make, the norm's result and that of the first activation (8 channels each), mean and variance
        assert most.saved_bytes == 4 * 4 * 32 * 32 * (16 + 4 * 8) + 2 * 4 * 4 * 4
        assert most.peak_bytes - recorded("unet")[1] == applied_peak("unet", ["up.2"], False)
        text = render_plans(found, ABOUT)
        assert "`up.2` saves most, and frees 768.1 KiB of what is saved, but" in text.replace("\n    ", " ")

    def test_what_is_good_is_not_called_poor(self) -> None:
        # GIVEN a stack of layers, of which each keeps much and is given little
        model = nn.Sequential(*(nn.Sequential(
            nn.Linear(32, 1024), nn.GELU(), nn.Linear(1024, 32)) for _ in range(3)))

        def run() -> None:
            for _ in range(PLANNED_STEP + 1):
                model(torch.randn(64, 32)).sum().backward()
                model.zero_grad()

        found = plans(View(record(run, plan_step=PLANNED_STEP).trace))
        # THEN no module is said to save much and to lower the peak by little
        assert MOST_SAVED not in [poor.name for poor in found.poor]


class TestChosen:
    def test_where_the_peak_is_goes_with_each_plan(self) -> None:
        found, (view, before) = planning("unet"), recorded("unet")
        chosen = found.options[found.chosen or 0]
        assert chosen.plan.chosen
        # THEN its peak is the one that comes when it is applied
        regions = [{"modules": list(one.modules), "kind": "selective" if one.keep else "full", "keep": list(one.keep)}
                   for one in chosen.plan.chosen]
        plan = {"schema_version": 1, "chosen": 0, "plans": [{"regions": regions}]}
        assert chosen.plan.peak.bytes - before == peak_of(record(lambda: train("unet", plan)))
        # AND its place is that of the allocation
        assert chosen.place is not None
        assert chosen.place.module == view.where(chosen.plan.peak.event)[2].module

    def test_what_keeps_more_operators_is_told_apart(self) -> None:
        # GIVEN plans that differ in the operators alone that one module keeps
        found = planning("unet")
        (one,) = found.gains[0].plan.chosen
        kept = [replace(one, keep=keep) for keep in (("aten::mm",), ("aten::mm", "aten::gelu"))]
        more = [replace(found.gains[0], name=f"frontier_{number}", plan=replace(found.gains[0].plan, chosen=(each,)))
                for number, each in enumerate(kept, 1)]
        text = render_plans(replace(found, options=[found.options[0], *more], chosen=2), ABOUT)
        # THEN their rows say how many, and the one that is chosen which
        rows = [line.split()[-1] for line in text.splitlines() if "frontier_" in line and "*" in line]
        assert rows == [f"{one.modules[0]}*1", f"{one.modules[0]}*2"]
        assert "*N: keeps the results of N operators" in " ".join(text.split())
        assert f"{one.modules[0]} keeping aten::mm, aten::gelu" in " ".join(text.split())

    def test_text_fits_a_terminal(self) -> None:
        for name in ("unet", "lstm"):
            assert all(len(line) <= 80 for line in render_plans(planning(name), ABOUT).splitlines())


class Inside(nn.Module):
    """Writes to what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 512), nn.Linear(512, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x.mul_(2)).sin())


class Outside(nn.Module):
    """What is written to is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = Inside()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inside(x + 1)


def trained(model: nn.Module, plan: Plan | None = None) -> Seen:
    if plan is not None:
        apply_plan(model, plan)

    def run() -> None:
        for _ in range(PLANNED_STEP + 1):
            model(torch.ones(64, 32)).sum().backward()
            model.zero_grad()

    return record(run, plan_step=None if plan is not None else PLANNED_STEP)


class TestAmong:
    def test_what_is_unsafe_stands_for_nothing_safe(self) -> None:
        # GIVEN modules with one inside that saves the same, takes less time, and must not run twice
        seen = trained(nn.Sequential(*(Outside() for _ in range(3))))
        found = plans(View(seen.trace), smallest=True)
        unsafe = {path for path, verdict in found.safety.items() if verdict.safety is Safety.UNSAFE}
        assert unsafe == {"0.inside", "1.inside", "2.inside"}
        # THEN those around them are in plans
        assert {"0", "1", "2"} <= {gain.plan.chosen[0].modules[0] for gain in found.gains}
        # AND what is told of them is what comes
        paths = [path for one in found.options[found.chosen or 0].plan.chosen for path in one.modules]
        assert paths
        there = trained(nn.Sequential(*(Outside() for _ in range(3))), {
            "schema_version": 1, "chosen": 0, "plans": [{"regions": [
                {"modules": list(one.modules), "kind": "full", "keep": list(one.keep)}
                for one in found.options[found.chosen or 0].plan.chosen]}]})
        told = found.options[found.chosen or 0].plan.peak.bytes - seen.line.start_bytes
        assert told == peak_of(there)

    def test_a_model_in_a_wrapper_has_no_path_and_is_none(self, tmp_path: Path) -> None:
        torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
        try:
            model = nn.Sequential(*(Outside() for _ in range(3)))
            found = plans(View(trained(nn.parallel.DistributedDataParallel(model)).trace), smallest=True)
        finally:
            torch.distributed.destroy_process_group()
        # THEN all that may be a checkpoint is a module of the model
        paths = {path for path, _ in model.named_modules() if path}
        assert {gain.plan.chosen[0].modules[0] for gain in found.gains} <= paths
        assert {path for one in found.options for region in one.plan.chosen for path in region.modules} <= paths
        assert found.options[found.chosen or 0].plan.chosen


    def test_a_model_beside_a_frozen_one_has_its_own_paths(self) -> None:
        # GIVEN a teacher that is not trained, and is called first
        teacher = nn.Sequential(*(Outside() for _ in range(2))).requires_grad_(False)
        student = nn.Sequential(*(Outside() for _ in range(3)))

        def run() -> None:
            for _ in range(PLANNED_STEP + 1):
                x = torch.ones(64, 32)
                with torch.no_grad():
                    target = teacher(x)
                (student(x) - target).square().sum().backward()
                student.zero_grad()

        found = plans(View(record(run, plan_step=PLANNED_STEP).trace), smallest=True)
        # THEN what is planned goes onto the student
        paths = [path for one in found.options[found.chosen or 0].plan.chosen for path in one.modules]
        assert paths
        assert apply_plan(student, paths).regions


class TestAside:
    def trace(self, **statistics: int) -> View:
        run = TraceBuilder(devices=["cuda:0", "cpu"])
        for step in (1, 2):
            for name, value in statistics.items():
                run.statistic(name.replace("_all_", ".all."), value + step, step=step, device="cuda:0")
        run.statistic("outside_pytorch_bytes", 7, step=2, device="cpu")
        run.allocate(1)
        return View(run.build())

    def test_a_device_s_own_statistics_in_that_step(self) -> None:
        run = self.trace(**{
            "reserved_bytes_all_peak": 900, "allocated_bytes_all_peak": 600, "outside_pytorch_bytes": 50})
        assert known_aside(run, 2) == {UNUSED: 300, OUTSIDE: 52}
        # AND nothing is made up where they are not there
        assert known_aside(run, 3) is None
        assert known_aside(self.trace(outside_pytorch_bytes=50), 1) == {OUTSIDE: 51}
        assert known_aside(self.trace(), 2) is None

    def test_nothing_on_the_cpu(self) -> None:
        run = TraceBuilder()
        run.allocate(1)
        assert known_aside(View(run.build()), 0) == {}

    def test_more_than_the_budget(self) -> None:
        found = planning("unet", 2**20, 2**30)
        assert (found.chosen, found.aside) == (None, 2**30)
        assert found.floor is not None
        assert found.floor.bytes <= min(one.plan.peak.bytes for one in found.options)
        assert all(found.headroom(one) == 2**20 - 2**30 - one.plan.peak.bytes for one in found.options)
        assert "above the budget, with what is set aside" in render_plans(found, ABOUT).replace("\n  ", " ")


class TestPicture:
    def test_each_point_is_where_its_plan_is(self) -> None:
        budget = planning("unet").bare.peak.bytes - 300_000
        found = planning("unet", budget, 100_000)
        drawn = plans_figure(found, ABOUT)
        (axes,) = drawn.axes
        assert axes.get_title(loc="left").startswith("train.py, step 2")
        assert (axes.get_xlabel()[-4:], axes.get_ylabel()) == ("(ms)", "peak of the step, allocated (MiB)")
        # THEN every plan has a mark at its peak and its time
        marks = {(round(float(x), 6), round(float(y), 6)) for line in axes.lines if line.get_marker() != "None"
                 for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)}
        points = {one.name: (round((found.step.work_ns + one.plan.again_ns) / 1e6, 6),
                             round(one.plan.peak.bytes / 2**20, 6)) for one in found.options}
        assert set(points.values()) <= marks
        # AND the legend says which is which, with the budget and what is set aside
        (legend,) = drawn.legends
        words = [text.get_text() for text in legend.get_texts()]
        chosen = found.options[found.chosen or 0]
        for start in ("as it is\n3.4 MiB", "every block\n", "every 2nd block\n", "every 3rd block\n", "frontier_1 … ",
                      f"chosen: {chosen.name}\n", "budget\n", "set aside\n97.7 KiB"):
            assert any(word.startswith(start) for word in words), start
        # AND all of it is inside
        (low, high), (left, right) = axes.get_ylim(), axes.get_xlim()
        assert all(left < x < right and low < y < high for x, y in points.values())
        assert low < (budget - 100_000) / 2**20 < budget / 2**20 < high

    def test_no_label_covers_another(self) -> None:
        for name in ("unet", "lstm"):
            drawn = plans_figure(planning(name), ABOUT)
            drawn.draw_without_rendering()
            boxes = [text.get_window_extent() for text in drawn.axes[0].texts]
            assert boxes
            assert not any(a.overlaps(b) for number, a in enumerate(boxes) for b in boxes[:number])

    def test_files(self, tmp_path: Path) -> None:
        draw_plans(planning("unet"), ABOUT, tmp_path / "a.png")
        assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
        for name in ("a.svg", "b.svg"):
            draw_plans(planning("unet"), ABOUT, tmp_path / name)
        assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_other_steps_with_other_inputs_are_told() -> None:
    # GIVEN a step that is planned for, and others with larger batches
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))

    def run(sizes: Sequence[int]) -> str:
        def loop() -> None:
            for size in sizes:
                model(torch.randn(size, 8)).sum().backward()
                model.zero_grad()

        return render_plans(plans(View(record(loop, plan_step=PLANNED_STEP).trace)), ABOUT)

    assert "2 other steps had inputs of other shapes" in run([16, 32, 8, 8])
    assert "other shapes" not in run([8, 8, 8, 8])
