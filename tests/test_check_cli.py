"""``memdiag check`` as a command: what it prints and writes, its exit statuses, and what a sudden end leaves."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from memdiag.check.check import NOTHING_COMPARED, Check, Request, Verdict
from memdiag.check.compare import Outcome
from memdiag.check.entries import Stage
from memdiag.cli.check import _request
from memdiag.record.process.launch import Target
from memdiag.report.check import check_to_markdown, render_check

SCRIPT = """\
import sys
import torch
from torch import nn

torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.drop = nn.Linear(32, 128), nn.Linear(128, 32), nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.fc2(torch.tanh(self.fc1(x))))


model = nn.Sequential(*(Block() for _ in range(4)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(8):
    optimizer.zero_grad()
    model(torch.randn(512, 32)).square().mean().backward()
    optimizer.step()
    print("step", step, *sys.argv[1:])
"""


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "memdiag", "check", *arguments]


def memdiag(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, **environment})


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A script, checked with all its blocks as checkpoints."""
    folder = tmp_path_factory.mktemp("checked")
    (folder / "train.py").write_text(SCRIPT)
    done = memdiag(
        folder, "--checkpoint", "0-3", "--rounds", "1", "--timed-steps", "4", "--json", "check.json", "--markdown",
        "check.md", "train.py", "--word")
    return folder, done


class TestCommand:
    def test_it_is_the_same_training_and_saves_memory(
        self, checked: tuple[Path, subprocess.CompletedProcess[str]]
    ) -> None:
        # GIVEN a correct plan / WHEN the script is checked
        folder, done = checked
        # THEN the status, the first line and the JSON say so
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.startswith("train.py --word: the same training\n")
        held = json.loads((folder / "check.json").read_text(encoding="utf-8"))
        assert held["verdict"] == "same_training"
        assert set(held["stages"].values()) == {"equal"}
        assert held["first_difference"] is None
        # AND the peak fell: of each block's saves some hidden tensor of 512 × 128 floats is gone for three blocks
        memory = held["memory"]
        assert memory["baseline_peak_bytes"] - memory["plan_peak_bytes"] >= 3 * 512 * 128 * 4
        assert memory["predicted_peak_bytes"] is None
        # AND both were timed, by so many examples a step
        time_ = held["time"]
        assert min(time_["baseline_step_ns"], time_["plan_step_ns"]) > 0
        assert time_["baseline"]["examples_per_step"] == time_["plan"]["examples_per_step"] == 512
        # AND what the script prints is kept back
        assert "step 0" not in done.stdout + done.stderr

    def test_the_report_fits_a_terminal(self, checked: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
        _, done = checked
        assert max(map(len, done.stdout.splitlines())) <= 80
        for word in ("inputs", "random state", "peak", "step time", "examples a second", "torch 2.", "0-3", "float32"):
            assert word in done.stdout

    def test_the_markdown_has_both_tables(self, checked: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
        text = (checked[0] / "check.md").read_text(encoding="utf-8")
        assert text.startswith("**`train.py --word`: the same training**\n")
        assert text.count("|---") >= 2
        assert re.search(r"^\| gradients +\| equal +\|$", text, re.MULTILINE)

    def test_what_is_there_is_not_replaced(self, checked: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
        folder, _ = checked
        before = (folder / "check.json").read_bytes()
        done = memdiag(folder, "--checkpoint", "*", "--json", "check.json", "train.py")
        assert done.returncode == 2
        assert "check.json: exists already; add --force" in done.stderr
        assert (folder / "check.json").read_bytes() == before


def test_a_plan_of_other_arguments_predicts_nothing_of_these(tmp_path: Path) -> None:
    # GIVEN a plan that was made with a smaller batch
    said = {"peak_bytes": 5, "step_time_ns": 7}
    plan = {
        "schema_version": 1, "about": {"argv": ["train.py", "--batch", "8"]}, "baseline": said, "chosen": 0,
        "plans": [{"name": "a", "regions": [{"modules": ["0"], "kind": "full", "keep": []}], "predicted": said}],
        "safety": []}
    (tmp_path / "plan.json").write_text(json.dumps(plan))

    def asked(*args: str) -> Request:
        return _request([Target("train.py", None, args)], str(tmp_path / "plan.json"), (), (), None, (3, 0, 4))

    # WHEN it is checked with these THEN what it predicts stands beside, and with others it is said that it does not
    assert asked("--batch", "8").predicted is not None
    other = asked("--batch", "64")
    assert other.predicted is None
    found = Check(other, Verdict.SAME, dict.fromkeys(Stage, Outcome.EQUAL), steps=3)
    for text in (render_check(found), check_to_markdown(found)):
        assert "plan was made with other arguments (--batch 8)" in " ".join(text.split())


def test_the_markdown_says_what_was_compared() -> None:
    # GIVEN checks with another script, with small arguments, and one that could not run
    script, other = Target("train.py", None, ("--batch", "64")), Target("other.py", None, ())
    few = Request(script, None, None, ("--batch", "8"), 3, 0, 4)
    text = check_to_markdown(Check(few, Verdict.SAME, dict.fromkeys(Stage, Outcome.EQUAL), steps=1))
    failed = Check(
        Request(script, other, None, None, 3, 0, 4), Verdict.COULD_NOT_RUN, NOTHING_COMPARED, why_not="it fails")
    # THEN each is told as on a terminal, and there is no table of what was not compared
    assert "Values compared with other arguments: --batch 8; memory and time are of its own." in text
    assert "| 1 step" in text
    assert "The second script: other.py." in check_to_markdown(failed)
    assert "|" not in check_to_markdown(failed)


@pytest.mark.parametrize(("arguments", "said"), [
    (("train.py",), "give one of --plan, --checkpoint and --against"),
    (("--plan", "plan.json", "--checkpoint", "*", "train.py"), "give one of --plan, --checkpoint and --against"),
    (("--plan", "nowhere.json", "train.py"), "nowhere.json: No such file"),
    (("--checkpoint", "*", "nowhere.py"), "nowhere.py"),
    (("--against", "nowhere.py", "train.py"), "nowhere.py"),
    (("--allow", "0", "--checkpoint", "*", "train.py"), "--allow is about the unsafe modules of a plan"),
    (("--checkpoint", "*", "run.mdiag"), "run.mdiag is no script"),
    (("--checkpoint", "*", "--small", "'", "train.py"), "--small '"),
    (("--checkpoint", "*", "--markdown", "train.py", "train.py"), "is used twice"),
])
def test_bad_input_is_said(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    # GIVEN a script / WHEN it is checked with what cannot be
    (tmp_path / "train.py").write_text(SCRIPT)
    done = memdiag(tmp_path, *arguments)
    # THEN one line says why, and nothing has run
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py"]


def test_under_a_launcher_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = memdiag(tmp_path, "--checkpoint", "*", "train.py", RANK="0", WORLD_SIZE="2")
    assert done.returncode == 2
    assert "without a launcher" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_check_that_is_cut_short_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    # GIVEN a script that says that it runs, and goes on for long
    (tmp_path / "train.py").write_text(
        SCRIPT.replace("for step in range(8):", "open('here', 'w').write(str(__import__('os').getpid()))\nwhile True:")
        .replace("optimizer.step()\n    print(\"step\", step, *sys.argv[1:])", "__import__('time').sleep(0.05)"))
    check = subprocess.Popen(
        command("--checkpoint", "*", "--json", "check.json", "train.py"), cwd=tmp_path, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env={**os.environ, "TMPDIR": str(tmp_path)}, text=True)
    while not (tmp_path / "here").exists() or not (tmp_path / "here").read_text():
        assert check.poll() is None
        time.sleep(0.05)
    run = int((tmp_path / "here").read_text())
    # WHEN the check is killed, or interrupted
    check.send_signal(number)
    _, said = check.communicate()
    # THEN it has died of that, without a traceback and without a result
    assert check.returncode == -number
    assert "Traceback" not in said
    assert not (tmp_path / "check.json").exists()
    # AND the run that was going on ends too
    for _ in range(600):
        if not Path(f"/proc/{run}").exists():
            break
        time.sleep(0.05)
    else:
        pytest.fail("the run goes on")
    # AND an interrupted one has taken its folder with it
    if number == signal.SIGINT:
        assert not list(tmp_path.glob("memdiag-check-*"))
