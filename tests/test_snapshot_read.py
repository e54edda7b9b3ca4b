"""What gets read as a memory snapshot, and what is refused, with which words. All but the real files is made here."""

from __future__ import annotations

import copy
import gc
import gzip
import json
import os
import pickle
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memdiag.errors import MemdiagError
from memdiag.snapshot.data import Snapshot
from memdiag.snapshot.read import read_snapshot
from memdiag.snapshot.unpickle import estimate, is_pickle

MIB = 1 << 20
GIB = 1 << 30
BASE = 0x7F00_0000_0000
FRAME = {"name": "forward", "filename": "model.py", "line": 12}


def block(address: int, size: int, state: str = "active_allocated", **more: Any) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": 0 if state == "inactive" else size, "state": state,
            "frames": [FRAME], **more}


def segment(**changes: Any) -> dict[str, Any]:
    blocks = [block(BASE, MIB), block(BASE + MIB, MIB, "inactive")]
    return {"device": 0, "address": BASE, "total_size": 2 * MIB, "allocated_size": MIB, "active_size": MIB,
            "requested_size": MIB, "stream": 0, "segment_type": "small", "segment_pool_id": (0, 0),
            "is_expandable": False, "frames": [], "blocks": blocks, **changes}


def event(**changes: Any) -> dict[str, Any]:
    return {"action": "alloc", "addr": BASE, "size": MIB, "stream": 0, "time_us": 1_783_874_495_959_433,
            "compile_context": "N/A", "user_metadata": "", "frames": [FRAME], **changes}


def whole(**changes: Any) -> dict[str, Any]:
    return {"segments": [segment()], "device_traces": [[event()]],
            "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": -1,
                                   "roundup_power2_divisions": {"1": 0}},
            "external_annotations": [{"stage": "START", "name": "step", "device": 0, "time_us": 1}], **changes}


def saved(folder: Path, what: Any, protocol: int = 4) -> Path:
    path = folder / "snapshot.pickle"
    path.write_bytes(what if isinstance(what, bytes) else pickle.dumps(what, protocol))
    return path


def refused(path: Path, **more: Any) -> str:
    with pytest.raises(MemdiagError) as error:
        read_snapshot(path, **more)
    message = str(error.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    assert len(message) < 400 + len(str(path))
    return message


# What is read.

@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_snapshot_as_pytorch_writes_it(tmp_path: Path, protocol: int) -> None:
    # GIVEN a snapshot with all that it can have WHEN it is read
    found = read_snapshot(saved(tmp_path, whole(), protocol))

    # THEN it says the same, and there is nothing to doubt
    held, = found.segments
    assert (held.device, held.address, held.size, held.stream, held.small) == (0, BASE, 2 * MIB, 0, True)
    assert (held.pool, held.expandable) == ((0, 0), False)
    assert [(b.address, b.size, b.requested_size, b.state) for b in held.blocks] == [
        (BASE, MIB, MIB, "active_allocated"), (BASE + MIB, MIB, 0, "inactive")]
    assert held.blocks[0].frames == [FRAME]
    assert found.traces == [[event()]]
    assert found.settings == whole()["allocator_settings"]
    assert found.annotations == whole()["external_annotations"]
    assert found.doubts == ()
    assert found.devices() == [0]


def without(what: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in what.items() if key not in keys}


def old() -> dict[str, Any]:
    """The form of 2.0: no addresses of blocks, frames in their history, the latest first."""
    blocks = [{"size": MIB, "requested_size": MIB - 1, "state": "active_allocated",
               "history": [{"addr": BASE, "real_size": MIB - 1, "frames": [FRAME]}]},
              {"size": MIB, "requested_size": 0, "state": "inactive",
               "history": [{"addr": BASE + MIB, "real_size": 3, "frames": []}]}]
    held = without(segment(blocks=blocks), "segment_pool_id", "is_expandable", "frames")
    return {"segments": [held], "device_traces": [[without(event(), "time_us", "compile_context", "user_metadata")]]}


VARIANTS: dict[str, tuple[Any, Callable[[Snapshot], Any], Any]] = {
    "a bare list of segments": ([segment()], lambda s: (len(s.segments), s.traces, s.settings, s.annotations),
                                (1, [], None, [])),
    "an empty list": ([], lambda s: s.segments, ()),
    "no device has anything": ({"segments": [], "device_traces": [[], []]}, lambda s: s.devices(), []),
    "two keys, blocks without addresses": (
        old(), lambda s: [(b.address, b.requested_size, b.frames) for b in s.segments[0].blocks],
        [(BASE, MIB - 1, [FRAME]), (BASE + MIB, 0, [])]),
    "the requested size in the history alone": (
        {"segments": [segment(blocks=[without(block(BASE, 2 * MIB, history=[{"real_size": 7}]), "requested_size")],
                              allocated_size=2 * MIB, active_size=2 * MIB)]},
        lambda s: s.segments[0].blocks[0].requested_size, 7),
    "the requested size nowhere": (
        {"segments": [segment(blocks=[without(block(BASE, 2 * MIB), "requested_size")],
                              allocated_size=2 * MIB, active_size=2 * MIB)]},
        lambda s: s.segments[0].blocks[0].requested_size, None),
    "no settings": (without(whole(), "allocator_settings"), lambda s: s.settings, None),
    "no annotations": (without(whole(), "external_annotations"), lambda s: s.annotations, []),
    "annotations that are None": (whole(external_annotations=None), lambda s: s.annotations, []),
    "keys of later versions": (whole(later={"a": [1]}), lambda s: len(s.segments), 1),
    "fields of later versions": (whole(segments=[segment(later=[[]])]), lambda s: len(s.segments), 1),
    "events without frames": (whole(device_traces=[[without(event(), "frames")]]), lambda s: len(s.traces[0]), 1),
    "an action of later versions": (whole(device_traces=[[event(action="later")]]), lambda s: len(s.traces[0]), 1),
    "an OOM has no address": (
        whole(device_traces=[[{"action": "oom", "size": 1, "stream": 0, "device_free": 5, "frames": []}]]),
        lambda s: s.traces[0][0]["device_free"], 5),
    "pools as lists": (whole(segments=[segment(segment_pool_id=[0, 7])]), lambda s: s.segments[0].pool, (0, 7)),
    "a stream by its handle": (whole(segments=[segment(stream=(1 << 63) + 5)]), lambda s: s.segments[0].stream,
                               (1 << 63) + 5),
    "an expandable segment": (whole(segments=[segment(is_expandable=True)]), lambda s: s.segments[0].expandable, True),
    "several devices, not in order": (
        whole(segments=[segment(device=3), segment(device=1)], device_traces=[[], [], [event()], []]),
        lambda s: ([held.device for held in s.segments], s.devices()), ([1, 3], [1, 2, 3])),
    "blocks that wait, by either name": (
        whole(segments=[segment(allocated_size=0, blocks=[
            block(BASE, MIB // 2, "active_pending_free"), block(BASE + MIB // 2, MIB // 2, "active_awaiting_free"),
            block(BASE + MIB, MIB, "inactive")])]),
        lambda s: [b.state for b in s.segments[0].blocks[:2]], ["active_awaiting_free"] * 2),
    "frames with what torch.fx adds": (
        whole(device_traces=[[event(frames=[{**FRAME, "fx_node_op": "call_function", "fx_node_info": {"a": 1}}])]]),
        lambda s: s.traces[0][0]["frames"][0]["fx_node_op"], "call_function"),
    "names in other scripts": (whole(device_traces=[[event(user_metadata="Schicht › 層")]]),
                               lambda s: s.traces[0][0]["user_metadata"], "Schicht › 層"),
    "long texts": (whole(device_traces=[[event(user_metadata="x" * 100_000)]]),
                   lambda s: len(s.traces[0][0]["user_metadata"]), 100_000),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_all_forms_are_read(tmp_path: Path, name: str) -> None:
    # GIVEN a form of snapshot WHEN it is read THEN what it says is there, without a doubt
    what, look, expected = VARIANTS[name]
    found = read_snapshot(saved(tmp_path, what))
    assert look(found) == expected
    assert found.doubts == ()


def test_frames_that_events_share_are_one_object(tmp_path: Path) -> None:
    # GIVEN many events of one stack
    shared = [dict(FRAME)]
    what = whole(device_traces=[[event(frames=shared) for _ in range(100)]])

    # WHEN they are read THEN there is one stack
    found = read_snapshot(saved(tmp_path, what))
    assert len({id(entry["frames"]) for entry in found.traces[0]}) == 1


@pytest.mark.parametrize(("changes", "words"), [
    ({"blocks": [block(BASE, MIB)]}, "in no block, and taken to be free (segments[0]: 1,048,576 bytes"),
    ({"allocated_size": 5}, "allocated_size is not what its blocks add up to (segments[0]: 5 and 1,048,576 bytes"),
    ({"active_size": 5}, "active_size is not what its blocks add up to"),
])
def test_what_does_not_add_up_is_said(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    # GIVEN a segment that contradicts itself WHEN it is read THEN it is, with the doubt in words
    doubt, = read_snapshot(saved(tmp_path, whole(segments=[segment(**changes)]))).doubts
    assert words in doubt


# What is refused, being no snapshot.

class Hostile:
    def __init__(self, trace: str) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.mkdir, (self.trace,)


PROTO = b"\x80\x04"
BYTES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "gzip": (gzip.compress(pickle.dumps(whole())), "gunzip"),
    "zip": (b"PK\x03\x04" + bytes(64), "torch.save"),
    "zstd": (b"\x28\xb5\x2f\xfd" + bytes(64), "unzstd"),
    "xz": (b"\xfd7zXZ" + bytes(64), "unxz"),
    "bzip2": (b"BZh9" + bytes(64), "bunzip2"),
    "a run file": (b"MEMDIAG\n" + bytes(64), "memdiag report"),
    "JSON": (json.dumps(whole()).encode(), "JSON"),
    "a JSON list": (b' [{"device": 0}]', "JSON"),
    "text": (b"hello\n", "not a memory snapshot"),
    "HTML": (b"<!DOCTYPE html>", "not a memory snapshot"),
    "zeros": (bytes(4096), "not a memory snapshot"),
    "one byte": (b"\x80", "not a memory snapshot"),
    "protocol 0": (pickle.dumps(whole(), 0), "protocol 0 or 1"),
    "protocol 1": (pickle.dumps(whole(), 1), "protocol 0 or 1"),
    "protocol 99": (b"\x80\x63}.", "protocol 99"),
    "noise in a pickle": (PROTO + b"\xff\xfe\xfd", "damaged"),
    "two pickles": (pickle.dumps(whole()) * 2, "follow the end"),
    "a global": (PROTO + b"cos\nsystem\n.", "code to be run (GLOBAL); nothing was run"),
    "a stacked global": (PROTO + b"\x8c\x02os\x8c\x06system\x93.", "code to be run (STACK_GLOBAL)"),
    "a call": (PROTO + b")R.", "code to be run (REDUCE)"),
    "an old instance": (PROTO + b"(ios\nsystem\n.", "code to be run (INST)"),
    "an old object": (PROTO + b"(o.", "code to be run (OBJ)"),
    "a new object": (PROTO + b"))\x81.", "code to be run (NEWOBJ)"),
    "a new object with names": (PROTO + b"))}\x92.", "code to be run (NEWOBJ_EX)"),
    "a state that is set": (PROTO + b"}}b.", "code to be run (BUILD)"),
    "a registered extension": (PROTO + b"\x82\x01.", "code to be run (EXT1)"),
    "a persistent id": (PROTO + b"P1\n.", "code to be run (PERSID)"),
    "a persistent object": (PROTO + b"K\x01Q.", "code to be run (BINPERSID)"),
    "bytes": (pickle.dumps(b"abc"), "what PyTorch does not write (SHORT_BINBYTES)"),
    "a bytearray": (pickle.dumps(bytearray(b"abc"), 5), "does not write (BYTEARRAY8)"),
    "a set": (pickle.dumps({1, 2}), "does not write (EMPTY_SET)"),
    "a frozen set": (pickle.dumps(frozenset((1, 2))), "does not write (FROZENSET)"),
    "a huge number": (pickle.dumps(1 << 4000), "does not write (LONG4)"),
    "a large number": (pickle.dumps(1 << 200), "does not write (LONG1)"),
    "tuples in tuples": (pickle.dumps(((1, 2), (3, 4))), "does not write (TUPLE2)"),
    "something put in nothing": (PROTO + b"a.", "damaged"),
    "an end without a start": (PROTO + b"e.", "damaged"),
    "nothing at all": (PROTO + b".", "damaged"),
    "a place in the memo that is empty": (PROTO + b"h\x05.", "damaged"),
    "a key that cannot be one": (PROTO + b"}]Ns.", "damaged"),
    "an item for a list": (PROTO + b"]]Ns.", "damaged"),
    "half a pair": (PROTO + b"}(Nu.", "damaged"),
    "text that is none": (PROTO + b"\x8c\x02\xff\xff.", "damaged"),
}


@pytest.mark.parametrize("name", BYTES)
def test_other_files_are_refused(tmp_path: Path, name: str) -> None:
    # GIVEN a file that is something else WHEN it is read THEN one line says what
    data, words = BYTES[name]
    assert words in refused(saved(tmp_path, data))


def test_nothing_in_a_hostile_pickle_is_run(tmp_path: Path) -> None:
    # GIVEN a snapshot with something in it that makes a folder when it is unpickled
    trace = tmp_path / "was run"
    for protocol in (2, 3, 4, 5):
        path = saved(tmp_path, whole(external_annotations=[Hostile(str(trace))]), protocol)

        # WHEN it is read THEN it is refused, and there is no folder
        assert "code to be run" in refused(path)
        assert not trace.exists()

    # AND the pickle would have made it
    pickle.loads(path.read_bytes())
    assert trace.exists()


def test_cuts_are_told(tmp_path: Path) -> None:
    # GIVEN a snapshot that ends early, at any of many places
    data = pickle.dumps(whole())
    for length in range(2, len(data), 3):

        # WHEN it is read THEN it is said to be truncated
        assert "truncated" in refused(saved(tmp_path, data[:length]))


def test_a_changed_byte_is_never_a_traceback(tmp_path: Path) -> None:
    # GIVEN a snapshot in which one byte is another
    data, said = pickle.dumps(whole()), []
    for at in range(len(data)):
        for value in (0x2E, 0xFF - data[at]):
            path = saved(tmp_path, data[:at] + bytes([value]) + data[at + 1:])

            # WHEN it is read
            try:
                read_snapshot(path)
            except MemdiagError as error:
                said.append(str(error))

    # THEN it is, or is refused in words
    assert len(said) > len(data)
    assert all(message.startswith(f"{path}: ") for message in said)


def test_no_file_and_no_right_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN what cannot be opened WHEN it is read THEN the reason is said
    assert "no such file" in refused(tmp_path / "none")
    assert "directory" in refused(tmp_path)
    assert "cannot be read" in refused(tmp_path / ("b" * 300))
    assert "null byte" in refused(Path("a\0b"))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert "not a regular file" in refused(pipe)
    assert "not a regular file" in refused(Path("/dev/zero"))

    def forbidden(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    path = saved(tmp_path, whole())
    monkeypatch.setattr(Path, "read_bytes", forbidden)  # root may read everything, so the modes of a file do not tell
    assert "cannot be read (Permission denied)" in refused(path)


# What is refused, being a pickle of plain data.

NAN = float("nan")
SHAPES: dict[str, tuple[Any, str]] = {
    "a number": (5, "holds an int"),
    "nothing": (None, "holds None"),
    "a text": ("snapshot", "holds a str"),
    "an empty dict": ({}, "no 'segments'"),
    "another dict": ({"model": [1.0]}, "no 'segments'"),
    "segments that are a dict": ({"segments": {}}, "its segments is a dict"),
    "a list of numbers": ([1, 2], "segments[0] is an int"),
    "a list of lists": ([[[]]], "segments[0] is a list"),
    "traces that are a dict": (whole(device_traces={}), "its device_traces is a dict"),
    "traces that are None": (whole(device_traces=None), "its device_traces is None"),
    "a trace that is a dict": (whole(device_traces=[{}]), "device_traces[0] is a dict"),
    "an event that is a list": (whole(device_traces=[[[]]]), "device_traces[0][0] is a list"),
    "an event without an action": (whole(device_traces=[[without(event(), "action")]]), "action is None"),
    "an action that is a number": (whole(device_traces=[[event(action=3)]]), "its action is 3"),
    "an event without a size": (whole(device_traces=[[without(event(), "size")]]), "alloc without 'size'"),
    "an event without an address": (whole(device_traces=[[event(), without(event(), "addr")]]),
                                    "device_traces[0][1]: alloc without 'addr'"),
    "an event of negative size": (whole(device_traces=[[event(size=-1)]]), "its size is -1"),
    "an event of half a byte": (whole(device_traces=[[event(size=0.5)]]), "its size is 0.5"),
    "an event of no number": (whole(device_traces=[[event(size=NAN)]]), "its size is nan"),
    "an event of True bytes": (whole(device_traces=[[event(size=True)]]), "its size is True"),
    "an event larger than memory can be": (whole(device_traces=[[event(size=1 << 60)]]), "its size is 11529215046068"),
    "an address as text": (whole(device_traces=[[event(addr="0x7f")]]), "its addr is '0x7f'"),
    "a time as text": (whole(device_traces=[[event(time_us="now")]]), "its time_us is 'now'"),
    "metadata that is a list": (whole(device_traces=[[event(user_metadata=[])]]), "user_metadata is a list"),
    "a pool that is a number": (whole(device_traces=[[event(pool_id=3)]]), "its pool is 3"),
    "frames that are text": (whole(device_traces=[[event(frames="x")]]), "its frames are a str"),
    "a frame that is text": (whole(device_traces=[[event(frames=["x"])]]), "a frame"),
    "a frame without a line": (whole(device_traces=[[event(frames=[without(FRAME, "line")])]]), "a frame"),
    "a frame with a wrong line": (whole(device_traces=[[event(frames=[{**FRAME, "line": "3"}])]]), "a frame"),
    "frames of a segment": (whole(segments=[segment(frames=[5])]), "a frame"),
    "a segment without a size": (whole(segments=[without(segment(), "total_size")]), "segments[0] has no 'total_size'"),
    "a segment of nothing": (whole(segments=[segment(total_size=0)]), "total_size is 0"),
    "a negative segment": (whole(segments=[segment(total_size=-MIB)]), "total_size is -1048576"),
    "a segment of no kind": (whole(segments=[segment(segment_type="huge")]), "segment_type is 'huge'"),
    "a segment of a list's kind": (whole(segments=[segment(segment_type=["small"])]), "segment_type is a list"),
    "a negative device": (whole(segments=[segment(device=-1)]), "device is -1"),
    "a wrong pool": (whole(segments=[segment(segment_pool_id=(1,))]), "its pool is a tuple"),
    "expandable by number": (whole(segments=[segment(is_expandable=1)]), "is_expandable is 1"),
    "segments that overlap": (whole(segments=[segment(), segment()]), "overlap"),
    "blocks that are missing": (whole(segments=[without(segment(), "blocks")]), "has no 'blocks'"),
    "blocks that are a number": (whole(segments=[segment(blocks=3)]), "its blocks is an int"),
    "a block that is a list": (whole(segments=[segment(blocks=[[]])]), "segments[0].blocks[0] is a list"),
    "a block of nothing": (whole(segments=[segment(blocks=[block(BASE, 0)])]), "its size is 0"),
    "a negative block": (whole(segments=[segment(blocks=[block(BASE, -512)])]), "its size is -512"),
    "a block of no state": (whole(segments=[segment(blocks=[block(BASE, MIB, "odd")])]), "its state is 'odd'"),
    "a block of a list's state": (whole(segments=[segment(blocks=[block(BASE, MIB, [])])]), "its state is a list"),
    "a block that is too long": (whole(segments=[segment(blocks=[block(BASE, 3 * MIB)])]), "beyond the segment"),
    "a block before its segment": (whole(segments=[segment(blocks=[block(BASE - 512, MIB)])]), "overlap the block"),
    "blocks that overlap": (whole(segments=[segment(blocks=[block(BASE, MIB), block(BASE + 512, MIB)])]), "overlap"),
    "more requested than there is": (
        whole(segments=[segment(blocks=[{**block(BASE, MIB), "requested_size": 2 * MIB}])]), "were requested"),
    "a history that is a number": (whole(segments=[segment(blocks=[block(BASE, MIB, history=3)])]), "its history is"),
    "settings that are a list": (whole(allocator_settings=[]), "allocator_settings is a list"),
    "settings in settings": (whole(allocator_settings={"a": {"b": {"c": 1}}}), "nested deeper"),
    "settings by number": (whole(allocator_settings={1: 1}), "1 is not the name of a setting"),
    "annotations that are text": (whole(external_annotations="x"), "external_annotations are a str"),
    "an annotation without a name": (whole(external_annotations=[{"stage": "START", "time_us": 1}]), "name is None"),
    "an annotation without a time": (whole(external_annotations=[{"stage": "START", "name": "a"}]), "no 'time_us'"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_malformed_snapshots_are_refused(tmp_path: Path, name: str) -> None:
    # GIVEN plain data of another shape WHEN it is read THEN one line says where, and what to do
    what, words = SHAPES[name]
    message = refused(saved(tmp_path, what))
    assert words in message
    assert "not a memory snapshot as PyTorch writes it" in message
    assert "torch.cuda.memory._dump_snapshot" in message


def nested(depth: int) -> bytes:
    return PROTO + b"]" * depth + b"a" * (depth - 1) + b"."


def doubled(levels: int) -> bytes:
    """Lists of two of the same list of two of the same list: small in memory, endless to walk."""
    return PROTO + b"]\x94" + b"".join(b"](h%ch%ce\x94" % (n, n) for n in range(levels)) + b"."


def repeated() -> bytes:
    """A list of ever the same segment, which has ever the same block."""
    one = segment(blocks=[block(BASE, 512)] * 200_000, total_size=512 * 200_000)
    return pickle.dumps([one] * 200_000)


BOMBS: dict[str, tuple[Callable[[], bytes], str]] = {
    "a text that claims 2**62 bytes": (lambda: PROTO + b"\x8d" + struct.pack("<Q", 1 << 62) + b"x.", "truncated"),
    "a text that claims 4 GiB": (lambda: PROTO + b"X" + struct.pack("<I", (1 << 32) - 1) + b"x.", "truncated"),
    "a frame that claims 2**62 bytes": (lambda: PROTO + b"\x95" + struct.pack("<Q", 1 << 62) + b"N.", "truncated"),
    "a memo of 32 GiB": (lambda: PROTO + b"Nr\xff\xff\xff\x7f.", "makes room"),
    "many lists in one another": (lambda: nested(200_000), "segments[0] is a list"),
    "a hundred doublings": (lambda: doubled(100), "segments[0] is a list"),
    "a segment and a block, over and over": (repeated, "overlap"),
    "millions of empty dicts": (lambda: PROTO + b"](" + b"}" * 4_000_000 + b"e.", "too large"),
    "millions of empty lists": (lambda: PROTO + b"](" + b"]" * 12_000_000 + b"e.", "too large"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused_before_they_go_off(tmp_path: Path, name: str) -> None:
    # GIVEN a small file that would be huge, or endless
    make, words = BOMBS[name]
    path = saved(tmp_path, make())

    # WHEN it is read on a machine with 1 GiB available
    gc.collect()
    tracemalloc.start()
    message = refused(path, available=GIB)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    # THEN it is refused, and never took more
    assert words in message
    assert most < GIB


# What is too large to hold.

def many(events: int, frames: int) -> dict[str, Any]:
    """Events as a training step makes them: of some stacks, with numbers of their own."""
    stacks = [[{"name": f"f{n}-{depth}", "filename": "a.py", "line": depth} for depth in range(frames)]
              for n in range(20)]
    return whole(device_traces=[[event(addr=BASE + 512 * n, size=n * 1000, time_us=(1 << 50) + n,
                                       frames=list(stacks[n % 20])) for n in range(events)]])


@pytest.mark.parametrize("frames", [0, 10, 60])
def test_the_estimate_is_no_less_than_what_is_taken_and_not_far_from_it(tmp_path: Path, frames: int) -> None:
    # GIVEN a snapshot with many events
    path = saved(tmp_path, many(5000, frames))

    # WHEN it is read
    gc.collect()
    tracemalloc.start()
    found = read_snapshot(path)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    # THEN it took less than was estimated, and more than a third of that
    assert len(found.traces[0]) == 5000
    assert most < estimate(path.read_bytes()) < 3 * most


def test_what_is_too_large_is_refused_with_advice(tmp_path: Path) -> None:
    # GIVEN a snapshot, and less memory than it takes
    path = saved(tmp_path, many(5000, 60))
    need = estimate(path.read_bytes())

    # WHEN it is read THEN it is refused, in one line that says what to do; a little more, and it is read
    message = refused(path, available=need - 1)
    assert "too large" in message
    assert "max_entries" in message
    assert "no C++ frames" in message
    assert read_snapshot(path, available=need).traces


def test_a_file_of_many_gibibytes_is_not_even_opened(tmp_path: Path) -> None:
    # GIVEN a sparse file of 4 TiB WHEN it is read THEN it is refused at once
    path = tmp_path / "huge.pickle"
    with open(path, "wb") as file:
        file.truncate(1 << 42)
    before = time.process_time()
    assert "too large" in refused(path)
    assert time.process_time() - before < 5


def test_reading_leaves_the_collector_as_it_was(tmp_path: Path) -> None:
    # GIVEN a good file and a bad one WHEN they are read THEN the garbage collector runs as before
    read_snapshot(saved(tmp_path, whole()))
    assert gc.isenabled()
    refused(saved(tmp_path, PROTO + b"a."))
    assert gc.isenabled()
    gc.disable()
    try:
        read_snapshot(saved(tmp_path, whole()))
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_pickles_are_told_by_their_first_bytes(tmp_path: Path) -> None:
    # GIVEN files WHEN asked THEN pickles are known, without reading more
    assert is_pickle(saved(tmp_path, whole()))
    assert is_pickle(saved(tmp_path, PROTO))
    assert not is_pickle(saved(tmp_path, b"MEMDIAG\n"))
    assert not is_pickle(saved(tmp_path, b""))
    assert not is_pickle(tmp_path)
    assert not is_pickle(tmp_path / "none")


def test_the_words_fit_what_pytorch_itself_would_read(tmp_path: Path) -> None:
    # GIVEN the snapshots above that are read WHEN they are pickled again THEN nothing of them was changed
    for what, _, _ in VARIANTS.values():
        kept = copy.deepcopy(what)
        read_snapshot(saved(tmp_path, what))
        assert what == kept


# Real files.

FILES = {
    # name: segments, events by device, devices, whether it has settings, doubts
    "attention_from_process_start": (9, [97], [0], True, 0),
    "small_from_process_start": (2, [713], [0], True, 0),
    "lm_small_forward_fp32_ctx128": (29, [2043], [0], True, 0),
    "lm_small_forward_autocast_bf16_ctx128": (43, [2811], [0], True, 0),
    "lm_medium_train_ctx128": (377, [19136], [0], True, 0),
    "lm_medium_train_ctx512": (400, [22332], [0], True, 0),
    "lm_few_frames": (216, [5163], [0], True, 0),
    "oom_expandable_three_gpus": (12, [6445, 596, 882, 0], [0, 1, 2], True, 0),
    "old_format_torch_2.0": (266, [1], [0], False, 0),
    "bare_segment_list": (255, [], [1], False, 0),
    "expandable_max_split_no_events": (3, [0, 0], [0, 1], True, 0),
    "four_streams_synthetic": (5, [1040], [0], False, 3),
}


@pytest.mark.data
@pytest.mark.parametrize("name", FILES)
def test_real_snapshots_are_read(data_folder: Path, name: str) -> None:
    # GIVEN a snapshot that was taken on a GPU WHEN it is read
    path = data_folder / "snapshots" / f"{name}.pickle"
    found = read_snapshot(path)

    # THEN all of it is there, and agrees with itself
    segments, events, devices, settings, doubts = FILES[name]
    assert (len(found.segments), [len(trace) for trace in found.traces]) == (segments, events)
    assert found.devices() == devices
    assert (found.settings is not None, len(found.doubts)) == (settings, doubts)
    for held in found.segments:
        assert held.blocks[0].address == held.address
        assert sum(b.size for b in held.blocks) == held.size


@pytest.mark.data
def test_addresses_of_old_blocks_are_those_of_their_history(data_folder: Path) -> None:
    # GIVEN a file whose blocks have no addresses, but a history that has
    path = data_folder / "snapshots" / "old_format_torch_2.0.pickle"
    plain = pickle.loads(path.read_bytes())
    histories = {(held["address"], number): b["history"][0]["addr"]
                 for held in plain["segments"] for number, b in enumerate(held["blocks"]) if b.get("history")}

    # WHEN it is read THEN the addresses that were worked out are these
    for held in read_snapshot(path).segments:
        for number, b in enumerate(held.blocks):
            assert histories.get((held.address, number), b.address) == b.address
    assert len(histories) > 100
