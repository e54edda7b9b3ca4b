from __future__ import annotations

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memdiag import units
from memdiag.errors import MemdiagError
from memdiag.units import format_bytes, parse_bytes

UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def test_the_examples_in_the_docstrings() -> None:
    result = doctest.testmod(units)
    assert result.attempted >= 6
    assert result.failed == 0


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), (" 7 ", 7), ("3b", 3), ("0.1GB", 10**8), ("2 TiB", 2**41), ("10kB", 10_000), ("0.3kib", 307)],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "1.5", "24G", "1e9", "1,000", "12 parsecs", "1 2", "1.GiB", "²", "0x10"]
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(MemdiagError, match="24GiB"):
        parse_bytes(text)


@given(st.integers(0, 2**60))
def test_plain_numbers_are_bytes(size: int) -> None:
    assert parse_bytes(str(size)) == size
    assert parse_bytes(f"{size:_}") == size


@given(st.integers(0, 2**49))
def test_a_printed_size_is_right_to_its_last_digit(size: int) -> None:
    # GIVEN a size as it is printed
    number, unit = format_bytes(size).split()
    # THEN it is off by no more than half of its last digit, and no figure has five digits before the point
    digit = 10 ** -len(number.partition(".")[2])
    assert abs(float(number) * UNITS[unit] - size) <= digit / 2 * UNITS[unit] + 1e-9 * size
    assert float(number) < 1024
    assert format_bytes(-size) == (f"-{number} {unit}" if size else "0 B")
