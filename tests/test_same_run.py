"""Scripts run under memdiag as they run without it; and the comparison that says so can fail."""

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import same_run
from same_run import Comparison, Run, SameRunError, compare, compare_text

EXAMPLES = Path(__file__).parent.parent / "examples"

TRAINING = """\
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    loss = model(torch.randn(8, 4)).square().mean() + model[0](torch.randn(2, 4)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.6f}")
"""

STAND_IN = """\
import os, random, runpy, sys
from sitecustomize import buffers, parameters
{before}
script = sys.argv[-1]
sys.argv = [script]
runpy.run_path(script, run_name="__main__")
{after}
"""


@pytest.fixture(scope="module")
def bare_training(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run, Run]:
    """A folder with a script, and two bare runs of it: the same for every stand-in, so made once."""
    folder = tmp_path_factory.mktemp("training")
    script = folder / "train.py"
    script.write_text(TRAINING, encoding="utf-8")
    first, second = (same_run.run([sys.executable, str(script)], None, folder, name) for name in ("bare-1", "bare-2"))
    return folder, first, second


def compare_training(bare: tuple[Path, Run, Run], tmp_path: Path, before: str = "", after: str = "") -> Comparison:
    """Compare with a run under a stand-in for the recorder that does something of its own."""
    folder, first, second = bare
    return compare("train.py", (first, second), run_training(folder, tmp_path, before, after), must_record=False)


def run_training(folder: Path, tmp_path: Path, before: str, after: str) -> Run:
    """Run it under such a stand-in."""
    stand_in = tmp_path / "stand_in.py"
    stand_in.write_text(STAND_IN.format(before=before, after=after), encoding="utf-8")
    return same_run.run([sys.executable, str(stand_in), str(folder / "train.py")], None, folder, tmp_path.name)


def compare_script(tmp_path: Path, script: str, before: str = "", after: str = "") -> Comparison:
    """The same for a script of the test's own, all its runs."""
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    (tmp_path / "stand_in.py").write_text(STAND_IN.format(before=before, after=after), encoding="utf-8")
    return same_run.same_run([str(tmp_path / "train.py")], [sys.executable, str(tmp_path / "stand_in.py")])


def test_a_run_that_only_looks_is_the_same(bare_training: tuple[Path, Run, Run], tmp_path: Path) -> None:
    # GIVEN a stand-in that does nothing of its own
    # WHEN the runs are compared
    found = compare_training(bare_training, tmp_path)

    # THEN all agree, to the bit, and there was something to compare
    assert found.differences == {}
    assert not any(finding.weaker for finding in found.findings.values())
    assert found.findings["losses"].word == "3 same"
    assert found.findings["parameters"].word == "4 same"


@pytest.mark.parametrize(
    ("before", "after", "things"),
    [
        pytest.param(
            "print('hello')",
            "open('left', 'w').close(); sys.stderr.write('hello'); sys.exit(3)",
            {"stdout", "stderr", "exit", "files"},
            id="outside",
        ),
        pytest.param("", "sys.stdout.flush(); os._exit(0)", {"parameters"}, id="state-never-written"),
        pytest.param(
            "import torch; randn = torch.randn; torch.randn = lambda *size: 1.001 * randn(*size)",
            "",
            {"stdout", "losses", "parameters"},
            id="other-training",
        ),
    ],
)
def test_what_differs_is_found_and_nothing_else(
    bare_training: tuple[Path, Run, Run], tmp_path: Path, before: str, after: str, things: set[str]
) -> None:
    # GIVEN a stand-in that changes things about the run
    # WHEN the runs are compared
    found = compare_training(bare_training, tmp_path, before, after)

    # THEN those things, and only those, differ
    assert set(found.differences) == things


@pytest.mark.parametrize(
    ("thing", "change"),
    [
        ("stdout", lambda run: {"stdout": "hello\n" + run.stdout}),
        ("stderr", lambda run: {"stderr": "hello"}),
        ("exit", lambda run: {"exit_code": 3}),
        ("files", lambda run: {"files": ["left"]}),
        ("parameters", lambda run: {"states": [{**run.states[0], "parameters": run.states[0]["parameters"][:-1]}]}),
    ],
)
def test_one_thing_that_differs_is_found_by_itself(
    bare_training: tuple[Path, Run, Run], thing: str, change: Callable[[Run], dict[str, Any]]
) -> None:
    # GIVEN a run that is as a bare one but for one thing WHEN compared THEN that thing alone differs
    _, first, second = bare_training
    found = compare("train.py", (first, second), replace(first, **change(first)), must_record=False)
    assert set(found.differences) == {thing}


def test_every_kind_of_state_is_written_and_compared(bare_training: tuple[Path, Run, Run], tmp_path: Path) -> None:
    # GIVEN a stand-in that makes a parameter more, and moves one value of the model's, one buffer and each random state
    folder, first, second = bare_training
    moved = run_training(
        folder, tmp_path,
        before="import torch; torch.nn.Parameter(torch.ones(1))",
        after="parameters[1].data[0, 0] += 1e-6; model, name = buffers[0]; getattr(model, name).add_(1)\n"
              "import numpy; torch.rand(1); random.random(); numpy.random.rand()",
    )  # fmt: skip

    # WHEN what it left is looked at THEN there is one parameter more, and of the others the one differs that was moved
    (bare,), (left,) = first.states, moved.states
    assert len(left["parameters"]) == len(bare["parameters"]) + 1
    apart = [i for i, (a, b) in enumerate(zip(bare["parameters"], left["parameters"][1:], strict=True)) if a != b]
    assert apart == [0]
    # one buffer, and all three random states
    assert [i for i, (a, b) in enumerate(zip(bare["buffers"], left["buffers"], strict=True)) if a != b] == [0]
    assert bare["random"].keys() == left["random"].keys() == {"python", "numpy", "torch"}
    assert all(bare["random"][kind] != left["random"][kind] for kind in bare["random"])

    # and each of these by itself is a difference
    ones = [{"parameters": left["parameters"]}, {"parameters": left["parameters"][1:]}, {"buffers": left["buffers"]}]
    ones += [{"random": {**bare["random"], kind: left["random"][kind]}} for kind in bare["random"]]
    for one in ones:
        found = compare("train.py", (first, second), replace(first, states=[{**bare, **one}]), must_record=False)
        assert set(found.differences) == {"parameters"}, one


def test_a_script_that_fails_is_compared_like_any_other(tmp_path: Path) -> None:
    # GIVEN a script that raises
    script = "raise ValueError('enough')\n"

    # WHEN it runs under a stand-in whose own frames show in the traceback
    found = compare_script(tmp_path, script)

    # THEN the exit code is the same and the traceback is not
    assert found.findings["exit"].word == "1"
    assert set(found.differences) == {"stderr"}


def test_what_differs_between_bare_runs_is_compared_as_far_as_it_goes(tmp_path: Path) -> None:
    # GIVEN a script that prints a time and a number that no seed fixes, on two streams
    script = (
        "import os, sys, time\n"
        "print(f'took {time.perf_counter():.6f} s')\n"
        "print('drawn', int.from_bytes(os.urandom(8), 'big'), file=sys.stderr)\n"
    )

    # WHEN it runs under a stand-in that does nothing, and under one that prints a line more
    same = compare_script(tmp_path, script)
    more = compare_script(tmp_path, script, after="print('more'); print('more', file=sys.stderr)")

    # THEN the first agrees, saying how strictly that was seen, and the second does not
    assert same.differences == {}
    assert same.findings["stdout"].word == "same but for timings"
    assert same.findings["stderr"].word == "same but for numbers"
    assert set(more.differences) == {"stdout", "stderr"}


def test_processes_that_the_script_starts_are_compared_too(tmp_path: Path) -> None:
    # GIVEN a script that trains in a child of its own, where a file in the folder moves the weights a little
    script = (
        "import os, torch, torch.multiprocessing as mp\n"
        "def child(rank):\n"
        "    model = torch.nn.Linear(2, 2)\n"
        "    model.weight.data += 1e-3 * os.path.exists('mark')\n"
        "if __name__ == '__main__':\n"
        "    mp.spawn(child, nprocs=1)\n"
        "    list(torch.utils.data.DataLoader([torch.ones(1)] * 4, num_workers=1))\n"
    )

    # WHEN it runs under a stand-in that leaves the file there
    found = compare_script(tmp_path, script, before="open('mark', 'w').close()")

    # THEN the child's parameters differ, and nothing else does: loader workers trained nothing
    assert found.differences.keys() == {"parameters", "files"}
    assert "parameters of SpawnProcess-1: 1 of 2" in found.differences["parameters"]


def test_a_recorder_that_records_nothing_is_a_difference(tmp_path: Path) -> None:
    # GIVEN a stand-in that is told where to put the run file and makes none
    (tmp_path / "train.py").write_text("print('hello')", encoding="utf-8")
    (tmp_path / "stand_in.py").write_text(STAND_IN.format(before="", after=""), encoding="utf-8")

    # WHEN the runs are compared
    recorder = [sys.executable, str(tmp_path / "stand_in.py"), "{run}"]
    found = same_run.same_run([str(tmp_path / "train.py")], recorder)

    # THEN it is said
    assert found.differences["run file"] == "no run file was made"


@pytest.mark.parametrize(
    ("bare", "recorded", "word"),
    [
        (("a", "a"), "a", "same"),
        (("", ""), "", "same, empty"),
        (("a", "a"), "b", "DIFFERENT"),
        (("took 1.5s", "took 1.5s"), "took 1.6s", "DIFFERENT"),  # bare runs agree: so must we
        (("took 1.5s", "took 1.6s"), "took 1.7s", "same but for timings"),
        (("took 1.5s loss 2", "took 1.6s loss 2"), "took 1.7s loss 3", "DIFFERENT"),
        (("{'runtime': '3.8'}", "{'runtime': '3.9'}"), "{'runtime': '4.1'}", "same but for timings"),
        (("\n 1%\r 50%\r100%", "\n 2%\r100%"), "\n 3%\r 9%\r100%", "same but for timings"),
        (("at 0x7f01", "at 0x7f02"), "at 0x7f03", "same but for timings"),
        (("drawn 1", "drawn 2"), "drawn 3", "same but for numbers"),
        (("drawn 1", "drawn 2"), "taken 3", "DIFFERENT"),
        (("red", "blue"), "green", "bare runs differ"),
        (("red", "blue"), "", "DIFFERENT"),
    ],
)
def test_text_is_compared_as_strictly_as_the_bare_runs_allow(bare: tuple[str, str], recorded: str, word: str) -> None:
    assert compare_text(bare, recorded).word == word


@pytest.mark.parametrize(
    "line",
    ["step 3 loss 1.25", "loss=1.25", "loss: 1.25", "{'loss': '1.25'}", "{'eval_loss': 1.25}",
     "average loss 1.25", "Loss 1.25 accuracy 3"],
)  # fmt: skip
def test_losses_are_read_from_what_scripts_print(line: str) -> None:
    assert Run(0, line, "", [], [], None).losses == ["1.25"]


def test_a_changed_loss_is_found_where_times_hide_the_output() -> None:
    # GIVEN bare runs whose output differs in a number that is not a loss
    def seen(drawn: str, loss: str) -> Run:
        return Run(0, f"drawn {drawn} loss {loss}", "", [], [], None)

    # WHEN the recorded run prints another loss
    found = compare("x", (seen("1", "0.5"), seen("2", "0.5")), seen("3", "0.6"), must_record=False)

    # THEN it is a difference though only the shape of the output can be compared
    assert found.findings["stdout"].word == "same but for numbers"
    assert found.differences["losses"] == "0.5 became 0.6"


def test_the_command_line_tells_by_its_exit_code(tmp_path: Path) -> None:
    # GIVEN a script and a stand-in that changes its output, and one that does not
    (tmp_path / "train.py").write_text("print('step 0 loss 1.5')", encoding="utf-8")
    stand_ins = {}
    for name, before in {"quiet": "", "loud": "print('hello')"}.items():
        (tmp_path / f"{name}.py").write_text(STAND_IN.format(before=before, after=""), encoding="utf-8")
        stand_ins[name] = f"{sys.executable} {tmp_path / name}.py"

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, same_run.__file__, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    # WHEN both are compared from the command line
    quiet = run(str(tmp_path / "train.py"), "--recorder", stand_ins["quiet"], "--keep", str(tmp_path / "kept"))
    loud = run(str(tmp_path / "train.py"), "--recorder", stand_ins["loud"])
    absent = run(str(tmp_path / "absent.py"))

    # THEN the exit code and the last line tell, and what was kept is there
    assert quiet.returncode == 0, quiet.stderr
    assert "1 scripts: 1 run the same, 0 differ" in quiet.stdout
    assert len(list((tmp_path / "kept").glob("train-*/*/stdout"))) == 2
    assert loud.returncode == 1
    assert "train.py: stdout: line 1: bare 'step 0" in loud.stdout
    assert absent.returncode == 2
    assert "there is no script" in absent.stderr


def must_be_the_same(found: Comparison) -> None:
    print(same_run.table([found]))
    assert found.differences == {}
    # The training itself is repeatable in all of these, so it was compared to the bit.
    for thing in ("exit", "losses", "parameters"):
        assert not found.findings[thing].weaker, found.findings[thing].word


@pytest.mark.parametrize(
    "script",
    [
        ["gpt.py", "--layers", "2", "--width", "48", "--batch", "2", "--tokens", "32", "--steps", "4"],
        ["convnet.py", "--width", "8", "--images", "64", "--epochs", "2"],
        ["leak.py", "--width", "32", "--steps", "5"],
    ],
    ids=lambda script: script[0],
)
def test_examples_run_the_same(script: list[str]) -> None:
    must_be_the_same(same_run.same_run([str(EXAMPLES / script[0]), *script[1:]]))


def test_a_loss_scaler_that_skips_steps_runs_the_same(tmp_path: Path) -> None:
    # GIVEN mixed precision with a first scale that overflows, so that the scaler skips steps until it has come down
    script = """\
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, backoff_factor=2.0**-3)
for step in range(6):
    x = 8 * torch.randn(64, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(f"step {step} loss {loss.item():.6f} scale {scaler.get_scale():.3e} taken {len(optimizer.state) > 0}")
"""
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    # WHEN it is recorded
    found = same_run.same_run([str(tmp_path / "train.py")], keep=tmp_path)

    # THEN it skips the same steps and trains the same
    must_be_the_same(found)
    (bare,) = tmp_path.glob("train-*/bare-1/stdout")
    assert "taken False" in bare.read_text(encoding="utf-8")
    assert "taken True" in bare.read_text(encoding="utf-8")


@pytest.mark.cases
@pytest.mark.parametrize(
    "case_id",
    [
        pytest.param("c41", id="lbfgs-closure"),
        pytest.param("c39", id="torch-compile"),
        pytest.param("c34", id="ddp"),
        pytest.param("c47", id="transformers-trainer"),
        pytest.param("c48", id="accelerate"),
        pytest.param("c22", id="keeps-exceptions"),
    ],
)
def test_cases_run_the_same(cases_folder: Path, case_id: str) -> None:
    (case,) = same_run.load_cases(cases_folder, [case_id])
    missing = [package for package in case["requires"] if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    for script in same_run.scripts_of(case, cases_folder):
        must_be_the_same(same_run.same_run([str(script)]))


def test_an_unknown_case_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cases.json").write_text('[{"id": "a1"}]', encoding="utf-8")
    with pytest.raises(SameRunError, match="has no case b2"):
        same_run.load_cases(tmp_path, ["a1", "b2"])
