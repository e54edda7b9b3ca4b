"""Where to checkpoint: what each boundary saves and costs."""

from memdiag.plan.aside import ASKED_FOR, OUTSIDE, UNUSED
from memdiag.plan.obvious import MOST_SAVED, WHOLE_MODEL, Poor
from memdiag.plan.planning import Floor, Option, Planning, plans
from memdiag.plan.safety import Reason, Safety, Verdict

__all__ = [
    "ASKED_FOR", "MOST_SAVED", "OUTSIDE", "UNUSED", "WHOLE_MODEL", "Floor", "Option", "Planning", "Poor", "Reason",
    "Safety", "Verdict", "plans",
]
