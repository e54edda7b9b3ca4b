"""Every case of the collection: does it run the same, and is its peak the allocator's own?

    python benchmarks/full.py --cases FOLDER [--ids c01,v02] [--peaks-only]

FOLDER holds ``cases.json`` and its scripts; without the option it is what MEMDIAG_CASES names. For every script:
`tests/same_run.py`. For every profile case also, from ``memdiag report RUN --json -`` of a run of its own:

- the peak over the whole run is within 0.1 % of ``allocator_peak_bytes``, which the case knows from elsewhere. Some
  operators take workspace by the kind of processor, so where it is not equal, `allocator_peak.py` measures it here, in
  a run of its own and without memdiag; that is then what the peak must be within 0.1 % of, and the table says "here";
- the phase of the peak is one of ``acceptable_phases``; where they name the forward, an evaluation passes too, for it
  is a forward with gradients off, and the table says so;
- the roles at the peak sum to it, and ``unknown`` is at most 1 % of it.

Prints one table and a line of summary; exits with 1 where anything fails. An hour or so on two cores.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import same_run

PEAK_TOLERANCE = 1e-3
UNKNOWN_AT_MOST = 1e-2
ALLOCATOR_PEAK = Path(__file__).parent / "allocator_peak.py"
MEMDIAG = [sys.executable, "-m", "memdiag"]
HEAD = ["script", "runs the same", "peak", "expected", "off by", "phase", "unknown", "result"]


def run(what: str, command: Sequence[str], folder: str) -> str:
    """Standard output of a command.

    Raises:
        SameRunError: it fails, or does not end.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": folder}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=same_run.TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as expired:
        raise same_run.SameRunError(f"{what} did not end in {same_run.TIMEOUT_S} s") from expired
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise same_run.SameRunError(f"{what} exited with {done.returncode}: {last[0]}")
    return done.stdout


def read_profile(script: Path) -> dict[str, Any]:
    """Profile a script as a user would, and read the run file as a program would."""
    with tempfile.TemporaryDirectory(prefix="memdiag-full-") as folder:
        run_file = f"{folder}/run.mdiag"
        run("profile", [*MEMDIAG, "profile", "-q", "--no-report", "-o", run_file, str(script)], folder)
        report: dict[str, Any] = json.loads(run("report", [*MEMDIAG, "report", run_file, "--json", "-"], folder))
        return report


def measure_here(script: Path) -> int:
    """The allocator's own peak on this machine, in bytes, without memdiag."""
    with tempfile.TemporaryDirectory(prefix="memdiag-full-") as folder:
        run("allocator_peak.py", [sys.executable, str(ALLOCATOR_PEAK), f"{folder}/peak", str(script)], folder)
        return int(Path(folder, "peak").read_text(encoding="utf-8"))


def check_peak(case: dict[str, Any], script: Path, report: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Cells of the table, and what is wrong."""
    peak, phase = report["peak"]["allocated_bytes"], report["peak"]["phase"]
    roles: dict[str, int] = report["roles_at_peak"]
    expected, place = case["allocator_peak_bytes"], ""
    if peak != expected:
        expected, place = measure_here(script), " here"
    off, unknown = peak / expected - 1, roles["unknown"] / max(peak, 1)
    wrong = []
    if abs(off) > PEAK_TOLERANCE:
        wrong.append(f"the peak is off by {peak - expected:+,} B")
    if phase == "evaluation" and phase not in case["acceptable_phases"] and "forward" in case["acceptable_phases"]:
        phase = "evaluation, as a forward"
    elif phase not in case["acceptable_phases"]:
        wrong.append(f"the phase is not {' or '.join(case['acceptable_phases'])}")
    if sum(roles.values()) != peak:
        wrong.append(f"the roles miss {peak - sum(roles.values()):,} B")
    if unknown > UNKNOWN_AT_MOST:
        wrong.append(f"{roles['unknown']:,} B are unknown")
    return [f"{peak:,}", f"{expected:,}{place}", f"{off:+.4%}", str(phase), f"{unknown:.2%}"], wrong


def check_script(case: dict[str, Any], script: Path, peaks_only: bool) -> tuple[list[str], list[str]]:
    """One row of the table but its last cell, and what is wrong."""
    wrong = []
    same = "not asked"
    if not peaks_only:
        found = same_run.same_run([str(script)])
        same = "no" if found.differences else "yes"
        if not found.differences:
            weaker = [f"{thing} {f.word}" for thing, f in found.findings.items() if f.weaker]
            same += f" ({', '.join(weaker)})" if weaker else ""
        wrong += [f"{thing}: {what}" for thing, what in found.differences.items()]
    cells = [""] * 5
    if case["kind"] == "profile":
        cells, faults = check_peak(case, script, read_profile(script))
        wrong += faults
    return [script.name, same, *cells], wrong


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=Path, default=os.environ.get("MEMDIAG_CASES"), metavar="FOLDER")
    parser.add_argument("--ids", metavar="ID,ID", help="only these cases")
    parser.add_argument("--peaks-only", action="store_true", help="leave out whether scripts run the same: a third")
    args = parser.parse_args(arguments)
    if args.cases is None:
        parser.error("name the collection: --cases FOLDER, or MEMDIAG_CASES")
    folder = Path(args.cases).resolve()
    try:
        cases = same_run.load_cases(folder, args.ids.split(",") if args.ids else None)
    except (OSError, same_run.SameRunError) as error:
        parser.error(str(error))

    rows: list[list[str]] = []
    problems: list[str] = []
    failed = skipped = 0
    for case in cases:
        if args.peaks_only and case["kind"] != "profile":
            continue
        missing = [package for package in case["requires"] if importlib.util.find_spec(package) is None]
        for script in same_run.scripts_of(case, folder):
            print(f"running {script.name}", file=sys.stderr, flush=True)
            if missing:
                skipped += 1
                rows.append([script.name, *[""] * 6, f"skipped: needs {', '.join(missing)}"])
                continue
            try:
                row, wrong = check_script(case, script, args.peaks_only)
            except same_run.SameRunError as error:
                row, wrong = [script.name, *[""] * 6], [str(error)]
            failed += bool(wrong)
            problems += [f"{script.name}: {what}" for what in wrong]
            rows.append([*row, "FAILED" if wrong else "ok"])
    print(tabulate(rows, HEAD, disable_numparse=True))
    if problems:
        print("", *problems, sep="\n")
    print(f"\n{len(rows)} scripts: {len(rows) - failed - skipped} ok, {failed} failed, {skipped} skipped")
    return 1 if failed or skipped == len(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
