"""Writes the chosen plan in one of the forms."""

from __future__ import annotations

import os

from memdiag.emit.chosen import chosen, refuse_runs
from memdiag.emit.code import code
from memdiag.emit.compile import compile_
from memdiag.emit.diff import diff
from memdiag.emit.fsdp import fsdp
from memdiag.emit.hf import hf
from memdiag.emit.pieces import Roots
from memdiag.emit.sites import sites
from memdiag.plan import Planning
from memdiag.plan.safety import chains
from memdiag.trace.models import models
from memdiag.trace.view import View
from memdiag.units import format_bytes


def emit(form: str, planning: Planning, run: View) -> str:
    """The chosen plan as what a person writes by hand.

    Args:
        form: one of ``memdiag.emit.FORMS``.
        run: that the plan is of.

    Raises:
        MemdiagError: there is nothing to write, or the form cannot say it.
    """
    option, regions = chosen(planning)
    script = str(run.trace.about.get("script") or "")
    folder = os.path.dirname(script) if script else os.getcwd()
    head = (f"Checkpoints for {os.path.basename(script) or 'this run'}, planned by memdiag: the peak of the step falls "
            f"from {format_bytes(planning.options[0].plan.peak.bytes)} to {format_bytes(option.plan.peak.bytes)}.")
    unsafe = sorted(planning.allowed.intersection(path for region in regions for path in region.modules))
    if unsafe:
        head += f" Unsafe to run twice, and allowed: {', '.join(unsafe)}."
    roots = Roots(models(run.trace.about))
    if form == "code":
        return code(sites(run), regions, folder, head, chains(run.trace), roots)
    if form == "diff":
        return diff(sites(run), regions, folder, head, chains(run.trace))
    if form == "compile":
        return compile_(planning.step, regions, head)
    if form == "fsdp":
        refuse_runs(regions, "the wrapper")
        return fsdp(regions, head, roots)
    refuse_runs(regions, "Transformers")
    return hf(sites(run), regions, head, roots)
