"""Pairs of training scripts with a known answer, without and with checkpoints: all but
the one that waits for Transformers, which MEMDIAG_VARIATIONS=all does too."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import same_run
from forked import Forked

from memdiag.check.check import Check, Request, Verdict, compare_values
from memdiag.check.compare import Outcome
from memdiag.record.process.launch import Target

ALL = ["v01", "v02", "v04", "v06", "v07", "v08", "v10", "v11", "v12", "v15"]
CHOSEN = ALL if os.environ.get("MEMDIAG_VARIATIONS") == "all" else [one for one in ALL if one != "v12"]
SAID = {"same": (Verdict.SAME, Verdict.SAVES_NOTHING), "different_training": (Verdict.DIFFERENT,),
        "could_not_run": (Verdict.COULD_NOT_RUN,)}
OUTCOMES = {"same": (Outcome.EQUAL, Outcome.WITHIN_NOISE), "different": (Outcome.DIFFERENT,),
            "not_compared": (Outcome.NOT_COMPARED,)}
# Of the modules that the collection names for each, one that the cause or what differs has to name, and words of it.
NAMED = {"v01": ("blocks.3", "random numbers"), "v02": ("stage1.0.1", "updated twice"),
         "v04": ("body.0", "4 times, the second 1"), "v06": ("blocks.0", "reentrant checkpoint"),
         "v08": ("experts.1", "another path"), "v10": ("blocks.0", "gradients are off")}


def checked(case: dict[str, object], folder: Path, runs: Forked) -> Check:
    one, other = (Target(str(folder / str(case[key])), None, ()) for key in ("script", "script_ckpt"))
    return compare_values(Request(one, other, None, None, 3, 0, 4), runs)


@pytest.mark.cases
@pytest.mark.parametrize("case_id", CHOSEN)
def test_stages_verdict_and_place_are_the_known_ones(runs: Forked, cases_folder: Path, case_id: str) -> None:
    # GIVEN a script, and the same with checkpoints in one of the ways in which it goes right or wrong
    (case,) = same_run.load_cases(cases_folder, [case_id])
    for package in case["requires"]:
        pytest.importorskip(package)
    # WHEN the two are compared THEN each stage comes out as is known, and so does the whole
    found = checked(case, cases_folder, runs)
    assert found.verdict in SAID[case["expected_check"]]
    stages = {stage.value: outcome for stage, outcome in found.stages.items()}
    for stage, word in case["expected_stages"].items():
        assert stages[stage] in OUTCOMES[word], stage
    # and the modules that are at fault are named
    if case_id in NAMED:
        assert found.difference is not None
        module, words = NAMED[case_id]
        names = [*found.difference.cause.names, *(pair.name for pair in found.difference.pairs)]
        assert any(name == module or name.startswith(f"{module}.") for name in names), names
        assert words in found.difference.cause.text
    else:
        assert found.difference is None
