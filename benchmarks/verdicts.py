"""Is the verdict right? Every profile case of the collection: class, phase, growth, and what its mending does.

    python benchmarks/verdicts.py --cases FOLDER [--ids c01,c12] [--no-fixes]

FOLDER holds ``cases.json`` and its scripts; without the option it is what MEMDIAG_CASES names. For each case, from
``memdiag diagnose --json -`` of a run of its own:

- the class is one of ``acceptable_classes``, and where that is ``none`` there is no finding;
- the phase of the peak is one of ``acceptable_phases`` (an evaluation passes for a forward);
- growth per step is within 2 % of ``growth_per_step_bytes * growth_units_per_step``, of the process for host memory;
- the line that keeps a leak is ``leak_location`` or one of ``leak_location_alt``;
- the change of its ``fix_check`` is made in a copy and profiled too: the peak falls by what the first finding's best
  advice said, within 10 % of that fall. A ``control`` must not lower it, a ``scaling`` must.

Both sides of the last are measured here. Prints one table and a line of summary; exits with 1 where anything fails.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import same_run
from full import MEMDIAG, run

GROWTH_TOLERANCE = 0.02
FIX_TOLERANCE = 0.10
HEAD = ["case", "class", "phase", "growth a step", "kept at", "fall said", "fall measured", "result"]


def report_of(script: Path, arguments: Sequence[str] = ()) -> dict[str, Any]:
    """What ``memdiag diagnose`` says of a run of a script."""
    with tempfile.TemporaryDirectory(prefix="memdiag-verdicts-") as folder:
        file = f"{folder}/run.mdiag"
        run("profile", [*MEMDIAG, "profile", "-q", "--no-report", "-o", file, str(script), *arguments], folder)
        report: dict[str, Any] = json.loads(run("diagnose", [*MEMDIAG, "diagnose", file, "--json", "-"], folder))
        return report


def mended(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The same of a copy of the case in which its ``fix_check`` is made."""
    fix = case["fix_check"]
    with tempfile.TemporaryDirectory(prefix="memdiag-mended-") as copy:
        shutil.copytree((folder / case["script"]).parent, Path(copy, "scripts"))
        file = Path(copy, fix.get("file", case["script"]))
        text = file.read_text(encoding="utf-8")
        for old, new in fix["change"]:
            if old not in text:
                raise same_run.SameRunError(f"{case['id']}: {old!r} is not in {file.name}")
            text = text.replace(old, new)
        file.write_text(text, encoding="utf-8")
        return report_of(Path(copy, case["script"]))


def judge(case: dict[str, Any], report: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Cells of the table, and what is wrong, of the verdict alone."""
    verdict, growth = report["verdict"], report["growth"]
    wrong = []
    if verdict["class"] not in case["acceptable_classes"]:
        wrong.append(f"the class is not {' or '.join(case['acceptable_classes'])}")
    if case["expected_class"] == "none" and report["findings"]:
        wrong.append("a healthy run has findings")
    phase = verdict["phase"]
    as_forward = phase == "evaluation" and "forward" in case["acceptable_phases"]
    if phase not in case["acceptable_phases"] and not as_forward:
        wrong.append(f"the phase is not {' or '.join(case['acceptable_phases'])}")
    grows = growth["host_bytes_per_step" if case["expected_class"] == "host_memory" else "bytes_per_step"]
    if case["growth_units_per_step"] is not None:
        expected = case["growth_per_step_bytes"] * case["growth_units_per_step"]
        if abs((grows or 0) - expected) > GROWTH_TOLERANCE * expected:
            wrong.append(f"growth is not {expected:,.0f}")
    holders = [f["holder"]["line"] for f in report["findings"] if f["holder"]]
    kept = holders[0] if holders else None
    if case["leak_location"] is not None and case["expected_class"] == "leak":
        allowed = [case["leak_location"], *case["leak_location_alt"]]
        if kept is None or os.path.basename(kept) not in allowed:
            wrong.append(f"it is kept at {' or '.join(allowed)}")
    return [verdict["class"], str(phase), f"{grows:,}" if grows is not None else "-", kept or "-"], wrong


def judge_fix(case: dict[str, Any], before: dict[str, Any], after: dict[str, Any]) -> tuple[list[str], list[str]]:
    """The same, of what the mending does."""
    fall = before["peak"]["allocated_bytes"] - after["peak"]["allocated_bytes"]
    advice = [a["bytes"] for finding in before["findings"][:1] for a in finding["advice"] if a["bytes"] is not None]
    said = max(advice, default=None)
    kind, wrong = case["fix_check"]["kind"], []
    if kind == "control" and fall > 0:
        wrong.append("a wrong mending lowers the peak")
    elif kind in ("fix", "scaling") and fall <= 0 and case["expected_class"] != "host_memory":
        wrong.append("mending does not lower the peak")
    elif kind == "fix" and said is not None and abs(said - fall) > FIX_TOLERANCE * fall:
        wrong.append(f"the fall is {said / fall:.2f} of the real one" if fall else "nothing falls")
    return ["-" if said is None else f"{said:,}", f"{fall:,}"], wrong


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=Path, default=os.environ.get("MEMDIAG_CASES"), metavar="FOLDER")
    parser.add_argument("--ids", metavar="ID,ID", help="only these cases")
    parser.add_argument("--no-fixes", action="store_true", help="leave out what mending does")
    args = parser.parse_args(arguments)
    if args.cases is None:
        parser.error("name the collection: --cases FOLDER, or MEMDIAG_CASES")
    folder = Path(args.cases).resolve()
    try:
        cases = same_run.load_cases(folder, args.ids.split(",") if args.ids else None)
    except (OSError, same_run.SameRunError) as error:
        parser.error(str(error))
    rows, failed, skipped = [], 0, 0
    for case in cases:
        if case["kind"] != "profile":
            continue
        missing = [package for package in case["requires"] if importlib.util.find_spec(package) is None]
        if missing:
            skipped += 1
            rows.append([case["id"], *[""] * 6, f"skipped: needs {', '.join(missing)}"])
            continue
        print(case["id"], file=sys.stderr, flush=True)
        try:
            report = report_of(folder / case["script"])
            cells, wrong = judge(case, report)
            fall = ["", ""]
            if case["fix_check"] and not args.no_fixes:
                fall, faults = judge_fix(case, report, mended(case, folder))
                wrong += faults
        except same_run.SameRunError as error:
            cells, fall, wrong = [""] * 4, ["", ""], [str(error)]
        failed += bool(wrong)
        rows.append([case["id"], *cells, *fall, "; ".join(wrong) or "ok"])
    print(tabulate(rows, HEAD, disable_numparse=True))
    print(f"{len(rows)} cases: {len(rows) - failed - skipped} ok, {failed} failed, {skipped} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
