"""A launched script behaves as under plain python: the oracle is always a bare run of the same script."""

from __future__ import annotations

import itertools
import os
import py_compile
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from memdiag.errors import MemdiagError
from memdiag.record.process.launch import Target, check

ROOT = Path(__file__).parent.parent

# The whole of a program around `launch.run`, with a watch that does nothing unless WATCH is set: then it notes in a
# file when it is entered and left, and in which process.
DRIVER = f"""
import importlib.util, os, sys
# The file by itself: a bare run imports no torch either.
sys.path.insert(0, {str(ROOT)!r})
path = {str(ROOT / "memdiag/record/process/launch.py")!r}
spec = importlib.util.spec_from_file_location("memdiag.record.process.launch", path)
launch = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(launch)
del sys.path[0]
""" + """
class Watch:
    def note(self, *words):
        if "WATCH" in os.environ:
            with open(os.environ["WATCH"], "a") as file:
                print(*words, file=file)
    def __enter__(self):
        self.pid = os.getpid()
        self.note("enter")
        if "WATCH_FAILS" in os.environ:
            sys.stdout.flush()
    def __exit__(self, kind, value, trace):
        self.note("exit", kind and kind.__name__, os.getpid() == self.pid)
        if "WATCH_FAILS" in os.environ:
            raise OSError("disk full")
def main():
    args = sys.argv[1:]
    if args[0] == "-m":
        target = launch.Target(module=args[1], args=tuple(args[2:]))
    else:
        target = launch.Target(path=args[0], args=tuple(args[1:]))
    launch.check(target)
    kept = launch.SignalsKept()
    status = launch.run(target, Watch(), kept)
    kept.release()
    return status
if __name__ == "__main__":
    launch.leave(main())
"""

SCRIPTS = {
    "names": """
        for name, value in list(globals().items()):
            print(name, type(value), "" if name in ("__builtins__", "__loader__") else value)
        import sys, __main__
        print(__main__ is sys.modules[__name__], vars(__main__) is globals(), sys.path, sys.argv)
        print(type(__loader__), getattr(__loader__, "name", None), getattr(__loader__, "path", None))
    """,
    "no_future": """
        from typing import get_type_hints
        from dataclasses import dataclass
        @dataclass
        class Point:
            x: 1 + 1
        print(Point.__annotations__, Point.__module__, Point(1), Point)
    """,
    "siblings": """
        import os, sys
        import sibling
        print(sibling.NAME, open("data.txt").read(), os.path.basename(sys.path[0]) != "")
    """,
    "exit_number": "import sys; sys.exit(3)",
    "exit_large": "import sys; sys.exit(300)",
    "exit_negative": "import sys; sys.exit(-1)",
    "exit_huge": "import sys; sys.exit(2**40 + 6)",
    "exit_text": "import sys; print('out'); sys.exit('bad é \\udcff end')",
    "exit_none": "import sys; print('out'); sys.exit(None)",
    "exit_true": "import sys; sys.exit(True)",
    "exit_tuple": "raise SystemExit(1, 2)",
    "exit_float": "raise SystemExit(2.5)",
    "exit_in_function_frees_its_frame": """
        import atexit, sys, threading, time
        class Noisy:
            def __del__(self): print("freed")
        def work():
            held = Noisy()
            try:
                1 / 0
            except ZeroDivisionError:
                sys.exit(4)
        atexit.register(print, "atexit")
        work()
    """,
    "exception": """
        import sys
        print("before")
        def f(n):
            held = [n] * 3
            raise ValueError(f"bad {n}")
        f(3)
    """,
    "exception_chain": """
        def f():
            try:
                {}["k"]
            except KeyError as error:
                raise RuntimeError("cause") from error
        try:
            f()
        except RuntimeError:
            raise OSError(2, "context")
    """,
    "exception_no_context": """
        try:
            1 / 0
        except ZeroDivisionError:
            raise ValueError("only this") from None
    """,
    "exception_base": "class Odd(BaseException): pass\nraise Odd",
    "exception_group": """
        import sys
        if sys.version_info >= (3, 11):
            raise ExceptionGroup("several", [ValueError(1), TypeError(2)])
        raise ValueError
    """,
    "exception_unprintable": """
        class Bad(Exception):
            def __str__(self): raise RuntimeError("no text")
        raise Bad
    """,
    "recursion": """
        def f(n): return f(n + 1)
        f(0)
    """,
    "recursion_depth": """
        def f(n):
            try:
                return f(n + 1)
            except RecursionError:
                return n
        print(f(0))
    """,
    "syntax_error": "print('never')\ndef f(:\n    pass\n",
    "indentation_error": "if True:\nprint(1)\n",
    "syntax_warning": "x = 1\nprint(x is 1)\n",
    "import_error": "import surely_no_such_module",
    "import_broken_module": "import broken",
    "hook": """
        import sys
        def hook(kind, value, trace):
            names = []
            while trace:
                names.append(trace.tb_frame.f_code.co_name)
                trace = trace.tb_next
            print("hook", kind, value, names, sys.exc_info(), sys.last_type, sys.last_value is value)
        sys.excepthook = hook
        def f(): raise ValueError("x")
        f()
    """,
    "hook_raises": """
        import sys
        def hook(*_): raise TypeError("the hook is broken")
        sys.excepthook = hook
        raise ValueError("x")
    """,
    "hook_exits": """
        import sys
        sys.excepthook = lambda *_: sys.exit(7)
        raise ValueError("x")
    """,
    "hook_missing": "import sys\ndel sys.excepthook\nraise ValueError('x')",
    "hook_none": "import sys\nsys.excepthook = None\nraise ValueError('x')",
    "interrupt": "raise KeyboardInterrupt",
    "interrupt_by_signal": """
        import atexit, os, signal, sys, threading, time
        atexit.register(lambda: print("atexit", sys.excepthook is sys.__excepthook__))
        def late():
            time.sleep(0.2)
            print("thread done")
        threading.Thread(target=late).start()
        print("out")
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(30)
    """,
    "interrupt_subclass": "class Mine(KeyboardInterrupt): pass\nraise Mine('x')",
    "interrupt_handled": """
        import os, signal
        signal.signal(signal.SIGINT, lambda *_: print("handled"))
        os.kill(os.getpid(), signal.SIGINT)
        print("goes on")
    """,
    "interrupt_default_action": """
        import os, signal, time
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(30)
    """,
    "interrupt_while_threads_finish": """
        import os, signal, threading, time
        def late():
            while threading.main_thread().is_alive():
                time.sleep(0.01)
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)
        threading.Thread(target=late).start()
    """,
    "interrupt_hook": """
        import sys
        sys.excepthook = lambda kind, *_: print("hook", kind)
        raise KeyboardInterrupt
    """,
    "terminated": """
        import os, signal, time
        print("out", flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)
    """,
    "terminated_handled": """
        import os, signal, sys, time
        def stop(*_): sys.exit(9)
        signal.signal(signal.SIGTERM, stop)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)
    """,
    "aborted": "import os; print('lost'); os.abort()",
    "os_exit": "import os; print('lost'); os._exit(5)",
    "atexit_order": """
        import atexit, threading, sys
        atexit.register(lambda: print("first in, last out", threading.main_thread().is_alive()))
        atexit.register(lambda: sys.exit(8))
        atexit.register(lambda: 1 / 0)
        class Noisy:
            def __del__(self): print("freed at the end")
        kept = Noisy()
        print("end")
    """,
    "threads_outlive": """
        import threading, time
        def late(n):
            time.sleep(0.1 * n)
            print("thread", n)
            if n == 2:
                raise ValueError("in a thread")
        for n in range(1, 4):
            threading.Thread(target=late, args=(n,), name=f"T{n}").start()
        threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
        raise RuntimeError("main ends first")
    """,
    "pool_left_open": """
        from concurrent.futures import ThreadPoolExecutor
        pool = ThreadPoolExecutor(2)
        futures = [pool.submit(print, "task", n) for n in range(1)]
    """,
    "asyncio": """
        import asyncio
        async def main():
            await asyncio.sleep(0)
            raise ValueError("in a task")
        asyncio.run(main())
    """,
    "order_of_streams": """
        import sys
        print("one"); print("two", file=sys.stderr); print("three")
        raise ValueError
    """,
    "stderr_replaced": "import io, sys; sys.stderr = io.StringIO(); sys.exit('unseen')",
    "stderr_closed": "import sys; sys.stderr.close(); raise ValueError",
    "stderr_none": "import sys; sys.stderr = None; sys.exit('text')",
    "stdout_closed": "import sys; print('x'); sys.stdout.close()",
    "unraisable": """
        class Bad:
            def __del__(self): raise ValueError("in del")
        Bad()
    """,
    "warning": """
        import warnings
        def f(): warnings.warn("look", DeprecationWarning, stacklevel=2)
        f()
        warnings.warn("here")
    """,
    "stdin": "import sys; print(sys.stdin.readline(), end=''); print(repr(input()))",
    "pickle": """
        import pickle
        class Mine:
            def __init__(self, x): self.x = x
        data = pickle.dumps(Mine(3))
        print(data, pickle.loads(data).x)
    """,
    "fork": """
        import os, sys, atexit
        atexit.register(lambda: print("atexit", os.getpid() == parent))
        parent = os.getpid()
        child = os.fork()
        if child:
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        else:
            raise ValueError("in the child")
    """,
    "fork_interrupted": """
        import os
        child = os.fork()
        if child:
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        else:
            raise KeyboardInterrupt
    """,
    "processes": """
        import multiprocessing, sys
        class Task:
            def __call__(self, queue):
                import __main__
                queue.put((__name__, type(self).__module__, __main__.__file__, sys.argv, sys.path))
        print("top", __name__)
        if __name__ == "__main__":
            for method in ("fork", "spawn", "forkserver"):
                context = multiprocessing.get_context(method)
                queue = context.Queue()
                process = context.Process(target=Task(), args=(queue,))
                process.start()
                print(method, queue.get())
                process.join()
                print(process.exitcode)
    """,
    "pool_of_processes": """
        import multiprocessing, os
        def square(x):
            if x == 3:
                raise ValueError(x)
            return x * x
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(square, [1, 2]))
                try:
                    pool.map(square, [3])
                except ValueError as error:
                    print("raised", error)
    """,
    "arguments": "import sys; print(sys.argv)",
    "locals": """
        x = 1
        print(x in locals().values(), [x for _ in range(2)], eval("x"))
        exec("y = 2"); print(y)
        def f(): global z; z = 3
        f(); print(z)
    """,
    "encoding": "# -*- coding: latin-1 -*-\nprint(ascii('\xe9'))".encode("latin-1"),
    "bom_and_crlf": b"\xef\xbb\xbfprint('bom')\r\nprint('''a\r\nb''')\r\n",
    "names_deleted": "del __spec__, __file__, __name__, __loader__, __builtins__\nprint('still here')",
    "empty": "",
}
TRACEBACKS = {"exception", "fork", "interrupt", "syntax_error"}
ARGUMENTS = {"arguments": ["--help", "-m", "", "--", "a b", "-q", "é", "--max-events=3"]}


def python(
    folder: Path, *args: str, driven: bool = False, merged: bool = False, **environment: str
) -> subprocess.CompletedProcess[bytes]:
    if driven:
        driver = folder.parent / "driver" / "driver.py"
        driver.parent.mkdir(exist_ok=True)
        driver.write_text(DRIVER)
        args = (str(driver), *args)
    return subprocess.run(
        [sys.executable, *args],
        cwd=folder,
        input=b"first line\nsecond line\n",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if merged else subprocess.PIPE,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **environment},
        timeout=60,
    )


def same_as_bare(folder: Path, *args: str, merged: bool = True, **environment: str) -> int:
    """Runs both ways, with the streams apart and (for their order) together; returns the exit status."""
    for together in (False, True) if merged else (False,):
        bare = python(folder, *args, merged=together, **environment)
        ours = python(folder, *args, merged=together, driven=True, **environment)
        assert without_addresses(ours.stdout) == without_addresses(bare.stdout)
        if not together:
            assert without_addresses(ours.stderr) == without_runpy(without_addresses(bare.stderr))
        assert ours.returncode == bare.returncode
    return bare.returncode


def without_addresses(output: bytes) -> str:
    return re.sub(r"\b0x[0-9a-f]{6,}|(?<=object refcount : )\d+", "0x", output.decode())


def without_runpy(text: str) -> str:
    """A bare ``python -m`` shows frames of its own above the user's, which are not the user's."""
    theirs = r'(<frozen (runpy|importlib|zipimport)|[^"]*/(runpy|importlib/\w+)\.py")'
    kept = re.sub(rf'  File "{theirs}.*\n(    .*\n)*', "", text)
    if kept != text and kept.rstrip().rpartition("\n")[2].startswith(("SyntaxError", "IndentationError")):
        # Nothing but the place of the error is left, and python calls that no traceback.
        kept = kept.replace("Traceback (most recent call last):\n", "")
    return kept


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "sibling.py").write_text("NAME = __name__\n")
    (folder / "broken.py").write_text("import surely_no_such_module\n")
    (folder / "data.txt").write_text("data")
    return folder


def write(path: Path, source: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(source, str):
        lines = source.split("\n")
        indent = len(lines[1]) - len(lines[1].lstrip()) if len(lines) > 1 and not lines[0] else 0
        source = "\n".join(line[indent:] for line in lines).encode()
    path.write_bytes(source)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_does_what_it_does_alone(name: str, folder: Path) -> None:
    # GIVEN a script
    write(folder / "script.py", SCRIPTS[name])
    # WHEN it runs bare and launched THEN output, errors and exit status are equal
    same_as_bare(folder, "script.py", *ARGUMENTS.get(name, []))


@pytest.mark.parametrize("path", ["./script.py", "../work/script.py", "sub/inner.py", "sub/link.py", "linked/inner.py"])
@pytest.mark.parametrize("name", ["names", "exception"])
def test_however_the_script_is_named(name: str, path: str, folder: Path) -> None:
    # GIVEN a script, one in another folder, and links to it
    write(folder / "script.py", SCRIPTS[name])
    write(folder / "sub" / "inner.py", SCRIPTS[name])
    (folder / "sub" / "link.py").symlink_to("../script.py")
    (folder / "linked").symlink_to("sub")
    # WHEN they run THEN sys.path, sys.argv, __file__ and the traceback are as bare
    same_as_bare(folder, path, "a", "b")
    same_as_bare(folder, str(folder / path))


@pytest.mark.parametrize("name", ["names", "exception", "syntax_error", "interrupt", "exit_text", "fork"])
@pytest.mark.parametrize("target", ["app", "app.zip", "app/"])
def test_folders_and_zip_files(name: str, target: str, folder: Path) -> None:
    # GIVEN a folder and a zip file with __main__.py
    write(folder / "app" / "__main__.py", SCRIPTS[name])
    with zipfile.ZipFile(folder / "app.zip", "w") as archive:
        archive.write(folder / "app" / "__main__.py", "__main__.py")
    # WHEN they run THEN all is as bare
    same_as_bare(folder, target, "x", merged=name not in TRACEBACKS)


@pytest.mark.parametrize(
    ("name", "module"),
    [
        *itertools.product(
            ["names", "exception", "syntax_error", "interrupt", "exit_text", "pickle"],
            ["alone", "package", "package.inner", "space.inner"],
        ),
        ("processes", "package.inner"),  # `package` itself is not imported again by children, and they fail
    ],
)
def test_modules(name: str, module: str, folder: Path) -> None:
    # GIVEN modules, a package and a namespace package
    announce = "import sys\nprint('package', sys.argv, sys.path[0])\n"
    write(folder / "package" / "__init__.py", announce)
    for path in ("alone.py", "package/__main__.py", "package/inner.py", "space/inner.py"):
        write(folder / path, SCRIPTS[name])
    # WHEN they run with -m THEN all is as bare, runpy's frames apart
    same_as_bare(folder, "-m", module, "x", "-y", merged=name not in TRACEBACKS)


@pytest.mark.parametrize(
    "init",
    [
        "import surely_no_such_module",
        "1 / 0",
        "import sys; sys.exit(6)",
        "def f(:",
        "import package.inner",  # runpy warns: found in sys.modules
        "__path__ = []",  # only running it tells that `inner` cannot be found
    ],
)
def test_a_parent_package_that_fails(init: str, folder: Path) -> None:
    # GIVEN a package that goes wrong before its module is run
    write(folder / "package" / "__init__.py", init)
    write(folder / "package" / "inner.py", "print('inner')")
    # WHEN the module is run THEN python's own messages are there
    same_as_bare(folder, "-m", "package.inner", merged=False)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_loader_workers(method: str, folder: Path) -> None:
    # GIVEN a script whose batches are made by worker processes, from a class of its own
    write(folder / "script.py", f"""
        import torch
        from torch.utils.data import DataLoader, Dataset, get_worker_info
        class Squares(Dataset):
            def __len__(self): return 8
            def __getitem__(self, n):
                import __main__
                return torch.tensor([n * n, get_worker_info().id]), __name__, __main__.__file__
        if __name__ == "__main__":
            for batch, names, files in DataLoader(Squares(), 4, num_workers=1, multiprocessing_context="{method}"):
                print(batch.tolist(), names, files)
    """)
    # WHEN it runs THEN all is as bare, and well. What python's tracker of semaphores says of a worker that it outlives,
    # or does not, changes from one bare run to the next.
    assert same_as_bare(folder, "script.py", merged=False, PYTHONWARNINGS="ignore:resource_tracker") == 0


def test_a_compiled_script(folder: Path) -> None:
    # GIVEN a .pyc file
    write(folder / "script.py", "import sys\nprint(__file__, type(__loader__), sys.argv)\n1 / 0\n")
    py_compile.compile(str(folder / "script.py"), str(folder / "script.pyc"))
    # WHEN it runs THEN all is as bare
    same_as_bare(folder, "script.pyc", "a")


@pytest.mark.parametrize("many", [1, 100_000])
def test_a_reader_that_goes_away(many: int, folder: Path) -> None:
    # GIVEN a script that prints little (it fails at exit) or much (it fails at once), and nobody who reads
    write(folder / "script.py", f"for n in range({many}): print(n)\n")
    outcomes = []
    for driven in (False, True):
        reader, writer = os.pipe()
        os.close(reader)
        driver = folder / "driver.py"
        driver.write_text(DRIVER)
        done = subprocess.run(
            [sys.executable, *([str(driver)] if driven else []), "script.py"],
            cwd=folder, stdout=writer, stderr=subprocess.PIPE, timeout=60,
        )
        os.close(writer)
        outcomes.append((done.returncode, done.stderr.decode()))
    # WHEN it runs both ways THEN it fails the same way
    assert outcomes[0] == outcomes[1]
    assert "BrokenPipeError" in outcomes[0][1]


@pytest.mark.parametrize("flag", ["-I", "-P", "-O", "-u", "-Werror", "-Xutf8=0", "-bb", "-Xdev"])
def test_flags_of_the_interpreter(flag: str, folder: Path) -> None:
    # GIVEN flags that change where python looks, or what it does
    if flag == "-P" and sys.version_info < (3, 11):
        pytest.skip("-P came with Python 3.11")
    write(folder / "script.py", "import sys, warnings\nprint(sys.path, sys.flags, __debug__)\nwarnings.warn('w')\n")
    write(folder / "app" / "__main__.py", "import sys\nprint(sys.path)\n")
    driver = folder / "driver.py"
    driver.write_text(DRIVER)
    for target in ("script.py", "app"):
        # WHEN the script runs both ways under the flag THEN they agree
        outcomes = []
        for start in ([], [str(driver)]):
            done = subprocess.run([sys.executable, flag, *start, target], cwd=folder, capture_output=True, timeout=60)
            outcomes.append((done.stdout.decode(), done.stderr.decode(), done.returncode))
        assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("empty", "exit None True"),
        ("exit_number", "exit SystemExit True"),
        ("exception", "exit ValueError True"),
        ("interrupt", "exit KeyboardInterrupt True"),
        ("fork", "exit None True"),
        ("fork_interrupted", "exit None True"),
        ("processes", "exit None True"),
        ("syntax_error", "exit SyntaxError True"),
    ],
)
def test_the_watch_is_entered_and_left_once(name: str, left: str, folder: Path) -> None:
    # GIVEN a script that ends in some way, perhaps in children as well
    write(folder / "script.py", SCRIPTS[name])
    notes = folder / "notes"
    # WHEN it is watched
    python(folder, "script.py", driven=True, WATCH=str(notes))
    # THEN the watch saw one beginning and one end, in the script's own process
    assert notes.read_text().splitlines() == ["enter", left]


def test_the_watch_is_left_after_the_threads(folder: Path) -> None:
    # GIVEN a script whose thread works on after the last line, and which has an exit handler
    write(folder / "script.py", """
        import atexit, os, threading
        def note(word):
            with open(os.environ["WATCH"], "a") as file:
                print(word, file=file)
        def late():
            threading.main_thread().join()
            note("thread")
        atexit.register(note, "atexit")
        threading.Thread(target=late).start()
        note("last line")
    """)
    notes = folder / "notes"
    # WHEN it is watched
    python(folder, "script.py", driven=True, WATCH=str(notes))
    # THEN the watch spans the thread's work, and exit handlers come after it
    assert notes.read_text().splitlines() == ["enter", "last line", "thread", "exit None True", "atexit"]


@pytest.mark.parametrize(("name", "status"), [("empty", 0), ("exit_number", 3), ("exception", 1), ("interrupt", -2)])
def test_a_watch_that_fails_does_not_change_the_exit_status(name: str, status: int, folder: Path) -> None:
    # GIVEN a watch that cannot finish
    write(folder / "script.py", SCRIPTS[name])
    # WHEN the script ends
    done = python(folder, "script.py", driven=True, WATCH_FAILS="1")
    # THEN the failure is said, and the status is the script's
    assert b"disk full" in done.stderr
    assert done.returncode == status


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (Target(path="missing.py"), "missing.py: no such file"),
        (Target(path="package.inner"), "write -m package.inner"),
        (Target(path="-"), "save it to a file"),
        (Target(path="package"), "package: has no __main__.py"),
        (Target(path="empty.zip"), "empty.zip: has no __main__.py"),
        (Target(path="sh"), "sh is a program"),
        (Target(module="surely_no_such_module"), "no module of this name"),
        (Target(module="package"), "no module named package.__main__"),
        (Target(module="package.other"), "no module of this name"),
        (Target(module="package.inner.deeper"), "no module of this name"),
        (Target(module="nowhere.inner"), "no module named nowhere"),
        (Target(module="alone.inner"), "no module of this name"),
        (Target(module="alone.py"), "write -m alone"),
        (Target(module=".alone"), "not a module's name"),
        (Target(module="package..inner"), "not a module's name"),
    ],
)
def test_a_target_that_cannot_run_is_refused(
    target: Target, says: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN some files, and a package that says so when it is run
    write(folder / "package" / "__init__.py", "raise AssertionError('the package was run')")
    write(folder / "package" / "inner.py", "")
    write(folder / "alone.py", "")
    with zipfile.ZipFile(folder / "empty.zip", "w"):
        pass
    monkeypatch.chdir(folder)
    before = sys.path[:]
    # WHEN the target is checked THEN one message says what is wrong, and nothing was run or changed
    with pytest.raises(MemdiagError, match=re.escape(says)) as caught:
        check(target)
    assert "\n" not in str(caught.value)
    assert sys.path == before


@pytest.mark.parametrize(
    "target",
    [
        Target(path="alone.py"),
        Target(path="app"),
        Target(module="alone"),
        Target(module="package.inner"),
        Target(module="app"),
        Target(module="space.deep.inner"),
        Target(module="json.tool"),
        Target(module="mover.anything"),
    ],
)
def test_a_target_that_may_run_is_not_refused(target: Target, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # GIVEN scripts, packages, a namespace package, and a package that changes where its modules are looked for
    write(folder / "package" / "__init__.py", "raise AssertionError('the package was run')")
    write(folder / "mover" / "__init__.py", "raise AssertionError('run')\n__path__ = ['elsewhere']\n")
    for path in ("package/inner.py", "alone.py", "app/__main__.py", "space/deep/inner.py"):
        write(folder / path, "")
    monkeypatch.chdir(folder)
    # WHEN it is checked THEN it passes, and no user's code ran
    check(target)


def test_names_for_files() -> None:
    assert Target(path="src/train.py").stem == "train"
    assert Target(path="src/app/").stem == "app"
    assert Target(module="package.train").stem == "package.train"
    assert Target(path="a.py", args=("-x",)).argv == ["a.py", "-x"]
    assert Target(module="a.b", args=("-x",)).argv == ["-m", "a.b", "-x"]
    with pytest.raises(ValueError, match="either"):
        Target(path="a.py", module="a")
