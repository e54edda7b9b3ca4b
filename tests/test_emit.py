"""What ``memdiag plan --emit`` writes, and that it does what the plan says when it is put into the script and run.

The oracle is a recording of the script that was changed: its losses are those of the script as it was, to the bit; the
modules that ran twice are those of the plan; its peak is the one that the replay told of the script as it was.
"""

from __future__ import annotations

import ast
import copy
import gc
import importlib
import json
import os
import re
import runpy
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recording import ROOT, Seen, record

from memdiag.emit.chosen import chosen
from memdiag.emit.code import code
from memdiag.emit.compile import compile_, kept_bytes
from memdiag.emit.diff import diff
from memdiag.emit.fsdp import fsdp
from memdiag.emit.hf import hf
from memdiag.emit.pieces import Roots
from memdiag.emit.sites import Sites, sites
from memdiag.errors import MemdiagError
from memdiag.plan import Reason, Safety, Verdict, plans
from memdiag.plan.replay import Region as Replayed
from memdiag.plan.replay import peak_under
from memdiag.plan.safety import chains
from memdiag.plan.step import Step, planned_step
from memdiag.record.options import PLANNED_STEP
from memdiag.trace import Kind
from memdiag.trace.model import RECOMPUTE
from memdiag.trace.models import Model, models
from memdiag.trace.view import View

MODEL = '''\
"""A script."""

import torch
import torch.nn.functional as F
from torch import nn

WIDTH = 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attend = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x, mask=None):
        y = self.attend(self.norm(x))
        if mask is not None:
            y = y * mask
        return x + self.mlp(  # what it adds
            F.dropout(y, 0.1),  # is random
        )


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x):
        mask = (x > 0).float()
        for block in self.blocks:
            x = block(x, mask=mask)
        mask = None
        return self.head(x)


def train():
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        loss = model(torch.randn(64, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
'''


@dataclass(frozen=True)
class Region:
    modules: tuple[str, ...]
    keep: tuple[str, ...] = ()


def regions(*modules: str, keep: tuple[str, ...] = ()) -> list[Region]:
    """Regions; of several modules, where their names stand in one string."""
    return [Region(tuple(paths.split()), keep) for paths in modules]


@dataclass
class Ran:
    """A script that was run, recorded."""

    seen: Seen
    losses: list[float]
    before: int

    @property
    def view(self) -> View:
        return View(self.seen.trace)

    @property
    def step(self) -> Step:
        return planned_step(self.view)

    @property
    def sites(self) -> Sites:
        return sites(self.view)

    @property
    def peak(self) -> int:
        """Of the planned step, above what was there before."""
        steps, line = self.seen.trace["steps"], self.seen.line
        (row,) = np.flatnonzero(steps["step"] == PLANNED_STEP)
        return int(line.live[steps["start_event"][row]:steps["end_event"][row]].max()) - self.before

    @property
    def ran_again(self) -> set[str]:
        """Modules that a checkpoint called again."""
        spans = self.seen.trace["spans"]
        again = (spans["kind"] == Kind.MODULE) & (spans["flags"] & RECOMPUTE != 0)
        return {self.seen.trace.text[name].replace("._checkpoint_wrapped_module", "") for name in spans["name"][again]}


def ran(script: Path, planned: bool = False) -> Ran:
    found: list[list[float]] = []

    def run() -> None:
        found.append(runpy.run_path(str(script))["train"]())

    seen = record(run, **({"plan_step": PLANNED_STEP} if planned else {}))
    return Ran(seen, found[0], seen.line.start_bytes)


def write(folder: Path, source: str = MODEL, **exchanged: str) -> Path:
    """A script, with parts of it exchanged: by the text of the part in ``PARTS``."""
    for part, text in exchanged.items():
        assert PARTS[part] in source
        source = source.replace(PARTS[part], text)
    script = folder / "train.py"
    script.write_bytes(textwrap.dedent(source).encode())
    return script


PARTS = {
    "loop": "        for block in self.blocks:\n            x = block(x, mask=mask)\n",
    "blocks": "nn.ModuleList(Block() for _ in range(5))",
    "imports": "from torch import nn\n",
}


def applied(script: Path, text: str, *command: str) -> None:
    """Puts a diff onto the folder of a script."""
    done = subprocess.run(command or ("git", "apply"), cwd=script.parent, input=text.encode(), capture_output=True,
                          check=False)
    assert done.returncode == 0, done.stderr.decode() + text


def written(run: Ran, plan: list[Region], folder: Path) -> str:
    return diff(run.sites, plan, str(folder), "A plan.", chains(run.seen.trace))


def assert_does_as_planned(script: Path, before: Ran, plan: list[Region]) -> None:
    after = ran(script)
    assert after.losses == before.losses
    # A module whose forward was exchanged runs again without being called again, what is inside it is called.
    paths = {path for region in plan for path in region.modules}
    inside = {path for path in before.sites.paths if any(path.startswith(f"{other}.") for other in paths)}
    # A part of a list goes by the name of its class.
    assert inside <= after.ran_again - {"Sequential"} <= inside | paths
    if not any(region.keep for region in plan):
        of = {path: number for number, region in enumerate(plan) for path in region.modules}
        calls: dict[tuple[int, int], list[Any]] = {}
        for call in before.step.calls:
            if call.path in of:
                number = of[call.path]
                key = (number, 0 if len(plan[number].modules) > 1 else call.number)
                calls.setdefault(key, []).append(call)
        replayed = peak_under(before.step, [Replayed(tuple(one)) for one in calls.values()]).bytes - before.before
        assert replayed == after.peak


def moved(where: Sites, recorded: str, script: Path) -> Sites:
    """The same calls, as of a script in another place."""
    assert {file for file, _ in where.by_line} == {recorded}
    return replace(where, by_line={(str(script), line): called for (_, line), called in where.by_line.items()})


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Ran]:
    """The script above, and its recording; the recording's lines are those of the file of this name."""
    folder = tmp_path_factory.mktemp("plain")
    return str(folder / "train.py"), ran(write(folder), planned=True)


WAYS = """\
for number, block in enumerate(self.a):
    x = block(x, mask=mask)
for number in range(4):
    x = self.b[number](x, mask)
for block, _ in zip(self.c, range(4)):
    x, y = block(x,
                 mask=mask), 0
for block in reversed(list(self.d)):
    x = x + block(x,)
for block in self.e[:2]:
    x = block(x)
for block in self.e[2:]:
    x = block(x)
x = self.f[1](self.f[0](x))
for call in list(self.g)[:2]:
    x = call(*(x,), **{'mask': mask})
x = self.g[3](x)
x = self.h[0](x)
x = self.h[0](self.h[1](x))
for name, block in self.blocks.items():
    x = block(x)
"""

ALL = [f"blocks.{number}" for number in range(5)]


class TestDiff:
    @pytest.mark.parametrize(("plan", "line"), [
        (regions(*ALL), "x = checkpoint(block, x, mask=mask, use_reentrant=False)"),
        (regions(*ALL[:3]),
         "x = checkpoint(block, x, mask=mask, use_reentrant=False) if block in self.blocks[:3] "
         "else block(x, mask=mask)"),
        (regions("blocks.0", "blocks.2", "blocks.4"), "if block in self.blocks[::2] else"),
        (regions("blocks.0", "blocks.3"), "if block in (self.blocks[0], self.blocks[3]) else"),
        (regions("blocks.1"), "if block is self.blocks[1] else"),
        (regions(*(f"{block}.mlp" for block in ALL)), "return x + checkpoint(self.mlp,   # what it adds"),
        (regions(*(f"{block}.attend" for block in ALL), *(f"{block}.norm" for block in ALL)),
         "y = checkpoint(self.attend, checkpoint(self.norm, x, use_reentrant=False), use_reentrant=False)"),
        (regions("blocks.0", "blocks.1.mlp"),
         "self.blocks[1].mlp.forward = partial(checkpoint, self.blocks[1].mlp.forward, use_reentrant=False)"),
        (regions("blocks.2.mlp.0", "blocks.2.mlp.1", "head"),
         "for module in (self.blocks[2].mlp[0], self.blocks[2].mlp[1]):"),
        (regions("blocks.1 blocks.2 blocks.3"),
         "x = checkpoint(run, x, self.blocks[1:4], mask, use_reentrant=False)"),
        (regions("blocks.1.mlp.0 blocks.1.mlp.1", "blocks.3.mlp.0 blocks.3.mlp.1", "blocks.4.mlp.1 blocks.4.mlp.2"),
         "in (self.blocks[1].mlp, self.blocks[3].mlp):\n+            module.forward = MethodType(run_1, module)"),
        (regions("blocks.0 blocks.1", "blocks.2", "blocks.3 blocks.4"),
         "x = checkpoint(run, x, self.blocks[:2], mask, use_reentrant=False)"),
        (regions(*ALL[:2], keep=("aten::addmm",)),
         "context_fn=partial(create_selective_checkpoint_contexts, [*overloads(torch.ops.aten.addmm)])"),
    ])
    def test_the_script_does_as_planned(
        self, plain: tuple[str, Ran], tmp_path: Path, plan: list[Region], line: str
    ) -> None:
        recorded, before = plain
        text = written(before, plan, Path(recorded).parent)
        assert line in text
        script = write(tmp_path)
        applied(script, text)
        assert_does_as_planned(script, before, plan)

    def test_however_modules_are_called(self, tmp_path: Path) -> None:
        # GIVEN a model that calls blocks in many ways, and a plan with some of each
        script = write(
            tmp_path, loop=textwrap.indent(WAYS, " " * 8),
            blocks="nn.ModuleDict({'first-one': Block(), 'second': Block()})\n" + textwrap.indent(
                "".join(f"self.{name} = nn.ModuleList(Block() for _ in range(4))\n" for name in "abcdefgh"), " " * 8))
        before = ran(script, planned=True)
        plan = regions(
            "a.1", "b.0", "b.3", "c.1", "c.2", "c.3", "d.1", "d.2", "d.3", "e.0", "e.1", "f.0", "f.1", "g.0", "g.1",
            "h.0", "blocks.first-one", "blocks.second.mlp", "g.3.attend")
        text = written(before, plan, tmp_path)
        # THEN each call is rewritten for what is in the plan alone
        for line in (
            "x = checkpoint(block, x, mask=mask, use_reentrant=False) if block is self.a[1] else block(x, mask=mask)",
            "if self.b[number] in (self.b[0], self.b[3]) else self.b[number](x, mask)",
            "x, y = (checkpoint(block, x,\n",
            "x = x + (checkpoint(block, x, use_reentrant=False) if block in self.d[1:] else block(x,))",
            "+            x = checkpoint(block, x, use_reentrant=False)\n",
            "x = checkpoint(self.f[1], checkpoint(self.f[0], x, use_reentrant=False), use_reentrant=False)",
            "x = checkpoint(call, *(x,), **{'mask': mask}, use_reentrant=False)",
            "x = checkpoint(self.h[0], self.h[1](x), use_reentrant=False)",
            "if block is self.blocks['first-one'] else block(x)",
            "for module in (self.g[3].attend, self.blocks['second'].mlp):\n",
        ):
            assert line in text
        applied(script, text, "patch", "-p1")
        assert_does_as_planned(script, before, plan)

    def test_a_name_that_is_taken_ends_of_lines_and_a_last_line_without(self, tmp_path: Path) -> None:
        # GIVEN a script that means something else by `checkpoint`, as Windows writes it, with letters beyond ASCII
        source = MODEL.replace("WIDTH = 32", "WIDTH, checkpoint = 32, 'größe.pt'").replace("\n", "\r\n").rstrip()
        script = write(tmp_path, source)
        before, plan = ran(script, planned=True), regions(*ALL)
        text = written(before, plan, tmp_path)
        assert "from torch.utils.checkpoint import checkpoint as checkpoint_\r\n" in text
        applied(script, text)
        changed = script.read_bytes()
        assert changed.count(b"\r\n") == changed.count(b"\n")
        assert_does_as_planned(script, before, plan)

    def test_what_is_imported_already_and_names_in_a_repository(self, tmp_path: Path) -> None:
        folder = tmp_path / "deep" / "inside"
        folder.mkdir(parents=True)
        subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
        script = write(folder, imports="from torch import nn\nfrom torch.utils.checkpoint import checkpoint as ac\n")
        before = ran(script, planned=True)
        text = written(before, regions(*ALL), folder)
        assert f"In {tmp_path}: git apply" in text
        assert "--- a/deep/inside/train.py\n" in text
        assert [line for line in text.splitlines()[4:] if line.startswith("+")] == [
            "+            x = ac(block, x, mask=mask, use_reentrant=False)"]
        subprocess.run(["git", "apply"], cwd=tmp_path, input=text.encode(), check=True)
        assert_does_as_planned(script, before, regions(*ALL))

    @pytest.mark.parametrize(("exchanged", "said"), [
        ({"loop": "        for block in self.blocks:\n            y = x * mask\n"}, "nothing is called there now"),
        ({"loop": "        for block in self.others:\n            x = block(x, mask=mask)\n"}, "cannot be told"),
        ({"loop": "        for block in self.blocks:\n            x = block(x, mask=mask\n"}, "is not Python"),
    ])
    def test_a_file_that_has_changed_since_is_refused(
        self, plain: tuple[str, Ran], tmp_path: Path, exchanged: dict[str, str], said: str
    ) -> None:
        recorded, before = plain
        where = moved(before.sites, recorded, write(tmp_path, **exchanged))
        with pytest.raises(MemdiagError, match=said):
            diff(where, regions(*ALL), str(tmp_path), "A plan.")

    def test_a_file_that_is_gone_is_said(self, plain: tuple[str, Ran], tmp_path: Path) -> None:
        recorded, before = plain
        with pytest.raises(MemdiagError, match=r"gone\.py: No such file"):
            diff(moved(before.sites, recorded, tmp_path / "gone.py"), regions(*ALL), str(tmp_path), "A plan.")

    @pytest.mark.parametrize(("exchanged", "plan", "said"), [
        ({}, regions("blocks.1.mlp.0 blocks.1.mlp.2"), "called by code that is not the script's own"),
        ({}, regions("blocks.1 blocks.3"), "do not follow each other"),
        ({"loop": "        for block in self.blocks:\n            y = block(x, mask=mask)\n            x = y\n"},
         regions("blocks.1 blocks.2"), "the loop does more"),
        ({"loop": "        for block in self.blocks[1:]:\n            x = block(x)\n"}, regions("blocks.1 blocks.2"),
         "over the list of them alone"),
        ({"imports": "from torch import nn; partial = 1\n"}, regions("blocks.1.mlp"), "name of something else"),
    ])
    def test_what_cannot_be_written_is_refused_whole(
        self, plain: tuple[str, Ran], tmp_path: Path, exchanged: dict[str, str], plan: list[Region], said: str
    ) -> None:
        recorded, before = plain
        script = write(tmp_path, **exchanged)
        where = ran(script).sites if "loop" in exchanged else moved(
            before.sites, recorded, write(tmp_path, **exchanged))
        with pytest.raises(MemdiagError, match=said) as refused:
            diff(where, [*plan, Region(("head",))], str(tmp_path), "A plan.")
        assert "--emit code" in str(refused.value)


def spliced(source: str, text: str) -> str:
    """A script with the emitted code in its places, as a person puts it there by hand."""
    ast.parse(text)
    head, *sections = re.split(r"^(?=# train\.py:\d+, in place of$|# Once the model)", text, flags=re.MULTILINE)
    lines = source.splitlines(keepends=True)
    for section in sorted(sections, key=lambda section: section.startswith("# Once")):
        if section.startswith("# Once"):
            place = next(number for number, line in enumerate(lines) if line == "    model = Model()\n")
            lines.insert(place + 1, textwrap.indent(section, "    "))
            continue
        first = int(re.match(r"# train\.py:(\d+)", section)[1])
        old = re.findall(r"^#     (.*)$", section, flags=re.MULTILINE)
        new = section.split("\n", 1 + len(old))[-1].rstrip() + "\n"
        indent = len(lines[first - 1]) - len(lines[first - 1].lstrip())
        assert [line.rstrip()[indent:] for line in lines[first - 1:first - 1 + len(old)]] == old
        lines[first - 1:first - 1 + len(old)] = [textwrap.indent(new, " " * indent), *[""] * (len(old) - 1)]
    return head + "".join(lines)


def after_the_model(source: str, text: str, last: str = "model") -> str:
    """A script with emitted code once the last model is built, and what that imports where the script begins."""
    lines, top = text.splitlines(keepends=True), ""
    for node in reversed(ast.parse(text).body):
        if isinstance(node, (ast.Import, ast.ImportFrom)) or getattr(node, "name", "") == "overloads":
            top = "".join(lines[node.lineno - 1:node.end_lineno]) + top
            del lines[node.lineno - 1:node.end_lineno]
    built = re.search(rf"^    {last} = .*\n", source, flags=re.MULTILINE)
    assert built is not None
    return top + source[:built.end()] + textwrap.indent("".join(lines), "    ") + source[built.end():]


class TestCode:
    @pytest.mark.parametrize(("plan", "forwards"), [
        (regions(*ALL[:2], "blocks.3.mlp", "blocks.4.mlp.0", "head"), 0),
        (regions("blocks.1.mlp.0 blocks.1.mlp.1", "blocks.2.mlp.1 blocks.2.mlp.2", "blocks.3.mlp.0 blocks.3.mlp.1"), 2),
        ([*regions("blocks.1 blocks.2 blocks.3"), *regions("blocks.0.mlp", keep=("aten::addmm",))], 0),
    ])
    def test_put_in_by_hand_the_script_does_as_planned(
        self, plain: tuple[str, Ran], tmp_path: Path, plan: list[Region], forwards: int
    ) -> None:
        recorded, before = plain
        text = code(before.sites, plan, str(Path(recorded).parent), "A plan.", chains(before.seen.trace))
        assert text.count("def forward(") == forwards  # one for all that are alike
        assert_does_as_planned(write(tmp_path, spliced(MODEL, text)), before, plan)

    def test_without_the_file_all_of_it_is_written_for_the_model(
        self, plain: tuple[str, Ran], tmp_path: Path
    ) -> None:
        recorded, before = plain
        plan = [*regions("blocks.0", "blocks.3.attend"), *regions("blocks.1", keep=("aten::addmm.default",))]
        text = code(moved(before.sites, recorded, tmp_path / "gone.py"), plan, str(tmp_path), "A plan.")
        assert "# - blocks.0: gone.py: No such file or directory; the run was recorded with it" in text
        assert_does_as_planned(write(tmp_path, after_the_model(MODEL, text)), before, plan)

    def test_a_run_without_a_loop_that_can_be_rewritten_is_a_function(self, plain: tuple[str, Ran]) -> None:
        recorded, before = plain
        text = code(before.sites, regions("blocks.1.mlp.0 blocks.1.mlp.1"), str(Path(recorded).parent), "A plan.")
        model = runpy.run_path(recorded)["Model"]()
        x = torch.randn(4, 32)
        two = list(model.blocks[1].mlp[:2])
        expected, called = two[1](two[0](x)), []
        for module in two:
            module.register_forward_pre_hook(lambda module, given: called.append(module))
        scope: dict[str, Any] = {"model": model, "x": x}
        exec(text, scope)
        assert torch.equal(scope["x"], expected)
        assert called == two
        scope["x"].sum().backward()
        assert called == two + two  # backward has both run again

    def test_a_copy_of_the_model_runs_its_own_modules(self, plain: tuple[str, Ran], tmp_path: Path) -> None:
        # GIVEN a model whose forwards were exchanged by the code, and a copy of it with weights of its own
        recorded, before = plain
        text = code(moved(before.sites, recorded, tmp_path / "gone.py"), regions(*ALL), str(tmp_path), "A plan.")
        model = runpy.run_path(recorded)["Model"]()
        exec(text, {"model": model})
        copied = copy.deepcopy(model)
        with torch.no_grad():
            copied.blocks[0].attend.weight.zero_()
        copied(torch.randn(4, 32)).sum().backward()
        assert copied.blocks[0].attend.weight.grad.abs().sum() > 0
        assert model.blocks[0].attend.weight.grad is None


def imported(module: str, name: str) -> None:
    """Imports something, and puts it out of the recorder's sight, as if it had been imported when the tests began."""
    getattr(importlib.import_module(module), name)
    gc.collect()
    gc.freeze()


class TestFSDP:
    @pytest.mark.parametrize("plan", [
        regions("blocks.0", "blocks.2", "blocks.4.mlp", "blocks.3.mlp.0", "head"),
        [*regions("blocks.0", keep=("aten::addmm",)), *regions("blocks.1")],
    ])
    def test_the_wrapped_model_does_as_planned(
        self, plain: tuple[str, Ran], tmp_path: Path, plan: list[Region]
    ) -> None:
        _, before = plain
        imported("torch.distributed.fsdp.wrap", "wrap")  # which applying the wrapper needs
        assert_does_as_planned(write(tmp_path, after_the_model(MODEL, fsdp(plan, "A plan."))), before, plan)


SEVERAL = """\
import torch
from torch import nn


def stage():
    return nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*(stage() for _ in range(3)))

    def forward(self, x):
        return self.net(x)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.ModuleList(stage() for _ in range(3))

    def forward(self, x):
        for one in self.net:
            x = one(x)
        return x


def train():
    torch.manual_seed(0)
    g = Generator()
    d = Critic()
    of_g, of_d = torch.optim.SGD(g.parameters(), lr=0.1), torch.optim.SGD(d.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        fake = g(torch.randn(256, 32))
        critic = d(fake.detach()).square().mean()
        critic.backward()
        of_d.step()
        of_d.zero_grad()
        loss = d(fake).square().mean()
        loss.backward()
        of_g.step()
        of_g.zero_grad()
        of_d.zero_grad()
        losses += [critic.item(), loss.item()]
    return losses
"""


class TestSeveralModels:
    PLANS = (regions("net.0", "d.net.1"), regions("net.0 net.1", "d.net.2.0", "d.net.0"), regions("d.net.0"))

    @pytest.fixture(scope="class")
    @staticmethod
    def several(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Ran]:
        folder = tmp_path_factory.mktemp("several")
        return str(folder / "train.py"), ran(write(folder, SEVERAL), planned=True)

    @pytest.mark.parametrize("plan", PLANS)
    @pytest.mark.parametrize("form", [code, fsdp])
    def test_once_they_are_built_the_script_does_as_planned(
        self, several: tuple[str, Ran], tmp_path: Path, plan: list[Region], form: Callable[..., str]
    ) -> None:
        recorded, before = several
        roots = Roots(models(before.seen.trace.about))
        if form is code:
            text = code(moved(before.sites, recorded, tmp_path / "gone.py"), plan, str(tmp_path), "A plan.",
                        chains(before.seen.trace), roots)
        elif all(len(one.modules) == 1 for one in plan):
            imported("torch.distributed.fsdp.wrap", "wrap")
            text = fsdp(plan, "A plan.", roots)
        else:
            return
        assert_does_as_planned(write(tmp_path, after_the_model(SEVERAL, text, "d")), before, plan)

    @pytest.mark.parametrize("plan", PLANS)
    def test_the_script_with_a_diff_does_as_planned(
        self, several: tuple[str, Ran], tmp_path: Path, plan: list[Region]
    ) -> None:
        _, before = several
        script = write(tmp_path, SEVERAL)
        applied(script, written(before, plan, Path(several[0]).parent))
        assert_does_as_planned(script, before, plan)

    def test_a_model_without_a_variable_goes_by_a_name_that_is_said(self) -> None:
        roots = Roots([Model("Net", "Net", "", False, 1), Model("one.1", "Net", "one.1", False, 1),
                       Model("Lambda", "Lambda", "Lambda", False, 1), Model("model", "Net", "model", True, 1)])
        assert roots.built(["0", "one.1.0", "Lambda.0"]) == "Once the models are built, as `model_`, `one_1`, `lambda_`"
        assert [roots.expression(path) for path in ("a.0", "one.1.0", "model.x.2")] == [
            "model_.a[0]", "one_1[0]", "model.x[2]"]

    def test_transformers_has_switches_for_one(self, several: tuple[str, Ran]) -> None:
        _, before = several
        roots = Roots(models(before.seen.trace.about))
        with pytest.raises(MemdiagError, match="modules of g and d, and Transformers switches"):
            hf(before.sites, regions("net.0", "d.net.0"), "A plan.", roots)
        text = hf(before.sites, regions("d.net.0", "d.net.1", "d.net.2"), "A plan.", roots)
        assert "d.activation_checkpointing_enable(activation_checkpointing_kwargs={\"use_reentrant\": False})" in text


LLAMA = """\
import torch
from transformers import LlamaConfig, LlamaForCausalLM


def build():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False)).train()


def train():
    model = build()
    return steps(model)


def steps(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        tokens = torch.randint(64, (4, 32))
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
"""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    pytest.importorskip("transformers", minversion="5.23")
    imported("transformers", "LlamaForCausalLM")
    return ran(write(tmp_path_factory.mktemp("llama"), LLAMA), planned=True)


class TestTransformers:
    @pytest.mark.parametrize(("numbers", "keep", "written"), [
        (range(4), (), 'activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})\n'),
        (range(0, 4, 2), (), "every_n_layers=2)"),
        ((1, 2), (), "it cannot say this plan"),
        (range(4), ("aten::mm",), '"context_fn": partial(create_selective_checkpoint_contexts'),
    ])
    def test_the_layers_run_twice(
        self, llama: Ran, tmp_path: Path, numbers: Sequence[int], keep: tuple[str, ...], written: str
    ) -> None:
        text = hf(llama.sites, regions(*(f"model.layers.{number}" for number in numbers), keep=keep), "A plan.")
        assert written in text
        scope = runpy.run_path(str(write(tmp_path, LLAMA)))
        model = scope["build"]()
        exec(text, {"model": model})
        calls = [0] * 4
        for number, layer in enumerate(model.model.layers):
            def count(*_: Any, number: int = number) -> None:
                calls[number] += 1
            layer.mlp.register_forward_pre_hook(count)
        assert scope["steps"](model) == llama.losses
        assert calls == [6 if number in numbers else 3 for number in range(4)]

    def test_the_peak_is_as_planned(self, llama: Ran, tmp_path: Path) -> None:
        plan = regions("model.layers.1", "model.layers.2")
        source = after_the_model(LLAMA, hf(llama.sites, plan, "A plan."))
        assert_does_as_planned(write(tmp_path, source), llama, plan)

    def test_parts_of_layers_are_refused(self, llama: Ran) -> None:
        with pytest.raises(MemdiagError, match=r"model\.layers\.0\.mlp: Transformers makes checkpoints of whole"):
            hf(llama.sites, regions("model.layers.0.mlp", "model.layers.1"), "A plan.")

    def test_layers_that_are_none_of_its_own_are_said(self, plain: tuple[str, Ran]) -> None:
        recorded, before = plain
        pytest.importorskip("transformers", minversion="5.23")
        text = hf(before.sites, regions("blocks.1"), "A plan.")
        model = runpy.run_path(recorded)["Model"]()
        model.activation_checkpointing_enable = lambda **settings: None
        with pytest.raises(AssertionError, match=r"not layers of Transformers: \{'blocks\.1'\}"):
            exec(text, {"model": model})


class TestCompile:
    def test_the_bytes_are_those_of_a_sum_by_hand(self, plain: tuple[str, Ran]) -> None:
        _, before = plain
        # GIVEN, in units of 64 x 32 float32, what blocks save: what goes into each, and the mask; inside, what comes of
        # the norm (and two numbers for each of 64 rows), the noise of the dropout, what comes of that, 4 and 4 around
        # GELU. And the head: what goes into it, which the last block has made, and 64 x 8 that come of it.
        unit, head = 64 * 32 * 4, 64 * 8 * 4
        inside, given = 5 * (11 * unit + 2 * 64 * 4), 5 * unit + unit
        every = kept_bytes(before.step, regions(*ALL))
        assert every == (given + unit + head, inside + given + unit + head, unit + head)
        # AND with the results of addmm kept: one of the three of a block is saved too, that of the first in its MLP
        kept, whole, least = kept_bytes(before.step, regions(*ALL, keep=("aten::addmm",)))
        assert (kept - every[0], whole, least) == (5 * 4 * unit, every[1], every[2])

    def test_the_compiler_keeps_less_with_it(self, plain: tuple[str, Ran]) -> None:
        _, before = plain
        text = compile_(before.step, regions(*ALL), "A plan.")
        found = re.search(r"activation_memory_budget = ([0-9.]+)", text)
        assert found is not None
        share = float(found[1])
        kept, saved, least = kept_bytes(before.step, regions(*ALL))
        assert share == round((kept - least) / (saved - least), 2)
        torch.manual_seed(0)
        layers = [torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.Tanh(), torch.nn.Linear(128, 32))
                  for _ in range(4)]
        model, x = torch.nn.Sequential(*layers), torch.randn(64, 32)

        def bytes_saved(forward: Callable[[torch.Tensor], torch.Tensor]) -> int:
            torch._dynamo.reset()
            parameters = {parameter.data_ptr() for parameter in model.parameters()}
            found: dict[int, int] = {}

            def pack(tensor: torch.Tensor) -> torch.Tensor:
                if tensor.data_ptr() not in parameters:
                    found[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
                return tensor

            compiled = torch.compile(forward, backend="aot_eager_decomp_partition")
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                out = compiled(x)
            out.sum().backward()
            return sum(found.values())

        def within_budget(x: torch.Tensor) -> torch.Tensor:
            with torch.autograd.graph.region_activation_memory_budget(share):
                return model(x)

        without, budget = bytes_saved(model), "activation_memory_budget"
        scope: dict[str, Any] = {}
        config = torch._functorch.config
        with config.patch({budget: 0.0}):
            least_of_it = bytes_saved(model)
        with config.patch({budget: 1.0}):  # is set back at the end
            exec(text, scope)
            assert config.activation_memory_budget == share
            with_it = bytes_saved(model)
        # THEN no more than the share of what lies between nothing and its own choice
        assert 0 < share < 1
        assert least_of_it <= with_it <= least_of_it + share * (without - least_of_it)
        assert least_of_it < without
        if hasattr(torch.autograd.graph, "region_activation_memory_budget"):
            assert f"region_activation_memory_budget({share})" in text
            assert bytes_saved(within_budget) == with_it


def memdiag(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "memdiag", *arguments], cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)})


SMALL = """\
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x):
        return x + self.down(self.up(x).tanh().exp())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(3):
    loss = model(torch.randn(64, 32)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item())
"""


class TestCommand:
    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """A script and a run of it that was recorded for plans."""
        folder = tmp_path_factory.mktemp("command")
        write(folder, SMALL)
        done = memdiag(folder, "profile", "--plan", "-q", "--no-report", "-o", "run.mdiag", "train.py")
        assert done.returncode == 0, done.stderr
        return folder

    def test_the_script_with_the_diff_of_the_chosen_plan_has_its_losses_and_its_peak(
        self, folder: Path, tmp_path: Path
    ) -> None:
        # GIVEN a budget half-way to the least peak
        plans = json.loads(memdiag(folder, "plan", "run.mdiag", "--json", "-").stdout)
        budget = (plans["baseline"]["peak_bytes"] + min(
            plan["predicted"]["peak_bytes"] for plan in plans["plans"])) // 2
        found = json.loads(memdiag(folder, "plan", "run.mdiag", "--budget", str(budget), "--json", "-").stdout)
        chosen = found["plans"][found["chosen"]]
        assert chosen["regions"]
        # WHEN what --emit prints goes straight into git apply
        emitted = memdiag(folder, "plan", "run.mdiag", "--budget", str(budget), "--emit", "diff")
        assert emitted.returncode == 0, emitted.stderr
        script = tmp_path / "train.py"
        script.write_bytes((folder / "train.py").read_bytes())
        applied(script, emitted.stdout)
        # THEN the changed script prints the same losses, and its third step has the peak that the plan foresaw
        bare, changed = (subprocess.run([sys.executable, "train.py"], cwd=where, capture_output=True, text=True,
                                        check=True).stdout for where in (folder, tmp_path))
        assert changed == bare
        done = memdiag(tmp_path, "profile", "-q", "--no-report", "--json", "report.json", "-o", "run.mdiag", "train.py")
        assert done.returncode == 0, done.stderr
        report = json.loads((tmp_path / "report.json").read_text())
        assert chosen["predicted"]["peak_bytes"] == max(
            phase["peak_bytes"] for phase in report["phases"] if phase["step"] == PLANNED_STEP)

    @pytest.mark.parametrize(("form", "holds"), [
        ("code", "from torch.utils.checkpoint import checkpoint"),
        ("fsdp", "apply_activation_checkpointing("), ("compile", "activation_memory_budget = 0."),
    ])
    def test_what_is_printed_is_python_alone(self, folder: Path, form: str, holds: str) -> None:
        done = memdiag(folder, "plan", "run.mdiag", "--minimum", "--emit", form)
        assert done.returncode == 0, done.stderr
        ast.parse(done.stdout)
        assert done.stdout.startswith("# Checkpoints for train.py, planned by memdiag: the peak of the step falls from")
        assert holds in done.stdout

    @pytest.mark.parametrize(("arguments", "said"), [
        (("--budget", "1KiB", "--emit", "code"), "there is no plan to write: none fits 1.0 KiB"),
        (("--budget", "1GiB", "--emit", "diff"), "the chosen plan has no checkpoint, for the budget is kept without"),
        (("--emit", "yaml"), "'yaml' is not one of"),
        (("--emit", "code", "--json", "-"), "--emit prints the plan alone"),
    ])
    def test_what_is_not_emitted_is_said(self, folder: Path, arguments: tuple[str, ...], said: str) -> None:
        done = memdiag(folder, "plan", "run.mdiag", *arguments)
        assert done.returncode == 2
        assert said in done.stderr
        assert done.stdout == ""


def test_what_is_unsafe_is_not_written(tmp_path: Path) -> None:
    script = write(tmp_path, SMALL.split("torch.manual_seed")[0] + MODEL[MODEL.index("def train"):].replace(
        "WIDTH", "32"))
    planning = plans(ran(script, planned=True).view, smallest=True)
    _, found = chosen(planning)
    path = found[0].modules[-1]
    unsafe = Verdict(path, Safety.UNSAFE, reasons=(Reason("buffer `mean` changes", None),))
    with pytest.raises(MemdiagError, match=f"{path}: is in the plan, and unsafe to run twice: buffer `mean` changes"):
        chosen(replace(planning, safety={**planning.safety, path: unsafe}))
    # BUT where it is allowed by name
    assert chosen(replace(planning, safety={**planning.safety, path: unsafe}, allowed=frozenset({path})))[1]
