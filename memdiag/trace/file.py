"""The run file: one container, appended to while the run goes on, readable at any moment.

Layout (little endian): 8 bytes of magic, 2 of major and 2 of minor version, 4 of padding, then 8 bytes that say
how much of the file is *committed* and 8 of state (0 while recording, 1 when closed, 2 when it could not be written
any more), then blocks. A block is a
length-prefixed JSON header and the zlib-compressed columns that it names. A block is written first and committed
after, so a process killed at any moment leaves a file that reads back to the last committed block; a file that is
shorter than it says was cut.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from memdiag.errors import MemdiagError
from memdiag.runfile import MAGIC
from memdiag.trace.model import SCHEMA, Table, Trace, as_table, empty_table

PEAK_STEP = "peak_step"
MAJOR, MINOR = 1, 6
_START = struct.Struct("<8sHHI")
_COMMIT = struct.Struct("<QQ")
_LENGTHS = struct.Struct("<IQI")  # header bytes, payload bytes, crc32 of both
_BODY = _START.size + _COMMIT.size
# Level 1 is within a few per cent of level 6 on these columns and about four times as fast.
_ZLIB_LEVEL = 1
_RECORDING, _CLOSED, _UNWRITABLE = 0, 1, 2


class Writer:
    """Appends tables, text and facts to a run file; every call leaves a file that can be read.

    Raises:
        OSError: from any call, when the file cannot be written. The committed part stays readable.
    """

    def __init__(self, path: str | os.PathLike[str], about: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self._file: BinaryIO | None = open(self.path, "wb", buffering=0, opener=_beyond_the_streams)  # noqa: SIM115
        self._file.write(_START.pack(MAGIC, MAJOR, MINOR, 0) + _COMMIT.pack(_BODY, 0))
        self._end = self._committed = _BODY
        self.about(about)

    def about(self, about: Mapping[str, Any]) -> None:
        """Adds facts; a later fact of the same name replaces the earlier."""
        self._block({"about": dict(about)}, [])

    def text(self, strings: Sequence[str]) -> None:
        """Appends interned text, numbered on from the last call."""
        if strings:
            self._block({"text": len(strings)}, [json.dumps(list(strings)).encode()])

    def table(self, name: str, rows: Mapping[str, Sequence[Any]], of: str | None = None) -> None:
        """Appends rows to a table of the schema: the run's, or that ``of`` a part (:data:`PEAK_STEP`)."""
        table = as_table(name, rows)
        count = len(next(iter(table.values())))
        if count:
            columns = [[column, values.dtype.str] for column, values in table.items()]
            payload = [_packed(values) for values in table.values()]
            self._block({"table": name, "of": of, "rows": count, "columns": columns}, payload)

    def close(self) -> None:
        """Marks the file as complete. A second call does nothing."""
        if self._file is not None:
            self._commit(_CLOSED)
            self.abandon()

    def abandon(self, full: bool = False) -> None:
        """Closes the file as it is: what is committed stays, and reads as cut off.

        Args:
            full: it could not be written any more, and says so to whoever reads it.
        """
        if self._file is not None:
            if full:
                with contextlib.suppress(OSError):  # the place is there already, so a full disk allows it
                    self._commit(_UNWRITABLE)
            self._file.close()
            self._file = None

    def _block(self, header: dict[str, Any], payload: list[bytes]) -> None:
        assert self._file is not None, "the run file is closed"
        packed = [zlib.compress(part, _ZLIB_LEVEL) for part in payload]
        head = json.dumps({**header, "parts": [len(part) for part in packed]}).encode()
        body = b"".join(packed)
        block = _LENGTHS.pack(len(head), len(body), zlib.crc32(body, zlib.crc32(head))) + head + body
        self._file.seek(self._end)
        view = memoryview(block)
        while view:  # an unbuffered write may take only part of it
            view = view[self._file.write(view) :]
        self._end += len(block)
        self._committed = self._end
        self._commit(_RECORDING)

    def _commit(self, state: int) -> None:
        assert self._file is not None
        self._file.seek(_START.size)
        self._file.write(_COMMIT.pack(self._committed, state))


def _beyond_the_streams(path: str, flags: int) -> int:
    """Opens a file so that nobody takes it for standard output or error, where the process was started without."""
    descriptor = os.open(path, flags, 0o666)
    taken = []
    while descriptor <= 2:
        taken.append(descriptor)
        descriptor = os.dup(descriptor)
    for number in taken:
        os.close(number)
    os.set_inheritable(descriptor, False)
    return descriptor


def _packed(values: np.ndarray[Any, Any]) -> bytes:
    # Differences of neighbours: event numbers, times and ids grow by little, and compress to a fraction.
    if values.dtype.itemsize == 8:
        first = values[:1]
        with np.errstate(over="ignore"):
            values = np.concatenate([first, np.diff(values)]).astype(values.dtype)
    return values.tobytes()


def _unpacked(data: bytes, dtype: str, rows: int) -> np.ndarray[Any, Any]:
    values = np.frombuffer(data, dtype=dtype, count=rows)
    if values.dtype.itemsize == 8:
        with np.errstate(over="ignore"):
            values = np.cumsum(values, dtype=values.dtype)
    return values


def load(path: str | os.PathLike[str]) -> Trace:
    """Reads a run file.

    Raises:
        MemdiagError: when the file is missing, foreign, cut short, damaged, or of a newer major version.
    """
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        raise MemdiagError(f"{path}: no such file") from None
    except OSError as error:
        raise MemdiagError(f"{path}: cannot be read ({error.strerror})") from None
    if len(data) < _BODY or not data.startswith(MAGIC):
        if MAGIC.startswith(data[: len(MAGIC)]) and data:
            raise MemdiagError(f"{path}: this run file is truncated: it ends inside its first {_BODY} bytes")
        raise MemdiagError(f"{path}: not a memdiag run file; `memdiag profile` writes one")
    _, major, minor, _ = _START.unpack_from(data)
    if major > MAJOR:
        raise MemdiagError(
            f"{path}: written by a newer memdiag (format {major}.{minor}, this one reads {MAJOR}.x); upgrade memdiag"
        )
    committed, state = _COMMIT.unpack_from(data, _START.size)
    if len(data) < committed:
        raise MemdiagError(
            f"{path}: this run file is truncated: {len(data):,} of {committed:,} bytes are there; copy it again"
        )
    return _assemble(path, data, committed, state)


def _assemble(path: str | os.PathLike[str], data: bytes, committed: int, state: int) -> Trace:
    about: dict[str, Any] = {}
    text: list[str] = []
    parts: dict[tuple[str | None, str], list[Table]] = {}
    at = _BODY
    while at < committed:
        start = at
        try:
            head_bytes, body_bytes, crc = _LENGTHS.unpack_from(data, at)
            head_at = at + _LENGTHS.size
            body_at = head_at + head_bytes
            at = body_at + body_bytes
            if at > committed or zlib.crc32(data[body_at:at], zlib.crc32(data[head_at:body_at])) != crc:
                raise ValueError("checksum")
            header = json.loads(data[head_at:body_at])
            payload = []
            for size in header["parts"]:
                payload.append(zlib.decompress(data[body_at : body_at + size]))
                body_at += size
            if "about" in header:
                about.update(header["about"])
            elif "text" in header:
                text.extend(json.loads(payload[0]))
            elif header["table"] in SCHEMA:  # a newer minor version may add tables: not ours to read
                parts.setdefault((header.get("of"), header["table"]), []).append(_table(header, payload))
        except (struct.error, zlib.error, ValueError, LookupError, TypeError) as error:
            raise MemdiagError(
                f"{path}: this run file is damaged ({error} in the block at byte {start:,}); copy or record it again"
            ) from None
    traces: dict[str | None, dict[str, Table]] = {None: {}}
    for (of, name), chunks in parts.items():
        traces.setdefault(of, {})[name] = {
            column: np.concatenate([chunk[column] for chunk in chunks]) for column in SCHEMA[name]}
    ended = {_CLOSED: None, _UNWRITABLE: "the run file could not be written any more"}.get(
        state, "the recording process was killed, or left by os._exit")
    peak_step = Trace(about, text, traces[PEAK_STEP], cut_short=ended) if PEAK_STEP in traces else None
    return Trace(about, text, traces[None], cut_short=ended, peak_step=peak_step)


def _table(header: dict[str, Any], payload: list[bytes]) -> Table:
    rows = int(header["rows"])
    found = {
        column: _unpacked(part, dtype, rows)
        for (column, dtype), part in zip(header["columns"], payload, strict=True)
    }
    table = empty_table(header["table"])
    for column, values in table.items():
        # A column that an older minor version did not have reads as "not known".
        table[column] = found[column] if column in found else np.full(rows, -1).astype(values.dtype)
    return table
