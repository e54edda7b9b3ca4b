"""Verdicts on real training scripts with a known right answer: a fixed sample; benchmarks/verdicts.py does them all,
also with ``--variations``, and ``MEMDIAG_VARIATIONS=all`` tries all variations here."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from pathlib import Path

import pytest
import same_run
import variations

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def verdicts():  # type: ignore[no-untyped-def]
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        spec = importlib.util.spec_from_file_location("verdicts", ROOT / "benchmarks" / "verdicts.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.report_of = functools.cache(module.report_of)  # a case may serve several tests
        yield module
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


@pytest.mark.cases
@pytest.mark.parametrize("case_id", [
    pytest.param("c10", id="optimizer-state"),
    pytest.param("c12", id="leak-of-copies"),
    pytest.param("c20", id="inputs"),
    pytest.param("c23", id="leak-of-a-growing-tensor"),
    pytest.param("c50", id="scratch"),
    pytest.param("c51", id="healthy"),
])
def test_the_verdict_is_the_known_one(verdicts, cases_folder: Path, case_id: str) -> None:  # type: ignore[no-untyped-def]
    (case,) = same_run.load_cases(cases_folder, [case_id])
    cells, wrong = verdicts.judge(case, verdicts.report_of(cases_folder / case["script"]))
    assert not wrong, cells


def _chosen() -> list[tuple[str, str]]:
    """Variations that are tried: MEMDIAG_VARIATIONS names cases, or all; else it is a sample."""
    cases = os.environ.get("MEMDIAG_VARIATIONS")
    if cases:
        wanted = sorted(variations.NAMES) if cases == "all" else cases.split(",")
        return [(case, variation.name) for case in wanted for variation in variations.variations(case)]
    return [("c06", "length x0.5"), ("c22", "moved"), ("c50", "names"), ("c51", "batch x2")]


@pytest.mark.cases
@pytest.mark.parametrize(("case_id", "name"), _chosen())
def test_sizes_names_and_helpers_do_not_change_it(  # type: ignore[no-untyped-def]
    verdicts, cases_folder: Path, case_id: str, name: str) -> None:
    # GIVEN a case with another size, other names, or what keeps moved elsewhere
    (case,) = same_run.load_cases(cases_folder, [case_id])
    (variation,) = [one for one in variations.variations(case_id) if one.name == name]
    # THEN its class is the same, and the line that keeps it, wherever that now is
    cells, wrong = verdicts.judge_varied(case, cases_folder, variation)
    assert not wrong, cells


@pytest.mark.cases
def test_every_case_is_varied(cases_folder: Path) -> None:
    # GIVEN the collection THEN every variation finds what it changes, and each case has at least other names
    for case in same_run.load_cases(cases_folder, None):
        if case["kind"] != "profile":
            continue
        found = variations.variations(case["id"])
        assert "names" in [variation.name for variation in found], case["id"]
        assert case["leak_location"] is None or "moved" in [one.name for one in found]
        for variation in found:
            with variations.varied(case, cases_folder, variation) as (script, _):
                compile(script.read_text(encoding="utf-8"), script.name, "exec")


@pytest.mark.cases
@pytest.mark.parametrize("case_id", ["c12", "c37"])
def test_mending_does_what_the_advice_said(verdicts, cases_folder: Path, case_id: str) -> None:  # type: ignore[no-untyped-def]
    # GIVEN a case and its mending WHEN both are recorded THEN the peak falls by what was said before
    (case,) = same_run.load_cases(cases_folder, [case_id])
    cells, wrong = verdicts.judge_fix(
        case, verdicts.report_of(cases_folder / case["script"]), verdicts.mended(case, cases_folder))
    assert not wrong, cells
