"""Plain data out of a pickle that nobody vouches for: nothing in it is run, and nothing larger than memory is built.

Before a byte is unpickled, the whole file is walked: only the instructions that make dicts, lists, flat tuples of
numbers, numbers, strings, None and booleans may be there, every length it claims must be there too, and what the
objects will take is added up. So neither a bomb nor an honest file that is too large gets to the kernel.
"""

from __future__ import annotations

import gc
import io
import os
import pickle
import pickletools
import re
import stat
from pathlib import Path
from typing import Any, NoReturn

from memdiag.errors import MemdiagError
from memdiag.units import format_bytes

# Numbers that pickle writes: of four bytes, one, two, or up to nine (an address above 2**63 has one for its sign).
_INT = (rb"(?:K.|J.{4}|M..|\x8a(?:\x06.{6}|\x07.{7}|\x05.{5}|\x08.{8}|\x04.{4}|\x03.{3}|\x02..|\x01.|\x09.{9}"
        rb"|\x00))")
# Tuples only of up to three such numbers: a tuple of tuples of tuples takes ages as a key of a dict.
_RUN = re.compile(rb"(?:j.{4}|[hq].|[}\])N\x88\x89(\x94uase]|" + _INT + rb"(?:\x85|" + _INT + rb"(?:\x86|" + _INT
                  + rb"\x87))?|G.{8}){1,500}", re.DOTALL)
_STRINGS = {0x8C: 1, ord("X"): 4, 0x8D: 8}  # SHORT_BINUNICODE, BINUNICODE, BINUNICODE8: bytes of the length
_FRAME, _LONG_BINPUT, _STOP = 0x95, ord("r"), ord(".")
_CUT_SHORT = {b"K": 2, b"h": 2, b"q": 2, b"M": 3, b"J": 5, b"j": 5, b"G": 9, b"\x8a": 11}
"""Instructions whose length is fixed, or at most so many bytes: at the end of a file they may be there in part."""
_RUNS_CODE = frozenset(("GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "PERSID",
                        "BINPERSID", "EXT1", "EXT2", "EXT4"))

_BYTES_OF = {"}": 360, "]": 100, "J": 40, "M": 40, "\x8a": 40, "G": 32, "\x8c": 60, "X": 60, "h": 8, "j": 8, "K": 8,
             "\x94": 16, "q": 16}
"""The most that the object of an instruction takes on CPython, its place in a list or the memo included.

Of the snapshots it was tried on, the sum is 1.4 to 2.2 times what unpickling them took at its height.
"""
_LEAST_PER_BYTE = 3
"""Bytes of memory for a byte of file: the least that was measured (C++ frames, which events share); the most was 12."""

_FOREIGN = (
    (b"\x1f\x8b", "compressed with gzip; unpack it first, with gunzip"),
    (b"PK\x03\x04", "a zip archive, as torch.save writes; a snapshot is what torch.cuda.memory._dump_snapshot writes"),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd; unpack it first, with unzstd"),
    (b"\xfd7zXZ", "compressed with xz; unpack it first, with unxz"),
    (b"BZh", "compressed with bzip2; unpack it first, with bunzip2"),
    (b"MEMDIAG\n", "a run file of memdiag; give it to `memdiag report`"),
)
_FEWER = ("record fewer events (max_entries of torch.cuda.memory._record_memory_history) or no C++ frames "
          "(stacks='python')")
_DAMAGED = (pickle.UnpicklingError, EOFError, ValueError, TypeError, LookupError, AttributeError, OverflowError)
"""What the unpickler raises where instructions do not fit one another."""


def is_pickle(path: str | os.PathLike[str]) -> bool:
    """Whether the file begins as a pickle of today does. Says nothing about the rest of it."""
    if not os.path.isfile(path):  # a pipe would be used up
        return False
    try:
        with open(path, "rb") as file:
            start = file.read(2)
    except OSError:
        return False
    return len(start) == 2 and start[0] == 0x80 and start[1] >= 2


def read_plain(path: str | os.PathLike[str], available: int | None = None) -> Any:
    """What a pickle holds, if that is plain data.

    Args:
        available: bytes of memory that it may take; by default, what the machine has available now.

    Raises:
        MemdiagError: when it is not there, cannot be read, is no such pickle, is cut short, or is too large.
    """
    limit = _available() if available is None else available
    data = _read(path, limit)
    _refuse_foreign(path, data)
    need = estimate(data)
    if need > limit:
        _too_large(path, len(data), need, limit)
    _walk(path, data)
    collects = gc.isenabled()
    gc.disable()  # or it would look through all of the objects again and again as they come
    try:
        return _Plain(io.BytesIO(data)).load()
    except MemoryError:
        _too_large(path, len(data), need, limit)
    except _DAMAGED as error:
        raise MemdiagError(
            f"{path}: this pickle is damaged ({_brief(error)}); copy or take the snapshot again") from None
    finally:
        if collects:
            gc.enable()


def estimate(data: bytes) -> int:
    """Bytes of memory that a pickle takes while it is read, itself included: the most, by what its bytes may mean.

    Bytes of strings and numbers are counted as if they were instructions as well.
    """
    return 2 * len(data) + sum(data.count(code.encode("latin-1")) * size for code, size in _BYTES_OF.items())


class _Plain(pickle.Unpickler):
    # What would be refused here never gets here; if it did, nothing would be run either.
    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError("it refers to objects outside of it")


def _read(path: str | os.PathLike[str], limit: int) -> bytes:
    try:
        about = os.stat(path)
        if stat.S_ISDIR(about.st_mode):
            raise MemdiagError(f"{path}: a directory; name the snapshot in it")
        if not stat.S_ISREG(about.st_mode):
            raise MemdiagError(f"{path}: not a regular file; save the snapshot to a file first")
        if about.st_size * _LEAST_PER_BYTE > limit:
            _too_large(path, about.st_size, about.st_size * _LEAST_PER_BYTE, limit)
        return Path(path).read_bytes()
    except FileNotFoundError:
        raise MemdiagError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:  # a name with a null byte is a ValueError
        raise MemdiagError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None


def _too_large(path: str | os.PathLike[str], size: int, need: int, limit: int) -> NoReturn:
    raise MemdiagError(
        f"{path}: too large: its {format_bytes(size)} may take {format_bytes(need)} of memory, and "
        f"{format_bytes(limit)} are available; read it on a machine with more memory, or {_FEWER}")


def _refuse_foreign(path: str | os.PathLike[str], data: bytes) -> None:
    if not data:
        raise MemdiagError(f"{path}: the file is empty; take the snapshot again, and wait until it is written")
    for magic, what in _FOREIGN:
        if data.startswith(magic):
            raise MemdiagError(f"{path}: {what}")
    if data[0] == 0x80 and len(data) > 1:
        if data[1] > 5:
            raise MemdiagError(f"{path}: pickle protocol {data[1]} is not known; pickle it again with protocol 4")
        if data[1] >= 2:
            return
    start = data[:64].lstrip()[:1]
    if start in (b"[", b"{"):
        raise MemdiagError(
            f"{path}: this looks like JSON; memdiag reads the pickle that torch.cuda.memory._dump_snapshot writes")
    if data[0] in b"(]}" and data.endswith(b"."):
        raise MemdiagError(f"{path}: a pickle of protocol 0 or 1; pickle it again with protocol 4")
    raise MemdiagError(
        f"{path}: not a memory snapshot, which is a pickle that torch.cuda.memory._dump_snapshot writes")


def _walk(path: str | os.PathLike[str], data: bytes) -> None:
    """Goes over all instructions.

    Raises:
        MemdiagError: for one that does not belong in plain data, and where the file ends before its pickle.
    """
    at, end = 2, len(data)
    while at < end:
        run = _RUN.match(data, at)
        if run is not None:
            at = run.end()
            continue
        code = data[at]
        if code in _STRINGS:
            width = _STRINGS[code]
            at = at + 1 + width + int.from_bytes(data[at + 1:at + 1 + width], "little")
        elif code == _FRAME:
            if at + 9 + int.from_bytes(data[at + 1:at + 9], "little") > end:
                break
            at += 9
        elif code == _LONG_BINPUT:
            # Python makes room up to the number given. Pickle counts up, at an instruction each.
            if int.from_bytes(data[at + 1:at + 5], "little") > at:
                _refuse(path, at, "it makes room for objects that it does not have")
            at += 5
        elif code == _STOP:
            if at + 1 != end:
                _refuse(path, at, f"{end - at - 1:,} bytes follow the end of its pickle")
            return
        else:
            _refuse_instruction(path, data, at)
            break
    raise MemdiagError(
        f"{path}: truncated: its {end:,} bytes end before its pickle does; copy or take the snapshot again")


def _refuse_instruction(path: str | os.PathLike[str], data: bytes, at: int) -> None:
    """Raises for what stands there; returns where it is only cut short."""
    code = data[at:at + 1]
    found = next((known for known in pickletools.opcodes if known.code == code.decode("latin-1")), None)
    if code in _CUT_SHORT and at + _CUT_SHORT[code] > len(data):
        return
    if found is None:
        why = "its pickle is damaged"
    elif found.name in _RUNS_CODE:
        why = f"it asks for code to be run ({found.name}); nothing was run"
    else:
        why = f"it has what PyTorch does not write ({found.name})"
    _refuse(path, at, why)


def _refuse(path: str | os.PathLike[str], at: int, why: str) -> NoReturn:
    raise MemdiagError(f"{path}: refused at byte {at:,}: {why}; a memory snapshot is plain data, so take it with "
                       "torch.cuda.memory._dump_snapshot")


def _brief(error: Exception) -> str:
    """What an error says, without the bytes of the file that it may quote."""
    return str(error).splitlines()[0][:120] if str(error) else type(error).__name__


def _available() -> int:
    """Bytes that a process could still take without others being pushed out."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except (OSError, ValueError):
        pass  # not Linux
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
