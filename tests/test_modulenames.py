"""Ranges and patterns, and the modules that they stand for."""

from __future__ import annotations

import doctest

from hypothesis import given
from hypothesis import strategies as st

from memdiag import modulenames
from memdiag.modulenames import matching
from memdiag.report.names import fold

PARTS = st.sampled_from(["a", "b", "0", "1", "2", "3", "10", "11"])
PATHS = st.sets(st.lists(PARTS, min_size=1, max_size=4).map(".".join), min_size=1, max_size=12)


def test_examples() -> None:
    assert doctest.testmod(modulenames).failed == 0


@given(PATHS)
def test_what_a_report_prints_is_taken_back(paths: set[str]) -> None:
    # GIVEN modules under the names that reports print, WHEN one is asked for THEN it is those that print so
    printed = fold(paths)
    for name in printed.values():
        assert set(matching(name, paths)) == {path for path in paths if printed[path] == name}


def test_a_name_that_is_there_is_no_pattern() -> None:
    assert matching("heads.0-1", ["heads.0", "heads.1", "heads.0-1"]) == ["heads.0-1"]
    assert matching("heads.a[0]", ["heads.a[0]", "heads.a0"]) == ["heads.a[0]"]


def test_a_range_that_runs_on_is_no_long_search() -> None:
    assert matching("blocks.0-999999999999", ["blocks.0", "blocks.1"]) == ["blocks.2"]
    assert matching("blocks.3-1", ["blocks.1", "blocks.2", "blocks.3"]) == ["blocks.3-1"]
