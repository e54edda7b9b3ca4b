"""The facts of a report, against figures worked out by hand and against a slow count of the same run."""

from __future__ import annotations

import pytest
from hypothesis import given
from traces import AnyRun, TraceBuilder, any_runs, training_run

from memdiag.report import Summary, summarize
from memdiag.report.summary import OutsideAllocator, Peak, PhasePeak, Step
from memdiag.trace import NONE, Kind, Phase, Pool, Role
from memdiag.trace.model import RECOMPUTE

WIDTH = 64 * 1024  # of training_run


def by_role(summary: Summary) -> dict[str, int]:
    return {row.role: row.bytes for row in summary.roles_at_peak if row.bytes}


class TestPeak:
    def test_of_a_plain_training_run(self) -> None:
        # GIVEN three steps of three layers under Adam WHEN the run is summed up
        summary = summarize(training_run(3, layers=2, width=WIDTH).build())
        # THEN the peak is where backward makes its first gradient and scratch, once the optimizer's state is there
        parameters, state, batch, activations = (3 * WIDTH // 2, 3 * WIDTH, WIDTH // 8, 3 * (WIDTH + WIDTH // 4))
        gradient, scratch = WIDTH // 2, WIDTH // 8
        assert summary.peak == Peak(
            allocated_bytes=parameters + state + batch + activations + gradient + scratch, reserved_bytes=None,
            step=1, phase="backward", module="head", operator="AddmmBackward0", line="model.py:12")
        assert by_role(summary) == {
            "parameters": parameters, "gradients": gradient, "optimizer_state": state, "inputs": batch,
            "saved_activations": activations, "workspace": scratch}

    def test_every_role_has_its_place_and_what_is_largest_in_it(self) -> None:
        summary = summarize(training_run().build())
        assert [row.role for row in summary.roles_at_peak] == [role.label for role in Role]
        rows = {row.role: row for row in summary.roles_at_peak}
        assert rows["gradients"].largest == "head.weight.grad"
        assert rows["gradients"].proof == "accumulated into a parameter's .grad"
        assert rows["saved_activations"].largest == "blocks.0.fc › aten::linear"
        assert rows["saved_activations"].proof == "saved by autograd for backward"
        assert rows["held"].largest is None

    @given(any_runs())
    def test_of_any_run(self, any_run: AnyRun) -> None:
        summary = summarize(any_run.trace)
        device = summary.device
        if device == "cpu":
            start = any_run.trace["allocations"]
            before = int(start["bytes"][(start["event"] == NONE) & (start["device"] == 0)].sum())
            assert summary.peak.allocated_bytes == max([before, *any_run.live])
        assert sum(row.bytes for row in summary.roles_at_peak) == summary.peak.allocated_bytes

    def test_the_outermost_operator_and_the_nearest_line(self) -> None:
        run = TraceBuilder()
        with (run.step(), run.phase(Phase.FORWARD, line="/project/train.py:1"), run.module("net", line="/lib/net.py:2"),
              run.operator("aten::linear"), run.operator("aten::addmm")):
            run.allocate(10)
        peak = summarize(run.build()).peak
        assert (peak.module, peak.operator, peak.line) == ("net", "aten::linear", "/lib/net.py:2")

    def test_in_a_custom_function(self) -> None:
        run = TraceBuilder()
        with run.step(), run.phase(Phase.FORWARD), run.module("net"), run.function("MyFunction"):
            run.allocate(10, line="/project/sub/fn.py:3")
        peak = summarize(run.build()).peak
        assert (peak.module, peak.operator, peak.line) == ("net", "MyFunction", "sub/fn.py:3")

    def test_in_a_region_that_runs_again(self) -> None:
        run = TraceBuilder()
        with (run.step(), run.phase(Phase.BACKWARD), run.node("CheckpointFunctionBackward"),
              run.module("block", flags=RECOMPUTE), run.operator("aten::linear")):
            run.allocate(10)
        peak = summarize(run.build()).peak
        assert (peak.phase, peak.module, peak.operator) == ("backward", "block", "aten::linear")

    def test_only_a_kernel_is_known(self) -> None:
        run = TraceBuilder()
        run.allocate(10, kernel="aten::empty")
        assert summarize(run.build()).peak == Peak(10, None, None, None, None, "aten::empty", None)

    def test_before_the_first_event(self) -> None:
        run = TraceBuilder()
        weight = run.existing(100)
        run.claim(weight, Role.PARAMETERS, "w")
        run.free(run.existing(50))
        summary = summarize(run.build())
        assert summary.peak == Peak(150, None, None, None, None, None, None)
        assert by_role(summary) == {"parameters": 100, "unknown": 50}

    def test_in_a_step_that_was_cut_short(self) -> None:
        # GIVEN a run that ended inside its second step, after a forward with gradients
        run = training_run(1)
        step = run.next_step()
        with run.unfinished_step(), run.phase(Phase.FORWARD), run.module("Net"):
            run.save(run.allocate(10 * WIDTH))
        # THEN that step has its number
        assert summarize(run.build()).peak.step == step == 1

    def test_after_the_last_step(self) -> None:
        # GIVEN an evaluation after training, in the stretch that the recorder leaves open
        run = training_run(1)
        with run.unfinished_step(), run.phase(Phase.EVALUATION), run.module("Net"):
            run.allocate(10 * WIDTH)
        peak = summarize(run.build()).peak
        assert (peak.step, peak.phase) == (None, "evaluation")

    def test_in_a_folded_step(self) -> None:
        # GIVEN a light step that went higher than any step recorded in full
        run = training_run(2)
        run.light_step({Phase.FORWARD: 10, Phase.BACKWARD: 10**9}, end_bytes=5)
        run.light_step({Phase.BACKWARD: 10**6}, end_bytes=5)
        summary = summarize(run.build())
        # THEN it is the peak, and its bytes are of unknown role: nothing is made up
        assert summary.peak == Peak(10**9, None, 2, "backward", None, None, None)
        assert by_role(summary) == {"unknown": 10**9}

    def test_in_the_highest_light_step(self) -> None:
        # GIVEN a light step whose events were kept, since none was higher
        run = training_run(2)
        run.light_step({Phase.FORWARD: 10**9, Phase.BACKWARD: 10**8}, end_bytes=100)
        light = run.highest_light_step()
        weight = light.existing(10**8)
        light.claim(weight, Role.PARAMETERS, "big.weight")
        with light.unfinished_step(2), light.phase(Phase.FORWARD):
            out = light.allocate(10**9 - 10**8)
            light.claim(out, Role.SAVED_ACTIVATIONS, proof="saved by autograd for backward")
            light.free(out)
        summary = summarize(run.build())
        # THEN its roles are told, and the saves are those of the last step that was recorded in full
        assert summary.peak == Peak(10**9, None, 2, "forward", None, None, None)
        assert by_role(summary) == {"parameters": 10**8, "saved_activations": 9 * 10**8}
        assert summary.saved_step == 1
        assert summary.saved[0].module == "blocks.0-1.fc"

    @pytest.mark.parametrize(("role", "step"), [(Role.SAVED_ACTIVATIONS, 2), (Role.OTHER_ACTIVATIONS, None)])
    def test_in_light_recording_after_the_last_step(self, role: Role, step: int | None) -> None:
        # GIVEN a stretch that no step's end closed: a step cut short where autograd saved in it, else none
        run = training_run(2)
        light = run.highest_light_step()
        with light.unfinished_step(2), light.phase(Phase.EVALUATION):
            light.claim(light.allocate(10**9), role)
        peak = summarize(run.build()).peak
        assert (peak.step, peak.phase, peak.allocated_bytes) == (step, "evaluation", 10**9)

    def test_a_light_step_of_another_device_that_went_higher(self) -> None:
        run = TraceBuilder(devices=("cuda:0", "cuda:1"))
        with run.step():
            run.allocate(10)
        light = run.highest_light_step()
        with light.unfinished_step(1):
            light.allocate(10**9, device="cuda:1")
        assert summarize(run.build()).peak.allocated_bytes == 10

    def test_a_folded_step_that_went_no_higher(self) -> None:
        run = training_run(2)
        run.light_step({Phase.BACKWARD: 10}, end_bytes=5)
        assert summarize(run.build()).peak.step == 1


class TestDevices:
    def test_the_accelerator_is_the_subject(self) -> None:
        run = TraceBuilder(devices=("cpu", "cuda:1", "cuda:0"))
        run.allocate(10**9)
        run.allocate(10, device="cuda:1")
        run.allocate(20, device="cuda:0")
        summary = summarize(run.build())
        assert (summary.device, summary.peak.allocated_bytes) == ("cuda:0", 20)
        assert summary.other_devices == {"cuda:1": 10, "cpu": 10**9}

    def test_mapped_memory_alone_does_not_make_a_device_the_subject(self) -> None:
        run = TraceBuilder(devices=("cuda:0", "cpu"))
        run.allocate(10, device="cuda:0", pool=Pool.MAPPED)
        run.allocate(5, device="cpu")
        assert summarize(run.build()).device == "cpu"

    def test_reserved_and_outside_pytorch_are_the_highest_of_the_device(self) -> None:
        run = TraceBuilder(devices=("cpu", "cuda:0"))
        run.allocate(1, device="cuda:0")
        for reserved, outside in ((100, 7), (300, 5)):
            run.statistic("reserved_bytes.all.peak", reserved, device="cuda:0")
            run.statistic("outside_pytorch_bytes", outside, device="cuda:0")
        run.statistic("reserved_bytes.all.peak", 10**6, device="cpu")
        summary = summarize(run.build())
        assert summary.peak.reserved_bytes == 300
        assert summary.outside_allocator.outside_pytorch == 7

    def test_pools_outside_the_allocator(self) -> None:
        run = TraceBuilder()
        run.free(run.allocate(30, pool=Pool.MAPPED))
        run.allocate(20, pool=Pool.MAPPED)
        run.allocate(7, pool=Pool.NUMPY)
        run.allocate(1)
        summary = summarize(run.build())
        assert summary.outside_allocator == OutsideAllocator(mapped=30, numpy=7, host_rss=None, outside_pytorch=None)
        assert summary.peak.allocated_bytes == 1


class TestPhasesAndSteps:
    def test_of_a_plain_training_run(self) -> None:
        summary = summarize(training_run(2, layers=2, width=WIDTH).build())
        parameters, state, batch, activations = (3 * WIDTH // 2, 3 * WIDTH, WIDTH // 8, 3 * (WIDTH + WIDTH // 4))
        forward = parameters + batch + activations
        backward = forward + WIDTH // 2 + WIDTH // 8
        optimizer = parameters + batch + 3 * WIDTH // 2 + state + WIDTH // 2  # gradients, state, a temporary
        assert summary.phases == [
            PhasePeak(0, "forward", forward, True),
            PhasePeak(0, "backward", backward, True),
            PhasePeak(0, "optimizer", optimizer, True),
            PhasePeak(1, "forward", forward + state, False),
            PhasePeak(1, "backward", backward + state, False),
            PhasePeak(1, "optimizer", optimizer, False),
            PhasePeak(None, "evaluation", parameters + state + WIDTH, False),
        ]
        end = parameters + state
        assert summary.steps == [
            Step(0, True, "full", end, 500 * 2**20, "[[8, 32]]"), Step(1, False, "full", end, 501 * 2**20, "[[8, 32]]")]
        assert summary.outside_allocator.host_rss == 501 * 2**20

    def test_a_phase_inside_another_keeps_its_peak_to_itself(self) -> None:
        # GIVEN an optimizer that runs forward again inside its step, as LBFGS does
        run = TraceBuilder()
        with run.step(), run.phase(Phase.OPTIMIZER):
            run.free(run.allocate(10))
            with run.phase(Phase.FORWARD):
                run.free(run.allocate(100))
            run.free(run.allocate(20))
        assert summarize(run.build()).phases == [
            PhasePeak(0, "forward", 100, False), PhasePeak(0, "optimizer", 20, False)]

    def test_a_phase_that_comes_twice_has_one_peak(self) -> None:
        run = TraceBuilder()
        with run.step():
            for size in (10, 30, 20):
                with run.phase(Phase.FORWARD):
                    run.free(run.allocate(size))
        assert summarize(run.build()).phases == [PhasePeak(0, "forward", 30, False)]

    def test_a_phase_counts_what_it_finds_and_nothing_if_it_does_nothing(self) -> None:
        run = TraceBuilder()
        run.existing(50)
        with run.step():
            with run.phase(Phase.FORWARD):
                pass
            with run.phase(Phase.OPTIMIZER), run.operator("aten::add_"):
                pass
        assert summarize(run.build()).phases == [PhasePeak(0, "optimizer", 50, False)]

    def test_folded_steps_come_along(self) -> None:
        run = TraceBuilder()
        with run.step(warm_up=True), run.phase(Phase.FORWARD):
            run.allocate(10)
        run.light_step({Phase.FORWARD: 30, Phase.BACKWARD: 40}, end_bytes=10, rss=99)
        summary = summarize(run.build())
        assert summary.phases == [
            PhasePeak(0, "forward", 10, True), PhasePeak(1, "forward", 30, False), PhasePeak(1, "backward", 40, False)]
        assert summary.steps[1] == Step(1, False, "light", 10, 99, None)

    @pytest.mark.parametrize(("phase", "step"), [(Phase.EVALUATION, None), (Phase.BACKWARD, 1)])
    def test_what_was_folded_after_the_last_step(self, phase: Phase, step: int | None) -> None:
        run = training_run(1)
        run.folded_rest({phase: 10**9})
        summary = summarize(run.build())
        assert PhasePeak(step, phase.label, 10**9, False) in summary.phases
        assert (summary.peak.step, summary.peak.allocated_bytes) == (step, 10**9)


class TestSaved:
    def test_of_a_plain_training_run(self) -> None:
        summary = summarize(training_run(3, layers=2, width=WIDTH).build())
        assert summary.saved_step == 1
        found = [(row.module, row.folded, row.dtype, row.shape, row.count, row.bytes, row.role)
                 for row in summary.saved]
        shape, weight = [8, WIDTH // 32], [32, WIDTH // 256]
        assert sorted(found, key=str) == sorted([
            ("blocks.0-1.fc", True, "float32", shape, 2, 2 * WIDTH, "saved_activations"),
            ("blocks.0-1.fc", True, "bool", shape, 2, WIDTH // 2, "saved_activations"),
            ("blocks.0-1.fc", True, "float32", weight, 2, WIDTH, "parameters"),
            ("head", False, "float32", shape, 1, WIDTH, "saved_activations"),
            ("head", False, "bool", shape, 1, WIDTH // 4, "saved_activations"),
            ("head", False, "float32", weight, 1, WIDTH // 2, "parameters"),
        ], key=str)
        assert all(row.operator == "aten::linear" and row.line == "model.py:12" for row in summary.saved)
        sizes = [row.bytes for row in summary.saved]
        assert sizes == sorted(sizes, reverse=True)

    @given(any_runs())
    def test_each_storage_once(self, any_run: AnyRun) -> None:
        # GIVEN any run WHEN the saves of the chosen step are walked one by one
        trace, summary = any_run.trace, summarize(any_run.trace)
        spans, saves = trace["spans"], trace["saves"]
        storages: dict[int, int] = {}
        for row in range(trace.rows("saves")):
            around = [up for up in trace.ancestors(int(saves["span"][row])) if spans["kind"][up] == Kind.STEP]
            step = int(trace.text[spans["name"][around[0]]]) if around else None
            if step == summary.saved_step:
                allocation = int(saves["allocation"][row])
                storages[allocation] = int(trace["allocations"]["bytes"][allocation])
        # THEN the rows hold the same storages and bytes
        assert sum(row.count for row in summary.saved) == len(storages)
        assert sum(row.bytes for row in summary.saved) == sum(storages.values())

    def test_a_storage_saved_many_times_belongs_to_its_first_saver(self) -> None:
        run = TraceBuilder()
        with run.step(), run.phase(Phase.FORWARD):
            with run.module("norm"), run.operator("aten::layer_norm"):
                out = run.allocate(100)
                run.save(out, shape=(5, 5))
            for name in ("q", "k"):
                with run.module(f"heads.{'qk'.index(name)}"), run.operator("aten::linear"):
                    run.save(out, shape=(25,))
        (row,) = summarize(run.build()).saved
        assert (row.module, row.operator, row.shape, row.count, row.bytes) == (
            "norm", "aten::layer_norm", [5, 5], 1, 100)
        assert row.savers == ["heads.0-1 › aten::linear", "norm › aten::layer_norm"]

    def test_a_view_keeps_its_whole_storage(self) -> None:
        run = TraceBuilder()
        with run.step(), run.operator("aten::split"):
            run.save(run.allocate(300), shape=(25,), bytes=100)
        (row,) = summarize(run.build()).saved
        assert row.bytes == 300

    def test_its_role_is_the_one_it_had_when_it_was_saved(self) -> None:
        run = TraceBuilder()
        with run.step(), run.operator("aten::relu"):
            out = run.allocate(10)
            run.save(out)
            run.allocate(1)
            run.claim(out, Role.OPTIMIZER_STATE, from_birth=False)
        (row,) = summarize(run.build()).saved
        assert row.role == "saved_activations"

    def test_blocks_that_differ_do_not_fold(self) -> None:
        run = TraceBuilder()
        with run.step(), run.phase(Phase.FORWARD):
            for block, (shape, dtype) in enumerate([((2,), "float32"), ((2,), "float32"), ((3,), "float32"),
                                                    ((2,), "bfloat16")]):
                with run.module(f"blocks.{block}"), run.operator("aten::relu"):
                    run.save(run.allocate(10), shape=shape, dtype=dtype)
        assert {(row.module, row.folded, row.count) for row in summarize(run.build()).saved} == {
            ("blocks.0-1", True, 2), ("blocks.2", False, 1), ("blocks.3", False, 1)}

    def test_a_module_called_many_times_is_not_folded_but_counted(self) -> None:
        run = TraceBuilder()
        with run.step(), run.phase(Phase.FORWARD):
            for _ in range(4):
                with run.module("blocks.0"), run.operator("aten::relu"):
                    run.save(run.allocate(10))
        (row,) = summarize(run.build()).saved
        assert (row.module, row.folded, row.count, row.bytes) == ("blocks.0", False, 4, 40)

    def test_the_last_step_that_saved_where_the_peaks_saved_nothing(self) -> None:
        run = TraceBuilder()
        with run.step(), run.phase(Phase.FORWARD), run.operator("aten::relu"):
            out = run.allocate(10)
            run.save(out)
        with run.step(), run.phase(Phase.EVALUATION):
            run.free(run.allocate(1000))
        summary = summarize(run.build())
        assert summary.peak.step == 1
        assert summary.saved_step == 0
        assert summary.saved[0].bytes == 10

    def test_a_script_without_steps(self) -> None:
        run = TraceBuilder()
        with run.phase(Phase.FORWARD):
            run.save(run.allocate(10), shape=())
        summary = summarize(run.build())
        assert summary.saved_step is None
        (row,) = summary.saved
        assert (row.module, row.operator, row.line, row.shape, row.savers) == (None, None, None, [], [])

    def test_a_storage_that_is_not_known_counts_as_itself(self) -> None:
        run = TraceBuilder()
        with run.step(), run.operator("aten::relu"):
            run.save(NONE, bytes=30)
            run.save(NONE, bytes=30)
        (row,) = summarize(run.build()).saved
        assert (row.count, row.bytes, row.role) == (2, 60, "unknown")

    def test_a_save_inside_a_backward_with_a_graph_of_its_own(self) -> None:
        run = TraceBuilder()
        with run.step():
            with run.phase(Phase.FORWARD), run.module("fc"), run.operator("aten::linear") as forward:
                pass
            with run.phase(Phase.BACKWARD), run.node("AddmmBackward0", forward=forward), run.operator("aten::mm"):
                run.save(run.allocate(10))
        (row,) = summarize(run.build()).saved
        assert (row.module, row.operator) == ("fc", "AddmmBackward0")


class TestWords:
    @pytest.mark.parametrize(("line", "shown"), [
        ("/project/train.py:3", "train.py:3"),
        ("/project/sub/model.py:3", "sub/model.py:3"),
        ("/projects/train.py:3", "/projects/train.py:3"),
        ("/usr/lib/x.py:1", "/usr/lib/x.py:1"),
    ])
    def test_lines_are_relative_to_the_scripts_folder(self, line: str, shown: str) -> None:
        run = TraceBuilder(script="/project/train.py")
        run.allocate(1, line=line)
        assert summarize(run.build()).peak.line == shown

    def test_without_a_script_lines_stay_as_they_are(self) -> None:
        run = TraceBuilder()
        run.about["script"] = None
        run.allocate(1, line="/project/train.py:3")
        assert summarize(run.build()).peak.line == "/project/train.py:3"

    def test_what_was_not_seen_is_passed_on(self) -> None:
        run = TraceBuilder(not_seen=["worker processes"])
        run.mark("unseen", "a free of memory whose allocation was not seen")
        trace = run.build()
        trace.cut_short = "the recording process was killed"
        summary = summarize(trace)
        assert summary.not_seen[:2] == ["worker processes", "a free of memory whose allocation was not seen"]
        assert "killed" in summary.not_seen[2]
        assert "not_seen" not in summary.about
        assert summary.cut_short
