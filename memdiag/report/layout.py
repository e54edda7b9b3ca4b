"""Text in 80 columns: facts, paragraphs and tables."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from tabulate import tabulate

from memdiag.report.names import shorten_apart
from memdiag.trace import Role

WIDTH = 80
INDENT = "  "


def words(name: str) -> str:
    """A role, or a class of shortage, for a person."""
    return "held by the script" if name == Role.HELD.label else name.replace("_", " ")


def share(part: int, total: int) -> str:
    return f"{part / total:.1%}".replace("%", " %") if total else "-"


def facts(known: dict[str, str | None]) -> list[str]:
    width = max(len(name) for name in known) + 2
    lines = []
    for name, fact in known.items():
        if fact:
            room = WIDTH - len(INDENT) - width
            lines += [f"{INDENT}{name if not number else '':{width}}{line}"
                      for number, line in enumerate(textwrap.wrap(fact, room, break_on_hyphens=False))]
    return lines


def paragraph(text: str, mark: str = "") -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=INDENT + mark, subsequent_indent=INDENT + " " * len(mark),
                         break_on_hyphens=False)


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], align: str) -> list[str]:
    """A table whose last column, where it is text, gives way so that the table fits."""
    if align[-1] == "l":
        short = shorten_apart((row[-1] for row in rows), room(headers, rows))
        rows = [[*row[:-1], short[row[-1]]] for row in rows]
    text = tabulate(rows, headers, tablefmt="plain", disable_numparse=True,
                    colalign=[{"l": "left", "r": "right"}[side] for side in align])
    return [(INDENT + line).rstrip() for line in text.splitlines()]


def room(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """What the other columns of a table leave for its last one."""
    # tabulate sets two columns of space between cells, and two more before a header.
    taken = sum(max(len(headers[column]) + 2, *(len(row[column]) for row in rows)) + 2
                for column in range(len(headers) - 1))
    return WIDTH - len(INDENT) - taken
