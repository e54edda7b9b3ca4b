"""Observes a real run and writes its trace."""

from memdiag.record.options import Options
from memdiag.record.recorder import Recorder

__all__ = ["Options", "Recorder"]
