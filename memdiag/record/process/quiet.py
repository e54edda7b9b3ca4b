"""The profiler library's own lines on standard error, and how to do without them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

_LOG_LEVEL = "KINETO_LOG_LEVEL"


@contextlib.contextmanager
def quiet_profiler() -> Iterator[None]:
    """Keeps the profiler's library from printing lines of its own.

    It decides so when it is first started, whenever torch was imported. A level that the user has set is left.
    """
    if _LOG_LEVEL in os.environ:
        yield
        return
    os.environ[_LOG_LEVEL] = "99"
    try:
        yield
    finally:
        os.environ.pop(_LOG_LEVEL, None)  # the script and its children see the environment that they had
