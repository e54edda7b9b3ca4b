"""The data model of a run, its file, and the arithmetic that every reader shares."""

from memdiag.trace.file import Writer, is_run_file, load
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
