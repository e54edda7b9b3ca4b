"""Planners side by side: a sample of ``benchmarks/planners.py``."""

from __future__ import annotations

from test_benchmarks import row, run


def test_none_that_fits_is_cheaper_than_ours() -> None:
    # GIVEN one model and two budgets / WHEN each planner plans, and one plan of each budget is run
    output = run("planners", "--models", "lstm", "--budgets", "2", "--applied", "1")
    # THEN none that fits is cheaper, and the peaks are what was said
    assert "none that fits is cheaper than ours" in output
    assert "2 plans applied and measured" in output
    # AND no checkpoint at all is over both budgets, which ours is not
    assert row(output, "lstm")[2:4] == ["0.0", "!"]
    exceeded = dict(part.rsplit(" ", 1) for part in output.partition("budgets: ")[2].splitlines()[0].split(", "))
    assert exceeded["none"] == "2"
    assert exceeded["ours"] == "0"
