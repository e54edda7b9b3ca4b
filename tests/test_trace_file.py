"""The run file: reads back equal, and says in one message what is wrong with it where something is."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from traces import AnyRun, TraceBuilder, any_runs, training_run, write

from memdiag.errors import MemdiagError
from memdiag.trace import NONE, Phase, Trace, Writer, is_run_file, load
from memdiag.trace.model import SCHEMA

HEADER = 32  # magic, version, padding; then the committed length and the state
COMMITTED, STATE = 16, 24

same_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def assert_same(found: Trace, wanted: Trace) -> None:
    assert found.about == wanted.about
    assert found.text == wanted.text
    for name, columns in wanted.tables.items():
        for column, values in columns.items():
            assert found[name][column].dtype == values.dtype
            assert np.array_equal(found[name][column], values), (name, column)
    assert (found.peak_step is None) is (wanted.peak_step is None)
    if found.peak_step is not None and wanted.peak_step is not None:
        assert_same(found.peak_step, wanted.peak_step)


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.mdiag"
    run = TraceBuilder()
    run.free(run.allocate(1))
    write(run.build(), path)  # small: some tests read it once for each of its bytes
    return path


class TestRoundTrip:
    @given(any_runs(), st.integers(1, 7))
    @same_folder
    def test_any_run_reads_back_equal(self, tmp_path: Path, any_run: AnyRun, rows: int) -> None:
        write(any_run.trace, tmp_path / "run.mdiag", rows_per_block=rows)
        found = load(tmp_path / "run.mdiag")
        assert_same(found, any_run.trace)
        assert found.complete

    @given(st.data())
    @same_folder
    def test_any_values_read_back_equal(self, tmp_path: Path, data: st.DataObject) -> None:
        # GIVEN columns of any values that their types hold, extremes included
        rows = data.draw(st.integers(1, 20))
        name = data.draw(st.sampled_from(sorted(SCHEMA)))
        table = {column: data.draw(npst.arrays(dtype, rows)) for column, dtype in SCHEMA[name].items()}
        about = data.draw(st.dictionaries(st.text(), st.none() | st.integers() | st.text() | st.lists(st.booleans())))
        text = data.draw(st.lists(st.text()))
        # WHEN they are written and read
        writer = Writer(tmp_path / "run.mdiag", about)
        writer.text(text)
        writer.table(name, table)
        writer.close()
        found = load(tmp_path / "run.mdiag")
        # THEN they are the same
        assert_same(found, Trace(about, text, {name: table}))

    def test_rows_come_in_the_order_in_which_they_were_appended(self, tmp_path: Path) -> None:
        writer = Writer(tmp_path / "run.mdiag", {"a": 1, "b": 1})
        writer.text(["zero"])
        writer.table("save_ends", {"save": [5], "unpacked_event": [6], "released_event": [7]})
        writer.text([])
        writer.text(["one", "two"])
        writer.table("save_ends", {"save": [], "unpacked_event": [], "released_event": []})
        writer.table("save_ends", {"save": [1, 2], "unpacked_event": [3, 4], "released_event": [NONE, NONE]})
        writer.about({"b": 2})
        writer.close()
        writer.close()  # and once more does nothing
        found = load(tmp_path / "run.mdiag")
        assert found.text == ["zero", "one", "two"]
        assert found["save_ends"]["save"].tolist() == [5, 1, 2]
        assert found.about == {"a": 1, "b": 2}

    def test_the_events_of_the_highest_light_step_come_along(self, tmp_path: Path) -> None:
        run = training_run(1)
        light = run.highest_light_step()
        light.existing(10)
        with light.unfinished_step(1), light.phase(Phase.FORWARD):
            light.free(light.allocate(20))
        write(run.build(), tmp_path / "run.mdiag", rows_per_block=2)
        assert_same(load(tmp_path / "run.mdiag"), run.build())

    def test_an_existing_file_is_replaced_whole(self, tmp_path: Path) -> None:
        path = tmp_path / "run.mdiag"
        write(training_run(5).build(), path)
        longer = path.stat().st_size
        write(TraceBuilder().build(), path)
        assert path.stat().st_size < longer
        assert load(path).rows("allocations") == 0

    def test_no_pickle_inside(self, run_file: Path) -> None:
        # NumPy refuses to make objects from bytes, whatever a block says of its columns.
        with pytest.raises(MemdiagError, match="damaged"):
            load(_with_block(run_file, {"table": "frees", "rows": 1, "columns": [["allocation", "|O"]]}, b"x" * 8))


class TestKilled:
    def test_everything_up_to_the_last_block_is_there(self, tmp_path: Path) -> None:
        # GIVEN a writer that was never closed, and half a block that it never committed
        path = tmp_path / "run.mdiag"
        wanted = training_run(2).build()
        write(wanted, path, close=False)
        with open(path, "ab") as file:
            file.write(b"half a block")
        # WHEN it is read THEN all that was committed is there, and the report can say how it ended
        found = load(path)
        assert_same(found, wanted)
        assert not found.complete
        assert any("killed" in text for text in found.not_seen)

    def test_every_moment_leaves_a_file_that_reads(self, tmp_path: Path) -> None:
        path = tmp_path / "run.mdiag"
        writer = Writer(path, {"started": True})
        assert load(path).about == {"started": True}
        for number in range(3):
            writer.text([str(number)])
            assert load(path).text == [str(n) for n in range(number + 1)]
        assert not load(path).complete
        writer.close()
        assert load(path).complete

    def test_a_process_that_was_really_killed(self, tmp_path: Path) -> None:
        # GIVEN a process that writes without end
        path = tmp_path / "run.mdiag"
        script = (
            "import sys\n"
            "from memdiag.trace import Writer\n"
            f"writer = Writer({str(path)!r}, {{}})\n"
            "number = 0\n"
            "while True:\n"
            "    writer.text([str(number)])\n"
            "    number += 1\n"
            "    if number == 50: print('go', flush=True)\n"
        )
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment)
        assert process.stdout is not None
        assert process.stdout.readline() == b"go\n"
        # WHEN it is killed outright
        process.kill()
        process.wait()
        process.stdout.close()
        # THEN what it had written reads back, without a gap
        text = load(path).text
        assert len(text) >= 50
        assert text == [str(number) for number in range(len(text))]


class TestWrongFiles:
    def test_truncated_anywhere(self, run_file: Path) -> None:
        # GIVEN a whole file, cut at every length that it can have
        data = run_file.read_bytes()
        assert len(data) > 3 * HEADER
        for length in range(len(data)):
            run_file.write_bytes(data[:length])
            # THEN it is never taken for a whole one, and where enough is left it says what happened
            with pytest.raises(MemdiagError) as error:
                load(run_file)
            assert error.value.exit_code == 2
            name, _, said = str(error.value).partition(": ")
            assert name == str(run_file)
            assert ("truncated" if length else "not a memdiag run file") in said

    @pytest.mark.parametrize("content", [b"", b"GIF89a", b"MEMDIAF\n" + bytes(100), b"\x80\x04K\x01.", b"{}"])
    def test_foreign(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "other.bin"
        path.write_bytes(content)
        assert not is_run_file(path)
        with pytest.raises(MemdiagError, match="not a memdiag run file"):
            load(path)

    def test_missing_or_unreadable(self, tmp_path: Path) -> None:
        with pytest.raises(MemdiagError, match="no such file"):
            load(tmp_path / "none.mdiag")
        with pytest.raises(MemdiagError, match="cannot be read"):
            load(tmp_path)
        assert not is_run_file(tmp_path / "none.mdiag")

    def test_newer_major(self, run_file: Path) -> None:
        data = bytearray(run_file.read_bytes())
        data[8:10] = struct.pack("<H", 2)
        run_file.write_bytes(data)
        assert is_run_file(run_file)
        with pytest.raises(MemdiagError, match=r"newer memdiag .*upgrade"):
            load(run_file)

    def test_newer_minor_with_a_table_and_a_column_of_its_own(self, run_file: Path) -> None:
        wanted = load(run_file)
        _with_block(run_file, {"table": "inventions", "rows": 1, "columns": [["x", "<i8"]]}, bytes(8))
        _with_block(run_file, {"table": "survivors", "rows": 1, "columns": [["bytes", "<i8"], ["x", "<i8"]]},
                    struct.pack("<q", 7), bytes(8))
        found = load(run_file)
        # THEN what it knows is read, a column that is missing reads as not known, and the rest is as it was
        assert {column: values.tolist() for column, values in found["survivors"].items()} == {
            "born_step": [NONE], "bytes": [7], "count": [NONE]}
        wanted.tables["survivors"] = found["survivors"]
        assert_same(found, wanted)

    def test_a_flipped_byte_anywhere_after_the_header_is_found(self, run_file: Path) -> None:
        data = run_file.read_bytes()
        for place in range(HEADER, len(data)):
            damaged = bytearray(data)
            damaged[place] ^= 0x5A
            run_file.write_bytes(damaged)
            with pytest.raises(MemdiagError, match=": this run file is damaged"):
                load(run_file)

    def test_a_flipped_byte_in_the_header_is_found_or_does_no_harm(self, run_file: Path) -> None:
        data, wanted = run_file.read_bytes(), load(run_file)
        for place in range(HEADER):
            damaged = bytearray(data)
            damaged[place] ^= 0x5A
            run_file.write_bytes(damaged)
            try:
                found = load(run_file)
            except MemdiagError:
                continue
            # Left over: the minor version, the padding, and the state.
            assert 10 <= place < COMMITTED or place >= STATE
            assert_same(found, wanted)

    @pytest.mark.parametrize("header", [
        {"table": "frees"},
        {"table": "frees", "rows": "many", "columns": []},
        {"table": "frees", "rows": 3, "columns": [["allocation", "<i8"]]},
        {"table": "frees", "rows": 1, "columns": [["allocation", "no type"]]},
        {"text": 1},
        {"about": 5},
        {},
        [],
    ])
    @pytest.mark.parametrize("columns", [(), (bytes(8),)])
    def test_a_block_that_makes_no_sense(self, run_file: Path, header: Any, columns: tuple[bytes, ...]) -> None:
        whole = run_file.stat().st_size
        with pytest.raises(MemdiagError, match=f"damaged .* at byte {whole:,}"):
            load(_with_block(run_file, header, *columns))

    def test_a_folder_that_does_not_exist(self, tmp_path: Path) -> None:
        with pytest.raises(OSError, match="No such file"):
            Writer(tmp_path / "none" / "run.mdiag", {})

    @pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
    def test_a_full_disk_is_an_error_of_the_system(self) -> None:
        with pytest.raises(OSError, match="No space left"):
            Writer("/dev/full", {})


def _with_block(path: Path, header: Any, *columns: bytes) -> Path:
    """Appends a block as a writer of another version would."""
    import json

    data = bytearray(path.read_bytes())
    packed = [zlib.compress(column) for column in columns]
    if isinstance(header, dict):
        header = {**header, "parts": [len(part) for part in packed]}
    head, body = json.dumps(header).encode(), b"".join(packed)
    data += struct.pack("<IQI", len(head), len(body), zlib.crc32(body, zlib.crc32(head))) + head + body
    data[COMMITTED:STATE] = struct.pack("<Q", len(data))
    path.write_bytes(data)
    return path
