"""Checks of small scripts, from end to end: runs of them, what differs, in which stage, and why."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import pytest
from forked import Forked

from memdiag.check.check import Check, Request, Verdict, _measure, compare_values, predicted
from memdiag.check.compare import Outcome
from memdiag.check.entries import Stage
from memdiag.check.spec import Regions
from memdiag.errors import MemdiagError
from memdiag.record.process.launch import Target

HEAD = """
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)

    class Block(nn.Module):
        def __init__(self, width=8):
            super().__init__()
            self.fc, self.drop = nn.Linear(width, width), nn.Dropout(0.2)
            self.calls = 0

        def forward(self, x, scale=None):
            y = self.drop(torch.tanh(self.fc(x)))
            return x + (y if scale is None else y * scale)

    class Model(nn.Module):
        def __init__(self, depth=3):
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(depth))
            self.out = nn.Linear(8, 1)

        def forward(self, x):
            for block in self.blocks:
                x = self.call(block, x)
            return self.out(x)

        def call(self, block, x):
            return block(x)
"""
LOOP = """
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(4):
        for _ in range(2):
            loss = model(torch.randn(4, 8)).square().mean() / 2
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""
ALL_BLOCKS = Regions(patterns=("blocks.*",))
CALL = "        def call(self, block, x):\n            return block(x)\n"


def script(folder: Path, text: str, name: str = "train.py") -> Target:
    path = folder / name
    path.write_text(dedent(text), encoding="utf-8")
    return Target(str(path), None, ())


def request(one: Target, other: Target | None = None, regions: Regions | None = None) -> Request:
    return Request(one, other, None if other else regions or ALL_BLOCKS, None, 3, 0, 4)


def against(runs: Forked, folder: Path, text: str, *changes: tuple[str, str]) -> Check:
    """A script, and the same with some of its text replaced."""
    changed = text
    for old, new in changes:
        assert old in changed
        changed = changed.replace(old, new)
    return compare_values(request(script(folder, text), script(folder, changed, "other.py")), runs)


def first(found: Check) -> tuple[Stage | None, str, str]:
    assert found.difference is not None
    return found.difference.stage, found.difference.cause.text, found.difference.cause.proved_by


def differing(found: Check) -> set[Stage]:
    return {stage for stage, outcome in found.stages.items() if outcome is Outcome.DIFFERENT}


def all_equal(found: Check) -> bool:
    return set(found.stages.values()) == {Outcome.EQUAL}


def test_dropout_and_accumulation_under_checkpoints_are_the_same_training(runs: Forked, tmp_path: Path) -> None:
    # GIVEN a model with dropout, and two micro-batches in a step WHEN its blocks become checkpoints
    found = compare_values(request(script(tmp_path, HEAD + LOOP)), runs)
    # THEN all is equal bit for bit, of three steps, and what was put in is told
    assert found.verdict is Verdict.SAME
    assert all_equal(found)
    assert (found.steps, found.noise) == (3, 0)
    assert [modules for modules, _ in found.regions] == [("blocks.0",), ("blocks.1",), ("blocks.2",)]


def test_a_counter_that_is_moved_twice(runs: Forked, tmp_path: Path) -> None:
    # GIVEN blocks that count their calls in an attribute
    text = HEAD.replace("y = self.drop", "self.calls += 1\n            y = self.drop") + LOOP
    # WHEN they are run again for backward
    found = compare_values(request(script(tmp_path, text)), runs)
    # THEN only the state of modules differs: two calls in the first step, and each once more
    assert found.verdict is Verdict.DIFFERENT
    assert differing(found) == {Stage.BUFFERS}
    stage, cause, proof = first(found)
    assert stage is Stage.BUFFERS
    assert "`blocks.0`" in cause
    assert "updated twice" in cause
    assert proof.startswith("`blocks.0.calls`")
    assert "1 after the first forward in both, 1 and 2 after backward" in proof
    assert "what is evaluated later is not" in cause


@pytest.mark.parametrize(("reads", "stage", "words"), [
    # outside the region: its gradients in the first micro-batch are right, what the second one computes is not
    (("return self.out(x)", "return self.out(x) * (1 + self.blocks[0].calls)"), Stage.BUFFERS,
     "later forwards of the step return is something else"),
    # inside: already the first micro-batch's gradients are not
    (("return x + (y", "return torch.tanh(x * self.calls) + (y"), Stage.GRADIENTS,
     "kept another state when run again")])
def test_the_first_difference_is_that_of_the_first_micro_batch(
    runs: Forked, tmp_path: Path, reads: tuple[str, str], stage: Stage, words: str
) -> None:
    # GIVEN blocks that count their calls, and forwards that depend on the count
    text = HEAD.replace("y = self.drop", "self.calls += 1\n            y = self.drop").replace(*reads) + LOOP
    # WHEN a step has two micro-batches
    found = compare_values(request(script(tmp_path, text)), runs)
    # THEN told is what the first backward does, not what the second forward makes of it
    assert Stage.OUTPUTS in differing(found)
    where, cause, _ = first(found)
    assert where is stage
    assert words in cause


def test_a_loss_that_is_divided_twice(runs: Forked, tmp_path: Path) -> None:
    # GIVEN a script that divides its loss by the two micro-batches WHEN another does so once more
    found = against(runs, tmp_path, HEAD + LOOP, ("loss.backward()", "(loss / 2).backward()"))
    # THEN it is the loss that differs, by a half, and gradients as well
    assert found.verdict is Verdict.DIFFERENT
    stage, cause, proof = first(found)
    assert stage is Stage.OUTPUTS
    assert "0.5 times" in cause
    assert proof.startswith("loss: ")
    assert Stage.GRADIENTS in differing(found)


def test_an_argument_that_a_wrapper_does_not_hand_on(runs: Forked, tmp_path: Path) -> None:
    # GIVEN blocks that are given a scale by keyword
    text = HEAD.replace("return block(x)", "return block(x, scale=torch.full((8,), 0.5))") + LOOP
    # WHEN another script wraps them, and hands on what comes by position alone
    local = ("return block(x, scale", "return checkpoint(lambda x, scale: block(x), x, use_reentrant=False, scale")
    found = against(runs, tmp_path, text, local)
    # THEN the argument is named
    stage, cause, proof = first(found)
    assert stage is Stage.OUTPUTS
    assert cause.startswith("`blocks.0` is not given the argument `scale`")
    assert proof == "what `blocks.0` is given"


def test_groups_that_are_chosen_by_names(runs: Forked, tmp_path: Path) -> None:
    # GIVEN a script that decays one layer, told by its name
    groups = """[
        {"params": [p for n, p in model.named_parameters() if n.startswith("blocks.0.fc")], "weight_decay": 0.5},
        {"params": [p for n, p in model.named_parameters() if not n.startswith("blocks.0.fc")], "weight_decay": 0.0}]"""
    text = HEAD + LOOP.replace("model.parameters()", groups)
    # WHEN what holds the model puts a part more into all names
    found = against(runs, tmp_path, text, ("in model.named", 'in nn.ModuleDict({"inner": model}).named'))
    # THEN gradients are equal, and the layer that is no longer decayed is named
    assert found.verdict is Verdict.DIFFERENT
    stage, cause, _ = first(found)
    assert stage is Stage.PARAMETERS
    assert found.stages[Stage.GRADIENTS] is Outcome.EQUAL
    assert "chosen by names" in cause
    assert found.difference is not None
    assert set(found.difference.cause.names) >= {"blocks.0.fc.weight", "blocks.0.fc.bias"}


WRAPPED = ("    model = Model()\n", """    class Wrapper(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, *args):
            return checkpoint(self.inner, *args, use_reentrant=False)

    model = Model()
    model.blocks = nn.ModuleList(map(Wrapper, model.blocks))
""")


def test_a_wrapper_that_changes_names_and_nothing_else(runs: Forked, tmp_path: Path) -> None:
    # GIVEN a script / WHEN another puts its blocks into a module each, which makes them checkpoints
    found = against(runs, tmp_path, HEAD + LOOP, WRAPPED)
    # THEN it is the same training, though parameters have other names
    assert found.verdict is Verdict.SAME, found
    assert set(found.stages.values()) == {Outcome.EQUAL}


def test_groups_that_lose_a_layer_by_a_wrapper(runs: Forked, tmp_path: Path) -> None:
    # GIVEN a script that decays one layer, told by its name
    groups = """[
        {"params": [p for n, p in model.named_parameters() if n.startswith("blocks.0.fc")], "weight_decay": 0.5},
        {"params": [p for n, p in model.named_parameters() if not n.startswith("blocks.0.fc")], "weight_decay": 0.0}]"""
    # WHEN another wraps the blocks before that
    found = against(runs, tmp_path, HEAD + LOOP.replace("model.parameters()", groups), WRAPPED)
    # THEN gradients are equal, and the layer that is no longer decayed is named as it was
    assert found.verdict is Verdict.DIFFERENT
    stage, cause, _ = first(found)
    assert (stage, found.stages[Stage.GRADIENTS]) == (Stage.PARAMETERS, Outcome.EQUAL)
    assert "chosen by names" in cause
    assert found.difference is not None
    assert set(found.difference.cause.names) == {"blocks.0.fc.weight", "blocks.0.fc.bias"}
    # AND how far apart the parameters are is known
    assert (found.difference.worst_absolute or 0) > 0


NESTED = (CALL, """        def call(self, block, x):
            def run(x):
                y = block(x)
                return ({"y": y}, x.sum())
            return checkpoint(run, x, use_reentrant=True)[0]["y"]
""")


def test_nested_outputs_under_the_reentrant_kind(runs: Forked, tmp_path: Path) -> None:
    # GIVEN a model WHEN another returns a dictionary in a tuple from a reentrant checkpoint
    found = against(runs, tmp_path, HEAD + LOOP, NESTED)
    # THEN outputs are equal, and no gradient comes to the blocks
    assert found.verdict is Verdict.DIFFERENT
    stage, cause, proof = first(found)
    assert stage is Stage.GRADIENTS
    assert found.stages[Stage.OUTPUTS] is Outcome.EQUAL
    assert cause.startswith("no gradient reaches `blocks.0")
    assert "none" in proof


SQUARE = """
    import torch
    from torch import nn

    class Square(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.tensor(3.0))

        def forward(self, x):
            return (self.w * x) ** 2

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.square = Square()

        def forward(self, x):
            return self.square(x)

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(3):
        loss = (model(torch.tensor(2.0)) - 25) ** 2 / 2
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_the_gradient_of_the_worked_example(runs: Forked, tmp_path: Path) -> None:
    # GIVEN x = 2, w = 3: y = (w x)^2 = 36, L = (y - 25)^2 / 2, and dL/dw = (y - 25) * 2 w x * x = 11 * 12 * 2 = 264
    gradient = (36 - 25) * (2 * 3 * 2) * 2
    assert gradient == 264
    # WHEN the region is a checkpoint THEN the gradient is 264 in both
    kept = compare_values(request(script(tmp_path, SQUARE), regions=Regions(patterns=("square",))), runs)
    assert all_equal(kept)
    where = ((0, "gradients", "square.w", 0),)
    from memdiag.check.spec import VALUES
    from memdiag.check.values import Kept
    for regions in (None, Regions(patterns=("square",))):
        left = runs.start("values", script(tmp_path, SQUARE), regions, 3, where)
        assert float(Kept(left.folder / VALUES).of(where[0])) == gradient


def test_weights_that_are_written_to_before_backward(runs: Forked, tmp_path: Path) -> None:
    # GIVEN the same with w = 4 by the time that the region runs again WHEN the two are compared
    found = against(
        runs, tmp_path, SQUARE,
        ("return self.square(x)", "return torch.utils.checkpoint.checkpoint(self.square, x, use_reentrant=False)"),
        ("loss.backward()", "model.square.w.data.fill_(4.0)\n"
         "        loss.backward()\n        model.square.w.data.fill_(3.0)"))
    # THEN y = 36 came from the forward, but the rest is of w = 4: (36 - 25) * (2 * 4 * 2) * 2 = 352, not 264
    assert (36 - 25) * (2 * 4 * 2) * 2 - 264 == 88
    assert found.verdict is Verdict.DIFFERENT
    stage, cause, proof = first(found)
    assert stage is Stage.GRADIENTS
    assert found.stages[Stage.OUTPUTS] is Outcome.EQUAL
    assert found.difference is not None
    assert found.difference.worst_absolute == 88
    assert cause.startswith("the parameters of `square` had changed")
    assert proof == "the parameters of `square`, in its forward and when it ran again"
    values = [(pair.a.value, pair.b.value) for pair in found.difference.pairs if pair.a and pair.b]
    assert values == [("264.0", "352.0")]


def test_a_region_that_takes_another_path_is_explained(runs: Forked, tmp_path: Path) -> None:
    # GIVEN a block that looks at a global variable, which the script changes before backward
    text = HEAD.replace("y = self.drop(torch.tanh(self.fc(x)))",
                        "y = self.drop(torch.tanh(self.fc(x))) if FIRST else x") + LOOP
    text = text.replace("    torch.manual_seed(0)", "    FIRST = True\n    torch.manual_seed(0)").replace(
        "loss.backward()", "FIRST = False\n            loss.backward()\n            FIRST = True")
    # WHEN one of three blocks is a checkpoint
    found = compare_values(request(script(tmp_path, text), regions=Regions(patterns=("blocks.1",))), runs)
    # THEN PyTorch's own error ends it, and it is told which block ran what
    assert found.verdict is Verdict.COULD_NOT_RUN
    assert found.failed is not None
    assert found.failed.kind == "CheckpointError"
    stage, cause, proof = first(found)
    assert stage is None
    assert "`blocks.1`" in cause
    assert "another path" in cause
    assert proof.startswith("`blocks.1.fc` ran in its forward")


def test_data_that_change_from_run_to_run(runs: Forked, tmp_path: Path) -> None:
    # GIVEN data from the system WHEN it is checked THEN nothing is compared, and it says what to take out
    text = HEAD + LOOP.replace("torch.randn(4, 8)", "torch.frombuffer(bytearray(os.urandom(32)), dtype=torch.uint8)"
                               ".view(4, 8).float()").replace("model = Model()", "import os\n    model = Model()")
    found = compare_values(request(script(tmp_path, text)), runs)
    assert found.verdict is Verdict.COULD_NOT_RUN
    assert "other data" in (found.why_not or "")


def test_a_script_that_fails_by_itself(runs: Forked, tmp_path: Path) -> None:
    # GIVEN a script that ends with an error as it is WHEN it is checked THEN that is said, with its line
    text = HEAD + LOOP.replace("optimizer.step()", "raise ValueError('no more data')")
    found = compare_values(request(script(tmp_path, text)), runs)
    assert found.verdict is Verdict.COULD_NOT_RUN
    assert "the script as it is ends with ValueError" in (found.why_not or "")
    assert "no more data" in (found.why_not or "")
    assert runs.started[-1][0] == "compare"


LARGE = ("for _ in range(2):", """for _ in range(2):
            if "--batch=1" not in sys.argv:
                raise torch.OutOfMemoryError("tried to allocate too much")""")


def test_out_of_memory_with_and_without_small(runs: Forked, tmp_path: Path) -> None:
    # GIVEN a script that fits with other arguments alone WHEN it is checked with its own
    text = (HEAD + LOOP).replace(*LARGE).replace("    import torch\n", "    import sys\n    import torch\n", 1)
    asked = request(script(tmp_path, text))
    found = compare_values(asked, runs)
    # THEN it is told what to give, and with that values are compared
    assert found.verdict is Verdict.COULD_NOT_RUN
    assert "--small" in (found.why_not or "")
    with_small = compare_values(replace(asked, small=("--batch=1",)), runs)
    assert with_small.verdict is Verdict.SAME
    assert all_equal(with_small)


LIMITED = """
    import ctypes, resource, sys
    import torch
    from torch import nn

    torch.manual_seed(0)
    size, limit = (int(word) for word in sys.argv[1:])
    ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD: what is freed goes back at once, and leaves no hole

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(64, 64)

        def forward(self, x):
            x = self.fc(x)
            for _ in range(8):
                x = torch.sin(x)
            return x

    model = nn.Sequential(*(Block() for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + limit, taken + limit))
    for step in range(6):
        model(torch.randn(size, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
LARGE_SIZE = 1 << 15  # rows of 64 floats: 8 MiB a tensor, of which the bare step keeps 6 times 9


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="limits of address space are asked of Linux")
@pytest.mark.parametrize(("limit", "fits"), [(280 << 20, True), (1 << 20, False)])
def test_memory_that_does_run_out(runs: Forked, tmp_path: Path, limit: int, fits: bool) -> None:
    # GIVEN a process that gets no more memory than the checkpoints need, or not even that
    target = replace(script(tmp_path, LIMITED), args=(str(LARGE_SIZE), str(limit)))
    asked = Request(target, None, Regions(patterns=("0-5",)), (f"{8}", f"{1 << 31}"), 3, 1, 4)
    # WHEN values are compared with a few rows THEN they are equal
    assert compare_values(asked, runs).verdict is Verdict.SAME
    bare = compare_values(replace(asked, small=None), runs)
    assert bare.verdict is Verdict.COULD_NOT_RUN
    assert "--small" in (bare.why_not or "")
    # AND memory is measured with all rows, of the checkpoints, which fit, or it is said that not even they do
    if not fits:
        with pytest.raises(MemdiagError, match="with checkpoints runs out of memory with its own arguments"):
            _measure(asked, runs)
        return
    (before, after), (slow, fast) = _measure(asked, runs)
    assert before is None
    assert slow is None
    assert after is not None
    assert fast is not None
    # six inputs of regions, and inside the one that runs again what its nine operations keep
    rows = LARGE_SIZE * 64 * 4
    assert 15 * rows < after.peak < 18 * rows


def test_a_scaler_that_skips_a_step(runs: Forked, tmp_path: Path) -> None:
    # GIVEN a scaler whose first step has a gradient that is not finite
    loop = """
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(4):
        loss = model(torch.randn(4, 8)).square().mean()
        scaler.scale(loss * (float("inf") if step == 0 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
"""
    # WHEN it is compared with checkpoints THEN it is the same, the skipped step with it
    found = compare_values(request(script(tmp_path, HEAD + loop)), runs)
    assert found.verdict is Verdict.SAME
    assert found.steps == 3
    # and where the other does not skip it, that is seen, in that step
    other = against(runs, tmp_path, HEAD + loop, ("if step == 0", "if step == 9"))
    assert other.verdict is Verdict.DIFFERENT
    assert other.difference is not None
    assert other.difference.step == 0
    assert Stage.SCHEDULE in differing(other)


def test_no_optimizer(runs: Forked, tmp_path: Path) -> None:
    # GIVEN a script that changes its parameters itself WHEN it is checked THEN they are compared too
    loop = """
    model = Model()
    for step in range(5):
        model(torch.randn(4, 8)).square().mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.01 * p.grad
                p.grad = None
"""
    assert all_equal(compare_values(request(script(tmp_path, HEAD + loop)), runs))
    other = against(runs, tmp_path, HEAD + loop, ("0.01", "0.02"))
    assert other.verdict is Verdict.DIFFERENT
    assert first(other)[0] is Stage.PARAMETERS


def test_two_optimizers(runs: Forked, tmp_path: Path) -> None:
    # GIVEN a generator and a discriminator, each with an optimizer
    loop = """
    generator, critic = Model(), Model(depth=2)
    generator.out = nn.Linear(8, 8)
    one = torch.optim.Adam(generator.parameters(), lr=1e-2)
    two = torch.optim.Adam(critic.parameters(), lr=1e-2)
    for step in range(4):
        made = generator(torch.randn(4, 8))
        loss = F.softplus(critic(made.detach())).mean() + F.softplus(-critic(torch.randn(4, 8))).mean()
        two.zero_grad()
        loss.backward()
        two.step()
        one.zero_grad()
        F.softplus(-critic(made)).mean().backward()
        one.step()
"""
    # WHEN blocks of both are checkpoints THEN it is the same, over the steps of both
    both = Regions(patterns=("blocks.*", "critic.blocks.*"))
    found = compare_values(request(script(tmp_path, HEAD + loop), regions=both), runs)
    assert found.verdict is Verdict.SAME, found
    assert all_equal(found)
    assert found.steps >= 6
    # and where one of them learns otherwise, it is seen
    other = against(runs, tmp_path, HEAD + loop, ("critic.parameters(), lr=1e-2", "critic.parameters(), lr=2e-2"))
    assert other.verdict is Verdict.DIFFERENT
    assert first(other)[0] is Stage.PARAMETERS


def test_the_guilty_region_is_named(runs: Forked, tmp_path: Path) -> None:
    # GIVEN three blocks of which the second keeps something that it changes
    text = HEAD.replace("y = self.drop(torch.tanh(self.fc(x)))", """self.calls += 1 if self.odd else 0
            y = self.drop(torch.tanh(self.fc(x) * (1 + self.calls)))""").replace(
        "self.calls = 0", "self.calls, self.odd = 0, False") + LOOP.replace(
        "model = Model()", "model = Model()\n    model.blocks[1].odd = True").replace("range(2)", "range(1)")
    # WHEN all are checkpoints THEN it is named, and nothing else
    found = compare_values(request(script(tmp_path, text)), runs)
    assert found.verdict is Verdict.DIFFERENT
    assert first(found)[0] is Stage.GRADIENTS
    assert found.difference is not None
    assert found.difference.guilty == ("blocks.1",)
    assert found.difference.alone
    # AND the probe of its safety tells the line
    assert found.difference.probed is not None
    line = dedent(text).splitlines().index("        self.calls += 1 if self.odd else 0") + 1
    assert [(module, told) for module, told, _ in found.difference.probed] == [
        ("blocks.1", "attribute `blocks.1.calls` changes, and would change twice")]
    assert (found.difference.probed[0].line or "").endswith(f"train.py:{line}")


OWN_GENERATOR = HEAD.replace("self.calls = 0", "self.own = torch.Generator().manual_seed(1)").replace(
    "y = self.drop(torch.tanh(self.fc(x)))", "y = torch.tanh(self.fc(x)) * torch.rand(8, generator=self.own)")
BY_NAME = OWN_GENERATOR.replace("self.own = torch.Generator()", "own[self] = torch.Generator()").replace(
    "self.own", "own[self]").replace("class Block", "own = {}\n\n    class Block")


@pytest.mark.parametrize(("text", "words", "proof"), [
    (OWN_GENERATOR, "`blocks.0.own` is a generator of its own", "the random state after the step"),
    (BY_NAME, "draws from a generator of its own, which a checkpoint does not set back (",
     "two forwards of `blocks.0` from one state; and the gradients of")])
def test_a_generator_of_a_region(runs: Forked, tmp_path: Path, text: str, words: str, proof: str) -> None:
    # GIVEN blocks that draw from generators of their own, which they keep, or something else does
    found = compare_values(request(script(tmp_path, text + LOOP)), runs)
    # THEN it is told, by the state of the generator, and where that is not seen by the probe of their safety
    stage, cause, proved_by = first(found)
    assert stage is Stage.GRADIENTS
    assert words in cause
    assert proof in proved_by
    assert (Stage.RANDOM_STATE in differing(found)) == (text is OWN_GENERATOR)


NOISE = """
    import os
    noise = torch.Generator().manual_seed(int.from_bytes(os.urandom(4), "little"))

    def noisy(gradient):  # element by element, as sums in another order have it
        return gradient * (1 + 2e-7 * (torch.rand(gradient.shape, generator=noise) - 0.5))
    for parameter in model.parameters():
        parameter.register_hook(noisy)
"""


def test_noise_is_told_from_a_difference(runs: Forked, tmp_path: Path) -> None:
    # GIVEN gradients that differ from run to run in their last bits
    text = HEAD + LOOP.replace("    for step", NOISE + "    for step")
    # WHEN blocks are checkpoints THEN that is no difference
    found = compare_values(request(script(tmp_path, text)), runs)
    assert found.noise > 0
    assert found.verdict is Verdict.SAME, found.difference
    assert found.stages[Stage.GRADIENTS] is Outcome.WITHIN_NOISE
    # and other dropout masks are one
    other = against(runs, tmp_path, text, (
        "return block(x)", "return checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)"))
    assert other.verdict is Verdict.DIFFERENT
    assert other.stages[Stage.GRADIENTS] is Outcome.DIFFERENT


def test_the_guilty_region_is_named_among_noise(runs: Forked, tmp_path: Path) -> None:
    # GIVEN gradients with noise, and three blocks of which one draws from a generator of its own
    loop = LOOP.replace("model = Model()", "model = Model()\n    model.blocks[1].odd = True")
    drawn = "torch.rand(8, generator=own[self])"
    text = BY_NAME.replace(drawn, f"({drawn} if self.odd else 1)")
    text = text.replace("own[self] = ", "self.odd = False\n            own[self] = ")
    text += loop.replace("    for step", NOISE + "    for step")
    # WHEN all are checkpoints THEN noise does not hide which it is
    found = compare_values(request(script(tmp_path, text)), runs)
    assert found.noise > 0
    assert found.difference is not None
    assert (found.difference.guilty, found.difference.alone) == (("blocks.1",), True)


def test_memory_is_measured(runs: Forked, tmp_path: Path) -> None:
    # GIVEN blocks that save much WHEN memory is measured, and no time
    text = HEAD + LOOP.replace("torch.randn(4, 8)", "torch.randn(4096, 8)")
    (before, after), taken = _measure(request(script(tmp_path, text)), runs)
    # THEN the peak falls by more than what one block saves in tanh and dropout, and no time is told
    assert before is not None
    assert after is not None
    assert before.peak - after.peak > 2 * 4096 * 8 * 4
    assert taken == (None, None)


@pytest.mark.parametrize("regions", [Regions(patterns=("block.*",))])
def test_a_module_that_is_not_there(runs: Forked, tmp_path: Path, regions: Regions) -> None:
    # GIVEN a name that no module has WHEN it is to be a checkpoint THEN names that are near are told
    found = compare_values(request(script(tmp_path, HEAD + LOOP), regions=regions), runs)
    assert found.verdict is Verdict.COULD_NOT_RUN
    assert "blocks.0" in json.dumps(found.why_not)


def test_the_peak_that_a_plan_predicts_is_the_one_that_is_measured(runs: Forked, tmp_path: Path) -> None:
    # GIVEN the file of a plan, made by the command line
    text = HEAD + LOOP.replace("torch.randn(4, 8)", "torch.randn(4096, 8)").replace("range(2)", "range(1)")
    train, file = script(tmp_path, text), tmp_path / "plan.json"
    subprocess.run(
        [sys.executable, "-m", "memdiag", "plan", "--json", str(file), "--choose", "every_block", str(train.path)],
        check=True, capture_output=True, cwd=tmp_path)
    plan = json.loads(file.read_text(encoding="utf-8"))
    chosen = plan["plans"][plan["chosen"]]
    regions = Regions(tuple((tuple(one["modules"]), tuple(one["keep"])) for one in chosen["regions"]))
    assert len(regions.regions) == 3
    # WHEN its peak is measured THEN it is what was said, to the byte, and the bare one as well
    (before, after), _ = _measure(request(train, regions=regions), runs)
    said = predicted(plan)
    assert said is not None
    assert before is not None
    assert after is not None
    assert (before.peak, after.peak) == (said.bare_peak_bytes, said.peak_bytes)
