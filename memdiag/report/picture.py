"""How pictures look, and writing them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memdiag.errors import MemdiagError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
TIME_UNITS = ((10**9, "s"), (10**6, "ms"), (10**3, "µs"))
BYTE_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))

_STYLE: Any = {
    "font.size": 8.0,
    "axes.titlesize": 8.5,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "hatch.linewidth": 0.5,
    "legend.fontsize": 8.0,
    "savefig.dpi": 200,
    # Text that stays text: it can be searched, and set in the font of the paper.
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
    "svg.hashsalt": "memdiag",
}


def save(path: str | os.PathLike[str], make: Callable[[], Figure]) -> None:
    """Writes a picture.

    Args:
        path: ends in .png, .svg or .pdf, which says what is written.
        make: the picture, in the style that is set when it is called.

    Raises:
        MemdiagError: for another ending.
        OSError: when the file cannot be written.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise MemdiagError(f"{path}: a picture is written as one of {', '.join(SUFFIXES)}; end its name so")
    # Late: reading a report must not cost this import, and a recorded script must not find it done.
    from matplotlib import rc_context

    with rc_context(_STYLE):
        drawn = make()
        # No date inside: the same trace makes the same file.
        metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(suffix)
        drawn.savefig(path, metadata=metadata)
