"""Sizes as people write them, and as reports print them; and times."""

from __future__ import annotations

import re
from decimal import Decimal

from memdiag.errors import MemdiagError

_BINARY = {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_DECIMAL = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS = {"": 1, "b": 1, **_BINARY, **_DECIMAL}
_SIZE = re.compile(r"([0-9][0-9_]*(?:\.[0-9]+)?)\s*([a-zA-Z]*)")


def parse_bytes(text: str) -> int:
    """Bytes from a size such as ``24GiB``, ``512 MB`` or ``1048576``; a fraction of a byte is dropped.

    >>> parse_bytes("24GiB")
    25769803776
    >>> parse_bytes("512 MB")
    512000000
    >>> parse_bytes("1.5kib")
    1536
    >>> parse_bytes("1_048_576")
    1048576

    A bare letter may mean either unit, so it is refused.

    >>> parse_bytes("24G")
    Traceback (most recent call last):
    ...
    memdiag.errors.MemdiagError: '24G' is not a size; write bytes, or a unit as in 24GiB (2**30) or 24GB (10**9)

    Raises:
        MemdiagError: when it is not a size, or negative.
    """
    match = _SIZE.fullmatch(text.strip())
    factor = _UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None or (factor == 1 and "." in match[1]):
        raise MemdiagError(f"{text!r} is not a size; write bytes, or a unit as in 24GiB (2**30) or 24GB (10**9)")
    # Decimal, because 0.1 GB is a hundred million bytes and not one less.
    return int(Decimal(match[1].replace("_", "")) * factor)


def format_bytes(count: int) -> str:
    """A size in the largest binary unit that it fills: two decimals for TiB and GiB, one for MiB and KiB.

    >>> [format_bytes(n) for n in (0, 1023, 1536, 540_000_000, 24 << 30, 3 << 40)]
    ['0 B', '1023 B', '1.5 KiB', '515.0 MiB', '24.00 GiB', '3.00 TiB']

    Differences have a sign, and what rounds to 1024 of a unit is one of the next.

    >>> [format_bytes(n) for n in (-2048, (1 << 20) - 1, (1 << 30) - 1)]
    ['-2.0 KiB', '1.0 MiB', '1.00 GiB']
    """
    sign, size = ("-", -count) if count < 0 else ("", count)
    if size < 1 << 10:
        return f"{sign}{size} B"
    units = (("KiB", 10, 1), ("MiB", 20, 1), ("GiB", 30, 2), ("TiB", 40, 2))
    for unit, shift, decimals in units[:-1]:
        value = round(size / (1 << shift), decimals)
        if value < 1024:
            return f"{sign}{value:.{decimals}f} {unit}"
    unit, shift, decimals = units[-1]
    return f"{sign}{size / (1 << shift):.{decimals}f} {unit}"


def format_time(ns: int) -> str:
    """A time in the largest unit that it fills, to three digits.

    >>> [format_time(n) for n in (0, 950, 41_234, 412_000_000, 5_230_000_000, 754_000_000_000)]
    ['0 ns', '950 ns', '41.2 µs', '412 ms', '5.23 s', '754 s']
    """
    for unit, size in (("s", 10**9), ("ms", 10**6), ("µs", 10**3)):
        if ns >= size:
            value = ns / size
            return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"
    return f"{ns} ns"
