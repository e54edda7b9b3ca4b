"""Where two runs first differ and why: rules on small runs written by hand, each with its evidence and without."""

from __future__ import annotations

import pytest

from memdiag.check import entries as e
from memdiag.check.cause import Cause, likely_cause, why_failed
from memdiag.check.compare import Outcome, compare, places
from memdiag.check.entries import Entry, Failure, Run, Segment, Stage

OFF = " (gradients off)"


def run(*entries: Entry, whole: bool = True, **facts: object) -> Run:
    return Run(dict(facts.pop("about", {})), [Segment(list(entries), whole)], **facts)  # type: ignore[arg-type, call-overload]


def note(stage: str, name: str, value: str, nth: int = 0, own: str | None = None) -> Entry:
    return Entry(stage, name, nth, value, own=own)


def tensor(stage: Stage, name: str, value: str, nth: int = 0) -> Entry:
    return Entry(stage.value, name, nth, value, "[2, 3]", "float32")


def cause(a: Run, b: Run, ratios: dict[str, float] | None = None) -> Cause:
    return likely_cause(a, b, compare(a, b), ratios or {})


def gradient(value: str, name: str = "fc.weight") -> Entry:
    return tensor(Stage.GRADIENTS, name, value)


def ran(name: str, given: str, own: str = "p", returned: str | None = None, again: bool = False) -> list[Entry]:
    """A module call, of the forward or again."""
    call, back = (e.RECOMPUTED, e.RECOMPUTED_RETURNED) if again else (e.CALL, e.RETURNED)
    return [note(call, name, given, own=own), *([] if returned is None else [note(back, name, returned)])]


# --- comparing ----------------------------------------------------------------------------------------------------


def test_the_first_stage_of_the_first_step_that_differs() -> None:
    # GIVEN two steps, of which the second differs in gradients and parameters
    def made(value: str) -> Run:
        return Run({}, [Segment([gradient("1")]), Segment([tensor(Stage.PARAMETERS, "w", value), gradient(value)])])

    found = compare(made("1"), made("2"))
    # THEN it is that step, and that stage that a step comes to first
    assert (found.step, found.first) == (1, Stage.GRADIENTS)
    assert found.stages[Stage.PARAMETERS] is Outcome.DIFFERENT
    assert found.stages[Stage.BUFFERS] is Outcome.EQUAL
    assert places(made("1"), made("2")) == {(1, (stage, name, 0)) for stage, name in (
        ("gradients", "fc.weight"), ("parameters", "w"))}


def test_what_a_micro_batch_leaves_comes_before_the_next_one() -> None:
    # GIVEN a state that a first micro-batch leaves otherwise, and outputs of the second that follow from it
    def made(value: str) -> Run:
        between = [note(Stage.BUFFERS.value, "bn.count", value), note(e.NEXT, "", "")]
        return run(tensor(Stage.OUTPUTS, "y", "1"), *between, tensor(Stage.OUTPUTS, "y", value, 1))

    # WHEN they are compared THEN the state is first, though a step comes to outputs first
    assert compare(made("1"), made("2")).first is Stage.BUFFERS
    # AND where already the first micro-batch's outputs differ, these are
    assert compare(run(tensor(Stage.OUTPUTS, "y", "1"), *made("1").segments[0].entries[1:]),
                   run(tensor(Stage.OUTPUTS, "y", "2"), *made("2").segments[0].entries[1:])).first is Stage.OUTPUTS


def test_what_is_within_noise_is_no_difference() -> None:
    a, b = run(gradient("1")), run(gradient("2"))
    found = compare(a, b, {(0, ("gradients", "fc.weight", 0))})
    assert found.step is None
    assert found.stages[Stage.GRADIENTS] is Outcome.WITHIN_NOISE


@pytest.mark.parametrize(("one", "other"), [([], [gradient("1")]), ([gradient("1")], []),
                                            ([gradient("1")], [gradient(e.NOTHING)])])
def test_a_gradient_that_one_run_has_alone_is_a_difference(one: list[Entry], other: list[Entry]) -> None:
    assert compare(run(*one), run(*other)).first is Stage.GRADIENTS


def test_no_gradient_and_none_are_the_same() -> None:
    assert compare(run(), run(gradient(e.NOTHING))).step is None


def test_a_step_that_broke_off_is_compared_as_far_as_it_came() -> None:
    # GIVEN a second run that ended in backward WHEN it is compared THEN what comes after is not
    after = note(e.BUFFERS_MIDWAY, "bn.mean", "1")
    a = run(after, gradient("1"), tensor(Stage.BUFFERS, "bn.mean", "9"))
    b = run(after, whole=False, failure=Failure("CheckpointError", "", None))
    found = compare(a, b)
    assert found.step is None
    assert found.stages[Stage.GRADIENTS] is Outcome.NOT_COMPARED
    assert found.stages[Stage.BUFFERS] is Outcome.EQUAL


def test_another_number_of_steps() -> None:
    a, b = Run({}, [Segment(), Segment()]), Run({}, [Segment()])
    assert compare(a, b).first is Stage.SCHEDULE
    assert cause(a, b).proved_by == "steps of optimizers: 2 and 1"


# --- causes -------------------------------------------------------------------------------------------------------

X1, X2 = (tensor(Stage.INPUTS, "Model argument 0", value) for value in "12")
Y1, Y2 = (tensor(Stage.OUTPUTS, "Model output 0", value) for value in "12")
L1, L2 = (note(Stage.OUTPUTS.value, "loss", value) for value in ("1.0", "0.5"))
G1, G2 = gradient("1"), gradient("2")
B1, B2 = (note(Stage.BUFFERS.value, "bn.count", value) for value in "12")
R1, R2 = (note(Stage.RANDOM_STATE.value, "torch", value) for value in "12")
W1, W2 = (tensor(Stage.PARAMETERS, "fc.weight", value) for value in "12")


def began(value: str) -> Entry:
    return note(e.BEGAN_RANDOM, "torch", value)


def weights(value: str) -> Entry:
    return tensor(Stage.PARAMETERS, "fc.weight", value)._replace(stage=e.BEGAN_PARAMETERS)


def told(name: str, value: str) -> Entry:
    return note(Stage.SCHEDULE.value, name, value)


AGAIN = ran("fc", "0=1", returned="5")
BLOCK = [*ran("block", "0=1"), *ran("block.fc", "0=2")]
BLOCK_AGAIN = [*ran("block", "0=1", again=True), *ran("block.fc", "0=9", again=True)]
# What the first run has, the second with the evidence, what its cause and its proof say, and the second without.
RULES = {
    "drawn-before": ([began("1"), X1], [began("2"), X2], "drawn before this forward", "torch's random generator",
                     [began("1"), X2]),
    "other-data": ([began("1"), X1], [began("1"), X2], "given other data", "Model argument 0", [began("2"), X2]),
    "began-otherwise": ([weights("1"), Y1], [weights("2"), Y2], "begin with other parameters",
                        "`fc.weight` before the first forward", [weights("1"), Y2]),
    "mode": ([told("mode of Model", "training"), Y1], [told("mode of Model", "evaluating: drop"), Y2],
             "mode of Model is not the same: training, and evaluating: drop", "mode of Model",
             [told("mode of Model", "training"), Y2]),
    "autocast": ([told("autocast of Model", "off"), Y1], [told("autocast of Model", "torch.bfloat16"), Y2],
                 "autocast of Model is not the same", "autocast of Model", [told("autocast of Model", "off"), Y2]),
    "loss": ([Y1, L1], [Y1, L2], "computed in another way", "loss, while outputs", [Y2, L2]),
    "argument": ([*ran("fc", "0=1 scale=2"), Y1], [*ran("fc", "0=1"), Y2], "not given the argument `scale`",
                 "what `fc` is given", [*ran("fc", "0=1 scale=2"), Y2]),
    "given": ([*ran("fc", "0=1"), Y1], [*ran("fc", "0=2"), Y2], "is given something else", "argument 0 of `fc`",
              [*ran("fc", "0=1"), Y2]),
    "own": ([*ran("fc", "0=1", "p"), Y1], [*ran("fc", "0=1", "q"), Y2], "has other parameters",
            "the parameters of `fc`", [*ran("fc", "0=1", "p"), Y2]),
    "returned": ([*ran("fc", "0=1", returned="5"), Y1], [*ran("fc", "0=1", returned="6"), Y2],
                 "returns something else", "what `fc` returns", [*ran("fc", "0=1", returned="5"), Y2]),
    "gradients-off": ([note(e.CALL, "block", "0=1"), *ran("block.fc", "0=1"), Y1],
                      [note(e.CALL, "block", f"0=1{OFF}"), *ran("block.fc", f"0=2{OFF}"), Y2],
                      "`block` does something else where gradients are off", "with gradients on and off",
                      [note(e.CALL, "block", "0=1"), *ran("block.fc", "0=2"), Y2]),
    "around": ([*ran("fc", "0=1"), Y1], [*ran("fc", "0=1"), Y2], "code around the modules", "`Model output 0`",
               [*ran("fc", "0=2"), Y2]),
    "accumulates": ([G1, told("backward calls", "4")], [G2, told("backward calls", "1")],
                    "backward 4 times, the second 1", ": 4 and 1", [G2, told("backward calls", "4")]),
    "weights": ([*AGAIN, G1], [*AGAIN, *ran("fc", "0=1", "q", again=True), G2], "parameters of `fc` had changed",
                "the parameters of `fc`, in its forward", [*AGAIN, *ran("fc", "0=1", "p", again=True), G2]),
    "given-again": ([*AGAIN, G1], [*AGAIN, *ran("fc", "0=9", again=True), G2], "`fc` was given something else",
                    "what `fc` is given, in its forward", [*AGAIN, *ran("fc", "0=1", again=True), G2]),
    "drew-between": ([*BLOCK, G1, R1], [*BLOCK, *BLOCK_AGAIN, G2, R2], "`block` drew other random numbers",
                     "while all that ran again before it was given the same; and the random state after the step",
                     [*BLOCK, *BLOCK_AGAIN, G2, R1]),
    "state-between": ([*BLOCK, G1], [*BLOCK, *BLOCK_AGAIN, G2], "`block` did not compute the same",
                      "what `block.fc` is given", [*BLOCK, *ran("block.fc", "0=9", again=True), G2]),
    "cleared": ([G1, gradient("3")._replace(nth=1)], [gradient(e.NOTHING), gradient("2")._replace(nth=1)],
                "are cleared between two micro-batches", "none, though there are some at the optimizer's step",
                [gradient(e.NOTHING), gradient(e.NOTHING)._replace(nth=1)]),
    "drew-again": ([*AGAIN, G1, R1], [*AGAIN, *ran("fc", "0=1", returned="6", again=True), G2, R2],
                   "`fc` drew other random numbers", "and the random state after the step",
                   [*AGAIN, *ran("fc", "0=1", returned="6", again=True), G2, R1]),
    "drew-and-stopped": ([*AGAIN, G1, R1], [*AGAIN, *ran("fc", "0=1", again=True), G2, R2],
                         "`fc` drew other random numbers", "that `fc` ran again", [*AGAIN, G2, R2]),
    "state-again": ([*AGAIN, G1], [*AGAIN, *ran("fc", "0=1", returned="6", again=True), G2],
                    "did not compute the same", "what `fc` returns, in its forward",
                    [*AGAIN, *ran("fc", "0=1", returned="5", again=True), G2]),
    "detached": ([G1], [gradient(e.NOTHING)], "a tensor on the way is detached", "`fc.weight`: none", [G2]),
    "reentrant": ([*ran("fc", "0=1"), G1], [*ran("fc", f"0=1{OFF}"), gradient(e.NOTHING)],
                  "`fc` runs in a reentrant checkpoint", "ran with gradients off and not again",
                  [*ran("fc", "0=1"), gradient(e.NOTHING)]),
    "own-state": ([*AGAIN, note(e.BUFFERS_MIDWAY, "fc.calls", "1"), G1, note(Stage.BUFFERS.value, "fc.calls", "1")],
                  [*AGAIN, note(e.BUFFERS_MIDWAY, "fc.calls", "1"), *ran("fc", "0=1", again=True), G2,
                   note(Stage.BUFFERS.value, "fc.calls", "2")], "`fc` kept another state when run again",
                  "`fc.calls`: 1 and 2 after backward",
                  [*AGAIN, note(e.BUFFERS_MIDWAY, "fc.running_mean", "1"), *ran("fc", "0=1", again=True), G2,
                   note(Stage.BUFFERS.value, "fc.running_mean", "2")]),
    "boundary": ([G1], [G2], "backward differs where forward does not", "`fc.weight`", [gradient(e.NOTHING)]),
    "twice": ([note(e.BUFFERS_MIDWAY, "bn.count", "1"), B1], [note(e.BUFFERS_MIDWAY, "bn.count", "1"), B2],
              "`bn` is updated twice", "1 after the first forward in both, 1 and 2 after backward",
              [note(e.BUFFERS_MIDWAY, "bn.count", "2"), B2]),
    "state": ([B1], [note(e.BUFFERS_MIDWAY, "bn.count", "2"), B2], "do so already after the forward",
              "`bn.count`: 1 and 2", [B2]),
    "draws-more": ([R1], [R2], "another number of random numbers", "the state of torch's random generator", [R1, W2]),
    "groups": ([W1, told("optimizer: parameters of group 0", "a, b")],
               [W2, told("optimizer: parameters of group 0", "a")], "chosen by names", "`b`",
               [W2, told("optimizer: parameters of group 0", "a, b")]),
    "settings": ([W1, told("optimizer: lr of group 0", "0.1")], [W2, told("optimizer: lr of group 0", "0.2")],
                 "with other settings", "lr of group 0: 0.1 and 0.2", [W2, told("optimizer: lr of group 0", "0.1")]),
    "update": ([W1], [W2], "updated otherwise", "fc.weight", [W2, told("optimizer: lr of group 0", "0.2")]),
    "schedule": ([told("examples", "4")], [told("examples", "8")], "not made up alike", "examples: 4 and 8",
                 [told("optimizer: lr of group 0", "0.2")]),
}


@pytest.mark.parametrize("rule", [name for name in RULES if name != "state"])
def test_each_cause_has_its_proof_and_is_not_told_without(rule: str) -> None:
    # GIVEN two runs that differ, with what shows why WHEN the cause is asked for THEN it is told, with that
    first, second, words, proof, without = RULES[rule]
    found = cause(run(*first), run(*second))
    assert words in found.text
    assert proof in found.proved_by
    # and where what shows it is missing, something else is said
    assert words not in cause(run(*first), run(*without)).text


def test_a_state_that_is_another_already_after_the_forward() -> None:
    first, second, words, proof, _ = RULES["state"]
    found = cause(run(note(e.BUFFERS_MIDWAY, "bn.count", "1"), *first), run(*second))
    assert words in found.text
    assert proof in found.proved_by


def test_scaled_losses_and_gradients() -> None:
    # GIVEN a loss and gradients that are one number times those of the first run THEN the number is told
    found = cause(run(Y1, L1), run(Y1, L2), {"loss": 0.5})
    assert "0.5 times" in found.text
    assert found.proved_by == "loss: 1.0 and 0.5"
    both = [gradient("1", name) for name in "ab"], [gradient("2", name) for name in "ab"]
    assert "all gradients are 4 times" in cause(run(*both[0]), run(*both[1]), {"a": 4.0, "b": 4.0}).text
    # and not where one of them is another, or none
    for ratios in ({"a": 4.0, "b": 2.0}, {"a": 4.0}, {}):
        assert "times those" not in cause(run(*both[0]), run(*both[1]), ratios).text


def test_runs_that_do_not_differ_have_no_cause() -> None:
    with pytest.raises(ValueError, match="do not differ"):
        cause(run(G1), run(G1))


def test_why_a_region_could_not_run_again() -> None:
    # GIVEN a region of two layers WHEN it ends with CheckpointError and the second layer never ran again
    failure = Failure("CheckpointError", "", None)
    forward = [*ran("e", "0=1"), *ran("e.fc1", "0=1"), *ran("e.fc2", "0=1")]
    other = run(*forward, *ran("e", "0=1", again=True), whole=False, failure=failure)
    # THEN that is the cause, and the region is named
    found = why_failed(other)
    assert found is not None
    assert found.names == ("e",)
    assert found.proved_by == "`e.fc1` ran in its forward, and not when it ran again"
    # and a region of a plan, whose own call does not come again, is told by its layers, or by being the only one
    for again in (ran("e.fc3", "0=1", again=True), []):
        found = why_failed(run(*forward, *again, whole=False, failure=failure, about={"regions": [(("e",), ())]}))
        assert found is not None
        assert found.names == ("e",)
    # where all ran, it is what was saved
    again = [part for name in ("e", "e.fc1", "e.fc2") for part in ran(name, "0=1", again=True)]
    found = why_failed(run(*forward, *again, whole=False, failure=failure))
    assert found is not None
    assert "did not save the same" in found.text
    # and of another error, or where nothing ran again, nothing is said
    assert why_failed(run(*forward, whole=False, failure=failure)) is None
    assert why_failed(run(*forward, *ran("e", "0=1", again=True), failure=Failure("ValueError", "", None))) is None
