"""The clock by which it is told how long work takes."""

from __future__ import annotations

from time import process_time_ns, time_ns
from typing import Any

import torch

from memdiag.record.stream import has_accelerator

_cuda: Any = torch.cuda


def worked_ns() -> int:
    """Nanoseconds of work so far; only differences mean something.

    On the CPU it is processor time of the process, all threads together: what other processes do is not in it. Where
    CUDA is in use it is the time of the day, once the device has done all that it was given.
    """
    if has_accelerator() and _cuda.is_initialized():
        _cuda.synchronize()
        return time_ns()
    return process_time_ns()
