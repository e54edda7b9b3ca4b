"""Where to checkpoint: what each boundary saves and costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memdiag.plan.aside import ASKED_FOR, OUTSIDE, UNUSED
    from memdiag.plan.obvious import MOST_SAVED, WHOLE_MODEL, Poor
    from memdiag.plan.planning import Floor, Option, Planning, plans
    from memdiag.plan.safety import Reason, Safety, Verdict

__all__ = [
    "ASKED_FOR", "MOST_SAVED", "OUTSIDE", "UNUSED", "WHOLE_MODEL", "Floor", "Option", "Planning", "Poor", "Reason",
    "Safety", "Verdict", "plans",
]


def __getattr__(name: str) -> Any:
    # Late, because these import NumPy, and what starts a script asks for the names of plans alone.
    if name in __all__:
        from memdiag.plan import aside, obvious, planning, safety

        return next(getattr(module, name) for module in (aside, obvious, planning, safety) if hasattr(module, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
