"""Is the verdict right? Every profile case of the collection: class, phase, growth, and what its mending does.

    python benchmarks/verdicts.py --cases FOLDER [--ids c01,c12] [--no-fixes | --variations]

FOLDER holds ``cases.json`` and its scripts; without the option it is what MEMDIAG_CASES names. For each case, from
``memdiag diagnose --json -`` of a run of its own:

- the class is one of ``acceptable_classes``, and where that is ``none`` there is no finding;
- the phase of the peak is one of ``acceptable_phases`` (an evaluation passes for a forward);
- growth per step is within 2 % of ``growth_per_step_bytes * growth_units_per_step``, of the process for host memory;
- the line that keeps a leak is ``leak_location`` or one of ``leak_location_alt``;
- the change of its ``fix_check`` is made in a copy and profiled too: the peak falls by what one of the advices said,
  within 10 % of that fall, or by no more where it said "at most". A ``control`` must not lower it, a ``scaling`` must.

Both sides of the last are measured here. With ``--variations`` each case is varied instead, as ``tests/variations.py``
says: batch and length doubled and halved, other names, what keeps moved elsewhere. Its class and the line that keeps it
must be the same. Prints one table and a line of summary; exits with 1 where anything fails.
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
import variations
from full import MEMDIAG, run

GROWTH_TOLERANCE = 0.02
FIX_TOLERANCE = 0.10
VARIED_HEAD = ["case", "variation", "class", "phase", "peak", "kept at", "result"]
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
    wrong = judge_class(case, report)
    phase = verdict["phase"]
    as_forward = phase == "evaluation" and "forward" in case["acceptable_phases"]
    if phase not in case["acceptable_phases"] and not as_forward:
        wrong.append(f"the phase is not {' or '.join(case['acceptable_phases'])}")
    grows = growth["host_bytes_per_step" if case["expected_class"] == "host_memory" else "bytes_per_step"]
    if case["growth_units_per_step"] is not None:
        expected = case["growth_per_step_bytes"] * case["growth_units_per_step"]
        if abs((grows or 0) - expected) > GROWTH_TOLERANCE * expected:
            wrong.append(f"growth is not {expected:,.0f}")
    kept, elsewhere = judge_line(case, report)
    wrong += elsewhere
    return [verdict["class"], str(phase), f"{grows:,}" if grows is not None else "-", kept or "-"], wrong


def judge_class(case: dict[str, Any], report: dict[str, Any]) -> list[str]:
    """What is wrong with the class."""
    wrong = []
    if report["verdict"]["class"] not in case["acceptable_classes"]:
        wrong.append(f"the class is not {' or '.join(case['acceptable_classes'])}")
    if case["expected_class"] == "none" and report["findings"]:
        wrong.append("a healthy run has findings")
    return wrong


def judge_line(case: dict[str, Any], report: dict[str, Any]) -> tuple[str | None, list[str]]:
    """The line that keeps a leak, and what is wrong with it."""
    holders = [f["holder"]["line"] for f in report["findings"] if f["holder"]]
    # Where no statement was found, the line of birth is what there is.
    births = [f["birth"]["line"] for f in report["findings"][:1] if f["birth"]]
    kept = next(iter(holders + births), None)
    if case["leak_location"] is None or case["expected_class"] not in ("leak", "host_memory"):
        return kept, []
    allowed = [case["leak_location"], *case["leak_location_alt"]]
    if kept is None or os.path.basename(kept) not in allowed:
        return kept, [f"it is kept at {' or '.join(allowed)}"]
    return kept, []


def judge_varied(case: dict[str, Any], folder: Path, variation: variations.Variation) -> tuple[list[str], list[str]]:
    """Cells of the table of variations, and what is wrong, of one variation of a case."""
    with variations.varied(case, folder, variation) as (script, moved):
        case = variations.expected(moved, variation)
        report = report_of(script)
    kept, elsewhere = judge_line(case, report)
    if report["verdict"]["class"] not in ("leak", "host_memory"):
        elsewhere = []  # a class that passes for a leak names nobody
    peak = f"{report['peak']['allocated_bytes']:,}"
    return [report["verdict"]["class"], str(report["verdict"]["phase"]), peak, kept or "-"], [
        *judge_class(case, report), *elsewhere]


def judge_fix(case: dict[str, Any], before: dict[str, Any], after: dict[str, Any]) -> tuple[list[str], list[str]]:
    """The same, of what the mending does."""
    fall = before["peak"]["allocated_bytes"] - after["peak"]["allocated_bytes"]
    kind, wrong = case["fix_check"]["kind"], []
    # A run has several advices, and the mending follows one.
    advice = [a for finding in before["findings"] for a in finding["advice"] if a["bytes"] is not None]
    advice.sort(key=lambda a: abs(a["bytes"] - fall))
    exact = next((a for a in advice if abs(a["bytes"] - fall) <= FIX_TOLERANCE * abs(fall)), None)
    said = exact or next((a for a in advice if a["at_most"] and a["bytes"] >= fall), None) or next(iter(advice), None)
    if kind == "control" and fall > 0:
        wrong.append("a wrong mending lowers the peak")
    elif kind in ("fix", "scaling") and fall <= 0 and case["expected_class"] != "host_memory":
        wrong.append("mending does not lower the peak")
    elif kind == "fix" and said is not None and exact is None and not (said["at_most"] and said["bytes"] >= fall):
        wrong.append(f"the fall is {said['bytes'] / fall:.2f} of the real one" if fall else "nothing falls")
    text = "-" if said is None else f"{said['bytes']:,}" + (" at most" if said["at_most"] else "")
    return [text, f"{fall:,}"], wrong


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=Path, default=os.environ.get("MEMDIAG_CASES"), metavar="FOLDER")
    parser.add_argument("--ids", metavar="ID,ID", help="only these cases")
    parser.add_argument("--no-fixes", action="store_true", help="leave out what mending does")
    parser.add_argument("--variations", action="store_true", help="vary the cases, and see whether verdicts stay")
    args = parser.parse_args(arguments)
    if args.cases is None:
        parser.error("name the collection: --cases FOLDER, or MEMDIAG_CASES")
    folder = Path(args.cases).resolve()
    try:
        cases = same_run.load_cases(folder, args.ids.split(",") if args.ids else None)
    except (OSError, same_run.SameRunError) as error:
        parser.error(str(error))
    head = VARIED_HEAD if args.variations else HEAD
    rows, failed, skipped = [], 0, 0
    for case in cases:
        if case["kind"] != "profile":
            continue
        missing = [package for package in case["requires"] if importlib.util.find_spec(package) is None]
        if missing:
            skipped += 1
            rows.append([case["id"], *[""] * (len(head) - 2), f"skipped: needs {', '.join(missing)}"])
            continue
        for variation in variations.variations(case["id"]) if args.variations else [None]:
            print(case["id"], variation.name if variation else "", file=sys.stderr, flush=True)
            try:
                cells, wrong = _judged(case, folder, variation, not args.no_fixes)
            except same_run.SameRunError as error:
                cells, wrong = [""] * (len(head) - (3 if variation else 2)), [str(error)]
            failed += bool(wrong)
            rows.append([
                case["id"], *([variation.name] if variation else []), *cells, "; ".join(wrong) or "ok"])
    print(tabulate(rows, head, disable_numparse=True))
    print(f"{len(rows)} runs: {len(rows) - failed - skipped} ok, {failed} failed, {skipped} skipped")
    return 1 if failed else 0


def _judged(
    case: dict[str, Any], folder: Path, variation: variations.Variation | None, fixes: bool
) -> tuple[list[str], list[str]]:
    """Cells of a row, and what is wrong."""
    if variation is not None:
        return judge_varied(case, folder, variation)
    report = report_of(folder / case["script"])
    cells, wrong = judge(case, report)
    fall = ["", ""]
    if case["fix_check"] and fixes:
        fall, faults = judge_fix(case, report, mended(case, folder))
        wrong += faults
    return [*cells, *fall], wrong


if __name__ == "__main__":
    sys.exit(main())
