"""The text report: fits 80 columns, closes, and reads well where there is little to say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from recording import ROOT, record_script
from traces import AnyRun, TraceBuilder, any_runs, training_run

from memdiag.policy import SAVED_ROWS
from memdiag.report import render_text, summarize
from memdiag.trace import Phase, Role, Trace
from memdiag.units import format_bytes

SECTIONS = ["Memory of", "Peak", "Alive at the peak", "Peaks by phase", "Largest tensors saved for backward",
            "Outside this allocator", "Not seen", "Verdict: ", "What the peak is made of", "Findings"]


def report_of(trace: Trace) -> str:
    return render_text(summarize(trace))


def section(text: str, title: str) -> list[str]:
    """The lines of one section, its title first."""
    return next(part for part in text.split("\n\n") if part.startswith(title)).splitlines()


def cells(line: str) -> list[str]:
    return re.split(r"\s{2,}", line.strip())


@given(any_runs())
def test_every_report_fits_and_has_its_sections(any_run: AnyRun) -> None:
    text = report_of(any_run.trace)
    assert max(len(line) for line in text.splitlines()) <= 80
    assert all(part.startswith(title) for part, title in zip(text.split("\n\n"), SECTIONS, strict=True))
    assert text.endswith("\n")
    assert not text.endswith("\n\n")
    assert "\x1b" not in text  # no colour, so nothing to switch off
    assert all(line == line.rstrip() for line in text.splitlines())


def test_a_training_run() -> None:
    # GIVEN a plain run WHEN it is reported
    text = report_of(training_run(
        3, torch="2.13.0", python="3.11.7", memdiag="0.1.0", cuda=None, argv=["src/train.py", "--lr", "0.1"],
        device_names={"cpu": "x86_64"}).build())
    # THEN it says what ran, on what
    header = section(text, "Memory of")
    assert header[0] == "Memory of train.py --lr 0.1"
    assert [cells(line) for line in header[1:4]] == [
        ["device", "cpu (x86_64)"], ["versions", "torch 2.13.0, Python 3.11.7, memdiag 0.1.0"],
        ["steps", "3: 3 recorded in full"]]
    # AND where it peaked
    peak = section(text, "Peak")
    assert peak[0] == "Peak: 576.0 KiB allocated"
    assert [cells(line) for line in peak[1:]] == [
        ["when", "step 1, backward"], ["where", "head › AddmmBackward0"], ["line", "model.py:12"]]
    # AND what was alive then, largest first, unknown and the total included
    alive = [cells(line) for line in section(text, "Alive")[2:]]
    assert alive[0] == ["saved activations", "240.0 KiB", "41.7 %", "blocks.0.fc › aten::linear"]
    assert [row[0] for row in alive] == [
        "saved activations", "optimizer state", "parameters", "gradients", "inputs", "workspace", "unknown", "total"]
    assert alive[-2] == ["unknown", "0 B", "0.0 %"]
    assert alive[-1] == ["total", "576.0 KiB", "100.0 %"]
    # AND how high each phase went
    assert [cells(line) for line in section(text, "Peaks by phase")[2:]] == [
        ["forward", "344.0 KiB", "536.0 KiB", "536.0 KiB", "1"],
        ["backward", "384.0 KiB", "576.0 KiB", "576.0 KiB", "1"],
        ["optimizer", "424.0 KiB", "424.0 KiB", "424.0 KiB", "1"],
        ["evaluation", "-", "352.0 KiB", "352.0 KiB", "outside"],
    ]
    # AND what backward needs
    saved = section(text, "Largest tensors")
    assert saved[0] == "Largest tensors saved for backward, in step 1"
    assert cells(saved[2]) == ["128.0 KiB", "2", "blocks.0-1.fc › aten::linear"]
    assert cells(saved[3]) == ["float32 [8, 2048], model.py:12"]
    assert cells(saved[-2]) == ["240.0 KiB", "6", "in all, each storage once"]
    assert saved[-1].strip() == "Saved too, but alive anyway: parameters 96.0 KiB."
    assert "502.0 MiB" in section(text, "Outside")[-1]
    assert section(text, "Not seen")[1:] == ["  nothing is known to be missing"]


def test_numbers_stand_under_each_other() -> None:
    text = report_of(training_run(width=1 << 24).build())
    for title in ("Alive", "Peaks by phase"):
        lines = section(text, title)[2:]
        ends = {re.search(r"[\d.]+ [KMG]?i?B", line).end() for line in lines if "B" in line and "- " not in line}  # type: ignore[union-attr]
        assert len(ends) == 1


def test_a_run_of_nothing() -> None:
    text = report_of(TraceBuilder().build())
    assert section(text, "Memory of")[0] == "Memory of train.py"
    assert "none: no backward and no optimizer step was seen" in text
    assert "nothing was allocated on cpu" in text
    assert "no phase was seen" in text
    assert "none was seen" in text
    assert section(text, "Alive")[1:] == ["  nothing"]
    assert section(text, "Outside")[1].strip().startswith("The resident memory of the process is not known")


def test_a_trace_that_says_nothing_of_its_run() -> None:
    text = report_of(Trace({}, []))
    assert text.startswith("Memory of this run\n")


def test_a_run_without_steps_saves_or_lines() -> None:
    run = TraceBuilder()
    run.allocate(5 << 20)
    text = report_of(run.build())
    assert [cells(line) for line in section(text, "Peak")[1:]] == [
        ["when", "no step"], ["where", "not known"], ["line", "not known"]]
    assert "The other figures are lower bounds: 100.0 % is unknown" in text


def test_a_light_peak_and_a_killed_process() -> None:
    run = training_run(1)
    run.light_step({Phase.FORWARD: 1 << 30}, end_bytes=0)
    trace = run.build()
    trace.cut_short = "the recording process was killed"
    text = report_of(trace)
    assert "Peak: 1.00 GiB allocated" in text
    assert [cells(line) for line in section(text, "Peak")[1:]] == [
        ["when", "step 1 (light), forward"],
        ["where", "not kept of a light step; `--steps 1:2` records it in full"],
        ["line", "not kept of a light step; `--steps 1:2` records it in full"]]
    assert "2 or more: 1 recorded in full, 1 in light" in text
    assert "the recording process was killed" in section(text, "Memory of")[-1]


@pytest.mark.parametrize(("add", "said"), [
    (lambda run: None, "step 0 (warm-up), forward"),
    (lambda run: run.light_step({Phase.FORWARD: 5}, end_bytes=5), "step 0 (warm-up), forward"),
])
def test_the_step_is_told_with_what_it_is(add: object, said: str) -> None:
    run = TraceBuilder()
    with run.step(warm_up=True), run.phase(Phase.FORWARD):
        run.allocate(10)
    add(run)  # type: ignore[operator]
    assert said in report_of(run.build())


def test_an_unfinished_step_is_said_to_be_one() -> None:
    run = training_run(1)
    with run.unfinished_step(), run.phase(Phase.FORWARD):
        run.save(run.allocate(1 << 30))
    assert "step 1 (unfinished), forward" in report_of(run.build())


def test_the_allocator_of_a_gpu() -> None:
    run = TraceBuilder(devices=("cuda:0", "cpu"), world_size=4, rank=2, allocator_settings="expandable_segments:True",
                       cuda="12.8", torch="2.13.0", device_names={"cuda:0": "NVIDIA H200"})
    run.allocate(3 << 30)
    run.allocate(1 << 20, device="cpu")
    run.statistic("reserved_bytes.all.peak", 4 << 30)
    run.statistic("outside_pytorch_bytes", 600 << 20)
    text = report_of(run.build())
    assert ["device", "cuda:0 (NVIDIA H200)"] in [cells(line) for line in section(text, "Memory of")]
    assert ["rank", "2 of 4"] in [cells(line) for line in section(text, "Memory of")]
    assert "torch 2.13.0, CUDA 12.8" in text
    assert "expandable_segments:True" in text
    assert ["reserved", "4.00 GiB by the allocator"] in [cells(line) for line in section(text, "Peak")]
    outside = [cells(line) for line in section(text, "Outside")]
    assert ["cuda:0, in use outside PyTorch", "600.0 MiB"] in outside
    assert ["allocated on cpu", "1.0 MiB"] in outside


def test_long_names_are_shortened_and_long_lists_summed() -> None:
    # GIVEN more kinds of saved tensors than the table shows, in modules with very long names
    run = TraceBuilder(argv=["train.py", *(f"--option-number-{i}=value" for i in range(20))], not_seen=["word " * 60])
    sizes = [1000 * (kind + 1) for kind in range(SAVED_ROWS + 5)]
    with run.step(), run.phase(Phase.FORWARD):
        for kind, size in enumerate(sizes):
            with run.module(f"model.{'very_' * 30}long.{'abc'[kind % 3]}{kind}"), run.operator("aten::relu"):
                out = run.allocate(size, line=f"/project/{'deep/' * 30}model.py:{kind}")
                run.save(out, shape=(2,) * 40)
                run.save(out, shape=(2,) * 40)
        with run.module("again"), run.operator("aten::exp"):
            run.save(out)
    text = report_of(run.build())
    assert max(len(line) for line in text.splitlines()) <= 80
    saved = [cells(line) for line in section(text, "Largest tensors")]
    assert [format_bytes(sum(sorted(sizes)[:5])), "5", "5 smaller kinds"] in saved
    assert saved[-1] == [format_bytes(sum(sizes)), str(len(sizes)), "in all, each storage once"]
    assert ["also by again › aten::exp"] in saved


def test_only_what_is_alive_anyway_was_saved() -> None:
    run = TraceBuilder()
    weight = run.existing(1 << 20)
    run.claim(weight, Role.PARAMETERS, "w")
    with run.step(), run.operator("aten::mm"):
        run.save(weight, leaf=True)
    lines = section(report_of(run.build()), "Largest tensors")
    assert lines[1:] == ["  None but what is alive anyway: parameters 1.0 MiB."]


def steps_of(trace: Trace) -> str:
    return next(cells(line)[1] for line in section(report_of(trace), "Memory of") if "  steps " in line)


class TestStepsInTheHeader:
    def test_those_that_were_not_recorded_are_counted(self) -> None:
        # GIVEN a run of 18 steps of which the recorder saw three
        run = training_run(3)
        run.about["steps"] = 18
        assert steps_of(run.build()) == "18: 3 recorded in full, 15 not recorded (see Not seen)"

    def test_of_light_recording(self) -> None:
        run = TraceBuilder(steps=2)
        for _ in range(2):
            run.light_step({Phase.FORWARD: 10}, end_bytes=0)
        text = report_of(run.build())
        assert "2: 2 recorded in light" in text
        assert "not known: nothing was recorded in full" in section(text, "Largest tensors")[1]

    def test_where_the_file_broke_off(self) -> None:
        trace = training_run(3).build()
        trace.cut_short = "the run file could not be written any more"
        assert steps_of(trace) == "3 or more: 3 recorded in full"

    def test_where_the_first_did_not_end(self) -> None:
        run = TraceBuilder()
        with run.unfinished_step(), run.phase(Phase.BACKWARD):
            run.allocate(5)
        assert steps_of(run.build()) == "none: the first did not come to its end"

    def test_a_step_that_is_seen_in_part(self) -> None:
        # GIVEN a peak in a step that ended while nothing was recorded
        run = training_run(1)
        run.about["steps"] = 9
        with run.unfinished_step(), run.phase(Phase.FORWARD):
            run.save(run.allocate(1 << 30))
        assert "step 1 (recorded in part), forward" in report_of(run.build())

    def test_a_profiler_of_the_scripts_own(self, tmp_path: Path) -> None:
        # GIVEN a script that profiles two of its nine steps itself
        seen = record_script(tmp_path, """
            import torch
            from torch.profiler import ProfilerActivity, profile

            model = torch.nn.Linear(9, 9)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            done = 0

            def step():
                global done
                model(torch.ones(2, 9)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                done += 1

            for _ in range(3):
                step()
            with profile(activities=[ProfilerActivity.CPU]):
                for _ in range(2):
                    step()
            for _ in range(4):
                step()
            print(done)
        """)
        # THEN the header counts what the script counts, and what has a row
        recorded = seen.trace.rows("steps")
        assert 0 < recorded < 9
        assert steps_of(seen.trace) == (
            f"{int(seen.output)}: {recorded} recorded in full, {9 - recorded} not recorded (see Not seen)")


class TestHowItEnded:
    @pytest.mark.parametrize(("facts", "said"), [
        ({"ended_by": "ValueError"}, "by ValueError, after 2 steps"),
        ({"ended_by": "KeyboardInterrupt"}, "by KeyboardInterrupt (Ctrl-C), after 2 steps"),
        ({"ended_by": "RuntimeError", "ended_out_of_memory": True}, "by RuntimeError (out of memory), after 2 steps"),
        ({"ended_by": "SystemExit"}, "by SystemExit, after 2 steps"),
        ({"ended_by": None}, None),
    ])
    def test_is_in_the_header(self, facts: dict[str, object], said: str | None) -> None:
        text = report_of(training_run(2, **facts).build())
        found = [cells(line)[1] for line in section(text, "Memory of") if line.startswith("  ended ")]
        assert found == ([] if said is None else [said])

    def test_before_a_step_had_ended(self) -> None:
        assert "by KeyError, before a step had ended" in report_of(TraceBuilder(ended_by="KeyError").build())

    def test_of_a_script(self, tmp_path: Path) -> None:
        script = tmp_path / "script.py"
        script.write_text("import torch\nx = torch.ones(2, requires_grad=True)\nx.sum().backward()\n"
                          "torch.optim.SGD([x], 0.1).step()\n{}['missing']\n")
        done = subprocess.run(
            [sys.executable, "-m", "memdiag", "profile", "-o", "run.mdiag", "script.py"], capture_output=True,
            text=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
        assert done.returncode == 1
        assert "  ended     by KeyError, after 1 step\n" in done.stderr


def test_a_proof_is_no_name() -> None:
    # GIVEN a light peak whose events were not kept: why nothing is known of it is told below the table alone
    run = training_run(1)
    run.light_step({Phase.FORWARD: 1 << 30}, end_bytes=0)
    alive = [cells(line) for line in section(report_of(run.build()), "Alive")]
    assert ["unknown", "1.00 GiB", "100.0 %"] in alive
    assert any("record that step in full" in " ".join(row) for row in alive)


def test_names_that_differ_stay_different() -> None:
    run = TraceBuilder()
    names = [f"model.language_model.decoder.layers.{number}.cross_attention.o_proj.of_the_second_half"
             for number in "ab"]
    with run.step(), run.phase(Phase.FORWARD):
        for name in names:
            with run.module(name), run.operator("aten::scaled_dot_product_attention"):
                run.save(run.allocate(1 << 20))
    savers = [line for line in section(report_of(run.build()), "Largest tensors") if "…" in line]
    assert len(savers) == len(set(savers)) == 2
