"""Two runs compared: on traces told by hand, and on scripts that are recorded before and after a change."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from recording import record_script
from traces import AnyRun, TraceBuilder, any_runs, training_run, write

from memdiag.diagnose import Comparison, compare
from memdiag.report import comparison_to_json, render_comparison
from memdiag.trace import NONE, Phase, Role, Trace
from memdiag.trace.view import View

MIB = 1 << 20


def compared(a: Trace, b: Trace) -> Comparison:
    return compare(View(a), View(b))


def loop(steps: int = 3, *, activation: int = 8 * MIB, shapes: str | None = "float32[8]", keep: int = 0,
         devices: tuple[str, ...] = ("cpu",), peak_at: int | None = None, script: str = "/project/train.py",
         modules: tuple[str, ...] = ("blocks.0", "blocks.1"), **about: Any) -> TraceBuilder:
    """Equal steps, in which each module saves an activation; one at which an extra tensor comes, if any."""
    run = TraceBuilder(devices, script=script, **about)
    folder = script.rpartition("/")[0]
    run.claim(run.existing(4 * MIB), Role.PARAMETERS, "weight")
    for number in range(steps):
        with run.step(warm_up=number == 0, shapes=shapes):
            made = []
            with run.phase(Phase.FORWARD):
                for module in modules:
                    with run.module(module), run.operator("aten::linear"):
                        made.append(run.allocate(activation, line=f"{folder}/model.py:5"))
                        run.save(made[-1])
                if number == peak_at:
                    with run.operator("aten::zeros"):
                        made.append(run.allocate(MIB, line=f"{script}:9"))
                run.free(*made)
            if keep:
                run.allocate(keep, line=f"{script}:11")
    return run


class TestFigures:
    def test_what_moved_the_peak(self) -> None:
        # GIVEN a run, and the same with activations of half the size
        found = compared(loop().build(), loop(activation=4 * MIB).build())
        # THEN the peak fell by two of these halves, and each place says what it did
        assert (found.a.peak_bytes, found.b.peak_bytes) == (20 * MIB, 12 * MIB)
        assert [(line.place.module, line.place.line, line.a_bytes, line.b_bytes) for line in found.lines] == [
            ("blocks.0", "model.py:5", 8 * MIB, 4 * MIB), ("blocks.1", "model.py:5", 8 * MIB, 4 * MIB),
            (None, None, 4 * MIB, 4 * MIB)]
        assert found.a.roles[Role.SAVED_ACTIVATIONS] == 16 * MIB
        assert found.b.roles[Role.SAVED_ACTIVATIONS] == 8 * MIB
        assert found.comparable

    def test_a_script_with_lines_put_in(self) -> None:
        # GIVEN a run, and the same of a script in which all is one line lower, once with one place more
        def run(shift: int, more: int = 0) -> Comparison:
            def made(first: int, places: int) -> Trace:
                built = TraceBuilder(("cpu",), script="/project/train.py")
                with built.step(), built.phase(Phase.FORWARD), built.operator("aten::mul"):
                    kept = [built.allocate((number + 1) * MIB, line=f"/project/train.py:{first + 2 * number}")
                            for number in range(places)]
                    built.free(*kept)
                return built.build()

            return compared(made(9, 2), made(9 + shift, 2 + more))

        # THEN the places are the same, with both lines
        assert [(line.place.line, line.b_line, line.a_bytes, line.b_bytes) for line in run(1).lines] == [
            ("train.py:11", "train.py:12", 2 * MIB, 2 * MIB), ("train.py:9", "train.py:10", MIB, MIB)]
        # AND where there are not as many, nothing says which is which
        assert all(line.b_line is None and 0 in (line.a_bytes, line.b_bytes) for line in run(1, 1).lines)
        # AND the text has both
        assert "train.py:9 (B: 10)" not in render_comparison(run(1))  # it did not move

    def test_two_versions_of_a_script(self) -> None:
        # GIVEN a script, and one of another name with an allocation more
        def made(script: str, places: int, unit: int = MIB) -> Trace:
            built = TraceBuilder(("cpu",), script=f"/project/{script}")
            with built.step(), built.phase(Phase.FORWARD), built.operator("aten::mul"):
                built.free(*[built.allocate((number + 1) * unit, line=f"/project/{script}:{7 + number}")
                             for number in range(places)], built.allocate(9 * MIB, line="/project/common.py:7"))
            return built.build()

        found = compared(made("a.py", 2), made("b.py", 3))
        # THEN lines with the same number are the same, and the one more is B's
        assert {(line.place.line, line.b_line, line.a_bytes, line.b_bytes) for line in found.lines} == {
            ("a.py:7", "b.py:7", MIB, MIB), ("a.py:8", "b.py:8", 2 * MIB, 2 * MIB), ("b.py:9", None, 0, 3 * MIB),
            ("common.py:7", None, 9 * MIB, 9 * MIB)}
        # AND the text says once that the one is the other
        moved = render_comparison(compared(made("a.py", 1), made("b.py", 1, unit=2 * MIB)))
        assert moved.count("b.py") == 2
        assert "(lines of a.py, which is b.py in B)" in moved.partition("What moved")[2]
        assert "aten::mul, a.py:7\n" in moved

    def test_a_copy_of_a_script_with_lines_taken_out(self) -> None:
        # GIVEN two allocations on lines 8 and 10, and in the copy on 6 and 8
        def made(script: str, first: int) -> Trace:
            built = TraceBuilder(("cpu",), script=f"/project/{script}")
            with built.step(), built.phase(Phase.FORWARD), built.operator("aten::mul"):
                built.free(*[built.allocate((number + 1) * MIB, line=f"/project/{script}:{first + 2 * number}")
                             for number in range(2)])
            return built.build()

        found = compared(made("a.py", 8), made("b.py", 6))
        # THEN the first is the first, though there is a line 8 in both
        assert {(line.place.line, line.b_line, line.a_bytes, line.b_bytes) for line in found.lines} == {
            ("a.py:8", "b.py:6", MIB, MIB), ("a.py:10", "b.py:8", 2 * MIB, 2 * MIB)}

    def test_two_copies_of_a_project(self) -> None:
        # GIVEN the same script in two folders
        found = compared(loop(script="/one/train.py").build(), loop(script="/other/copy/train.py").build())
        # THEN its lines are the same lines
        assert all(line.a_bytes == line.b_bytes for line in found.lines)

    @given(any_runs(), any_runs())
    def test_roles_and_lines_sum_to_the_peaks(self, a: AnyRun, b: AnyRun) -> None:
        found = compared(a.trace, b.trace)
        for side, size in ((found.a, "a_bytes"), (found.b, "b_bytes")):
            assert sum(side.roles.values()) == side.peak_bytes
            assert sum(getattr(line, size) for line in found.lines) == side.peak_bytes

    @given(any_runs())
    def test_a_run_is_as_itself(self, run: AnyRun) -> None:
        found = compared(run.trace, run.trace)
        assert found.comparable
        assert all(line.a_bytes == line.b_bytes for line in found.lines)


class TestFair:
    """Each reason by itself, and that it is the only one."""

    def reason(self, a: TraceBuilder, b: TraceBuilder) -> str:
        both = []
        for first, second in ((a, b), (b, a)):
            found = compared(first.build(), second.build())
            assert not found.comparable
            both.append(found.why_not)
        assert [len(reasons) for reasons in both] == [1, 1], both
        return both[0][0]

    def test_a_peak_in_the_warm_up_and_one_after_it(self) -> None:
        assert self.reason(loop(peak_at=0), loop(peak_at=1)) == (
            "A peaks in its warm-up and B after it: one is cold, the other warm")

    def test_steps_that_are_as_high_as_the_warm_up(self) -> None:
        # GIVEN a run whose steps are all equal, so that the first is the first to reach the peak
        assert compared(loop().build(), loop(peak_at=1).build()).comparable

    def test_a_peak_after_the_last_step_is_warm(self) -> None:
        # GIVEN a run that evaluates at its end, where it peaks
        def evaluated(extra: int) -> TraceBuilder:
            run = loop()
            with run.unfinished_step(), run.phase(Phase.EVALUATION), run.operator("aten::zeros"):
                run.free(run.allocate(64 * MIB + extra))
            return run

        assert compared(evaluated(0).build(), evaluated(MIB).build()).comparable
        assert compared(evaluated(0).build(), loop().build()).comparable

    def test_only_a_warm_up(self) -> None:
        assert self.reason(loop(steps=1), loop(steps=3, peak_at=0)) == (
            "A has only its warm-up, B has steps after it: one is cold, the other warm")

    def test_a_step_that_never_ended_is_a_warm_up(self) -> None:
        def cold() -> TraceBuilder:
            run = TraceBuilder()
            with run.unfinished_step(), run.phase(Phase.FORWARD), run.operator("aten::mul"):
                run.save(run.allocate(8))
            return run

        assert compared(cold().build(), cold().build()).comparable
        assert not compared(cold().build(), loop(peak_at=1, shapes=None).build()).comparable

    def test_other_inputs(self) -> None:
        assert self.reason(loop(shapes="float32[8]"), loop(shapes="float32[4]")) == (
            "other inputs: float32[8] in A, float32[4] in B")
        text = render_comparison(compared(loop(shapes="float32[8]").build(), loop(shapes="float32[4]").build()))
        assert "Not comparable, unless the inputs are what was changed" in text

    def test_of_inputs_those_of_the_peak_count(self) -> None:
        # GIVEN two runs over batches of several lengths that peak at the same one
        def lengths(order: list[int]) -> Trace:
            run = TraceBuilder()
            for number, length in enumerate(order):
                with run.step(warm_up=number == 0, shapes=f"float32[{length}]"), run.phase(Phase.FORWARD):
                    run.free(run.allocate(length))
            return run.build()

        assert compared(lengths([1, 3, 9, 2]), lengths([4, 9, 5])).comparable
        assert not compared(lengths([1, 3, 9, 2]), lengths([4, 8, 5])).comparable

    def test_another_device(self) -> None:
        assert self.reason(loop(devices=("cuda:0",)), loop()) == "another device: cuda:0 in A, cpu in B"
        gpus = [loop(devices=("cuda:0",), device_names={"cuda:0": name}) for name in ("Big", "Small")]
        assert self.reason(*gpus) == "another device: Big in A, Small in B"
        assert compared(loop(devices=("cuda:0",)).build(), loop(devices=("cuda:1",)).build()).comparable

    @pytest.mark.parametrize(("key", "values", "said"), [
        ("torch", ("2.6.0", "2.13.0"), "another version of PyTorch: 2.6.0 in A, 2.13.0 in B"),
        ("default_dtype", ("float32", "bfloat16"), "another default dtype: float32 in A, bfloat16 in B"),
        ("threads", (2, 8), "another number of threads: 2 in A, 8 in B"),
        ("world_size", (None, 2), "another number of ranks: none in A, 2 in B"),
    ])
    def test_another_setting(self, key: str, values: tuple[Any, Any], said: str) -> None:
        assert self.reason(*(loop(**{key: value}) for value in values)) == said

    def test_settings_that_do_not_matter_on_a_device(self) -> None:
        assert compared(loop(allocator_settings="x").build(), loop().build()).comparable
        on_gpu = [loop(devices=("cuda:0",), threads=number).build() for number in (1, 2)]
        assert compared(*on_gpu).comparable
        other = [loop(devices=("cuda:0",), allocator_settings=text) for text in ("x", None)]
        assert self.reason(*other) == "another setting of the allocator: x in A, none in B"

    def test_one_that_ended_out_of_memory(self) -> None:
        assert self.reason(loop(ended_out_of_memory=True), loop()) == (
            "A ended for want of memory: it peaks where it stopped")

    def test_one_that_was_cut_short(self) -> None:
        short = loop().build()
        short.cut_short = "the recording process was killed"
        found = compared(loop().build(), short)
        assert found.why_not == ["B holds only a part of its run: the recording process was killed"]

    def test_one_that_peaks_in_a_light_step(self) -> None:
        # GIVEN a run whose highest step was recorded in light, with its events, and one without them
        run = loop(shapes=None)
        light = run.highest_light_step()
        light.existing(4 * MIB)
        with light.unfinished_step(3), light.phase(Phase.FORWARD):
            light.allocate(90 * MIB)
        run.light_step({Phase.FORWARD: 94 * MIB}, end_bytes=4 * MIB)
        assert self.reason(run, loop(shapes=None)) == (
            "A peaks in a step recorded in light: modules, operators and lines are not known there")
        killed = loop(shapes=None)
        killed.light_step({Phase.FORWARD: 94 * MIB}, end_bytes=4 * MIB)
        found = compared(killed.build(), loop(shapes=None).build())
        # THEN what is there is not set against what is not known
        assert "not known of most of A" in render_comparison(compared(run.build(), loop(shapes=None).build()))
        # AND the latter has a peak, and no lines
        assert found.lines == []
        assert found.a.roles[Role.UNKNOWN] == found.a.peak_bytes == 94 * MIB
        assert "not known of most of A" in render_comparison(found)

    def test_growth_over_more_steps(self) -> None:
        assert self.reason(loop(8, keep=MIB), loop(12, keep=MIB)) == (
            "A has 7 steps after its warm-up and B 11, and memory grows with each: by 1.0 MiB in A, 1.0 MiB in B")
        # AND as many steps are fair, as is a loss of four bytes kept for each
        assert compared(loop(8, keep=MIB).build(), loop(8, keep=MIB).build()).comparable
        assert compared(loop(8, keep=4).build(), loop(12, keep=4).build()).comparable

    def test_all_reasons_are_told(self) -> None:
        found = compared(loop(torch="1", shapes="a").build(), loop(steps=1, torch="2", shapes="b").build())
        assert len(found.why_not) >= 3


class TestShown:
    def test_as_text(self) -> None:
        found = compared(loop(torch="1").build(), loop(activation=4 * MIB, torch="2").build())
        text = render_comparison(found, ("before.mdiag", "after.mdiag"))
        assert max(map(len, text.splitlines())) <= 80
        assert "before.mdiag: train.py, on cpu" in text
        assert "Not comparable" in text
        assert "Peak: -8.0 MiB (-40.0 %)" in text
        # repeated blocks are one line
        assert "16.0 MiB  8.0 MiB  -8.0 MiB  blocks.0-1 › aten::linear, model.py:5" in text

    def test_blocks_that_moved_otherwise_stay_apart(self) -> None:
        # GIVEN two blocks, of which one is gone in the second run
        found = compared(loop().build(), loop(modules=("blocks.0",)).build())
        text = render_comparison(found)
        assert "8.0 MiB  0 B  -8.0 MiB  blocks.1 › aten::linear, model.py:5" in text
        assert "blocks.0" not in text.partition("What moved")[2]

    def test_of_many_places_the_rest_is_summed(self) -> None:
        names = tuple(f"part{'x' * number}" for number in range(20))
        text = render_comparison(compared(loop(modules=()).build(), loop(modules=names, activation=MIB).build()))
        assert "8.0 MiB  +8.0 MiB  8 places that moved less" in text
        assert max(map(len, text.splitlines())) <= 80

    def test_nothing_moved(self) -> None:
        run = training_run().build()
        assert "nothing: every place has the same bytes in both" in render_comparison(compared(run, run))

    def test_of_nothing(self) -> None:
        text = render_comparison(compared(TraceBuilder().build(), Trace({}, [])))
        assert "Peak: 0 B" in text

    def test_as_json(self) -> None:
        found = json.loads(comparison_to_json(compared(loop().build(), loop(activation=4 * MIB, torch="2").build())))
        assert list(found) == ["schema_version", "about", "comparable", "why_not", "peak", "roles", "lines"]
        assert found["about"][1]["torch"] == "2"
        assert (found["comparable"], len(found["why_not"])) == (False, 1)
        assert found["peak"] == {"a_bytes": 20 * MIB, "b_bytes": 12 * MIB}
        assert found["roles"].keys() == {role.label for role in Role}
        assert found["roles"]["saved_activations"] == {"a_bytes": 16 * MIB, "b_bytes": 8 * MIB}
        assert found["lines"][0] == {
            "module": "blocks.0", "operator": "aten::linear", "line": "model.py:5", "a_bytes": 8 * MIB,
            "b_bytes": 4 * MIB, "b_line": None}


class TestCommand:
    def run(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "memdiag", "compare", *map(str, arguments)], capture_output=True, text=True,
            check=False)

    @pytest.fixture
    def runs(self, tmp_path: Path) -> tuple[Path, Path]:
        paths = tmp_path / "a.mdiag", tmp_path / "b.mdiag"
        write(loop().build(), paths[0])
        write(loop(activation=4 * MIB).build(), paths[1])
        return paths

    def test_as_text(self, runs: tuple[Path, Path]) -> None:
        done = self.run(*runs)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("Two runs compared\n")

    def test_json_alone(self, runs: tuple[Path, Path]) -> None:
        done = self.run(*runs, "--json", "-")
        assert json.loads(done.stdout)["comparable"] is True

    def test_json_to_a_file(self, runs: tuple[Path, Path], tmp_path: Path) -> None:
        out = tmp_path / "out.json"
        assert self.run(*runs, "--json", out).returncode == 0
        assert json.loads(out.read_text())["peak"]["a_bytes"] == 20 * MIB
        assert "--force" in self.run(*runs, "--json", out).stderr
        assert self.run(*runs, "-f", "--json", out).returncode == 0

    def test_it_does_not_write_over_what_it_reads(self, runs: tuple[Path, Path]) -> None:
        done = self.run(*runs, "-f", "--json", runs[1])
        assert done.returncode == 2
        assert "used twice" in done.stderr

    @pytest.mark.parametrize("number", [0, 1, 3])
    def test_it_takes_two(self, runs: tuple[Path, Path], number: int) -> None:
        assert self.run(*[runs[0]] * number).returncode == 2

    def test_a_run_that_is_not_there(self, runs: tuple[Path, Path], tmp_path: Path) -> None:
        assert "no such file" in self.run(runs[0], tmp_path / "none.mdiag").stderr


SCRIPT = """
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(
                [nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64)) for _ in range(4)])

        def forward(self, x):
            for block in self.blocks:
                x = BLOCK
            return x

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        model(torch.randn(BATCH, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


class TestRealRuns:
    def recorded(self, folder: Path, block: str, batch: int = 1024) -> Trace:
        folder.mkdir()
        return record_script(folder, SCRIPT.replace("BLOCK", block).replace("BATCH", str(batch))).trace

    def test_before_and_after_checkpointing(self, tmp_path: Path) -> None:
        # GIVEN a project and a copy of it, in which each block is checkpointed
        before = self.recorded(tmp_path / "before", "block(x)")
        after = self.recorded(tmp_path / "after", "checkpoint(block, x, use_reentrant=False)")
        found = compared(before, after)
        # THEN the two compare, and what the ReLU inside each block saved is gone, save in the block that is made anew
        # where the peak is now: 1024 × 512 floats
        assert found.comparable, found.why_not
        saved = 1024 * 512 * 4
        gone = [line for line in found.lines if line.place.operator == "aten::relu" and line.a_bytes == saved]
        assert len(gone) == 4
        assert sum(line.b_bytes for line in gone) <= saved
        assert found.a.peak_bytes - found.b.peak_bytes > 2 * saved
        # AND one line of the report says so of the others
        assert "blocks.0-2.1 › aten::relu" in render_comparison(found)

    def test_another_batch_is_no_comparison(self, tmp_path: Path) -> None:
        small, large = (self.recorded(tmp_path / str(size), "block(x)", size) for size in (256, 1024))
        assert compared(small, large).why_not == ["other inputs: float32[256, 64] in A, float32[1024, 64] in B"]


def test_allocations_from_before_are_no_place() -> None:
    run = TraceBuilder()
    run.existing(7)
    place = compared(run.build(), run.build()).lines[0].place
    assert (place.module, place.operator, place.line) == (None, None, None)
    assert View(run.build()).worst.event == NONE
