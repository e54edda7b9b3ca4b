"""What the probe says of regions that make a difference: the script's forward run twice, with no checkpoint."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from memdiag.check.arms import Arms
from memdiag.check.spec import RECORDED
from memdiag.plan.safety import NOT_PROBED, verdicts
from memdiag.record.options import PLANNED_STEP
from memdiag.record.process.launch import Target
from memdiag.trace import load


class Probed(NamedTuple):
    """Something that forbids a checkpoint.

    Attributes:
        line: ``file.py:12`` of what does so; None where it is not in the script.
    """

    module: str
    text: str
    line: str | None


def probed(script: Target, modules: Collection[str], started: Arms) -> tuple[Probed, ...] | None:
    """What forbids that some modules are checkpoints, as ``memdiag plan`` would tell; () where nothing does.

    None where the script has too few steps for the probe, or does not come to its end under it.
    """
    left = started.start("probe", script, None, PLANNED_STEP + 1, told="what is in the regions that make a difference")
    if left.status or not (left.folder / RECORDED).exists():
        return None
    found = verdicts(load(left.folder / RECORDED))
    known = {module: [reason for reason in found[module].reasons if reason.text != NOT_PROBED]
             for module in modules if module in found}
    if not known or any(not reasons and found[module].reasons for module, reasons in known.items()):
        return None
    return tuple(Probed(module, reason.text, reason.line) for module, reasons in sorted(known.items())
                 for reason in reasons)
