"""The profiler's raw entry points: one chunk of the event stream at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C._profiler import ProfilerActivity, ProfilerState, RecordScope, _ExperimentalConfig

from memdiag.record.marks import CUT, Marks
from memdiag.record.process.quiet import quiet_profiler
from memdiag.record.reading.failures import Failures, Request
from memdiag.trace import Level

_profiler: Any = torch.autograd.profiler
_ACTIVITIES = {ProfilerActivity.CPU}
_SCOPES = {
    # Operators and autograd nodes. The user's own record_function ranges have another scope and are left out, so
    # none of them can be open where we cut.
    Level.FULL: {RecordScope.FUNCTION, RecordScope.BACKWARD_FUNCTION},
    # A scope that nothing in training has: memory events alone.
    Level.LIGHT: {RecordScope.LITE_INTERPRETER},
}


class Stream:
    """Opens and closes the profiler on the thread that calls it."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self.level: Level | None = None
        # Whether full recording has the shapes, and with them the storages that operators read. What torch.func wraps
        # is then kept alive until the chunk is read.
        self.shapes = True
        self.with_shapes = False  # the chunk that is open
        self._failures = Failures()
        self._result: Any = None  # of the chunk that was closed last, until it has been read
        # The originals, taken before anyone wraps them to watch for a profiler of the user's own.
        self._prepare: Callable[..., Any] = _profiler._prepare_profiler
        self._enable: Callable[..., Any] = _profiler._enable_profiler
        self._disable: Callable[..., Any] = _profiler._disable_profiler

    def open(self, level: Level, shapes: bool = True) -> None:
        assert self.level is None
        self.with_shapes = level is Level.FULL and self.shapes and shapes
        config = _profiler.ProfilerConfig(
            ProfilerState.KINETO,
            self.with_shapes,
            True,  # memory
            False,  # Python stacks: blind to operators such as `x @ y`, and slow
            False,
            False,
            _ExperimentalConfig(),
        )
        with quiet_profiler():
            self._prepare(config, _ACTIVITIES)
            self._enable(config, _ACTIVITIES, _SCOPES[level])
        self.level = level

    def close(self) -> list[Any]:
        """Ends the chunk.

        Returns:
            The roots of the event tree. Where the chunk was full its last root is the ``CUT`` mark.
        """
        level, self.level = self.level, None
        if level is Level.FULL:
            with self._marks.range((CUT,)):
                pass
        self._result = self._disable()
        roots: list[Any] = self._result.experimental_event_tree()
        return roots

    def failed_requests(self) -> list[Request]:
        """What the chunk that was closed last asked an allocator for in vain, in order of time."""
        return self._failures.read(self._result)

    def forget(self) -> None:
        """Lets the last chunk go: it has been read."""
        self._result = None

    def drop(self) -> None:
        """Ends the chunk and forgets it: for a forked child, which must not grow."""
        if self.level is not None:
            self.level = None
            self._disable()


def has_accelerator() -> bool:
    """Whether events can come from a device other than the CPU: by the build, since asking the driver wakes it."""
    version: Any = torch.version
    built = any(getattr(version, name, None) for name in ("cuda", "hip", "xpu"))
    return built or torch.backends.mps.is_built() or torch._C._get_privateuse1_backend_name() != "privateuseone"
