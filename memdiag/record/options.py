"""What a user may choose about a recording."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_MAX_EVENTS = 2_000_000
PLANNED_STEP = 2
"""The step that plans are made from: the first after the warm-up has filled the caches, with the optimizer's state."""


@dataclass(frozen=True)
class Options:
    """Choices of a recording.

    Attributes:
        max_events: budget of profiler events recorded in full; after it the run goes on in light recording.
        steps: record only the steps ``[first, last)`` in full, counted from 0; None on either side is open.
        stop_after: end the script, as ``sys.exit(0)`` would, at the end of this many steps.
        plan_step: in this step, counted from 0, each outermost forward that trains is run a second time before it runs,
            and the arguments of module calls are noted: what a plan of checkpoints is made from.
        progress: show one line on standard error while the run goes on.
    """

    max_events: int = DEFAULT_MAX_EVENTS
    steps: tuple[int | None, int | None] | None = None
    stop_after: int | None = None
    plan_step: int | None = None
    progress: bool = False
