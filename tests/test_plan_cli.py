"""``memdiag profile --plan`` and ``memdiag plan`` on real scripts, as subprocesses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from recording import ROOT

SCRIPT = """\
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(4):
    x = torch.randn(256, 64)
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
"""


def memdiag(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "memdiag", *arguments], cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)})


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A folder with a run that was recorded for plans, and what was printed then."""
    folder = tmp_path_factory.mktemp("planned")
    (folder / "train.py").write_text(SCRIPT)
    done = memdiag(folder, "profile", "--plan", "-o", "run.mdiag", "train.py")
    assert done.returncode == 0, done.stderr
    return folder, done.stdout, done.stderr


class TestProfile:
    def test_the_plans_come_after_the_report_and_the_script_is_as_always(
        self, planned: tuple[Path, str, str]
    ) -> None:
        folder, out, err = planned
        bare = subprocess.run([sys.executable, "train.py"], cwd=folder, capture_output=True, text=True, check=True)
        assert out == bare.stdout
        assert err.index("Verdict:") < err.index("Checkpoints for train.py") < err.index("Chosen")
        assert all(len(line) <= 80 for line in err.splitlines())

    def test_a_script_without_a_third_step_is_told_so(self, tmp_path: Path) -> None:
        (tmp_path / "train.py").write_text(SCRIPT.replace("range(4):\n    x", "range(2):\n    x"))
        done = memdiag(tmp_path, "profile", "--plan", "-q", "train.py")
        assert done.returncode == 0
        assert "no step of this run was recorded for plans" in done.stderr


class TestPlan:
    def test_it_is_the_same_from_the_file(self, planned: tuple[Path, str, str]) -> None:
        folder, _, err = planned
        done = memdiag(folder, "plan", "run.mdiag")
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() in err

    def test_the_json_holds_the_contract(self, planned: tuple[Path, str, str]) -> None:
        folder, _, _ = planned
        done = memdiag(folder, "plan", "run.mdiag", "--json", "-")
        found = json.loads(done.stdout)
        assert list(found) == [
            "schema_version", "about", "baseline", "budget_bytes", "plans", "chosen", "floor", "safety"]
        assert found["plans"][0]["name"] == "none"
        assert found["plans"][0]["predicted"]["peak_bytes"] == found["baseline"]["peak_bytes"]
        blocks = next(plan for plan in found["plans"] if plan["name"] == "every_block")
        assert [region["modules"] for region in blocks["regions"]] == [["0"], ["1"], ["2"], ["3"]]
        # AND the frontier falls, and costs more and more
        frontier = [plan["predicted"] for plan in found["plans"] if plan["name"].startswith("frontier")]
        assert frontier == sorted(frontier, key=lambda plan: -plan["peak_bytes"])
        assert frontier == sorted(frontier, key=lambda plan: plan["step_time_ns"])

    def test_a_budget_has_the_cheapest_plan_that_fits(self, planned: tuple[Path, str, str]) -> None:
        folder, _, _ = planned
        every = json.loads(memdiag(folder, "plan", "run.mdiag", "--json", "-").stdout)
        budget = (every["baseline"]["peak_bytes"] + min(
            plan["predicted"]["peak_bytes"] for plan in every["plans"])) // 2
        found = json.loads(memdiag(folder, "plan", "run.mdiag", "--budget", str(budget), "--json", "-").stdout)
        chosen = found["plans"][found["chosen"]]
        assert chosen["headroom_bytes"] == budget - chosen["predicted"]["peak_bytes"] >= 0
        assert chosen["predicted"]["step_time_ns"] == min(
            plan["predicted"]["step_time_ns"] for plan in found["plans"] if plan["predicted"]["peak_bytes"] <= budget)

    def test_where_none_fits_the_floor_is_told(self, planned: tuple[Path, str, str]) -> None:
        folder, _, _ = planned
        found = json.loads(memdiag(folder, "plan", "run.mdiag", "--budget", "100KiB", "--json", "-").stdout)
        assert found["chosen"] is None
        assert sum(holder["bytes"] for holder in found["floor"]["holders"]) == found["floor"]["bytes"]
        parameters = 4 * 4 * (64 * 256 + 256 + 256 * 64 + 64)
        assert {"what": "parameters", "bytes": parameters} in found["floor"]["holders"]
        text = memdiag(folder, "plan", "run.mdiag", "--budget", "100KiB").stdout
        assert "No plan fits" in text
        assert "above the budget" in text

    def test_the_smallest_is_chosen_where_it_is_asked_for(self, planned: tuple[Path, str, str]) -> None:
        folder, _, _ = planned
        found = json.loads(memdiag(folder, "plan", "run.mdiag", "--minimum", "--json", "-").stdout)
        assert found["plans"][found["chosen"]]["predicted"]["peak_bytes"] == min(
            plan["predicted"]["peak_bytes"] for plan in found["plans"])

    def test_what_is_not_safe_to_run_twice_is_in_no_plan(self, tmp_path: Path) -> None:
        # GIVEN layers of which one in two moves statistics, with the line that calls it
        (tmp_path / "train.py").write_text(SCRIPT.replace("nn.GELU()", "nn.BatchNorm1d(256), nn.GELU()"))
        done = memdiag(tmp_path, "profile", "--plan", "-o", "run.mdiag", "train.py")
        assert "Not safe to run twice" in done.stderr
        found = json.loads(memdiag(tmp_path, "plan", "run.mdiag", "--minimum", "--json", "-").stdout)
        safety = {row["module"]: row for row in found["safety"]}
        unsafe = {module for module, row in safety.items() if row["verdict"] == "unsafe"}
        assert {"0.1", "3.1", "0", "3"} <= unsafe
        assert unsafe.isdisjoint(f"{block}.{part}" for block in range(4) for part in (0, 2, 3))
        assert "running_mean" in " ".join(reason["text"] for reason in safety["0.1"]["reasons"])
        regions = [region for plan in found["plans"] for region in plan["regions"]]
        assert unsafe.isdisjoint(path for region in regions for path in region["modules"])

    @pytest.mark.parametrize(("arguments", "said"), [
        (("run.mdiag", "--budget", "24G"), "'24G' is not a size"),
        (("run.mdiag", "--budget", "1GiB", "--minimum"), "choose different plans"),
        (("none.mdiag",), "none.mdiag"),
    ])
    def test_bad_input_is_said(self, planned: tuple[Path, str, str], arguments: tuple[str, ...], said: str) -> None:
        folder, _, _ = planned
        done = memdiag(folder, "plan", *arguments)
        assert done.returncode != 0
        assert said in done.stderr

    def test_a_run_that_was_recorded_without_is_told_how(self, planned: tuple[Path, str, str]) -> None:
        folder, _, _ = planned
        assert memdiag(folder, "profile", "-q", "--no-report", "-o", "bare.mdiag", "train.py").returncode == 0
        done = memdiag(folder, "plan", "bare.mdiag")
        assert done.returncode == 2
        assert "`memdiag profile --plan SCRIPT`" in done.stderr
