"""Where to checkpoint: what each boundary saves and costs."""

from memdiag.plan.planning import Floor, Option, Planning, plans
from memdiag.plan.safety import Reason, Safety, Verdict

__all__ = ["Floor", "Option", "Planning", "Reason", "Safety", "Verdict", "plans"]
