"""Printing for the verbs that read."""

from __future__ import annotations

import sys


def show(text: str) -> None:
    """Prints to standard output, ending in one newline."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that cannot show a sign still gets the figures
    sys.stdout.write(text.rstrip("\n") + "\n")
    sys.stdout.flush()
