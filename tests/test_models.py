"""Scripts with several models: what their modules are called, and a plan for them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from planned import sample
from recording import ROOT, Seen, record
from torch import nn

import memdiag
from memdiag.errors import MemdiagError
from memdiag.plan import Planning, plans
from memdiag.record.options import PLANNED_STEP
from memdiag.report.plans import plans_to_json
from memdiag.trace import Kind
from memdiag.trace.models import Model, as_facts, model_of, models
from memdiag.trace.view import View


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


class Discriminator(Generator):
    """Names of its modules are those of the other's."""


def named(seen: Seen) -> set[str]:
    """Names of all modules that were called."""
    return {seen.trace.text[seen.trace["spans"]["name"][row]] for row in seen.spans(Kind.MODULE)}


class TestNames:
    def test_of_models_in_variables(self) -> None:
        def run() -> None:
            g, d, loss = Generator(), Discriminator(), nn.MSELoss()
            for _ in range(2):
                loss(d(g(torch.randn(8, 32))), torch.zeros(8, 32)).backward()

        seen = record(run)
        count = sum(one.numel() for one in Generator().parameters())
        g, d = found = models(seen.trace.about)
        # THEN each is noted, the first that trains with bare names; a loss is none
        assert found == [Model("g", "Generator", "", True, count), Model("d", "Discriminator", "d", True, count)]
        assert {"net.0.1", "d.net.2.1"} <= named(seen)
        assert (model_of("net.0.1", found), model_of("d.net.2.1", found)) == (g, d)
        assert (g.relative("net.0.1"), d.relative("d.net.2.1"), d.relative("d")) == ("net.0.1", "net.2.1", "")

    def test_no_two_have_the_same(self) -> None:
        def loop() -> None:
            total = torch.zeros(())
            for one in [Generator(), Discriminator(), Discriminator()]:  # in nobody's variable but the loop's
                total = total + one(torch.randn(8, 32)).sum()
            total.backward()

        def called(one: nn.Module) -> torch.Tensor:
            return one(torch.randn(8, 32)).sum()

        def functions() -> None:
            g, d = Generator(), Discriminator()
            (called(g) + called(d)).backward()

        def attributes() -> None:
            held = type("Held", (), {})()
            held.nets = [Generator(), Generator()]
            (held.nets[0](torch.randn(8, 32)) + held.nets[1](torch.randn(8, 32))).sum().backward()

        def parts() -> None:
            class Whole(nn.Module):
                def __init__(self) -> None:
                    super().__init__()
                    self.d = Generator()

                def forward(self, x: torch.Tensor) -> torch.Tensor:
                    return self.d(x)

            model, d = Whole(), Discriminator()
            (model(torch.randn(8, 32)) + d(torch.randn(8, 32))).sum().backward()

        for run, names in ((loop, ["one", "one.1", "one.2"]), (functions, ["one", "d"]),
                           (attributes, ["Generator", "Generator.1"]), (parts, ["model", "Discriminator"])):
            run_: Callable[[], Any] = run
            seen = record(run_)
            found = models(seen.trace.about)
            assert [one.name for one in found] == names
            # AND each module has one name
            inside = [name for name in named(seen) if ".net" in f".{name}" and "0.0" in name]
            assert len(inside) == len(found)
            assert {model_of(path, found) for path in inside} == set(found)

    def test_one_whose_part_is_called_as_a_frozen_one_before_it_has_no_bare_names(self) -> None:
        class Whole(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = nn.Sequential(nn.Linear(32, 32))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.net(x)

        def run() -> None:
            net, model = nn.Sequential(nn.Linear(32, 32)).requires_grad_(False), Whole()
            (net(torch.randn(8, 32)) + model(torch.randn(8, 32))).sum().backward()

        seen = record(run)
        assert [(one.name, one.prefix) for one in models(seen.trace.about)] == [("net", "net"), ("model", "model")]
        assert {"net.0", "model.net.0"} <= named(seen)


def parts(plan: Any) -> None:
    """Trains an embedding, a transformer and a head, which nothing holds together."""
    torch.manual_seed(0)
    embedding = nn.Sequential(nn.Embedding(64, 32), nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)))
    transformer = nn.ModuleList(Generator() for _ in range(3))
    body = nn.Sequential(*transformer)
    head = nn.Sequential(nn.Sequential(nn.Linear(32, 128), nn.GELU()), nn.Linear(128, 64))
    if plan is not None:
        memdiag.apply_plan({"embedding": embedding, "body": body, "head": head}, plan)
    optimizer = torch.optim.AdamW([*embedding.parameters(), *body.parameters(), *head.parameters()])
    for _ in range(PLANNED_STEP + 1):
        tokens = torch.randint(64, (16, 32))
        loss = F.cross_entropy(head(body(embedding(tokens))).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def gan(plan: Any) -> None:
    """Trains a generator and a discriminator by two optimizers."""
    torch.manual_seed(0)
    g, d = Generator(), Discriminator()
    if plan is not None:
        memdiag.apply_plan({"g": g, "d": d}, plan)
    of_g, of_d = torch.optim.Adam(g.parameters()), torch.optim.Adam(d.parameters())
    for _ in range(PLANNED_STEP + 1):
        fake = g(torch.randn(512, 32))
        (d(fake.detach()).mean() - d(torch.randn(512, 32)).mean()).backward()
        of_d.step()
        of_d.zero_grad()
        d(fake).mean().neg().backward()
        of_g.step()
        of_g.zero_grad()
        of_d.zero_grad()


@cache
def planned(train: Callable[[Any], None]) -> tuple[Planning, dict[str, Any], int]:
    """Plans for such a script, and bytes that were there before it."""
    seen = record(lambda: train(None), plan_step=PLANNED_STEP)
    planning = plans(View(seen.trace))
    return planning, json.loads(plans_to_json(planning, seen.trace.about)), seen.line.start_bytes


def peak(seen: Seen) -> int:
    """Of the planned step, above what was there before."""
    steps = seen.trace["steps"]
    (row,) = np.flatnonzero(steps["step"] == PLANNED_STEP)
    return int(seen.line.live[steps["start_event"][row]:steps["end_event"][row]].max()) - seen.line.start_bytes


class TestPlan:
    @pytest.mark.parametrize(("train", "names"), [(parts, {"embedding", "body", "head"}), (gan, {"g", "d"})])
    def test_the_peak_of_each_is_the_one_that_comes(self, train: Callable[[Any], None], names: set[str]) -> None:
        # GIVEN the plans of a script with several models, those that one would write by hand among them
        _, file, before = planned(train)
        said = set()
        for number, plan in sample(list(enumerate(file["plans"]))):
            of = {region["model"] for region in plan["regions"]}
            if plan["name"] == "by_hand":
                continue
            # WHEN each is put onto the models, by their names
            seen = record(lambda chosen=number: train({**file, "chosen": chosen}))
            # THEN the peak is the one that was replayed, to the byte
            assert peak(seen) == plan["predicted"]["peak_bytes"] - before, plan["name"]
            said |= of
        # AND there were plans with modules of all of them
        assert said == names
        assert any({region["model"] for region in plan["regions"]} == names for plan in file["plans"])


    def test_of_a_recording_that_does_not_know_its_models_there_is_a_plan_as_ever(self) -> None:
        # GIVEN a run file of a recorder that did not note them
        seen = record(lambda: gan(None), plan_step=PLANNED_STEP)
        del seen.trace.about["models"]
        file = json.loads(plans_to_json(plans(View(seen.trace), smallest=True), seen.trace.about))
        regions = [region for plan in file["plans"] for region in plan["regions"]]
        assert {region["model"] for region in regions} == {None}
        # THEN one model takes what is its own, by the prefix that its modules have
        plan = {**file, "plans": [{"regions": [region for region in regions if region["modules"] == ["d.net.0"]][:1]}],
                "chosen": 0}
        for model, given in ((d := Discriminator(), d), (d := Discriminator(), {"d": d})):
            memdiag.apply_plan(given, plan)
            assert exchanged(model) == ["net.0"]


class TestCommand:
    def test_it_says_what_to_write(self, tmp_path: Path) -> None:
        # GIVEN a script with two models
        (tmp_path / "gan.py").write_text(SCRIPT)

        def run(*arguments: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run([sys.executable, "-m", "memdiag", "plan", *arguments], cwd=tmp_path, text=True,
                                  capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)

        # WHEN a plan with modules of both is made
        done = run("--choose", "every_block", "--json", "plan.json", "-o", "run.mdiag", "gan.py")
        assert done.returncode == 0, done.stderr
        file = json.loads((tmp_path / "plan.json").read_text())
        assert [(one["name"], one["class"]) for one in file["about"]["models"]] == [
            ("g", "Sequential"), ("d", "Sequential")]
        assert {(region["model"], *region["modules"]) for region in file["plans"][file["chosen"]]["regions"]} == {
            ("g", "0"), ("g", "1"), ("d", "d.0"), ("d", "d.1")}
        # THEN the next step is a line for both, which the script runs with
        line = done.stderr.splitlines()[-1].strip().partition("  ")[0]
        assert line == """memdiag.apply_plan({"g": g, "d": d}, 'plan.json')"""
        script = SCRIPT.replace("# built", f"import memdiag; print(len({line}.regions))")
        (tmp_path / "gan.py").write_text(script)
        assert "4\n" in subprocess.run([sys.executable, "gan.py"], cwd=tmp_path, text=True, capture_output=True,
                                       env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True).stdout
        # AND written by hand, both have their names
        code = run("run.mdiag", "--choose", "every_block", "--emit", "code").stdout
        assert "Once the models are built, as `g`, `d`" in code
        assert re.search(r"    g\[0\],\n    g\[1\],\n    d\[0\],\n    d\[1\],\n", code)


SCRIPT = """\
import torch
from torch import nn

g, d = (nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(2)))
        for _ in range(2))
# built
optimizers = [torch.optim.SGD(net.parameters(), lr=0.01) for net in (g, d)]
for step in range(4):
    loss = d(g(torch.randn(256, 64))).square().mean()
    loss.backward()
    for one in optimizers:
        one.step()
        one.zero_grad()
"""

BOTH = [{"modules": ["net.0"], "kind": "full", "keep": [], "model": "g"},
        {"modules": ["d.net.1", "d.net.2"], "kind": "full", "keep": [], "model": "d"}]
G, D = Model("g", "Generator", "", True, 12_576), Model("d", "Discriminator", "d", True, 12_576)


def plan_of(*regions: dict[str, Any], known: tuple[Model, ...] = (G, D), **more: Any) -> dict[str, Any]:
    return {"schema_version": 1, "about": {"models": as_facts(known)}, "plans": [{"regions": list(regions)}],
            "chosen": 0, **more}


def exchanged(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if "forward" in vars(module)]


class TestApplied:
    def test_each_region_goes_onto_its_own_model(self) -> None:
        g, d = Generator(), Discriminator()
        applied = memdiag.apply_plan({"g": g, "d": d}, plan_of(*BOTH))
        assert (exchanged(g), exchanged(d)) == (["net.0"], ["net"])
        assert [(one.model, one.modules) for one in applied.regions] == [("g", ("net.0",)), ("d", ("net.1", "net.2"))]
        applied.undo()
        assert exchanged(g) == exchanged(d) == []

    def test_of_one_of_several_models_it_is_given_that_one(self) -> None:
        d = Discriminator()
        memdiag.apply_plan(d, plan_of(BOTH[1]))
        assert exchanged(d) == ["net"]
        g = Generator()
        memdiag.apply_plan({"g": g, "d": (d := Discriminator())}, plan_of(BOTH[0]))
        assert (exchanged(g), exchanged(d)) == (["net.0"], [])

    def test_module_paths_begin_with_the_name_of_a_model(self) -> None:
        g, d = Generator(), Discriminator()
        memdiag.apply_plan({"g": g, "d": d}, ["g.net.0", "d.net.1"])
        assert (exchanged(g), exchanged(d)) == (["net.0"], ["net.1"])

    @pytest.mark.parametrize(("given", "plan", "why"), [
        (Generator, plan_of(*BOTH), r"of `g` \(Generator\) and `d` \(Discriminator\); give each by its name: "
                                    r"memdiag\.apply_plan\(\{\"g\": g, \"d\": d\}, …\)"),
        (lambda: {"g": Generator()}, plan_of(*BOTH), r"d is not given.*\{\"g\": g, \"d\": d\}"),
        (lambda: {"g": Generator(), "critic": Discriminator()}, plan_of(BOTH[0]), r"critic is none.*\{\"g\": g\}"),
        (lambda: {"g": Generator(), "d": 1}, plan_of(*BOTH), "d: is a int, and no model"),
        (lambda: [Generator()], plan_of(*BOTH), "not onto a list"),
        (lambda: {"g": Generator(), "d": Discriminator()}, ["net.0"], r"net\.0: the plan does not say.*g\.net\.0"),
        (lambda: {"g": Generator(), "d": Discriminator()}, ["g.net.0", "d.net.9"],
         r"d: net\.9: the model has no such module"),
        (lambda: dict.fromkeys("gd", Generator()), ["g.net.0", "d.net.0.1"], r"net\.0\.1 of d: is in net\.0 of g too"),
        (lambda: dict.fromkeys("gd", Generator()), ["g.net.0", "d.net.0"], r"net\.0: is in the plan twice"),
        (lambda: Generator(), plan_of({**BOTH[0], "model": 3}), "is not a plan")])
    def test_what_does_not_go_is_refused(self, given: Callable[[], Any], plan: Any, why: str) -> None:
        models = given()
        with pytest.raises(MemdiagError, match=why):
            memdiag.apply_plan(models, plan)
        each = models.values() if isinstance(models, dict) else [models]
        assert not any(exchanged(one) for one in each if isinstance(one, nn.Module))

    def test_a_plan_of_one_does_not_go_onto_another(self) -> None:
        # GIVEN models whose modules have the same names
        wrapped = nn.Module()
        wrapped.module = Discriminator()
        for given in (Discriminator(), wrapped, {"g": Discriminator()}):
            with pytest.raises(MemdiagError, match=r"is of `g` \(Generator\), and a Discriminator.* `d`; give it `g`"):
                memdiag.apply_plan(given, plan_of(BOTH[0]))  # type: ignore[arg-type]

    def test_of_one_class_the_size_tells_them_apart(self) -> None:
        small, large = (nn.Sequential(nn.Linear(4, width), nn.Linear(width, 4)) for width in (8, 16))
        counts = [sum(one.numel() for one in model.parameters()) for model in (small, large)]
        known = tuple(Model(name, "Sequential", prefix, True, count) for name, prefix, count in zip(
            "gd", ("", "d"), counts, strict=True))
        plan = plan_of({**BOTH[0], "modules": ["0"]}, known=known)
        with pytest.raises(MemdiagError, match=r"a Sequential with 148 parameters is given.* `d`"):
            memdiag.apply_plan(large, plan)
        # BUT one of another size is taken: the script may have been changed
        for model in (small, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))):
            memdiag.apply_plan(model, plan)
            assert exchanged(model) == ["0"]

    def test_subclasses_and_wrappers_are_none_of_the_others(self) -> None:
        class Better(Generator):
            pass

        class Wrapper(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net, self.d = Generator().net, Discriminator()

        for model in (Better(), Wrapper()):
            memdiag.apply_plan(model, plan_of(BOTH[0]))
            assert exchanged(model) == ["net.0"]

    def test_a_second_plan_on_one_of_them(self) -> None:
        models = {"g": Generator(), "d": Discriminator()}
        memdiag.apply_plan(models["d"], ["net.0"])
        with pytest.raises(MemdiagError, match="has a plan already"):
            memdiag.apply_plan(models, plan_of(BOTH[0]))
