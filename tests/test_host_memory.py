"""Memory of the process that grows beside its tensors, and the statement that keeps it: many ways, each in a script.

The statement that keeps the arrays has the comment ``# keeps``: the line that is expected comes from the script's text,
and the bytes that are expected from the size of the arrays.
"""

from __future__ import annotations

import gc
import importlib.util
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from recording import Seen, record_script
from traces import TraceBuilder

from memdiag import policy
from memdiag.diagnose import Class, Finding, diagnose
from memdiag.record.keepers import containers
from memdiag.record.keepers.containers import Containers
from memdiag.record.keepers.holders import walk_from
from memdiag.trace import NONE
from memdiag.trace.view import View

MIB = 1 << 20
PART = 8 * MIB  # kept in each step

TOP = """
import functools
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

def image(step):
    return np.full((2, 4 << 20), step % 256, dtype=np.uint8)

BEFORE
"""

SCRIPT = TOP + """
def main():
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    START
    for step in range(STEPS):
        STEP
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

main()
"""

MODULE = TOP + """
START

def keep(step):
    STEP
"""


@dataclass(frozen=True)
class Way:
    """A way to keep arrays.

    Attributes:
        name: of the test.
        chain: what the chain must read.
        step: code of each step.
        before: code before the function with the loop.
        start: code in the function, before the loop.
        helper: code in another file.
        fixed: bytes that the container has from the start.
    """

    name: str
    chain: str
    step: str
    before: str = ""
    start: str = ""
    helper: str = ""
    fixed: int = 0


DATASET = """
class Images(Dataset):
    def __init__(self):
        self.cache = {}
        self.seen = []

    def __len__(self):
        return 10 ** 6

    def __getitem__(self, i):
        if i not in self.cache:
            self.seen.append(i)
            self.cache[i] = image(i)  # keeps
        return torch.from_numpy(self.cache[i][0, :4].copy())
"""

RUNS = [
    Way("dataset", "loader.dataset.cache[*]", "next(batches)", DATASET,
        "loader = DataLoader(Images(), batch_size=1)\n    batches = iter(loader)"),
    Way("global_list", "history[*]", "history.append(image(step))  # keeps", "history = []"),
    Way("helper_class", "store.items[*]", "store.put(step, image(step))", "import helper", "store = helper.Store()", """
class Store:
    def __init__(self):
        self.items = {}
        self.last = None

    def put(self, key, item):
        self.last = key
        self.items[key] = item  # keeps
"""),
    # The C library moves arrays of less than 32 MiB to and fro: growth is smooth beyond that.
    Way("local_array", "bank", "bank = np.concatenate([bank, image(step)])  # keeps", "",
        "bank = image(0).repeat(8, axis=0)", fixed=8 * PART),
]

LOOKS = [
    Way("dict", "files[*]", "files[step] = image(step)  # keeps", "", "files = {}"),
    Way("dict_of_lists", "files['train'][*]", "files['train'].append(image(step))  # keeps", "",
        "files = {'train': [], 'other': []}"),
    Way("deque", "recent[*]", "recent.append(image(step))  # keeps", "import collections",
        "recent = collections.deque()"),
    Way("tuples", "samples[*][*]", "samples.append((image(step), step))  # keeps", "", "samples = []"),
    Way("records", "rows[*]['image']", "rows.append({'image': image(step), 'label': step})  # keeps", "", "rows = []"),
    Way("objects", "samples[*].image", "samples.append(Sample(step))  # keeps", """
class Sample:
    def __init__(self, step):
        self.image = image(step)
""", "samples = []"),
    Way("attribute", "bank.rows", "bank.grow(image(step))", """
class Bank:
    def __init__(self):
        self.rows = image(0)
        self.fixed = np.ones(32 << 20, dtype=np.uint8)
    def grow(self, more):
        self.rows = np.concatenate([self.rows, more])  # keeps
""", "bank = Bank()", fixed=5 * PART),
    Way("slots", "bank.rows", "bank.grow(image(step))", """
class Bank:
    __slots__ = ('rows', 'fixed')
    def __init__(self):
        self.rows = image(0)
    def grow(self, more):
        self.rows = np.concatenate([self.rows, more])  # keeps
""", "bank = Bank()", fixed=PART),
    Way("class_attribute", "Bank.rows[*]", "Bank.grow(image(step))", """
class Bank:
    rows = {}
    @classmethod
    def grow(cls, more):
        cls.rows[len(cls.rows)] = more  # keeps
"""),
    Way("global_array", "bank", "grow(image(step))", """
bank, fixed = image(0), np.ones(32 << 20, dtype=np.uint8)
def grow(more):
    global bank
    bank = np.concatenate([bank, more])  # keeps
""", fixed=5 * PART),
    Way("replaced_item", "banks['a']", "banks['a'] = np.concatenate([banks['a'], image(step)])  # keeps", "",
        "banks = {'a': image(0), 'b': image(0)}", fixed=2 * PART),
    Way("views", "cuts[*]", "cuts.append(image(step)[:, ::64])  # keeps", "", "cuts = []"),
    Way("bytes", "files[*]", "files[step] = image(step).tobytes()  # keeps", "", "files = {}"),
    Way("from_numpy", "kept[*]", "kept.append(torch.from_numpy(image(step)))  # keeps", "", "kept = []"),
    Way("lru_cache", "decode → its cache", "decode(step)", """
@functools.lru_cache(maxsize=None)  # keeps
def decode(step):
    return image(step)
"""),
]


def with_way(source: str, way: Way, steps: int = 0) -> str:
    source = source.replace("BEFORE", way.before).replace("START", way.start or "pass")
    return source.replace("STEPS", str(steps)).replace("STEP", way.step)


def places(*files: Path) -> set[str]:
    """The places of the statements that keep."""
    return {f"{file}:{number}" for file in files for number, line in enumerate(file.read_text().splitlines(), 1)
            if line.endswith("  # keeps")}


def run(folder: Path, way: Way, steps: int = 13) -> Seen:
    """Records a way."""
    (folder / "helper.py").write_text(way.helper)
    return record_script(folder, with_way(SCRIPT, way, steps))


def of_host(seen: Seen) -> list[Finding]:
    return [finding for finding in diagnose(View(seen.trace)).findings if finding.cls is Class.HOST_MEMORY]


class TestWhoKeepsIt:
    @pytest.mark.parametrize("way", RUNS, ids=lambda way: way.name)
    def test_the_statement_is_in_the_finding(self, tmp_path: Path, way: Way) -> None:
        # GIVEN a script that keeps an array of 8 MiB in each step, WHEN recorded
        seen = run(tmp_path, way)
        # THEN the process is found to grow, about by that, and the line is that of the statement that keeps it
        (finding,) = of_host(seen)
        assert finding.bytes == pytest.approx(11 * PART, rel=0.3)
        assert finding.holder is not None
        assert {f"{tmp_path}/{finding.holder.line}"} == places(tmp_path / "script.py", tmp_path / "helper.py")
        assert " → ".join(finding.holder.chain) == way.chain
        assert [advice.bytes for advice in finding.advice] == [None]
        assert any(f"({finding.holder.line})" in line for line in finding.evidence)
        # and what the container keeps is what was put there until some step of the later half
        table = seen.trace["holders"]
        kept = int(table["bytes"][table["allocation"] == NONE][-1])
        assert (kept - way.fixed) % PART == 0
        assert 6 <= (kept - way.fixed) // PART <= 13

    def test_nothing_of_the_scripts_is_touched(self, tmp_path: Path) -> None:
        # GIVEN arrays whose class answers for what is asked of it, and says when it goes
        way = Way("watched", "", "cache.append(Watched(image(step)))\n        print(step)\n        del cache[:-6]", """
class Watched:
    def __init__(self, array):
        self.array = array.view(Noisy)
    def __del__(self):
        print('gone', int(self.array[0, 0]))
class Noisy(np.ndarray):
    @property
    def nbytes(self):
        raise RuntimeError('asked')
    base = nbytes
    def __sizeof__(self):
        raise RuntimeError('asked')
    def __len__(self):
        raise RuntimeError('asked')
""", "cache = []")
        # WHEN recorded, THEN nothing was asked, and each went when the script let it go
        seen = run(tmp_path, way, steps=12)
        expected = [line for step in range(12) for line in (str(step), f"gone {step - 6}")[: 1 + (step >= 6)]]
        assert seen.output.splitlines()[: len(expected)] == expected

    def test_a_cache_that_fills_and_stops_is_no_finding(self, tmp_path: Path) -> None:
        # GIVEN a cache that has all it will have after the first steps
        way = Way("filled", "", "if step < 6: cache.append(image(step))", "", "cache = []")
        # WHEN recorded, THEN nothing is said of the process
        seen = run(tmp_path, way, steps=20)
        assert of_host(seen) == []

    def test_tensors_that_grow_are_a_leak_alone(self, tmp_path: Path) -> None:
        # GIVEN tensors that are kept, of PyTorch's own memory, also where NumPy has a view of it
        way = Way("tensors", "", "kept.append(torch.ones(8 << 20, dtype=torch.uint8).numpy())", "", "kept = []")
        # WHEN recorded, THEN it is a leak, and no memory beside the tensors; nor is a container blamed for it
        seen = run(tmp_path, way)
        assert of_host(seen) == []
        assert diagnose(View(seen.trace)).verdict.cls is Class.LEAK
        assert not (seen.trace["holders"]["allocation"] == NONE).any()

    def test_without_numpy_it_is_found_too(self, tmp_path: Path) -> None:
        # GIVEN a script that uses no NumPy and keeps bytes
        source = """
            import torch
            kept = []
            w = torch.ones(3, requires_grad=True)
            optimizer = torch.optim.SGD([w], lr=0.1)
            for step in range(13):
                kept.append(bytes([step]) * (8 << 20))
                w.sum().backward()
                optimizer.step()
        """
        (finding,) = of_host(record_script(tmp_path, source))
        assert finding.holder is not None
        assert finding.holder.line == "script.py:7"


class TestLooks:
    """In this process: when a look is due, and what it finds."""

    @pytest.fixture(autouse=True)
    def seen_by_the_collector(self) -> Iterator[None]:
        gc.unfreeze()
        yield
        gc.freeze()

    def test_looks_are_ever_rarer(self) -> None:
        # GIVEN a process that grows by a MiB in each of 1,000 steps, WHEN asked at each step's end
        watched = Containers()
        due = [step for step in range(1000) if watched.due(100 * MIB + step * MIB)]
        # THEN the first look is after 16 MiB, and each next after half as much again
        assert due[:4] == [16, 24, 36, 54]
        assert len(due) <= 12

    def test_a_process_that_does_not_grow_is_not_looked_at(self) -> None:
        watched = Containers()
        assert not any(watched.due(100 * MIB + step % 16 * MIB) for step in range(1000))

    @pytest.mark.parametrize("way", LOOKS, ids=lambda way: way.name)
    def test_the_statement_that_keeps_it_is_found(
        self, tmp_path: Path, way: Way, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # GIVEN a module that keeps an array of 8 MiB each time
        file = tmp_path / "keeper.py"
        file.write_text(with_way(MODULE, way))
        spec = importlib.util.spec_from_file_location("keeper", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "keeper", module)
        spec.loader.exec_module(module)
        watched, number = Containers(), 0
        watched.due(0)
        # WHEN looked at three times, with some more kept in between
        for more in (2, 3, 4):
            for step in range(number, number + more):
                module.keep(step)
            number += more
            assert watched.due(3 * number * PART)  # others may take more of it
            parts, _ = watched.look()
        walked = walk_from(
            {at: part.things for at, part in enumerate(parts)}, {at: part.group for at, part in enumerate(parts)})
        # THEN the chain is found that leads to it, and the line is that of the statement, each time anew
        assert {holder.chain for holder in walked.holders} == {way.chain}
        assert {holder.line for holder in walked.holders} == places(file)
        (kept,) = {part.bytes for part in parts}
        assert 0 <= kept - way.fixed - number * PART <= 100 * number  # bytes have a header of their own

    def test_only_growth_is_found(self) -> None:
        # GIVEN a large list that stays, a list that is renewed, and one that grows
        watched = Containers()
        still = [np.ones(40_000_003, dtype=np.uint8)]
        renewed = [np.ones(20_000_003, dtype=np.uint8)]
        growing = [np.ones(10_000_003, dtype=np.uint8)]
        watched.due(0)
        assert watched.due(20 * MIB)
        assert watched.look() == ([], None)  # there is nothing to compare with
        # WHEN looked at again
        renewed = [np.ones(20_000_003, dtype=np.uint8)]
        growing += [np.ones(30_000_001, dtype=np.uint8), np.ones(5_000_011, dtype=np.uint8)]
        assert watched.due(20 * MIB + 35_000_012)
        parts, stopped = watched.look()
        # THEN its two new arrays are found, with all that it keeps, and nothing else is
        assert stopped is None
        assert [part.things[0] is growing for part in parts] == [True, True]
        assert [part.things[1].nbytes for part in parts] == [30_000_001, 5_000_011]
        assert {part.bytes for part in parts} == {45_000_015}
        assert len(still) == len(renewed) == 1

    def test_views_of_one_array_count_once(self) -> None:
        # GIVEN a list to which many views of one array come
        watched = Containers()
        base = np.ones(30_000_000, dtype=np.uint8)
        views = [base[:10]]
        watched.due(0)
        watched.due(20 * MIB)
        watched.look()
        views += [base[at:] for at in range(100)]
        watched.due(40 * MIB)
        # THEN they are no growth
        assert watched.look() == ([], None)

    def test_nothing_is_kept_by_looking(self) -> None:
        # GIVEN an object with an array, in a list that grows, and no garbage collection that would clean up
        class Sample:
            def __init__(self) -> None:
                self.image = np.ones(30_000_000, dtype=np.uint8)

        gc.collect()
        gc.disable()
        try:
            watched = Containers()
            kept = [Sample()]
            watched.due(0)
            watched.due(20 * MIB)
            watched.look()
            kept.append(Sample())
            watched.due(40 * MIB)
            parts, _ = watched.look()
            walked = walk_from({0: parts[0].things}, {0: 0})
            assert [holder.chain for holder in walked.holders] == ["kept[*].image"]
            gone = [weakref.ref(sample) for sample in kept] + [weakref.ref(sample.image) for sample in kept]
            # WHEN it is let go, THEN it is gone
            del kept, parts
            assert [reference() for reference in gone] == [None] * 4
        finally:
            gc.enable()

    def test_too_many_objects_are_said(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # GIVEN time for ten objects, WHEN looked at, THEN nothing is made up, and that it stopped is said
        monkeypatch.setattr(policy, "HOST_LOOK_OBJECTS", 10)
        assert Containers().look() == ([], containers.STOPPED)

    def test_what_is_in_a_tensor_or_a_file_is_not_counted(self, tmp_path: Path) -> None:
        # GIVEN arrays that are a tensor's memory, and a file's pages
        watched = Containers()
        kept = [np.ones(3)]
        watched.due(0)
        watched.due(20 * MIB)
        watched.look()
        kept.append(torch.ones(20 * MIB, dtype=torch.uint8).numpy())
        kept.append(np.memmap(tmp_path / "file", np.uint8, "w+", shape=(20 * MIB,)))
        watched.due(40 * MIB)
        # THEN the list has not grown by them
        assert watched.look() == ([], None)


def test_a_holder_is_told_where_the_recording_found_one() -> None:
    # GIVEN a run whose process grows by 16 MiB in each step, recorded by a memdiag that looked for no containers
    run = TraceBuilder()
    for step in range(12):
        with run.step(warm_up=step == 0, rss=(500 + 16 * step) * MIB):
            run.free(run.allocate(4 * MIB))
    found = diagnose(View(run.build()))
    (finding,) = [one for one in found.findings if one.cls is Class.HOST_MEMORY]
    # THEN the finding is there, without a holder, and without advice that it could not know
    assert finding.bytes == 16 * 10 * MIB
    assert finding.holder is None
    assert finding.advice == []
