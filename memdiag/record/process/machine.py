"""Facts of the process and of its devices."""

from __future__ import annotations

import os
import platform
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from memdiag.version import __version__

_CPU_ALLOCATOR = "DefaultCPUAllocator: "  # in the text of its only error
_PAGE = os.sysconf("SC_PAGE_SIZE")
# What of the caching allocator's statistics goes into the trace, at each step's end.
_STATISTICS = (
    "allocated_bytes.all.current", "allocated_bytes.all.peak", "reserved_bytes.all.current", "reserved_bytes.all.peak",
    "active_bytes.all.current", "requested_bytes.all.current", "inactive_split_bytes.all.current",
    "num_alloc_retries", "num_ooms",
)


def host_rss() -> int:
    """Resident bytes of this process now."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * _PAGE
    except OSError:  # no /proc: the most it ever was is what the system tells
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def device_stats() -> list[tuple[str, str, int]]:
    """(device, statistic, bytes or count) of every CUDA device in use; nothing is synchronised or reset."""
    cuda: Any = torch.cuda
    # Asking whether CUDA is available wakes the driver, and a capture of a graph is no time for questions to it.
    if not cuda.is_initialized() or cuda.is_current_stream_capturing():
        return []
    found: list[tuple[str, str, int]] = []
    for index in range(torch.cuda.device_count()):
        stats = torch.cuda.memory_stats(index)
        if not stats.get("reserved_bytes.all.peak"):
            continue  # not used; asking more of it would create a context there
        found += [(f"cuda:{index}", name, int(stats[name])) for name in _STATISTICS if name in stats]
        free, total = torch.cuda.mem_get_info(index)
        outside = total - free - int(stats["reserved_bytes.all.current"])
        found += [(f"cuda:{index}", "device_free_bytes", free), (f"cuda:{index}", "device_total_bytes", total),
                  (f"cuda:{index}", "outside_pytorch_bytes", outside)]
    return found


def about(argv: Sequence[str], script: str | None, start_ns: int) -> dict[str, Any]:
    """What a report says of the run besides its memory. No environment variables but the allocator's settings."""
    allocator = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    return {
        "memdiag": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "host": platform.node(),
        "platform": platform.platform(),
        "argv": list(argv),
        "script": None if script is None else str(Path(script).resolve()),
        "folder": os.getcwd(),
        "rank": _number("RANK"),
        "local_rank": _number("LOCAL_RANK"),
        "world_size": _number("WORLD_SIZE"),
        "allocator_settings": allocator,
        **settings(),
        "start_ns": start_ns,
    }


def settings() -> dict[str, Any]:
    """What the script may set as it runs."""
    return {
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "seed": torch.initial_seed(),
    }


def ending(error: BaseException | None) -> dict[str, Any]:
    """How the run ended, from the exception that ended it. Nothing of it is kept but the name of its class."""
    well = error is None or isinstance(error, SystemExit) and error.code in (None, 0)
    return {
        "ended_by": None if well else type(error).__name__,
        "ended_out_of_memory": is_out_of_memory(error),
    }


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an exception, or one that it came of, says that an allocator of PyTorch's had no memory."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        # The CPU's allocator has no exception of its own, only a text.
        text = error.args[0] if type(error) is RuntimeError and error.args else None
        if isinstance(error, torch.OutOfMemoryError) or isinstance(text, str) and _CPU_ALLOCATOR in text:
            return True
        error = error.__context__ if error.__cause__ is None else error.__cause__
    return False


def device_names(devices: Sequence[str]) -> dict[str, str]:
    """What each device is called by its maker, where that is known without waking it."""
    cuda: Any = torch.cuda
    names: dict[str, str] = {}
    for device in devices:
        if device == "cpu":
            names[device] = platform.processor() or platform.machine()
        elif device.startswith("cuda") and cuda.is_initialized():  # asking would initialise it
            names[device] = cuda.get_device_name(device)
    return names


def _number(variable: str) -> int | None:
    value = os.environ.get(variable, "")
    return int(value) if value.isdigit() else None
