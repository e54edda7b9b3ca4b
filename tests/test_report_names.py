"""Folding: a folded name stands for exactly the paths that were given."""

from __future__ import annotations

import doctest
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memdiag.report import names
from memdiag.report.names import fold, ranges, shorten, shorten_apart


def unfolded(name: str) -> set[str]:
    """Every path that a folded name stands for."""
    choices: list[list[str]] = []
    for part in name.split("."):
        if part and part[0].isdigit():
            runs = [run.split("-") for run in part.split(",")]
            choices.append([str(n) for run in runs for n in range(int(run[0]), int(run[-1]) + 1)])
        else:
            choices.append([part])
    return {".".join(parts) for parts in product(*choices)}


PARTS = st.sampled_from(["0", "1", "2", "3", "7", "blocks", "fc"])


@given(st.sets(st.lists(PARTS, min_size=1, max_size=4).map(".".join), max_size=25))
def test_names_stand_for_the_paths_that_were_given_and_no_others(paths: set[str]) -> None:
    folded = fold(paths)
    assert set(folded) == paths
    for path, name in folded.items():
        assert path in unfolded(name)
    # Every path in one name only, and no name with a path that is not there.
    assert sorted(path for name in set(folded.values()) for path in unfolded(name)) == sorted(paths)


@pytest.mark.parametrize(("paths", "wanted"), [
    (["fc"], {"fc"}),
    (["blocks.0.fc"], {"blocks.0.fc"}),
    ([f"blocks.{i}.mlp.fc2" for i in range(12)], {"blocks.0-11.mlp.fc2"}),
    ([f"blocks.{i}.mlp" for i in (0, 1, 2, 3, 5, 6, 7)], {"blocks.0-3,5-7.mlp"}),
    ([f"stages.{i}.blocks.{j}.conv" for i in range(3) for j in range(4)], {"stages.0-2.blocks.0-3.conv"}),
    (["stages.0.blocks.0", "stages.0.blocks.1", "stages.1.blocks.0"], {"stages.0.blocks.0-1", "stages.1.blocks.0"}),
    (["a.0", "b.0", "a.1"], {"a.0-1", "b.0"}),
    (["a.0", "a.0.x", "a.1", "a.1.x"], {"a.0-1", "a.0-1.x"}),
    (["layer.01", "layer.02"], {"layer.01", "layer.02"}),
    (["10", "9"], {"9-10"}),
    ([], set()),
])
def test_examples(paths: list[str], wanted: set[str]) -> None:
    assert set(fold(paths).values()) == wanted


@given(st.sets(st.integers(0, 60)))
def test_ranges_hold_each_number_once(numbers: set[int]) -> None:
    if numbers:
        assert unfolded(ranges(numbers)) == {str(number) for number in numbers}


@given(st.text(max_size=60), st.integers(3, 40))
def test_short_text_fits_and_keeps_both_ends(text: str, width: int) -> None:
    short = shorten(text, width)
    assert len(short) == min(len(text), width)
    if len(text) > width:
        head, tail = short.split("…", 1) if "…" not in text else (short[0], short[-1])
        assert text.startswith(head)
        assert text.endswith(tail)


def test_the_examples_in_the_docstrings() -> None:
    assert doctest.testmod(names).failed == 0


@given(st.lists(st.text("ab.", max_size=40), max_size=8), st.integers(12, 30))
def test_shortened_texts_that_differ_stay_different(texts: list[str], width: int) -> None:
    found = shorten_apart(texts, width)
    assert set(found) == set(texts)
    assert len(set(found.values())) == len(set(texts))
    assert all(len(short) <= width for short in found.values())
    assert all(short == text for text, short in found.items() if len(text) <= width)
