"""Rows on their way to the run file, and the text that they share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memdiag.trace import NONE, Writer
from memdiag.trace.model import SCHEMA


class Rows:
    """Collects rows by table, in the order of the schema's columns, and interns text.

    Args:
        shared: rows of another trace in the same file, whose text these share.
    """

    def __init__(self, shared: Rows | None = None) -> None:
        self._rows: dict[str, list[Sequence[Any]]] = {name: [] for name in SCHEMA}
        self._text: dict[str, int] = {} if shared is None else shared._text
        self._fresh: list[str] = [] if shared is None else shared._fresh

    def __getitem__(self, table: str) -> list[Sequence[Any]]:
        return self._rows[table]

    def intern(self, text: str | None) -> int:
        """The number of a text in the run file; NONE for None."""
        if text is None:
            return NONE
        found = self._text.get(text)
        if found is None:
            found = self._text[text] = len(self._text)
            self._fresh.append(text)
        return found

    def knows(self, text: str) -> bool:
        """Whether a text is in the run file."""
        return text in self._text

    def text(self, number: int) -> str | None:
        """The text of a number; NONE is None."""
        return None if number == NONE else next(t for t, n in self._text.items() if n == number)

    def flush(self, writer: Writer, of: str | None = None) -> None:
        """Writes what has come since the last flush, to the run's trace or to one ``of`` a part of it.

        Raises:
            OSError: the file cannot be written.
        """
        writer.text(self._fresh)
        self._fresh.clear()
        for name, rows in self._rows.items():
            if rows:
                self._rows[name] = []
                writer.table(name, dict(zip(SCHEMA[name], zip(*rows, strict=True), strict=True)), of)
