"""Runs a script as it is and with checkpoints, and compares the two."""

from memdiag.check.check import Check, Request, Verdict, check

__all__ = ["Check", "Request", "Verdict", "check"]
