"""Does a script run as without us? Runs it bare and recorded, and compares what can be seen of it.

    python tests/same_run.py examples/gpt.py "examples/leak.py --steps 5"
    python tests/same_run.py --cases FOLDER --ids c01,c02

Compared: standard output, standard error, exit code, the losses printed, the names of the files left in the working
directory, and the final parameters, buffers and random states (written by same_run_site/sitecustomize.py, the same in
all runs). Where anything differs, the script runs bare once more: where the two bare runs agree, the recorded run must
agree to the bit. Where they do not, timings, clocks and addresses are taken out first; where they still do not, only
the shape of the output is compared; and the table says so. Exits with 1 where a recorded run differs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

SITE = Path(__file__).parent / "same_run_site"
PROFILE = [sys.executable, "-m", "memdiag", "profile", "-q", "--no-report", "-o", "{run}"]
TIMEOUT_S = 900

NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
LOSS = re.compile(rf"\w*loss\w*['\"]?\s*[:=]?\s*['\"]?({NUMBER}|nan|-?inf)\b", re.IGNORECASE)
VARIABLE = [  # what may change from run to run without a difference in the training
    (re.compile(r"\b[IWEF]\d{4} \d\d:\d\d:\d\d\.\d+(?: +\d+)?"), "<log time>"),
    (re.compile(r"\b\d{1,2}:\d\d(?::\d\d)?(?:\.\d+)?\b"), "<clock>"),
    (re.compile(rf"(\w*(?:runtime|per_second|elapsed|seconds|time)['\"]?\s*[:=]\s*['\"]?){NUMBER}"), r"\1<time>"),
    (re.compile(rf"{NUMBER}\s*(?:s/\w+|\w+/s|ms|us|s|sec|seconds)\b"), "<time>"),
    (re.compile(r"0x[0-9a-fA-F]+"), "<address>"),
    (re.compile(r"(?<=[\r\n])[^\r\n]*\r"), ""),  # states of a progress bar, but the last
]


class SameRunError(Exception):
    """The comparison itself could not be made."""


@dataclass(frozen=True)
class Run:
    """What can be seen of one run.

    Attributes:
        states: what each process wrote at its end, in an order of their own.
        files: names of what lay in the working directory afterwards.
        recorded_bytes: size of the run file; None for a bare run.
    """

    exit_code: int
    stdout: str
    stderr: str
    states: list[dict[str, Any]]
    files: list[str]
    recorded_bytes: int | None

    @property
    def losses(self) -> list[str]:
        return LOSS.findall(self.stdout) + LOSS.findall(self.stderr)


@dataclass(frozen=True)
class Finding:
    """How one thing compares: a word for the table, and what differs where it does.

    Attributes:
        weaker: the bare runs disagree, so that less than every bit was compared.
    """

    word: str
    weaker: bool = False
    difference: str | None = None


@dataclass(frozen=True)
class Comparison:
    """One script: a finding for each thing compared."""

    name: str
    findings: dict[str, Finding]

    @property
    def differences(self) -> dict[str, str]:
        return {thing: f.difference for thing, f in self.findings.items() if f.difference is not None}


def run(command: Sequence[str], run_file: Path | None, base: Path, name: str) -> Run:
    """Run a command under ``base``, where every run finds the same empty folders under the same names.

    Raises:
        SameRunError: it does not end in time.
    """
    work, temporary, state = base / "work", base / "tmp", base / "state.json"
    for folder in (work, temporary):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    state.unlink(missing_ok=True)
    python_path = [str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": os.pathsep.join(python_path),
        "TMPDIR": str(temporary),  # compilers keep what they made there: each run starts without
        "SAME_RUN_STATE": str(state),
        "SAME_RUN_PARENT": str(os.getpid()),
    }
    try:
        done = subprocess.run(
            command, cwd=work, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT_S,
            text=True, errors="backslashreplace", check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as expired:
        raise SameRunError(f"{name} run of {shlex.join(command)} did not end within {TIMEOUT_S} s") from expired
    lines = state.read_text(encoding="utf-8").splitlines() if state.exists() else []
    recorded = None
    if run_file is not None:
        recorded = run_file.stat().st_size if run_file.exists() else 0
    result = Run(
        done.returncode,
        done.stdout,
        done.stderr,
        [json.loads(line) for line in sorted(lines)],
        sorted(str(path.relative_to(work)) for path in work.rglob("*")),
        recorded,
    )
    kept = base / name
    kept.mkdir()
    (kept / "stdout").write_text(done.stdout, encoding="utf-8")
    (kept / "stderr").write_text(done.stderr, encoding="utf-8")
    (kept / "state.json").write_text("\n".join(lines), encoding="utf-8")
    return result


def first_difference(bare: str, recorded: str) -> str:
    a, b = bare.splitlines(), recorded.splitlines()
    for i, (left, right) in enumerate(zip(a, b)):  # noqa: B905
        if left != right:
            return f"line {i + 1}: bare {left[:200]!r}, recorded {right[:200]!r}"
    if len(a) == len(b):
        return "line ends differ"
    more, lines = ("bare", a) if len(a) > len(b) else ("recorded", b)
    return f"only {more} has line {min(len(a), len(b)) + 1}: {lines[min(len(a), len(b))][:200]!r}"


def without_timings(text: str) -> str:
    for pattern, replacement in VARIABLE:
        text = pattern.sub(replacement, text)
    return text


def shape_of(text: str) -> str:
    return re.sub(NUMBER, "#", without_timings(text))


def compare_text(bare: tuple[str, str], recorded: str) -> Finding:
    """As strictly as the bare runs allow: every byte, all but timings, all but numbers, or whether there is any."""
    rungs: list[tuple[str, Callable[[str], str]]] = [
        ("same", lambda text: text),
        ("same but for timings", without_timings),
        ("same but for numbers", shape_of),
        ("bare runs differ", lambda text: str(bool(text))),
    ]
    for word, view in rungs:
        first, second, ours = view(bare[0]), view(bare[1]), view(recorded)
        if first == second:
            if first != ours:
                return Finding("DIFFERENT", word != "same", first_difference(first, ours))
            return Finding(word if recorded or word != "same" else "same, empty", word != "same")
    return Finding("bare runs differ", True)


def compare_losses(bare: tuple[Run, Run], recorded: Run) -> Finding:
    first, second, ours = bare[0].losses, bare[1].losses, recorded.losses
    if first == second:
        if first == ours:
            return Finding(f"{len(first)} same" if first else "none printed")
        wrong = [f"{a} became {b}" for a, b in zip(first, ours) if a != b]  # noqa: B905
        return Finding("DIFFERENT", False, wrong[0] if wrong else f"{len(first)} bare, {len(ours)} recorded")
    if len(first) == len(second) != len(ours):
        return Finding("DIFFERENT", True, f"{len(first)} bare, {len(ours)} recorded")
    return Finding("bare runs differ", True)


def compare_states(bare: tuple[Run, Run], recorded: Run) -> Finding:
    """Parameters, buffers and random states of every process; what the bare runs disagree on, by shape alone."""
    first, second, ours = bare[0].states, bare[1].states, recorded.states
    if len(first) != len(ours) and len(first) == len(second):
        return Finding("DIFFERENT", False, f"{len(first)} processes trained bare, {len(ours)} recorded")
    if not first or len(first) != len(second):
        return Finding("not written" if not first else "bare runs differ", True)
    weaker = []
    for a, b, c in zip(first, second, ours, strict=True):
        for what in ("parameters", "buffers", "random"):
            if a[what] == b[what]:
                if a[what] != c[what]:
                    return Finding("DIFFERENT", bool(weaker), f"{what} of {a['process']}: {difference(a, c, what)}")
            elif shapes(a, what) == shapes(b, what) != shapes(c, what):
                return Finding("DIFFERENT", True, f"shapes of the {what} of {a['process']}")
            else:
                weaker.append(what)
    if weaker:
        return Finding(f"bare runs differ: {', '.join(dict.fromkeys(weaker))}", True)
    return Finding(f"{sum(len(state['parameters']) for state in first)} same")


def shapes(state: dict[str, Any], what: str) -> list[Any]:
    return sorted(state[what]) if what == "random" else [entry[:-1] for entry in state[what]]


def difference(bare: dict[str, Any], recorded: dict[str, Any], what: str) -> str:
    if what == "random":
        names = {*bare[what], *recorded[what]}
        return ", ".join(sorted(n for n in names if bare[what].get(n) != recorded[what].get(n)))
    if len(bare[what]) != len(recorded[what]):
        return f"{len(bare[what])} bare, {len(recorded[what])} recorded"
    wrong = [i for i, (a, b) in enumerate(zip(bare[what], recorded[what], strict=True)) if a != b]
    return f"{len(wrong)} of {len(bare[what])}, the first is number {wrong[0]} {bare[what][wrong[0]][:-1]}"


def compare(name: str, bare: tuple[Run, Run], recorded: Run, must_record: bool) -> Comparison:
    codes = {bare[0].exit_code, bare[1].exit_code}
    if len(codes) > 1:
        exit_finding = Finding("bare runs differ", True)
    elif recorded.exit_code in codes:
        exit_finding = Finding(str(recorded.exit_code))
    else:
        exit_finding = Finding("DIFFERENT", False, f"bare {bare[0].exit_code}, recorded {recorded.exit_code}")
    findings = {
        "stdout": compare_text((bare[0].stdout, bare[1].stdout), recorded.stdout),
        "stderr": compare_text((bare[0].stderr, bare[1].stderr), recorded.stderr),
        "exit": exit_finding,
        "losses": compare_losses(bare, recorded),
        "parameters": compare_states(bare, recorded),
        "files": compare_text(("\n".join(bare[0].files), "\n".join(bare[1].files)), "\n".join(recorded.files)),
    }
    if must_record:  # a recorder that records nothing would leave every script as it is
        size = recorded.recorded_bytes
        findings["run file"] = Finding(f"{size:,} B") if size else Finding("DIFFERENT", False, "no run file was made")
    return Comparison(name, findings)


def same_run(
    script: Sequence[str], recorder: Sequence[str] = PROFILE, keep: Path | None = None, name: str | None = None
) -> Comparison:
    """Run a script bare and recorded, and compare; where they differ, bare once more, to see what its own runs do.

    Args:
        script: path of the script and its arguments.
        recorder: what stands before the script in the recorded run; ``{run}`` becomes the path of the run file.
        keep: an existing folder that gets a folder with the outputs of all runs; None: they are removed.
    """
    path = Path(script[0]).resolve()
    if not path.is_file():
        raise SameRunError(f"there is no script {script[0]}")
    words = [str(path), *script[1:]]
    base = Path(tempfile.mkdtemp(prefix=f"{path.stem}-", dir=keep)).resolve()
    try:
        run_file = base / "run.mdiag"
        command = [word.format(run=run_file) if word == "{run}" else word for word in recorder]
        first = run([sys.executable, *words], None, base, "bare-1")
        recorded = run([*command, *words], run_file, base, "recorded")
        found = compare(name or path.name, (first, first), recorded, must_record="{run}" in recorder)
        if found.differences:
            second = run([sys.executable, *words], None, base, "bare-2")
            found = compare(name or path.name, (first, second), recorded, must_record="{run}" in recorder)
        return found
    finally:
        if keep is None:
            shutil.rmtree(base)


def load_cases(folder: Path, ids: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """The entries of ``cases.json``, or those with the given ids (``v01`` stands for ``v01_dropout_rng``)."""
    entries: list[dict[str, Any]] = json.loads((folder / "cases.json").read_text(encoding="utf-8"))
    if ids is None:
        return entries
    picked = [e for e in entries if e["id"] in ids or e["id"].split("_")[0] in ids]
    missing = [i for i in ids if not any(i in (e["id"], e["id"].split("_")[0]) for e in picked)]
    if missing:
        raise SameRunError(f"{folder / 'cases.json'} has no case {', '.join(missing)}")
    return picked


def scripts_of(case: dict[str, Any], folder: Path) -> list[Path]:
    return [folder / case[field] for field in ("script", "script_ckpt") if case.get(field)]


def table(comparisons: Sequence[Comparison]) -> str:
    things = list(dict.fromkeys(thing for c in comparisons for thing in c.findings))
    rows = [[c.name, *(c.findings[thing].word if thing in c.findings else "" for thing in things)] for c in comparisons]
    return tabulate(rows, ["script", *things], disable_numparse=True)


def summary(comparisons: Sequence[Comparison]) -> str:
    wrong = [c for c in comparisons if c.differences]
    weaker = [c for c in comparisons if any(f.weaker for f in c.findings.values())]
    return (
        f"{len(comparisons)} scripts: {len(comparisons) - len(wrong)} run the same, {len(wrong)} differ; "
        f"{len(weaker)} compared less strictly somewhere, because the bare runs differ"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT", help="a script, or one with arguments in quotes")
    parser.add_argument("--cases", type=Path, metavar="FOLDER", help="a collection: cases.json and its scripts")
    parser.add_argument("--ids", metavar="ID,ID", help="of the collection, only these cases")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the outputs of all runs there")
    parser.add_argument("--recorder", help=argparse.SUPPRESS)  # for the tests: another command than memdiag profile
    args = parser.parse_args(arguments)
    if args.ids and not args.cases:
        parser.error("--ids picks from a collection: give --cases FOLDER too")
    if not args.scripts and not args.cases:
        parser.error("nothing to run: give a SCRIPT or --cases FOLDER")
    comparisons = []
    try:
        commands = [[s] if os.path.exists(s) else shlex.split(s) for s in args.scripts]
        if args.cases:
            cases = load_cases(args.cases, args.ids.split(",") if args.ids else None)
            commands += [[str(path)] for case in cases for path in scripts_of(case, args.cases)]
        if args.keep:
            args.keep.mkdir(parents=True, exist_ok=True)
        recorder = shlex.split(args.recorder) if args.recorder else PROFILE
        for command in commands:
            print(f"running {shlex.join(command)}", file=sys.stderr, flush=True)
            comparisons.append(same_run(command, recorder, args.keep))
    except SameRunError as error:
        print(f"same_run: {error}", file=sys.stderr)
        return 2
    print(table(comparisons))
    for comparison in comparisons:
        for thing, what in comparison.differences.items():
            print(f"{comparison.name}: {thing}: {what}")
    print(summary(comparisons))
    return 1 if any(c.differences for c in comparisons) else 0


if __name__ == "__main__":
    sys.exit(main())
