"""The picture: what it draws is true, stays small, and touches nothing outside."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import AnyRun, TraceBuilder, any_runs, training_run

from memdiag.errors import MemdiagError
from memdiag.policy import PLOT_COLUMNS, PLOT_STEP_COLUMNS
from memdiag.report import draw
from memdiag.report.plot import _stairs, curve, envelope, figure, folded
from memdiag.trace import NONE, Phase, Role, Trace
from memdiag.trace.ledger import roles
from memdiag.trace.timeline import timeline


def many_events(events: int, steps: int = 1) -> Trace:
    """A sawtooth of random heights, with one tooth that is the peak."""
    run = TraceBuilder()
    sizes = np.random.default_rng(0).integers(1, 1000, events // 2)
    sizes[len(sizes) // 3] = 5000
    for part in np.array_split(sizes, steps):
        with run.step(), run.phase(Phase.FORWARD), run.module("net"):
            for size in part.tolist():
                run.free(run.allocate(size))
    return run.build()


class TestEnvelope:
    @given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 100)), min_size=1, max_size=200), st.integers(1, 20))
    def test_each_column_keeps_its_lowest_highest_and_last(
        self, points: list[tuple[int, int]], columns: int
    ) -> None:
        # GIVEN a curve, ascending in time WHEN it is thinned
        gaps, heights = zip(*points, strict=True)
        time, live = np.cumsum(gaps), np.array(heights)
        kept = envelope(time, live, columns)
        # THEN in every column of time, found here one by one, nothing that can be seen is gone
        width = (time[-1] - time[0] + 1) / columns
        column = np.array([int((moment - time[0]) / width) for moment in time])
        for one in set(column.tolist()):
            inside = np.flatnonzero(column == one)
            shown = np.intersect1d(inside, kept)
            assert live[shown].max() == live[inside].max()
            assert live[shown].min() == live[inside].min()
            assert inside[-1] in shown
        assert live.argmax() in kept
        assert len(kept) <= max(3 * columns, 1)
        assert kept.tolist() == sorted(set(kept.tolist()))

    def test_no_events(self) -> None:
        assert envelope(np.empty(0, np.int64), np.empty(0, np.int64), 10).tolist() == []

    @given(st.lists(st.integers(0, 3), min_size=2, max_size=30))
    def test_stairs_are_the_outline_of_the_steps(self, heights: list[int]) -> None:
        # GIVEN heights that hold until the next x WHEN their outline is drawn
        x = np.arange(len(heights), dtype=float)
        outline_x, outline_y = _stairs(x, np.array(heights, dtype=float))
        # THEN its area is that of the columns under it (the last height lasts no time), by the shoelace formula
        area = abs(np.dot(outline_x, np.roll(outline_y, 1)) - np.dot(outline_y, np.roll(outline_x, 1))) / 2
        assert area == pytest.approx(sum(heights[:-1]))
        assert (np.diff(outline_x) >= 0).all()


class TestCurve:
    @given(any_runs())
    def test_roles_sum_to_the_live_bytes_at_every_drawn_moment(self, any_run: AnyRun) -> None:
        trace = any_run.trace
        line = timeline(trace, "cpu")
        drawn = curve(trace, line, roles(trace), (0, len(line.live)), 0, 2**62)
        wanted = [line.start_bytes if event == NONE else any_run.live[event] for event in drawn.events]
        assert drawn.bytes.sum(axis=0).tolist() == wanted
        assert (np.diff(drawn.time_ns) >= 0).all()

    def test_a_long_run_is_thinned_and_keeps_its_peak(self) -> None:
        trace = many_events(20_000)
        line = timeline(trace, "cpu")
        drawn = curve(trace, line, roles(trace), (0, len(line.live)), int(line.time_ns[0]), int(line.time_ns[-1]))
        assert len(drawn.events) <= 3 * PLOT_COLUMNS + 2
        assert line.peak_event in drawn.events
        assert drawn.bytes.sum(axis=0).max() == line.peak_bytes == 5000

    def test_highest_moments_of_columns_with_their_lowest(self) -> None:
        trace = many_events(2_000)
        line = timeline(trace, "cpu")
        drawn = curve(trace, line, roles(trace), (0, len(line.live)), int(line.time_ns[0]), int(line.time_ns[-1]), 10)
        assert len(drawn.time_ns) == 11
        assert drawn.bytes.sum(axis=0).max() == 5000
        assert drawn.low is not None
        assert drawn.low.tolist() == [0] * 11

    def test_a_part_starts_with_what_was_alive_before_it(self) -> None:
        run = TraceBuilder()
        run.allocate(100)
        with run.step():
            run.allocate(10)
        trace = run.build()
        line = timeline(trace, "cpu")
        assert curve(trace, line, roles(trace), (1, 2), 0, 2**62).bytes.sum(axis=0).tolist() == [100, 110, 110]

    def test_folded_stretches_keep_their_highest_and_their_lowest(self) -> None:
        # GIVEN light steps before and after full ones, more than there are columns
        run = TraceBuilder()
        peaks = np.random.default_rng(0).integers(1, 100, 500).tolist()
        ends = [peak // 3 for peak in peaks]
        for peak, end in zip(peaks, ends, strict=True):
            run.light_step({Phase.FORWARD: peak, Phase.BACKWARD: peak // 2}, end_bytes=end)
        with run.step():
            run.allocate(1)
        run.light_step({}, end_bytes=7)
        first, second = folded(run.build(), 20)
        assert len(first.start_ns) == 20
        assert first.peak.max() == max(peaks)
        assert first.peak.tolist() == [max(peaks[at:at + 25]) for at in range(0, 500, 25)]
        assert second.peak.tolist() == second.left.tolist() == [7]
        # AND the least that was alive at an end
        assert first.left.tolist() == [min(ends[at:at + 25]) for at in range(0, 500, 25)]
        assert folded(TraceBuilder().build(), 20) == []


def words(path: Path) -> str:
    return path.read_text()


class TestFiles:
    def test_an_svg_holds_its_words_as_text(self, tmp_path: Path) -> None:
        path = tmp_path / "out.svg"
        draw(training_run().build(), path)
        text = words(path)
        for word in ("peak 576.0 KiB", "the whole run (cpu)", "step 1, the step of the peak", "live memory (KiB)",
                     "time (µs)", "backward", "saved activations", "240.0 KiB"):
            assert word in text
        # Only what is there has a place in the legend.
        for role in (Role.HELD, Role.RECOMPUTED_ACTIVATIONS, Role.UNKNOWN):
            assert role.label.replace("_", " ") not in text

    def test_a_pdf_holds_its_fonts(self, tmp_path: Path) -> None:
        path = tmp_path / "out.pdf"
        draw(training_run().build(), path)
        data = path.read_bytes()
        assert data.startswith(b"%PDF")
        assert b"/CIDFontType2" in data  # TrueType: text that can be searched and edited
        assert b"/Type3" not in data

    def test_a_png(self, tmp_path: Path) -> None:
        path = tmp_path / "out.PNG"
        draw(training_run().build(), path)
        assert path.read_bytes().startswith(b"\x89PNG")

    def test_the_same_trace_makes_the_same_file(self, tmp_path: Path) -> None:
        for name in ("a.svg", "b.svg"):
            draw(training_run().build(), tmp_path / name)
        assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()

    def test_a_long_run_makes_a_small_file(self, tmp_path: Path) -> None:
        path = tmp_path / "out.svg"
        draw(many_events(20_000), path)
        assert path.stat().st_size < 2**20

    @pytest.mark.parametrize("name", ["out", "out.jpg", "out.svgz"])
    def test_another_ending_is_refused_with_those_that_work(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(MemdiagError, match=r"\.png, \.svg, \.pdf"):
            draw(training_run().build(), tmp_path / name)
        assert list(tmp_path.iterdir()) == []

    def test_a_folder_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(OSError, match="No such file"):
            draw(training_run().build(), tmp_path / "none" / "out.png")


class TestFigure:
    def test_the_step_of_the_peak_is_enlarged_on_the_same_scale(self) -> None:
        whole, step = figure(training_run().build()).axes
        assert whole.get_ylim() == step.get_ylim()
        assert step.get_xlim()[1] < whole.get_xlim()[1]
        assert step.get_title(loc="left") == "step 1, the step of the peak"

    def test_without_a_step_there_is_one_panel(self) -> None:
        run = TraceBuilder()
        run.allocate(10)
        assert len(figure(run.build()).axes) == 1

    def test_a_folded_peak_is_marked_in_the_whole_run_alone(self) -> None:
        run = training_run(1)
        run.light_step({Phase.FORWARD: 1 << 30}, end_bytes=0)
        (whole,) = figure(run.build()).axes
        assert [text.get_text() for text in whole.texts if "peak" in text.get_text()] == ["peak 1.00 GiB"]
        assert whole.get_ylabel() == "live memory (GiB)"

    def test_a_light_peak_is_enlarged_where_its_events_were_kept(self) -> None:
        run = training_run(1)
        light = run.highest_light_step()
        with light.unfinished_step(1), light.phase(Phase.FORWARD):
            light.claim(light.allocate(1 << 30), Role.SAVED_ACTIVATIONS)
        run.light_step({Phase.FORWARD: 1 << 30}, end_bytes=0)
        whole, step = figure(run.build()).axes
        assert step.get_title(loc="left") == "step 1, the step of the peak"
        for axes in (whole, step):
            assert [text.get_text() for text in axes.texts if "peak" in text.get_text()] == ["peak 1.00 GiB"]

    def test_nothing_at_all(self, tmp_path: Path) -> None:
        (axes,) = figure(TraceBuilder().build()).axes
        assert [text.get_text() for text in axes.texts] == ["nothing was allocated"]
        draw(Trace({}, []), tmp_path / "out.png")

    def test_many_steps_are_drawn_by_their_highest_moments(self) -> None:
        steps = PLOT_COLUMNS // PLOT_STEP_COLUMNS + 1
        whole, step = figure(many_events(20_000, steps)).axes
        assert "highest moments" in whole.get_title(loc="left")
        assert "highest moments" not in step.get_title(loc="left")

    @given(any_runs())
    @settings(max_examples=30)
    def test_any_run_can_be_drawn(self, any_run: AnyRun) -> None:
        figure(any_run.trace).draw_without_rendering()

    def test_roles_look_apart(self) -> None:
        from memdiag.report.plot import _LOOK

        assert set(_LOOK) == set(Role)
        assert len(set(_LOOK.values())) == len(Role)

    def test_global_state_is_left_alone(self, tmp_path: Path) -> None:
        before = dict(mpl.rcParams)
        draw(training_run().build(), tmp_path / "out.svg")
        assert dict(mpl.rcParams) == before

    def test_no_window_system_and_no_early_import(self, tmp_path: Path) -> None:
        # GIVEN a process that reports WHEN it draws
        script = (
            "import sys, memdiag.report\n"
            "assert 'matplotlib' not in sys.modules\n"
            "from traces import training_run\n"
            f"memdiag.report.draw(training_run().build(), {str(tmp_path / 'out.png')!r})\n"
            "assert 'matplotlib.pyplot' not in sys.modules\n"
        )
        folder = Path(__file__).parent
        environment = {**os.environ, "PYTHONPATH": f"{folder.parent}{os.pathsep}{folder}"}
        subprocess.run([sys.executable, "-c", script], env=environment, check=True)
        assert (tmp_path / "out.png").exists()
