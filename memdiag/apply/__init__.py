"""Puts a plan onto a live model."""

from memdiag.apply.apply import Applied, apply_plan
from memdiag.apply.read import Plan, Region

__all__ = ["Applied", "Plan", "Region", "apply_plan"]
