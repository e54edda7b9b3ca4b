"""Starts a recording when the script has imported torch.

torch reads its environment while it is imported (``OMP_NUM_THREADS``, ``TORCH_LOGS`` and more), and many scripts set
it in their first lines. If we imported torch before them, they would run with other settings than alone. Nothing is
missed: before that import there is no tensor.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, TracebackType
from typing import Any, Generic, TypeVar

from memdiag.record.process.quiet import quiet_profiler
from memdiag.record.process.signals import SignalsWait

R = TypeVar("R", bound=AbstractContextManager[Any])


class WhenTorchIsThere(MetaPathFinder, Generic[R]):
    """A watch for :func:`.launch.run` that makes and enters a recorder right after ``import torch``.

    Attributes:
        recorder: once it was made; None where the script never imported torch.
        problem: why the recorder could not be started. The script runs on without it.
    """

    def __init__(self, make: Callable[[], R]) -> None:
        self.recorder: R | None = None
        self.problem: str | None = None
        self._make = make
        self._pid = os.getpid()

    def __enter__(self) -> WhenTorchIsThere[R]:
        if "torch" in sys.modules:
            self._start()
        else:
            sys.meta_path.insert(0, self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_waiting()
        if self.recorder is not None:
            self.recorder.__exit__(kind, error, trace)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Finds torch as the other finders do, and has the recorder started when its code has run."""
        if name != "torch":
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_start(module: ModuleType) -> None:
            del loader.exec_module  # the loader is itself again
            execute(module)
            self._stop_waiting()
            if os.getpid() == self._pid:  # a forked child is not recorded
                self._start()

        loader.exec_module = execute_and_start
        return spec

    def _stop_waiting(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def _start(self) -> None:
        with SignalsWait():
            try:
                recorder = self._make()
                with quiet_profiler():
                    recorder.__enter__()
            except Exception as error:  # whatever it is, the script must not fail in its `import torch`
                self.problem = f"the recording could not be started ({type(error).__name__}: {error})"
            else:
                self.recorder = recorder
