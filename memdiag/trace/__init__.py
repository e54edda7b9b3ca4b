"""The data model of a run, its file, and the arithmetic that every reader shares."""

from memdiag.runfile import is_run_file
from memdiag.trace.file import Writer, load
from memdiag.trace.model import (
    NONE,
    Kind,
    Level,
    Phase,
    Pool,
    Role,
    Trace,
)

__all__ = ["NONE", "Kind", "Level", "Phase", "Pool", "Role", "Trace", "Writer", "is_run_file", "load"]
