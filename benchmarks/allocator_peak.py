"""The most that PyTorch's CPU allocator held while a script ran, by the running total of the profiler's memory events.

    python benchmarks/allocator_peak.py FILE train.py [its arguments…]

It shares no code with memdiag and looks at nothing but that total, so it can say whether memdiag is right. Writes the
bytes to FILE; the script's output and exit code are its own.
"""

import os
import runpy
import sys
from pathlib import Path

import torch
from torch._C._profiler import RecordScope, _EventType, _ExperimentalConfig
from torch.autograd import ProfilerActivity, ProfilerConfig, ProfilerState, _disable_profiler, _enable_profiler
from torch.autograd.profiler import _prepare_profiler


def main(result: str, script: str) -> None:
    out = Path(result).resolve()
    sys.argv = sys.argv[2:]
    sys.path[0] = os.path.dirname(os.path.realpath(script))
    config = ProfilerConfig(ProfilerState.KINETO, False, True, False, False, False, _ExperimentalConfig())
    _prepare_profiler(config, {ProfilerActivity.CPU})
    # Operators belong to another scope: without them there are only memory events, which cost next to nothing.
    _enable_profiler(config, {ProfilerActivity.CPU}, {RecordScope.USER_SCOPE})
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        peak = 0
        events = list(_disable_profiler().experimental_event_tree())
        while events:
            event = events.pop()
            events += event.children
            if event.tag == _EventType.Allocation and event.extra_fields.device == torch.device("cpu"):
                peak = max(peak, event.extra_fields.total_allocated)
        out.write_text(f"{peak}\n", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2])
