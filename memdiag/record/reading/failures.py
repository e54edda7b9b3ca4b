"""What an allocator was asked for in vain."""

from __future__ import annotations

import json
import os
import tempfile
from typing import Any, NamedTuple

import torch

from memdiag.trace import NONE

EVENT = "[OutOfMemory]"
"""The name of such an event in the profiler's stream."""

_MOST_READS = 20  # chunks of one recording: each may take a second, and a script may fail and retry at every step


class Request(NamedTuple):
    """A request that failed. What is not known is NONE.

    Attributes:
        bytes: that were asked for, as the allocator rounds them.
        reserved: bytes that the device's allocator had taken from the device then.
        device: "cpu", "cuda:0"…; None where it is not known.
    """

    bytes: int
    reserved: int
    device: str | None


UNKNOWN = Request(NONE, NONE, None)


class Failures:
    """Reads the requests that failed out of what the profiler exports: its event tree shows that they did, and where,
    but not their sizes."""

    def __init__(self) -> None:
        self._reads = 0

    def read(self, result: Any) -> list[Request]:
        """The requests of a chunk that failed, in order of time.

        Fewer than there were, or none, where the disk has no room for the export or too many chunks were read.
        """
        self._reads += 1
        if self._reads > _MOST_READS:
            return []
        try:
            with tempfile.TemporaryDirectory(prefix="memdiag-") as folder:
                path = os.path.join(folder, "events.json")
                result.save(path)
                return _requests(path)
        except (OSError, MemoryError, RuntimeError, ValueError, LookupError):
            return []  # a full disk, another format: the report then says that their sizes are not known


def _requests(path: str) -> list[Request]:
    found: list[tuple[float, Request]] = []
    time = 0.0
    named = False
    with open(path, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if '"name": "' in line:
                named = f'"name": "{EVENT}"' in line
            elif not named:
                continue
            elif '"ts": ' in line:
                time = float(line.partition(":")[2].strip().rstrip(","))
            elif '"Bytes": ' in line:
                fields = json.loads(f"{{{line}}}")
                found.append((time, Request(
                    fields["Bytes"], fields["Total Reserved"] or NONE,
                    _device(fields["Device Type"], fields["Device Id"]))))
    return [request for _, request in sorted(found, key=lambda pair: pair[0])]


def _device(kind: int, index: int) -> str | None:
    types: Any = torch._C._autograd.DeviceType
    name = {int(value): name.lower() for name, value in types.__members__.items()}.get(kind)
    if name == "privateuse1":
        name = torch._C._get_privateuse1_backend_name()
    return name if name == "cpu" or name is None else f"{name}:{index}"
