"""Verdicts on real training scripts with a known right answer: a fixed sample; benchmarks/verdicts.py does them all."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import same_run

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


@pytest.mark.cases
@pytest.mark.parametrize("case_id", ["c12", "c37"])
def test_mending_does_what_the_advice_said(verdicts, cases_folder: Path, case_id: str) -> None:  # type: ignore[no-untyped-def]
    # GIVEN a case and its mending WHEN both are recorded THEN the peak falls by what was said before
    (case,) = same_run.load_cases(cases_folder, [case_id])
    cells, wrong = verdicts.judge_fix(
        case, verdicts.report_of(cases_folder / case["script"]), verdicts.mended(case, cases_folder))
    assert not wrong, cells
