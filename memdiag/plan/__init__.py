"""Where to checkpoint: what each boundary saves and costs."""

from memdiag.plan.planning import Floor, Option, Planning, plans

__all__ = ["Floor", "Option", "Planning", "plans"]
