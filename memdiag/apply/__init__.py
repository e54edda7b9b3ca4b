"""Puts a plan onto a live model."""

from memdiag.apply.regions import checkpointed

__all__ = ["checkpointed"]
