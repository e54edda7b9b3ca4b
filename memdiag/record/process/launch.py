"""Runs a user's script in this process so that it behaves as under plain ``python``.

What a script can still tell: ``sys.orig_argv`` says how the process was really started, and code that walks the stack
past the script's first frame (``traceback.print_stack``, a warning with too large a ``stacklevel``) finds the frames
of the launcher below it.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import importlib.machinery
import importlib.util
import io
import marshal
import os
import pkgutil
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import CodeType, ModuleType, TracebackType
from typing import Any, NoReturn

from memdiag.errors import MemdiagError
from memdiag.record.process.signals import SignalsKept

INTERRUPTED = -signal.SIGINT
"""The status of a script that ended by an unhandled KeyboardInterrupt: it dies of the signal, not with a number."""


@dataclass(frozen=True)
class Target:
    """What to run.

    Attributes:
        path: a script, or a folder or zip file with a ``__main__.py``, as written on the command line.
        module: instead of a path, a module or package as ``python -m`` takes it.
        args: what the script finds in ``sys.argv[1:]``.
    """

    path: str | None = None
    module: str | None = None
    args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (self.path is None) == (self.module is None):
            raise ValueError("a target is either a path or a module")

    @property
    def stem(self) -> str:
        """A name for files about this script: ``train`` for ``src/train.py``, ``a.b`` for ``-m a.b``."""
        if self.path is None:
            return str(self.module)
        return os.path.splitext(os.path.basename(os.path.abspath(self.path)))[0]

    @property
    def argv(self) -> list[str]:
        """The command line after ``python``."""
        return [self.path, *self.args] if self.path is not None else ["-m", str(self.module), *self.args]


def check(target: Target) -> None:
    """Says what is wrong with a target before anything starts; runs none of the user's code.

    Raises:
        MemdiagError: for a file that is missing or cannot be read, a folder or zip file without ``__main__``, a module
            that cannot be found, a package without ``__main__``.
    """
    if target.path is not None:
        _check_path(target.path)
    else:
        _check_module(str(target.module))


def run(target: Target, watch: AbstractContextManager[Any], kept: SignalsKept) -> int:
    """Runs the script to its end and returns its exit status; :func:`leave` ends the process with it.

    ``watch`` is entered right before the user's first line. It is left once the script and its non-daemon threads are
    done, with the exception that ended the script, if one did; of SystemExit with its status alone, and not where that
    is 0. Whatever leaving it raises is said on standard error and does not change the status.

    ``sys.argv``, ``sys.path`` and ``sys.modules["__main__"]`` stay the script's own, since its exit handlers run after
    this. In a child that the script forked and that reaches the end of the script, this never returns: the child
    leaves as it would have, without touching ``watch``.

    Args:
        kept: keeps signals from the script's end on, but while code of the script's runs; to be released by the caller.

    Returns:
        0 to 255, or INTERRUPTED.
    """
    stderr, pid = sys.stderr, os.getpid()
    is_script = target.path is not None and not _is_importable(target.path)
    names = _stage(target)
    error: BaseException | None = None
    # The script can go as deep as alone, and a RecursionError looks the same.
    sys.setrecursionlimit(sys.getrecursionlimit() + _depth())
    watch.__enter__()
    try:
        exec(_script_code(target, names) if is_script else _module_code(target, names), names)
    except BaseException as caught:
        error = caught
    # Outside the `except`: the user's hook must find no exception being handled.
    while True:
        try:
            kept.hold()
            break
        except BaseException as at_once:  # Ctrl-C, and again
            kept.is_due(at_once)
    if is_script:
        kept.interruptible(_flush)  # python does so after a script, not after a module, and passes over what it raises
    status = 0 if error is None else _end(error, kept)
    if isinstance(error, SystemExit):
        # What its frames hold goes now, before threads are waited for.
        error = SystemExit(status) if status else None
    _join_threads(kept)
    if os.getpid() != pid:
        kept.release()
        _leave_child(status)
    try:
        watch.__exit__(*((None, None, None) if error is None else (type(error), error, error.__traceback__)))
    except (Exception, KeyboardInterrupt):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # a closed stderr: there is nowhere to say it
            stderr.write("memdiag: error: the script ran to its end, but ending the recording failed:\n")
            traceback.print_exc(file=stderr)
    return status


def leave(status: int) -> NoReturn:
    """Ends the process with a status that :func:`run` returned, or without a word as interrupted."""
    if status != INTERRUPTED:
        sys.exit(status)
    # The interpreter dies of SIGINT, after exit handlers, only where a KeyboardInterrupt comes out of the main
    # program. A script's traceback was shown when it ended; one of ours would tell nothing.
    hook = sys.excepthook

    def once(*_: object) -> None:
        sys.excepthook = hook

    sys.excepthook = once
    raise KeyboardInterrupt


def _leave_child(status: int) -> NoReturn:
    """Ends a child that the script forked.

    Where the profiler runs in the parent, the C library's exit handlers of a child wait for a thread that only the
    parent has. So Python's own are run, and the process is left without those.
    """
    if "memdiag.record.recorder" not in sys.modules:
        leave(status)
    private: Any = atexit
    private._run_exitfuncs()
    _flush()
    if status == INTERRUPTED:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status & 0xFF)


def _check_path(path: str) -> None:
    if path == "-":
        raise MemdiagError("a script on standard input cannot be profiled; save it to a file")
    if not os.path.exists(path):
        if os.path.basename(path) == path and shutil.which(path):
            raise MemdiagError(
                f"{path} is a program; name the Python script itself (a launcher goes in front: "
                "torchrun ... -m memdiag profile train.py)"
            )
        hint = "" if path.endswith(".py") else f" (to run a module, write -m {path})"
        raise MemdiagError(f"{path}: no such file{hint}")
    if not os.access(path, os.R_OK):
        raise MemdiagError(f"{path}: cannot be read; check its permissions")
    if _is_importable(path):
        with contextlib.suppress(SyntaxError):  # a zip file compiles what it finds: it is there, and running it tells
            if importlib.machinery.PathFinder.find_spec("__main__", [path]) is None:
                raise MemdiagError(f"{path}: has no __main__.py to run; name the script inside it")
    elif os.path.isdir(path):
        raise MemdiagError(f"{path}: is a folder that cannot be listed; check its permissions")


def _is_importable(path: str) -> bool:
    """Whether python treats the path as a place to import ``__main__`` from: a folder or a zip file."""
    return pkgutil.get_importer(path) is not None


def _check_module(name: str) -> None:
    if name.endswith(".py"):
        raise MemdiagError(f"-m {name}: -m takes a module's name; write -m {name[:-3]}, or {name} without -m")
    if name.startswith(".") or not all(name.split(".")):
        raise MemdiagError(f"-m {name}: not a module's name; write it in full, as in -m package.module")
    with _importing_from_here():
        missing = _missing_part(name)
    if missing == name:
        raise MemdiagError(f"-m {name}: no module of this name in the current folder or where Python looks")
    if missing is not None:
        raise MemdiagError(f"-m {name}: no module named {missing}, so there is nothing to run")


@contextlib.contextmanager
def _importing_from_here() -> Iterator[None]:
    before = sys.path[:]
    _search_first(os.getcwd())
    try:
        yield
    finally:
        sys.path[:] = before


def _missing_part(name: str) -> str | None:
    """The first part of a dotted name that is not there, found without importing any; None where it cannot be told."""
    parts = name.split(".")
    where: Any = None
    for count in range(1, len(parts) + 2):
        part = ".".join(parts[:count]) if count <= len(parts) else f"{name}.__main__"
        try:
            spec = _find(part, where)
        except Exception:  # a finder that needs the parent imported, or that compiles: then only running it can tell
            return None
        if spec is None:
            return part
        where = spec.submodule_search_locations
        if where is None:
            return None if count >= len(parts) else ".".join(parts[: count + 1])
        if _may_move_its_path(spec):
            return None
    return None


def _find(name: str, where: Any) -> importlib.machinery.ModuleSpec | None:
    found = (finder.find_spec(name, where) for finder in sys.meta_path)
    return next((spec for spec in found if spec is not None), None)


def _may_move_its_path(spec: importlib.machinery.ModuleSpec) -> bool:
    """Whether a package may look for its modules elsewhere once imported: then only running it can tell."""
    try:
        source = spec.loader.get_source(spec.name)  # type: ignore[union-attr]
    except (AttributeError, ImportError):
        return spec.origin is not None
    return source is None or "__path__" in source


def _stage(target: Target) -> dict[str, Any]:
    """Makes ``sys`` look as at the start of the script; returns the names of its fresh ``__main__``."""
    main = ModuleType("__main__")
    names = main.__dict__
    if "__annotations__" in sys.modules["__main__"].__dict__:  # up to Python 3.13
        names["__annotations__"] = {}
    names["__builtins__"] = builtins
    sys.modules["__main__"] = main
    sys.argv[:] = ["-m" if target.path is None else target.path, *target.args]
    if target.path is None:
        _search_first(os.getcwd())
    elif _is_importable(target.path):
        _search_first(_absolute(target.path), even_if_safe=True)
    else:
        _search_first(os.path.dirname(os.path.realpath(target.path)))
    return names


def _search_first(folder: str, even_if_safe: bool = False) -> None:
    # Python put a folder of ours first, except in safe mode, where it puts none.
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
        sys.path[0] = folder
    elif even_if_safe:
        sys.path.insert(0, folder)


def _absolute(path: str) -> str:
    """The path as python makes it absolute: without tidying ``..`` and the like."""
    return os.getcwd() if path == "." else os.path.join(os.getcwd(), path)


def _depth() -> int:
    """How much of the recursion limit is in use below the script."""
    frame, depth = sys._getframe(1), 1
    while frame.f_back is not None:
        frame, depth = frame.f_back, depth + 1
    if sys.version_info < (3, 12):  # an `exec` counts, too: ours, and the one of `python -m`
        depth += 2 if frame.f_globals.get("__name__") == "runpy" else 1
    return depth


def _module_code(target: Target, names: dict[str, Any]) -> CodeType:
    """The code of a module, folder or zip file, with what its ``__main__`` says of itself filled in."""
    import runpy

    # Not public, but what `python -m` itself calls, and the same since Python 3.4.
    private: Any = runpy
    try:
        if target.path is None:
            _, spec, code = private._get_module_details(target.module, private._Error)
        else:
            _, spec, code = private._get_main_module_details(private._Error)
    except private._Error as error:
        raise SystemExit(f"{sys.executable}: {error}") from None
    if target.path is None:
        sys.argv[0] = spec.origin
    names.update(
        __file__=spec.origin,
        __cached__=spec.cached,
        __loader__=spec.loader,
        __package__=spec.parent,
        __spec__=spec,
    )
    return code  # type: ignore[no-any-return]


def _script_code(target: Target, names: dict[str, Any]) -> CodeType:
    path = _absolute(str(target.path))
    with io.open_code(path) as file:
        source = file.read()
    compiled = source.startswith(importlib.util.MAGIC_NUMBER)
    loader = importlib.machinery.SourcelessFileLoader if compiled else importlib.machinery.SourceFileLoader
    names.update(__file__=path, __cached__=None, __loader__=loader("__main__", path))
    if compiled:
        code: CodeType = marshal.loads(source[16:])
        return code
    return compile(source, path, "exec", dont_inherit=True)


def _flush() -> None:
    for stream in (sys.stderr, sys.stdout):
        # As python does: what cannot be written now fails, and is told, when the interpreter ends.
        with contextlib.suppress(Exception):
            stream.flush()


def _end(error: BaseException, kept: SignalsKept) -> int:
    """Shows an exception that ended the script as python does; returns the exit status."""
    if isinstance(error, SystemExit):
        return _exit_status(error)
    _clean(error)
    trace = error.__traceback__
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    failure: BaseException | None = None
    if not hasattr(sys, "excepthook"):
        _complain("sys.excepthook is missing\n")
        sys.__excepthook__(type(error), error, trace)
    else:
        failure = kept.interruptible(lambda: sys.excepthook(type(error), error, trace))
    if isinstance(failure, SystemExit):
        return _exit_status(failure)
    if failure is not None:
        _clean(failure)
        _complain("Error in sys.excepthook:\n")
        sys.__excepthook__(type(failure), failure, failure.__traceback__)
        _complain("\nOriginal exception was:\n")
        sys.__excepthook__(type(error), error, trace)
    return INTERRUPTED if type(error) is KeyboardInterrupt else 1


def _exit_status(error: SystemExit) -> int:
    code = error.code
    if code is None:
        return 0
    if isinstance(code, int):
        return int(code) & 0xFF if -(2**63) <= code < 2**63 else 0xFF
    try:
        text = str(code)
    except Exception:
        text = ""  # python, too, only ends the line
    _complain(text)
    _complain("\n")
    return 1


def _complain(text: str) -> None:
    try:
        sys.stderr.write(text)
    except Exception:
        with contextlib.suppress(OSError):
            os.write(2, text.encode(errors="backslashreplace"))


_OURS = {__name__, SignalsKept.__module__, "runpy", "zipimport"} | {
    "importlib.util", "importlib._bootstrap", "importlib._bootstrap_external"}


def _clean(error: BaseException) -> None:
    """Leaves what python would show of an exception that ended the script."""
    if "memdiag.record.process.late" in sys.modules:  # else nothing of ours was in the script's way
        from memdiag.record.process.tracebacks import clean

        clean(error)
    error.__traceback__ = _users(error.__traceback__)


def _users(trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback from the user's first frame on; None where none of theirs is in it."""
    while trace is not None and trace.tb_frame.f_globals.get("__name__") in _OURS:
        trace = trace.tb_next
    return trace


def _join_threads(kept: SignalsKept) -> None:
    # What the interpreter calls when the main program has ended. Joining by hand would wait forever for the workers
    # of a thread pool that was left open.
    private: Any = threading

    def wait() -> None:
        kept.deliver()
        private._shutdown()

    failure = kept.interruptible(wait)
    if failure is not None:  # Ctrl-C while waiting: the interpreter tells of it and goes on to end
        header = "Exception ignored on threading shutdown" if sys.version_info >= (3, 13) else "Exception ignored in"
        frames = "".join(traceback.format_tb(_users(failure.__traceback__)))
        _complain(f"{header}: {threading!r}\nTraceback (most recent call last):\n{frames}")
        _complain(f"{type(failure).__name__}: {failure}\n")
