"""From a file to a snapshot: every form that PyTorch has written since 2.0, checked before it is believed.

The form is told by ``torch/cuda/memory.py`` (``_snapshot``) and ``torch/csrc/cuda/Module.cpp``. Three exist: the bare
list of segments of ``torch.cuda.memory_snapshot()``; a dict of ``segments`` and ``device_traces`` (2.0 and 2.1: blocks
without addresses, frames in ``history``); and the same with ``allocator_settings`` and ``external_annotations``. What
later versions add to a dict is passed over, unless it takes the place of what is needed.

A million events with 31 frames each, of a real stream repeated, are a file of 238 MB. Reading took 16 s of one core and
1.0 GB at its height, of which 0.75 GB stay; following them (:mod:`memdiag.snapshot.peaks`) took 7 s.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from memdiag.allocator.state import ALLOCATED, FREE, WAITING
from memdiag.errors import MemdiagError
from memdiag.snapshot.data import Block, Event, Frame, Segment, Snapshot
from memdiag.snapshot.unpickle import read_plain

_ADDRESSES = 1 << 57
"""No processor's virtual address has more bits. So sums of what lies side by side stay below 2**63 also."""
_HANDLES = 1 << 64
_STATES = {"active_allocated": ALLOCATED, "active_awaiting_free": WAITING, "active_pending_free": WAITING,
           "inactive": FREE}
"""PyTorch's documentation has ``active_awaiting_free`` for what its code writes as ``active_pending_free``."""
_NEED_ADDRESS = frozenset(("alloc", "free_requested", "free_completed", "segment_alloc", "segment_free",
                           "segment_map", "segment_unmap"))
_LIMITS = {"addr": _ADDRESSES, "size": _ADDRESSES, "device_free": _ADDRESSES, "stream": _HANDLES, "time_us": 1 << 63}
_TEXTS = frozenset(("compile_context", "user_metadata"))


class _Malformed(Exception):
    """What is wrong, and where in the file."""


def read_snapshot(path: str | os.PathLike[str], available: int | None = None) -> Snapshot:
    """Reads a snapshot that ``torch.cuda.memory._dump_snapshot`` wrote, or a pickle of ``memory_snapshot()``.

    Nothing in the file is run. Events and frames are those of the file, not copies.

    Args:
        available: bytes of memory that it may take; by default, what the machine has available now.

    Raises:
        MemdiagError: when the file is missing, unreadable, foreign, malformed, cut short, or too large to hold.
    """
    plain = read_plain(path, available)
    try:
        return _snapshot(os.fspath(path), plain)
    except _Malformed as error:
        raise MemdiagError(f"{path}: not a memory snapshot as PyTorch writes it: {error}; take it again with "
                           "torch.cuda.memory._dump_snapshot") from None


def _snapshot(path: str, plain: Any) -> Snapshot:
    if type(plain) is list:
        plain = {"segments": plain}
    elif type(plain) is not dict:
        raise _Malformed(f"it holds {_kind(plain)}, where a dict or a list of segments was expected")
    if "segments" not in plain:
        raise _Malformed("it has no 'segments'")
    doubts = _Doubts()
    segments = tuple(_segment(entry, f"segments[{number}]", doubts)
                     for number, entry in enumerate(_list(plain, "segments", "the file")))
    segments = tuple(sorted(segments, key=lambda segment: (segment.device, segment.address)))
    for one, other in pairwise(segments):
        if one.device == other.device and one.address + one.size > other.address:
            raise _Malformed(f"segments at {one.address:#x} and {other.address:#x} of device {one.device} overlap")
    traces = _list(plain, "device_traces", "the file") if "device_traces" in plain else []
    _check_traces(traces)
    _check_frames([*_frames_of(segments), *(event["frames"] for trace in traces for event in trace
                                            if "frames" in event)])
    annotations = plain.get("external_annotations")
    return Snapshot(path, segments, traces, _settings(plain.get("allocator_settings")),
                    [] if annotations is None else _annotations(annotations), doubts.said())


def _frames_of(segments: Iterable[Segment]) -> Iterable[list[Frame]]:
    for segment in segments:
        yield segment.frames
        for block in segment.blocks:
            yield block.frames


def _segment(entry: Any, where: str, doubts: _Doubts) -> Segment:
    _dict(entry, where)
    address = _number(entry, "address", where)
    size = _number(entry, "total_size", where)
    if not size:
        raise _Malformed(f"{where}: its total_size is 0")
    kind = entry.get("segment_type")
    if kind not in ("small", "large"):
        raise _Malformed(f"{where}: its segment_type is {_shown(kind)}, where 'small' or 'large' was expected")
    blocks = _blocks(_list(entry, "blocks", where), address, size, where, doubts)
    for key, states in (("allocated_size", (ALLOCATED,)), ("active_size", (ALLOCATED, WAITING))):
        if key in entry:
            held = sum(block.size for block in blocks if block.state in states)
            if _number(entry, key, where) != held:
                doubts.add(f"a segment's {key} is not what its blocks add up to",
                           f"{where}: {entry[key]:,} and {held:,} bytes")
    expandable = entry.get("is_expandable", False)
    if type(expandable) is not bool:
        raise _Malformed(f"{where}: its is_expandable is {_shown(expandable)}, where True or False was expected")
    return Segment(_number(entry, "device", where, 1 << 16), address, size, _number(entry, "stream", where, _HANDLES),
                   kind == "small", _pool(entry.get("segment_pool_id", (0, 0)), where), expandable, blocks,
                   _list(entry, "frames", where) if "frames" in entry else [])


def _pool(value: Any, where: str) -> tuple[int, int]:
    if type(value) in (list, tuple) and len(value) == 2 and type(value[0]) is type(value[1]) is int:
        return value[0], value[1]
    raise _Malformed(f"{where}: its pool is {_shown(value)}, where two numbers were expected")


def _blocks(entries: list[Any], address: int, size: int, where: str, doubts: _Doubts) -> tuple[Block, ...]:
    """A segment's blocks. What lies between the blocks that the file names is free."""
    blocks: list[Block] = []
    at, end = address, address + size
    for number, entry in enumerate(entries):
        place = f"{where}.blocks[{number}]"
        block = _block(entry, at, place)
        if block.address < at or block.address + block.size > end:
            raise _Malformed(f"{place}: {block.size:,} bytes at {block.address:#x} overlap the block before or reach "
                             "beyond the segment")
        if block.address > at:
            blocks.append(_between(at, block.address, place, doubts))
        blocks.append(block)
        at = block.address + block.size
    if at < end:
        blocks.append(_between(at, end, where, doubts))
    return tuple(blocks)


def _between(start: int, end: int, where: str, doubts: _Doubts) -> Block:
    doubts.add("part of a segment is in no block, and taken to be free",
               f"{where}: {end - start:,} bytes at {start:#x}")
    return Block(start, end - start, 0, FREE, [])


def _block(entry: Any, at: int, where: str) -> Block:
    _dict(entry, where)
    size = _number(entry, "size", where)
    if not size:
        raise _Malformed(f"{where}: its size is 0")
    name = entry.get("state")
    state = _STATES.get(name) if type(name) is str else None
    if state is None:
        raise _Malformed(f"{where}: its state is {_shown(name)}, where one of {', '.join(_STATES)} was expected")
    address = _number(entry, "address", where) if "address" in entry else at
    history = _list(entry, "history", where) if "history" in entry else []
    latest = _dict(history[0], f"{where}.history[0]") if history else {}
    requested: int | None = 0
    if state != FREE:
        source, key = (entry, "requested_size") if "requested_size" in entry else (latest, "real_size")
        requested = _number(source, key, where) if key in source else None
        if requested is not None and requested > size:
            raise _Malformed(f"{where}: {requested:,} bytes were requested, but it has {size:,}")
    source = entry if "frames" in entry else latest
    return Block(address, size, requested, state, _list(source, "frames", where) if "frames" in source else [])


def _check_traces(traces: list[list[Event]]) -> None:
    for device, trace in enumerate(traces):
        if type(trace) is not list:
            raise _Malformed(f"device_traces[{device}] is {_kind(trace)}, where a list of events was expected")
        for number, event in enumerate(trace):
            if type(event) is not dict:
                raise _Malformed(f"device_traces[{device}][{number}] is {_kind(event)}, where a dict was expected")
            _check_event(event, device, number)


def _check_event(event: Event, device: int, number: int) -> None:
    # A million of them is usual, so a place is only put into words when there is something to say about it.
    for key, value in event.items():
        limit = _LIMITS.get(key)
        if limit is not None:
            if type(value) is not int or not 0 <= value < limit:
                _number(event, key, f"device_traces[{device}][{number}]", limit)
        elif key == "frames":
            if type(value) is not list:
                raise _Malformed(f"device_traces[{device}][{number}]: its frames are {_kind(value)}, not a list")
        elif key in _TEXTS and value is not None and type(value) is not str:
            raise _Malformed(f"device_traces[{device}][{number}]: its {key} is {_kind(value)}, not text")
        elif key == "pool_id":
            _pool(value, f"device_traces[{device}][{number}]")
    action = event.get("action")
    if type(action) is not str:
        raise _Malformed(f"device_traces[{device}][{number}]: its action is {_shown(action)}, where text was expected")
    needed = ("addr", "size", "stream") if action in _NEED_ADDRESS else ("size",) if action == "oom" else ()
    for key in needed:
        if key not in event:
            raise _Malformed(f"device_traces[{device}][{number}]: {action} without '{key}'")


def _check_frames(lists: Iterable[list[Any]]) -> None:
    """Each list once, and each frame once, however many events share them."""
    seen: set[int] = set()
    frames: dict[int, Any] = {}
    for stack in lists:
        if stack and id(stack) not in seen:
            seen.add(id(stack))
            frames.update(zip(map(id, stack), stack, strict=True))
    for frame in frames.values():
        if not (type(frame) is dict and type(frame.get("name")) is str and type(frame.get("filename")) is str
                and type(frame.get("line")) is int):
            raise _Malformed("a frame of a stack is not a dict with 'name', 'filename' and 'line'")


def _settings(value: Any) -> dict[str, Any] | None:
    if value is None:
        return None
    for key, setting in _dict(value, "allocator_settings").items():
        if type(key) is not str:
            raise _Malformed(f"allocator_settings: {_shown(key)} is not the name of a setting")
        inside = setting.values() if type(setting) is dict else setting if type(setting) is list else (setting,)
        if any(type(part) in (dict, list, tuple) for part in inside):
            raise _Malformed(f"allocator_settings: {_shown(key)} is nested deeper than PyTorch writes")
    return value  # type: ignore[no-any-return]


def _annotations(value: Any) -> list[dict[str, Any]]:
    if type(value) is not list:
        raise _Malformed(f"its external_annotations are {_kind(value)}, where a list was expected")
    for number, entry in enumerate(value):
        where = f"external_annotations[{number}]"
        _dict(entry, where)
        for key in ("stage", "name"):
            if type(entry.get(key)) is not str:
                raise _Malformed(f"{where}: its {key} is {_shown(entry.get(key))}, where text was expected")
        _number(entry, "time_us", where, 1 << 63)
        if "device" in entry:
            _number(entry, "device", where, 1 << 16)
    return value


class _Doubts:
    """What does not agree, told once per kind however often it comes."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[int, str]] = {}

    def add(self, what: str, example: str) -> None:
        count, first = self._found.get(what, (0, example))
        self._found[what] = count + 1, first

    def said(self) -> tuple[str, ...]:
        return tuple(f"{what} ({example}{f'; {count:,} in all' if count > 1 else ''})"
                     for what, (count, example) in self._found.items())


def _dict(value: Any, where: str) -> dict[Any, Any]:
    if type(value) is not dict:
        raise _Malformed(f"{where} is {_kind(value)}, where a dict was expected")
    return value


def _list(entry: dict[Any, Any], key: str, where: str) -> list[Any]:
    value = entry.get(key)
    if type(value) is not list:
        raise _Malformed(f"{where}: its {key} is {_kind(value)}, where a list was expected"
                         if key in entry else f"{where} has no '{key}'")
    return value


def _number(entry: dict[Any, Any], key: str, where: str, limit: int = _ADDRESSES) -> int:
    if key not in entry:
        raise _Malformed(f"{where} has no '{key}'")
    value = entry[key]
    if type(value) is not int or not 0 <= value < limit:
        raise _Malformed(f"{where}: its {key} is {_shown(value)}, where a number from 0 to {limit - 1} was expected")
    return value


def _kind(value: Any) -> str:
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _shown(value: Any) -> str:
    """A value in a message: containers by their kind alone, since printing one may never end."""
    if type(value) in (dict, list, tuple):
        return _kind(value)
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"

