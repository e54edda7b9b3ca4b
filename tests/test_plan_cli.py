"""``memdiag plan`` and ``memdiag profile --plan`` on real scripts, as subprocesses."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from recording import ROOT
from torch import nn

from memdiag.apply import apply_plan
from memdiag.cli.output import FAILED
from memdiag.errors import MemdiagError

SCRIPT = """\
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(4):
    x = torch.randn(256, 64)
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
"""


def memdiag(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "memdiag", *arguments], cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment})


def on_a_terminal(folder: Path, *arguments: str) -> str:
    """What a command writes to standard error where that is a terminal."""
    ours, its = pty.openpty()
    with open(ours, "rb", buffering=0) as terminal:
        process = subprocess.Popen(
            [sys.executable, "-m", "memdiag", *arguments], cwd=folder, stdout=subprocess.DEVNULL, stderr=its,
            env={**os.environ, "PYTHONPATH": str(ROOT)})
        os.close(its)
        seen = b""
        with contextlib.suppress(OSError):  # so Linux says that the other end was closed
            while part := terminal.read(4096):
                seen += part
        assert process.wait() == 0
    return seen.decode()


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A folder with a run that was recorded for plans, and what was printed then."""
    folder = tmp_path_factory.mktemp("planned")
    (folder / "train.py").write_text(SCRIPT)
    done = memdiag(folder, "profile", "--plan", "-o", "run.mdiag", "train.py")
    assert done.returncode == 0, done.stderr
    return folder, done.stdout, done.stderr


@pytest.fixture(scope="module")
def in_one_go(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A folder with a script that was run and planned for, and what came of it."""
    folder = tmp_path_factory.mktemp("script")
    (folder / "train.py").write_text("import sys\nprint(sys.argv[1:])\n" + SCRIPT)
    return folder, memdiag(
        folder, "plan", "--minimum", "--json", "plan.json", "--plot", "plans.pdf", "-o", "run.mdiag", "train.py",
        "--minimum", "-x")


class TestProfile:
    def test_the_plans_come_after_the_report_and_the_script_is_as_always(
        self, planned: tuple[Path, str, str]
    ) -> None:
        folder, out, err = planned
        bare = subprocess.run([sys.executable, "train.py"], cwd=folder, capture_output=True, text=True, check=True)
        assert out == bare.stdout
        assert err.index("Verdict:") < err.index("Checkpoints for train.py") < err.index("Chosen")
        # AND how the two go together, and how to have the plan file
        bound = re.search(r"lower the peak by (.* MiB) at most", err)
        assert bound is not None
        assert f"The verdict's {bound[1]} is a bound" in err
        assert "memdiag plan run.mdiag --json plan.json" in err
        report, _ = err.split("memdiag: recorded")
        assert all(len(line) <= 80 for line in report.splitlines())

    def test_a_script_without_a_third_step_is_told_so(self, tmp_path: Path) -> None:
        (tmp_path / "train.py").write_text(SCRIPT.replace("range(4):\n    x", "range(2):\n    x"))
        done = memdiag(tmp_path, "profile", "--plan", "-q", "train.py")
        assert done.returncode == 0
        assert "no step of this run was recorded for plans" in done.stderr

    @pytest.mark.parametrize(("options", "said"), [
        (("--steps", "3:9"), "--plan needs step 2 recorded in full"), (("--steps", ":2"), "with 0:3 it is"),
        (("--stop-after", "2"), "3 is enough")])
    def test_options_that_leave_the_third_step_out_are_refused(
        self, tmp_path: Path, options: tuple[str, ...], said: str
    ) -> None:
        (tmp_path / "train.py").write_text("print('ran')")
        done = memdiag(tmp_path, "profile", "--plan", *options, "train.py")
        assert (done.returncode, done.stdout) == (2, "")
        assert said in done.stderr


class TestPlan:
    def test_it_is_the_same_from_the_file(self, planned: tuple[Path, str, str]) -> None:
        folder, _, err = planned
        done = memdiag(folder, "plan", "run.mdiag")
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() in err

    def test_while_it_plans_a_terminal_says_so(self, planned: tuple[Path, str, str]) -> None:
        folder, _, _ = planned
        line, gone = "\rmemdiag: planning ...\x1b[K", "\r\x1b[K"
        # WHEN it plans from a file where someone looks THEN a line says so, and goes
        assert on_a_terminal(folder, "plan", "run.mdiag") == line + gone
        # AND of a script before the plans are told
        seen = on_a_terminal(folder, "plan", "-o", "seen.mdiag", "train.py")
        assert line + gone + "Checkpoints for train.py" in seen
        # AND there is none where it is to be quiet, or where nobody looks
        assert on_a_terminal(folder, "plan", "-q", "run.mdiag") == ""
        assert memdiag(folder, "plan", "run.mdiag").stderr == ""

    def test_the_json_holds_the_contract(self, planned: tuple[Path, str, str]) -> None:
        folder, _, _ = planned
        done = memdiag(folder, "plan", "run.mdiag", "--json", "-")
        found = json.loads(done.stdout)
        assert list(found) == [
            "schema_version", "about", "present", "other_inputs", "baseline", "budget_bytes", "plans", "chosen",
            "floor", "gains", "poor_choices", "safety"]
        assert found["plans"][0]["name"] == "none"
        assert found["plans"][0]["predicted"]["peak_bytes"] == found["baseline"]["peak_bytes"]
        blocks = next(plan for plan in found["plans"] if plan["name"] == "every_block")
        assert [region["modules"] for region in blocks["regions"]] == [["0"], ["1"], ["2"]]
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
        parameters = 3 * 4 * (64 * 256 + 256 + 256 * 64 + 64)
        assert {"what": "parameters", "bytes": parameters} in found["floor"]["holders"]
        # AND the exit status, what is left, and what to do about it
        done = memdiag(folder, "plan", "run.mdiag", "--budget", "100KiB")
        assert (done.returncode, done.stderr) == (FAILED, "")
        for said in ("No plan fits", "above the budget", "What would help instead", "> parameters: ",
                     "`memdiag diagnose RUN`"):
            assert said in done.stdout

    def test_the_smallest_is_not_bought_at_any_price(self, planned: tuple[Path, str, str]) -> None:
        folder, _, _ = planned
        found = json.loads(memdiag(folder, "plan", "run.mdiag", "--minimum", "--json", "-").stdout)
        all_of_them = [plan["predicted"] for plan in found["plans"]]
        lowest = min(plan["peak_bytes"] for plan in all_of_them)
        as_low = [plan for plan in all_of_them if plan["peak_bytes"] <= lowest + found["baseline"]["peak_bytes"] / 1000]
        assert found["plans"][found["chosen"]]["predicted"]["step_time_ns"] == min(
            plan["step_time_ns"] for plan in as_low)

    def test_what_is_set_aside_is_taken_off_the_budget(self, planned: tuple[Path, str, str]) -> None:
        folder, _, _ = planned
        every = json.loads(memdiag(folder, "plan", "run.mdiag", "--choose", "every_2nd_block", "--json", "-").stdout)
        wanted = every["plans"][every["chosen"]]
        assert wanted["name"] == "every_2nd_block"
        assert (wanted["headroom_bytes"], wanted["set_aside"]) == (None, {})
        # GIVEN a budget in which a plan fits beside what is set aside, to the byte, or is a byte too large
        budget = wanted["predicted"]["peak_bytes"] + 5 * 2**20
        for short in (0, 1):
            arguments = ("--budget", str(budget - short), "--set-aside", "5MiB")
            found = json.loads(memdiag(folder, "plan", *arguments, "run.mdiag", "--json", "-").stdout)
            same = next(plan for plan in found["plans"] if plan["name"] == "every_2nd_block")
            assert same["set_aside"] == {"asked_for": 5 * 2**20}
            assert same["headroom_bytes"] == -short
            chosen = found["plans"][found["chosen"]]
            assert chosen["predicted"]["peak_bytes"] <= budget - short - 5 * 2**20
        text = memdiag(folder, "plan", "run.mdiag", "--budget", str(budget), "--set-aside", "5MiB").stdout
        assert "set aside  5.0 MiB as asked for" in text
        assert "5.0 MiB set aside" in text[text.index("Chosen"):]

    def test_the_picture(self, planned: tuple[Path, str, str]) -> None:
        folder, _, _ = planned
        done = memdiag(folder, "plan", "run.mdiag", "--plot", "plans.svg")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.endswith("wrote plans.svg\n")
        assert "train.py, step 2" in (folder / "plans.svg").read_text()
        # AND a second time only where it may, and without a word where it is to be quiet
        assert "exists already" in memdiag(folder, "plan", "run.mdiag", "--plot", "plans.svg").stderr
        assert "wrote" not in memdiag(folder, "plan", "run.mdiag", "--plot", "plans.svg", "-f", "-q").stdout

    def test_what_is_not_safe_to_run_twice_is_in_no_plan(self, tmp_path: Path) -> None:
        # GIVEN layers of which one in two moves statistics, with the line that calls it
        (tmp_path / "train.py").write_text(SCRIPT.replace("nn.GELU()", "nn.BatchNorm1d(256), nn.GELU()"))
        done = memdiag(tmp_path, "profile", "--plan", "-o", "run.mdiag", "train.py")
        assert "Not safe to run twice" in done.stderr
        found = json.loads(memdiag(tmp_path, "plan", "run.mdiag", "--minimum", "--json", "-").stdout)
        safety = {row["module"]: row for row in found["safety"]}
        unsafe = {module for module, row in safety.items() if row["verdict"] == "unsafe"}
        assert {"0.1", "2.1", "0", "2"} <= unsafe
        assert unsafe.isdisjoint(f"{block}.{part}" for block in range(3) for part in (0, 2, 3))
        changed = "buffers `0.1.num_batches_tracked`, `0.1.running_mean` and `0.1.running_var` change"
        assert [reason["text"] for reason in safety["0.1"]["reasons"]] == [f"{changed}, and would change twice"]
        regions = [region for plan in found["plans"] for region in plan["regions"]]
        assert unsafe.isdisjoint(path for region in regions for path in region["modules"])

        # AND what is only around them is told as that
        text = memdiag(tmp_path, "plan", "run.mdiag").stdout
        unsafe_lines = text[text.index("Not safe"):]
        named = "- 0-2.1: buffers `num_batches_tracked`, `running_mean` and `running_var` change,"
        assert named in unsafe_lines.replace("\n    ", " ")
        assert "more" not in unsafe_lines[:unsafe_lines.index("for what is in them")]
        assert "- 0-2, the whole model: for what is in them" in unsafe_lines
        # WHEN one is allowed by name
        assert memdiag(tmp_path, "plan", "run.mdiag", "--allow", "0", "--minimum", "--json", "a.json").returncode == 0
        found = json.loads((tmp_path / "a.json").read_text())
        row = next(row for row in found["safety"] if row["module"] == "0")
        assert (row["verdict"], row["allowed"]) == ("unsafe", True)
        assert not any(row["allowed"] for row in found["safety"] if row["module"] != "0")
        inside = {path for plan in found["plans"] for region in plan["regions"] for path in region["modules"]}
        assert inside & unsafe == {"0"}
        # THEN it is said, and the file goes onto a model only where it is allowed there too
        found["chosen"] = next(number for number, plan in enumerate(found["plans"])
                               if any(region["modules"] == ["0"] for region in plan["regions"]))
        model = nn.Sequential(*(nn.Sequential(
            nn.Linear(64, 256), nn.BatchNorm1d(256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)))
        with pytest.raises(MemdiagError, match=r"0: is unsafe to run twice.*allow_unsafe=\['0'\]"):
            apply_plan(model, found)
        assert ("0",) in [region.modules for region in apply_plan(model, found, allow_unsafe=["0"]).regions]
        name = found["plans"][found["chosen"]]["name"]
        text = memdiag(tmp_path, "plan", "run.mdiag", "--allow", "0", "--choose", name).stdout
        assert "though not safe: 0: buffers" in text
        # AND a range, or a pattern, allows all that it stands for
        for asked, modules in (("0-1.1", {"0.1", "1.1"}), ("*.1", {"0.1", "1.1", "2.1"})):
            found = json.loads(memdiag(tmp_path, "plan", "run.mdiag", "--allow", asked, "--json", "-").stdout)
            assert {row["module"] for row in found["safety"] if row["allowed"]} == modules
        assert "0-2, the whole model (allowed: 0): for what is in them" in text

    @pytest.mark.parametrize(("arguments", "said"), [
        (("run.mdiag", "--budget", "24G"), "'24G' is not a size"),
        (("run.mdiag", "--budget", "20"), "20 is in bytes; with a unit it is, say, 20GiB"),
        (("plan.json",), "plan.json is no script"),
        (("run.mdiag", "--budget", "1GiB", "--minimum"), "choose different plans"),
        (("run.mdiag", "--minimum", "--choose", "none"), "choose different plans"),
        (("run.mdiag", "--set-aside", "1MiB"), "give --budget too"),
        (("run.mdiag", "--choose", "frontier"), "there is none, every_block, every_2nd_block"),
        (("run.mdiag", "--choose", "within_budget"), "the plan that --budget SIZE chooses"),
        (("--choose", "every_4th_block", "train.py"), "there may be none, every_block, every_2nd_block"),
        (("run.mdiag", "--allow", "2-7"), "3: no module of this name was called"),
        (("run.mdiag", "--allow", "2.x"), "2.x: no module of this name was called"),
        (("run.mdiag", "--plot", "plans.jpg"), "ends in .png, .svg or .pdf"),
        (("run.mdiag", "-o", "other.mdiag"), "-o names the file that a script is recorded in"),
        (("run.mdiag", "--minimum", "more"), "one argument too many"),
        (("none.mdiag",), "none.mdiag"),
    ])
    def test_bad_input_is_said(self, planned: tuple[Path, str, str], arguments: tuple[str, ...], said: str) -> None:
        folder, _, _ = planned
        done = memdiag(folder, "plan", *arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert said in done.stderr

    def test_a_run_that_was_recorded_without_is_told_how(self, planned: tuple[Path, str, str]) -> None:
        folder, _, _ = planned
        assert memdiag(folder, "profile", "-q", "--no-report", "-o", "bare.mdiag", "train.py").returncode == 0
        done = memdiag(folder, "plan", "bare.mdiag")
        assert done.returncode == 2
        assert "`memdiag plan SCRIPT`" in done.stderr
        assert "`memdiag profile --plan SCRIPT`" in done.stderr


class TestScript:
    """In one go: the script under recording, until its third step has ended, then plans."""

    def test_the_script_is_as_always_to_the_third_step(
        self, in_one_go: tuple[Path, subprocess.CompletedProcess[str]]
    ) -> None:
        folder, ran = in_one_go
        bare = subprocess.run(
            [sys.executable, "train.py", "--minimum", "-x"], cwd=folder, capture_output=True, text=True, check=True)
        assert ran.returncode == 0, ran.stderr
        # THEN its output is that of the steps that ended; the third prints after that
        assert ran.stdout == "".join(bare.stdout.splitlines(keepends=True)[:3])
        assert ran.stdout.startswith("['--minimum', '-x']\n0 ")

    def test_plans_are_told_and_written(self, in_one_go: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
        folder, ran = in_one_go
        text, hint = ran.stderr.split("memdiag: wrote", maxsplit=1)
        assert text.startswith("Checkpoints for train.py\n")
        assert all(len(line) <= 80 for line in text.splitlines())
        assert "plan.json\nmemdiag: wrote plans.pdf\nmemdiag: recorded in run.mdiag; next:\n" in hint
        assert "memdiag.apply_plan(model, 'plan.json')" in hint
        assert (folder / "plans.pdf").read_bytes().startswith(b"%PDF")
        # AND the file is that of the verb that reads, and goes onto the model
        again = memdiag(folder, "plan", "run.mdiag", "--minimum", "--json", "-")
        assert again.stdout == (folder / "plan.json").read_text()
        model = nn.Sequential(*(nn.Sequential(
            nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(3)))
        assert apply_plan(model, folder / "plan.json").regions

    @pytest.mark.parametrize(("after", "arguments", "status", "said"), [
        ("raise SystemExit(7)", ("--budget", "100KiB"), 7, "no step of this run was recorded for plans"),
        ("1 / 0", (), 1, "ZeroDivisionError"),
        ("", (), 2, "no step of this run was recorded for plans"),
    ])
    def test_the_script_s_own_status_comes_first(
        self, tmp_path: Path, after: str, arguments: tuple[str, ...], status: int, said: str
    ) -> None:
        # GIVEN a script that ends before its third step
        (tmp_path / "train.py").write_text(SCRIPT.replace("range(4):\n    x", "range(2):\n    x") + after)
        done = memdiag(tmp_path, "plan", *arguments, "train.py")
        assert (done.returncode, said in done.stderr) == (status, True), done.stderr
        (run,) = tmp_path.glob("memdiag-train.*.mdiag")
        assert f"memdiag report {run.name}" in done.stderr

    def test_no_plan_that_fits_and_ranks(self, tmp_path: Path) -> None:
        # GIVEN a script whose third step ends, a budget that is too small, and the second of two ranks
        package = tmp_path / "train"
        package.mkdir()
        (package / "__main__.py").write_text(SCRIPT)
        arguments = ("plan", "-q", "--budget", "100KiB", "--json", "plan.json", "-m", "train")
        done = memdiag(tmp_path, *arguments)
        assert done.returncode == FAILED
        assert "No plan fits" in done.stderr
        second = memdiag(tmp_path, *arguments, RANK="1", WORLD_SIZE="2")
        assert (second.returncode, second.stderr) == (FAILED, "")
        # THEN names have the rank, and the file says that none is chosen
        assert len(list(tmp_path.glob("memdiag-train.rank1.*.mdiag"))) == 1
        for name in ("plan.json", "plan.rank1.json"):
            assert json.loads((tmp_path / name).read_text())["chosen"] is None

    def test_a_compiled_model_is_told_apart(self, tmp_path: Path) -> None:
        # GIVEN a script whose model runs compiled WHEN it is planned THEN it is said that it does, and what to do
        changes = (("model(x) - x", "compiled(x) - x"),
                   ("for step in", 'compiled = torch.compile(model, backend="aot_eager")\nfor step in'))
        text = SCRIPT
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        (tmp_path / "train.py").write_text(text)
        done = memdiag(tmp_path, "plan", "-q", "train.py")
        assert done.returncode == 2
        assert "`OptimizedModule` runs compiled" in done.stderr
        # AND with that there is a plan
        done = memdiag(tmp_path, "plan", "-q", "train.py", TORCH_COMPILE_DISABLE="1")
        assert done.returncode == 0, done.stderr

    def test_nothing_to_plan_for(self, tmp_path: Path) -> None:
        (tmp_path / "train.py").write_text("print('hello')\n")
        done = memdiag(tmp_path, "plan", "-q", "train.py")
        assert (done.returncode, done.stdout) == (2, "hello\n")
        assert "the script never imported torch" in done.stderr
