"""The command line as a user meets it: real processes, their exit status and what they print.

Where a profile is run, torch and the recorder are stand-ins: what is tested is what the command does around them.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from traces import TraceBuilder, write

from memdiag.trace import Phase, Role

ROOT = Path(__file__).parent.parent

# A package `memdiag.record` whose recorder does as the environment says. It has no steps and no memory.
STAND_IN = f"""
import os, sys, types
sys.path.insert(0, {str(ROOT)!r})
import memdiag
package = sys.modules["memdiag.record"] = types.ModuleType("memdiag.record")
package.__path__ = [os.path.join(memdiag.__path__[0], "record")]
""" + """
class Recorder:
    def __init__(self, path, options, argv, script):
        self.path, self.problem = path, os.environ.get("PROBLEM")
        self.facts = {"argv": argv, "script": script, "options": repr(options)}
        if "CANNOT_START" in os.environ:
            raise OSError(28, "No space left on device")
    def __enter__(self):
        from memdiag.trace import Writer
        self.facts["log_level"] = os.environ.get("KINETO_LOG_LEVEL")
        self.writer = Writer(self.path, self.facts)
    def __exit__(self, kind, error, trace):
        self.writer.about({"ended_by": kind and kind.__name__})
        self.writer.close()
package.Recorder = Recorder
if "REPORT_FAILS" in os.environ:
    import memdiag.report
    def fail(*_): raise LookupError("a fault of ours")
    memdiag.report.render_text = memdiag.report.to_json = memdiag.report.draw = fail
from memdiag.cli.main import main
if __name__ == "__main__":
    sys.argv[0] = "memdiag"
    sys.exit(main())
"""


def memdiag(*args: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return _run([sys.executable, "-m", "memdiag", *map(str, args)], cwd, environment)


def profile(*args: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    stand_in = cwd.parent / "stand_in" / "memdiag.py"
    stand_in.parent.mkdir(exist_ok=True)
    stand_in.write_text(STAND_IN)
    if not (cwd / "torch.py").exists():
        (cwd / "torch.py").write_text("")
    return _run([sys.executable, str(stand_in), "profile", *args], cwd, environment)


def _run(command: list[str], cwd: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    return subprocess.run(
        command, cwd=cwd, env={**clean, "PYTHONPATH": str(ROOT), **environment}, capture_output=True, text=True,
        timeout=120,
    )


def refused(done: subprocess.CompletedProcess[str]) -> str:
    """The one line that a refusal is."""
    assert done.returncode == 2
    assert done.stdout == ""
    assert re.fullmatch(r"memdiag: error: .+\n", done.stderr), done.stderr
    return done.stderr


def facts(run: Path) -> dict[str, object]:
    from memdiag.trace import load

    return load(run).about


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "train.py").write_text(
        "import sys\nprint('args', sys.argv)\nprint('error stream', file=sys.stderr)\nimport torch\n"
        "open('ran', 'w').close()\nprint('trained')\n"
    )
    return folder


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    trace = TraceBuilder()
    weight = trace.existing(4096)
    trace.claim(weight, Role.PARAMETERS, "fc.weight")
    with trace.step():
        with trace.phase(Phase.FORWARD), trace.operator("aten::linear"):
            out = trace.allocate(1 << 20)
        with trace.phase(Phase.BACKWARD):
            trace.free(out)
    path = tmp_path / "some.mdiag"
    write(trace.build(), path)
    return path


# --- help and usage -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", [[], ["profile"], ["plan"], ["report"], ["plot"]])
def test_help_fits_a_terminal(verb: list[str], folder: Path) -> None:
    # WHEN help is asked for, on a wide terminal too
    done = memdiag(*verb, "--help", cwd=folder, COLUMNS="200")
    # THEN it is on standard output and at most 80 columns wide
    assert (done.returncode, done.stderr) == (0, "")
    assert "Usage: memdiag" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_without_a_verb_help_is_shown(folder: Path) -> None:
    done = memdiag(cwd=folder)
    assert done.returncode == 2
    assert "profile" in done.stdout + done.stderr


def test_the_version(folder: Path) -> None:
    import memdiag as package

    done = memdiag("--version", cwd=folder)
    assert (done.returncode, done.stdout) == (0, f"memdiag {package.__version__}\n")


def imported(folder: Path, *args: str | Path) -> set[str]:
    """Which large packages a command imports."""
    code = (
        "import sys\nfrom memdiag.cli.main import main\nmain(sys.argv[1:])\n"
        "print(*({'torch', 'numpy', 'matplotlib'} & set(sys.modules)), file=sys.stderr)"
    )
    done = _run([sys.executable, "-c", code, *map(str, args)], folder, {})
    assert done.returncode == 0, done.stderr
    return set(done.stderr.splitlines()[-1].split())


def test_commands_import_no_more_than_they_need(folder: Path, run_file: Path) -> None:
    assert imported(folder, "--help") == set()
    assert imported(folder, "profile", "--help") == set()
    assert imported(folder, "profile", "missing.py") == set()
    assert imported(folder, "plan", "missing.py") == set()
    assert imported(folder, "report", run_file) == {"numpy"}
    assert imported(folder, "plot", run_file) == {"numpy", "matplotlib"}


def test_nothing_is_imported_before_the_script_that_reads_the_environment(folder: Path) -> None:
    # GIVEN a script that must be first to import torch and numpy, for they read the environment as they are imported
    (folder / "first.py").write_text("import sys\nprint(*({'torch', 'numpy'} & set(sys.modules)))\n")
    # WHEN it is profiled, with the real recorder at hand
    done = memdiag("profile", "-q", "first.py", cwd=folder)
    # THEN it is
    assert done.stdout == "\n"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["prof"], "No such command 'prof'"),
        (["profile"], "Missing argument 'TARGET'"),
        (["profile", "--no-such", "train.py"], "No such option"),
        (["profile", "missing.py"], "missing.py: no such file"),
        (["profile", "-m", "missing"], "no module of this name"),
        (["profile", "-m", "train.py"], "write -m train"),
        (["profile", "."], "has no __main__.py"),
        (["profile", "sh", "train.py"], "sh is a program"),
        (["profile", "--steps", "5", "train.py"], "'5' is not A:B"),
        (["profile", "--steps", "a:b", "train.py"], "'a:b' is not A:B"),
        (["profile", "--steps", "-1:4", "train.py"], "'-1:4' is not A:B"),
        (["profile", "--steps", "5:5", "train.py"], "holds no step"),
        (["profile", "--steps", ":0", "train.py"], "holds no step"),
        (["profile", "--stop-after", "0", "train.py"], "0 is not in the range x>=1"),
        (["profile", "--max-events", "many", "train.py"], "'many' is not a valid integer"),
        (["profile", "--plot", "a.jpg", "train.py"], "a.jpg: a picture's name ends in .png, .svg or .pdf"),
        (["profile", "--plot", "taken.png", "train.py"], "taken.png: exists already; add --force"),
        (["profile", "--json", "taken.json", "train.py"], "taken.json: exists already; add --force"),
        (["profile", "-o", "taken.mdiag", "train.py"], "taken.mdiag: exists already; add --force"),
        (["profile", "-o", "nowhere/a.mdiag", "train.py"], "its folder does not exist"),
        (["profile", "--json", "nowhere/a.json", "train.py"], "its folder does not exist"),
        (["profile", "--plot", "nowhere/a.png", "train.py"], "its folder does not exist"),
        (["profile", "-o", "/proc/a.mdiag", "train.py"], "its folder cannot be written to"),
        (["profile", "--json", "/proc/a.json", "train.py"], "its folder cannot be written to"),
        (["profile", "-f", "-o", "/dev/null", "train.py"], "is not a regular file"),
        (["profile", "-f", "-o", ".", "train.py"], "is a folder"),
        (["profile", "-f", "-o", "train.py", "train.py"], "train.py: is used twice"),
        (["profile", "-o", "a", "--json", "./a", "train.py"], "a: is used twice"),
        (["report"], "Missing argument 'RUN'"),
        (["report", "missing.mdiag"], "missing.mdiag: no such file"),
        (["report", "train.py"], "train.py: not a memdiag run file"),
        (["report", "."], ".: cannot be read"),
        (["report", "train.py", "--json", "taken.json"], "taken.json: exists already"),
        (["report", "train.py", "-f", "--json", "train.py"], "train.py: is used twice"),
        (["plot", "missing.mdiag"], "missing.mdiag: no such file"),
        (["plot", "train.py"], "train.py: not a memdiag run file"),
        (["plot", "train.py", "-o", "a.gif"], "a.gif: a picture's name ends in"),
        (["plot", "train.py", "-o", "taken.png"], "taken.png: exists already"),
        (["plot", "taken.mdiag"], "taken.png: exists already"),
        (["plot", "taken.png", "-f"], "taken.png: is used twice"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(args: list[str], says: str, folder: Path) -> None:
    # GIVEN a script that leaves a file when it runs, and names that are taken
    for name in ("taken.png", "taken.json", "taken.mdiag"):
        (folder / name).write_text("mine")
    before = sorted(folder.iterdir())
    # WHEN a command cannot work THEN one line says why and nothing was run, made or changed
    assert says in refused(memdiag(*args, cwd=folder))
    assert sorted(folder.iterdir()) == before
    assert {(folder / name).read_text() for name in ("taken.png", "taken.json", "taken.mdiag")} == {"mine"}


# --- reading verbs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["report", "plot"])
def test_a_file_that_was_cut_is_refused(verb: str, run_file: Path) -> None:
    # GIVEN a run file that lost its end
    cut = run_file.with_name("cut.mdiag")
    cut.write_bytes(run_file.read_bytes()[:-20])
    # WHEN it is read THEN one line says so, and nothing is left behind
    before = sorted(cut.parent.iterdir())
    assert "truncated" in refused(memdiag(verb, cut, cwd=cut.parent))
    assert sorted(cut.parent.iterdir()) == before


def test_report_prints_text(folder: Path, run_file: Path) -> None:
    done = memdiag("report", run_file, cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert "1.0 MiB" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_report_as_json(folder: Path, run_file: Path) -> None:
    # WHEN JSON is asked for on standard output THEN that is all there is
    alone = memdiag("report", run_file, "--json", "-", cwd=folder)
    assert json.loads(alone.stdout)["peak"]["allocated_bytes"] == 4096 + (1 << 20)
    # WHEN it goes to a file THEN the text is printed as well, and the file holds the same
    both = memdiag("report", run_file, "--json", "out.json", cwd=folder)
    assert "1.0 MiB" in both.stdout
    assert both.stdout.endswith("wrote out.json\n")
    assert (folder / "out.json").read_text() == alone.stdout
    # WHEN the file exists THEN it is replaced only where that is asked for
    (folder / "out.json").write_text("mine")
    refused(memdiag("report", run_file, "--json", "out.json", cwd=folder))
    assert memdiag("report", run_file, "--json", "out.json", "-f", cwd=folder).returncode == 0
    assert (folder / "out.json").read_text() == alone.stdout


@pytest.mark.parametrize(("name", "begins"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.pdf", b"%PDF")])
def test_plot_draws(name: str, begins: bytes, folder: Path, run_file: Path) -> None:
    done = memdiag("plot", run_file, "-o", name, cwd=folder)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"wrote {name}\n", "")
    assert (folder / name).read_bytes().startswith(begins)
    assert not list(folder.glob(".a*"))


def test_plot_chooses_a_name(folder: Path, run_file: Path) -> None:
    done = memdiag("plot", run_file, cwd=folder)
    assert done.stdout == f"wrote {run_file.with_suffix('.png')}\n"
    assert run_file.with_suffix(".png").stat().st_size > 1000


def test_a_reader_that_has_seen_enough(folder: Path, run_file: Path) -> None:
    # GIVEN nobody who reads standard output
    reader, writer = os.pipe()
    os.close(reader)
    # WHEN a report goes there THEN it ends quietly
    done = subprocess.run(
        [sys.executable, "-m", "memdiag", "report", str(run_file)], stdout=writer, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=folder, timeout=60,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_terminal_that_knows_no_signs(folder: Path, run_file: Path) -> None:
    done = memdiag("report", run_file, cwd=folder, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()


# --- profile --------------------------------------------------------------------------------------------------------


def test_what_a_profile_leaves_and_prints(folder: Path) -> None:
    # WHEN a script is profiled
    done = profile("train.py", "--help", "-q", "-m", "", "--", cwd=folder)
    # THEN standard output is the script's alone, with all of its arguments
    assert done.stdout == f"args {['train.py', '--help', '-q', '-m', '', '--']}\ntrained\n"
    assert done.returncode == 0
    # AND standard error has the script's, then the report, then the file and what to do next
    (run,) = folder.glob("memdiag-train.*.mdiag")
    assert re.fullmatch(r"memdiag-train\.\d+\.mdiag", run.name)
    assert done.stderr.startswith("error stream\nMemory of ")
    assert done.stderr.endswith(f"memdiag: recorded in {run.name}; next:\n    memdiag plot {run.name}\n")
    # AND the recorder was told what is run
    assert facts(run)["argv"] == ["train.py", "--help", "-q", "-m", "", "--"]
    assert facts(run)["script"] == str(folder / "train.py")


def test_options_reach_the_recorder(folder: Path) -> None:
    done = profile("--steps", "3:", "--stop-after", "9", "--max-events", "0", "-o", "a.mdiag", "train.py", cwd=folder)
    assert done.returncode == 0
    told = facts(folder / "a.mdiag")["options"]
    assert told == "Options(max_events=0, steps=(3, None), stop_after=9, plan_step=None, progress=False)"
    assert profile("--steps", ":4", "-o", "b.mdiag", "train.py", cwd=folder).returncode == 0
    assert "max_events=2000000, steps=(None, 4), stop_after=None" in str(facts(folder / "b.mdiag")["options"])


def test_a_quiet_profile_prints_nothing(folder: Path) -> None:
    done = profile("-q", "--no-report", "train.py", cwd=folder)
    assert (done.stdout, done.stderr) == ("args ['train.py']\ntrained\n", "error stream\n")
    assert len(list(folder.glob("*.mdiag"))) == 1


def test_a_module_is_profiled(folder: Path) -> None:
    done = profile("-m", "train", "-m", "other", cwd=folder)
    assert done.stdout == f"args {[str(folder / 'train.py'), '-m', 'other']}\ntrained\n"
    (run,) = folder.glob("memdiag-train.*.mdiag")
    assert facts(run)["argv"] == ["-m", "train", "-m", "other"]


@pytest.mark.parametrize(
    ("ending", "status", "ended_by"),
    [
        ("sys.exit(3)", 3, "SystemExit"),
        ("sys.exit(0)", 0, None),
        ("sys.exit('text')", 1, "SystemExit"),
        ("raise ValueError('wrong')", 1, "ValueError"),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt"),
    ],
)
def test_the_exit_status_is_the_scripts(ending: str, status: int, ended_by: str | None, folder: Path) -> None:
    # GIVEN a script that ends in some way
    (folder / "ends.py").write_text(f"import sys, torch\n{ending}\n")
    # WHEN it is profiled THEN it ends so, and leaves its run and its report
    done = profile("-o", "a.mdiag", "ends.py", cwd=folder)
    assert done.returncode == status
    assert facts(folder / "a.mdiag")["ended_by"] == ended_by
    assert "Memory of" in done.stderr
    # AND no frame of ours is in what it prints
    assert "memdiag/" not in done.stderr
    # WHEN the recording or the report fails THEN that is said, and the status stays
    for environment, says in (
        ({"PROBLEM": "the disk is full"}, "memdiag: error: the disk is full\n"),
        ({"CANNOT_START": "1"}, "memdiag: error: the recording could not be started"),
        ({"REPORT_FAILS": "1"}, "memdiag: error: the report failed (LookupError: a fault of ours); the run is in"),
    ):
        failed = profile("-f", "-o", "a.mdiag", "ends.py", cwd=folder, **environment)
        assert failed.returncode == status
        assert says in failed.stderr


def test_every_output_is_tried_though_others_fail(folder: Path) -> None:
    done = profile("-o", "a.mdiag", "--json", "a.json", "--plot", "a.png", "train.py", cwd=folder, REPORT_FAILS="1")
    assert done.returncode == 0
    assert re.findall(r"error: (.*) failed", done.stderr) == ["the report", "the JSON", "the picture"]
    assert [path.name for path in sorted(folder.glob("*a.*"))] == ["a.mdiag"]


def test_all_outputs_land_where_it_started(folder: Path) -> None:
    # GIVEN a script that goes elsewhere
    (folder / "goes.py").write_text("import os, torch\nos.mkdir('deep'); os.chdir('deep'); os.rmdir('../deep')\n")
    # WHEN it is profiled with relative names THEN they are relative to where it began
    done = profile("-o", "a.mdiag", "--json", "a.json", "--plot", "a.png", "goes.py", cwd=folder)
    assert done.returncode == 0
    assert "memdiag: wrote a.json\nmemdiag: wrote a.png\nmemdiag: recorded in a.mdiag" in done.stderr
    assert {"a.mdiag", "a.json", "a.png"} < {path.name for path in folder.iterdir()}


def test_json_on_standard_output_follows_the_scripts_own(folder: Path) -> None:
    done = profile("--json", "-", "--no-report", "-q", "train.py", cwd=folder)
    own, _, rest = done.stdout.partition("trained\n")
    assert own == "args ['train.py']\n"
    assert json.loads(rest)["schema_version"] == 1
    assert done.stderr == "error stream\n"


def test_existing_files_are_replaced_where_that_is_asked_for(folder: Path) -> None:
    for name in ("a.mdiag", "a.json", "a.png"):
        (folder / name).write_text("old")
    done = profile("-f", "-o", "a.mdiag", "--json", "a.json", "--plot", "a.png", "train.py", cwd=folder)
    assert done.returncode == 0
    assert (folder / "a.mdiag").read_bytes().startswith(b"MEMDIAG")
    assert json.loads((folder / "a.json").read_text())
    assert (folder / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("environment", "rank"),
    [
        ({"RANK": "0", "WORLD_SIZE": "4"}, 0), ({"RANK": "3", "LOCAL_RANK": "1"}, 3), ({"LOCAL_RANK": "1"}, 1),
        ({"RANK": ""}, None),
    ],
)
def test_ranks(environment: dict[str, str], rank: int | None, folder: Path) -> None:
    # WHEN one process of several is profiled
    place = "" if rank is None else f".rank{rank}"
    done = profile("--json", "a.json", "train.py", cwd=folder, **environment)
    # THEN each file has the rank in its name
    assert len(list(folder.glob(f"memdiag-train{place}.*.mdiag"))) == 1
    assert (folder / f"a{place}.json").exists()
    # AND one rank reports for all
    assert ("Memory of" in done.stderr) == (not rank)
    assert ("the other ranks' files are beside it" in done.stderr) == (rank == 0)
    named = profile("-o", "b.mdiag", "--plot", "b.png", "--json", "-", "train.py", cwd=folder, **environment)
    assert (folder / f"b{place}.mdiag").exists()
    assert (folder / f"b{place}.png").exists()
    assert ("schema_version" in named.stdout) == (not rank)
    # AND names that are taken are seen
    again = profile("-o", "b.mdiag", "train.py", cwd=folder, **environment)
    assert f"b{place}.mdiag: exists already" in refused(again)


def test_the_environment_is_the_scripts(folder: Path) -> None:
    # GIVEN a script that shows a variable before, in and after the import of torch
    show = "import os\nprint(os.environ.get('KINETO_LOG_LEVEL'), flush=True)\n"
    (folder / "torch.py").write_text(show)
    child = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import torch'])\n"
    (folder / "shows.py").write_text(show + "import torch\n" + show + child)
    # WHEN it is profiled THEN it sees what it would alone, and the recorder starts in silence
    done = profile("-q", "--no-report", "-o", "a.mdiag", "shows.py", cwd=folder)
    assert (done.stdout, done.stderr) == ("None\n" * 4, "")
    assert facts(folder / "a.mdiag")["log_level"] == "99"
    # AND a value of the user's own holds
    done = profile("-q", "--no-report", "-o", "b.mdiag", "shows.py", cwd=folder, KINETO_LOG_LEVEL="1")
    assert done.stdout == "1\n" * 4
    assert facts(folder / "b.mdiag")["log_level"] == "1"


@pytest.mark.parametrize(
    "script",
    [
        "print('no torch here')",
        "import importlib.util; importlib.util.find_spec('torch')",
        "import os\nif os.fork():\n    os.wait()\nelse:\n    import torch",
    ],
)
def test_a_script_that_never_imports_torch(script: str, folder: Path) -> None:
    # GIVEN a script that imports no torch, or only looks for it, or imports it only in a child
    (folder / "other.py").write_text(script)
    # WHEN it is profiled THEN there is no run file, and that is said
    done = profile("other.py", cwd=folder)
    assert done.returncode == 0
    assert done.stderr == "memdiag: nothing was recorded: the script never imported torch\n"
    assert list(folder.glob("*.mdiag")) == []


def test_looking_for_torch_first_does_not_lose_it(folder: Path) -> None:
    # GIVEN a script that asks whether torch is there before it imports it, and looks at it afterwards
    (folder / "asks.py").write_text(
        "import importlib.util, sys\nassert importlib.util.find_spec('torch')\nimport torch\n"
        "print(sorted(vars(torch.__spec__.loader)), [f for f in sys.meta_path if 'memdiag' in type(f).__module__])\n"
    )
    # WHEN it is profiled THEN it is recorded, and no trace of how is left
    done = profile("-q", "--no-report", "-o", "a.mdiag", "asks.py", cwd=folder)
    assert done.stdout == "['name', 'path'] []\n"
    assert (folder / "a.mdiag").exists()


@pytest.mark.parametrize("closing", ["sys.stderr.close()", "sys.stdout.close()", "os.close(1)", "os.close(2)"])
def test_closed_streams(closing: str, folder: Path) -> None:
    # GIVEN a script that closes a stream and exits with a status
    (folder / "closes.py").write_text(f"import os, sys, torch\n{closing}\nsys.exit(5)\n")
    # WHEN it is profiled and there is much to print THEN its status is what it is alone
    alone = _run([sys.executable, "closes.py"], folder, {})
    done = profile("--json", "-", "-o", "a.mdiag", "closes.py", cwd=folder)
    assert done.returncode == alone.returncode
    assert facts(folder / "a.mdiag")["ended_by"] == "SystemExit"


def test_a_reader_of_json_that_goes_away(folder: Path) -> None:
    # GIVEN nobody who reads standard output, and a script that prints nothing there
    (folder / "silent.py").write_text("import sys, torch\nsys.exit(6)\n")
    profile("-o", "a.mdiag", "silent.py", cwd=folder)
    reader, writer = os.pipe()
    os.close(reader)
    # WHEN JSON goes there THEN that is said, and the status is the script's
    done = subprocess.run(
        [sys.executable, str(folder.parent / "stand_in" / "memdiag.py"), "profile", "--json", "-", "silent.py"],
        stdout=writer, stderr=subprocess.PIPE, cwd=folder, timeout=60,
    )
    os.close(writer)
    assert done.returncode == 6
    assert b"memdiag: error: the JSON failed (BrokenPipeError" in done.stderr


STREAMS = """
import os, sys, torch
print("printed")
print("complaint", file=sys.stderr)
said = [sys.stdout is None, sys.stderr is None]
for number in (0, 1, 2):
    try:
        said.append(os.fstat(number) and "open")
    except OSError as error:
        said.append(error.errno)
with open("said", "w") as file:
    file.write(repr(said))
sys.exit(5)
"""


@pytest.mark.parametrize("closed", [(1,), (2,), (1, 2), (0,), (0, 1, 2)])
@pytest.mark.parametrize("options", [("-q", "--no-report"), ("--json", "-")], ids=["quiet", "all"])
def test_streams_that_are_closed_from_the_start(
    closed: tuple[int, ...], options: tuple[str, ...], folder: Path
) -> None:
    # GIVEN a script that says what it finds, and a process that is started without some of its streams
    (folder / "streams.py").write_text(STREAMS)
    profile("-o", "before.mdiag", "train.py", cwd=folder)  # makes the stand-in
    found = []
    for start in ([], [str(folder.parent / "stand_in" / "memdiag.py"), "profile", "-o", "a.mdiag", *options]):
        # WHEN it runs alone and profiled
        done = subprocess.run(
            [sys.executable, *start, "streams.py"], cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True, text=True, timeout=60, preexec_fn=lambda: [os.close(number) for number in closed])
        found.append((done.returncode, done.stdout, done.stderr, (folder / "said").read_text()))
    alone, ours = found
    # THEN the script finds and says the same, the run is kept, and the report goes where there is a place for it
    assert alone[0] == 5
    assert (ours[0], ours[3]) == (alone[0], alone[3])
    assert ours[1].startswith(alone[1])
    assert ours[2].startswith(alone[2])
    assert "AttributeError" not in ours[2]
    assert facts(folder / "a.mdiag")["ended_by"] == "SystemExit"
    if "-q" in options:
        assert ours == alone
    else:
        assert ("schema_version" in ours[1]) == (1 not in closed)
        assert ("Memory of" in ours[2]) == (2 not in closed)
        assert ("standard output is closed" in ours[2]) == (1 in closed and 2 not in closed)


def test_a_verb_that_prints_needs_a_place_for_it(folder: Path, run_file: Path) -> None:
    # WHEN a report is wanted, and standard output is closed THEN one line says so
    done = subprocess.run(
        [sys.executable, "-m", "memdiag", "report", str(run_file)], cwd=folder, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60, preexec_fn=lambda: os.close(1))
    assert "standard output is closed" in refused(done)


@pytest.mark.parametrize(
    "torch",
    [
        "import os, signal\nos.kill(os.getpid(), signal.SIGINT)",
        "def deep():\n    import os, signal\n    os.kill(os.getpid(), signal.SIGINT)\ndeep()",
        "import no_such_module",
        "import helper",
        "raise OSError('libsomething.so: cannot open shared object file')",
        "def f(:",
    ],
    ids=["interrupted", "deep", "missing", "further-in", "broken", "syntax"])
@pytest.mark.parametrize("script", ["import torch", "try:\n    import torch\nexcept Exception:\n    1 / 0"])
def test_an_import_of_torch_that_fails_looks_as_it_does_alone(torch: str, script: str, folder: Path) -> None:
    # GIVEN a torch whose import is interrupted, or fails
    (folder / "torch.py").write_text(torch)
    (folder / "helper.py").write_text("import no_such_module")
    (folder / "imports.py").write_text(f"def work():\n    {script.replace(chr(10), chr(10) + '    ')}\nwork()\n")
    # WHEN the script runs alone and profiled THEN it says the same
    alone = _run([sys.executable, "imports.py"], folder, {})
    done = profile("-q", "imports.py", cwd=folder)
    assert alone.returncode != 0
    assert (done.returncode, done.stdout, done.stderr) == (alone.returncode, alone.stdout, alone.stderr)


def test_an_interrupt_while_the_recording_starts(folder: Path) -> None:
    # GIVEN Ctrl-C that comes as soon as torch's own code has run, and would hit our imports
    (folder / "torch.py").write_text(
        "import os, signal, sys\n"
        "if 'memdiag' in sys.modules:\n"
        "    from memdiag.record.process import late\n"
        "    make = late.WhenTorchIsThere._stop_waiting\n"
        "    def interrupted(self):\n"
        "        recorder = self._make\n"
        "        self._make = lambda: (os.kill(os.getpid(), signal.SIGINT), recorder())[1]\n"
        "        make(self)\n"
        "    late.WhenTorchIsThere._stop_waiting = interrupted\n")
    (folder / "imports.py").write_text("import torch\n")
    # WHEN the script is profiled
    done = profile("-q", "--no-report", "-o", "a.mdiag", "imports.py", cwd=folder)
    # THEN it dies of it, at its own line and nowhere else
    assert done.returncode == -signal.SIGINT
    assert re.fullmatch(
        r'Traceback .*\n  File ".*imports.py", line 1, in <module>\n    import torch\nKeyboardInterrupt\n', done.stderr)


@pytest.mark.parametrize("verb", [
    ("report", "run.mdiag"), ("diagnose", "run.mdiag"), ("compare", "run.mdiag", "run.mdiag"), ("plot", "run.mdiag"),
    ("plan", "run.mdiag"), ("plan", "run.mdiag", "--emit", "code")], ids=" ".join)
def test_a_verb_that_reads_is_interrupted_without_a_word(tmp_path: Path, verb: tuple[str, ...]) -> None:
    # GIVEN a verb in the midst of reading: its run file is a pipe, which opens once both ends are there
    os.mkfifo(tmp_path / "run.mdiag")
    process = subprocess.Popen(
        [sys.executable, "-m", "memdiag", *verb], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    with open(tmp_path / "run.mdiag", "wb"):
        # WHEN Ctrl-C comes
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    # THEN it dies of that, which is 130 in a shell, and nothing is left behind
    assert (process.returncode, out, err) == (-signal.SIGINT, "", "")
    assert [path.name for path in tmp_path.iterdir()] == ["run.mdiag"]


# --- options that came after the script -----------------------------------------------------------------------------


@pytest.mark.parametrize(("verb", "given", "said"), [
    ("plan", ["--budget", "1GiB"], "--budget came after train.py, so the script got it"),
    ("plan", ["--budget=1GiB", "-o", "a.mdiag", "--epochs", "3"], "--budget, -o came after train.py, so the script got "
     "them"),
    ("profile", ["--plot", "a.png"], "--plot came after train.py, so the script got it"),
    ("profile", ["--budget", "1GiB"], None),  # it is no option of this verb
])
def test_options_of_ours_after_a_script_that_fails(
    verb: str, given: list[str], said: str | None, tmp_path: Path
) -> None:
    # GIVEN a script that does not know an option of ours, WHEN it stands after the script
    (tmp_path / "train.py").write_text(
        "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--epochs')\nparser.parse_args()\n")
    done = memdiag(verb, "train.py", *given, cwd=tmp_path)
    # THEN the script fails as it does alone, and a line after that says why
    assert done.returncode == 2
    assert "train.py: error: unrecognized arguments" in done.stderr
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1] == (
        "memdiag: nothing was recorded: the script never imported torch" if said is None else
        f"memdiag: {said}; options of memdiag go before the script")
    # AND none where it is to be quiet
    assert "came after" not in memdiag(verb, "-q", "train.py", *given, cwd=tmp_path).stderr


def test_a_script_may_have_options_of_our_names(tmp_path: Path) -> None:
    # GIVEN a script that takes them, THEN nothing is said of them where it ends well
    (tmp_path / "train.py").write_text("import sys\nprint(sys.argv[1:])\n")
    done = memdiag("profile", "train.py", "--json", "out.json", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "['--json', 'out.json']\n")
    assert "came after" not in done.stderr
