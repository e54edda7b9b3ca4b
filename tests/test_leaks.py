"""Who keeps what grows, and the statement that does: many ways to leak, in one script.

Each way keeps memory of a size that nothing else has, and the statement that keeps it has a comment with its name: so
the line that is expected comes from the script's text, and the memory that it is expected for from its size.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from recording import Seen, record_script

from memdiag.diagnose import Class, diagnose
from memdiag.trace.model import GARBAGE, GRADIENT_CYCLE, UNCOLLECTED
from memdiag.trace.view import View

STEPS = 6
FIRST = 100_003  # floats of the first way; each next one has a thousand more


@dataclass(frozen=True)
class Way:
    """A way to keep memory.

    Attributes:
        name: marks the statement that keeps it, in a comment.
        chain: part of what the chain must read.
        step: code of each step; ``graph()`` is a number with a graph that saved memory of the way's size, ``data()`` is
            that much memory without one.
        before: code before the loop.
        helper: code in another file.
    """

    name: str
    chain: str
    step: str
    before: str = ""
    helper: str = ""


WAYS = [
    Way("list", "log_list[*] → its graph", "log_list.append(graph())  # list", "log_list = []"),
    Way("other_name", "[*]", "journal.add(data())", """
class Journal:
    def __init__(self):
        self.pages = []

    def add(self, item):
        self.pages.append(item)  # other_name

journal = Journal()
shelf = journal.pages
"""),
    Way("dict_of_lists", "history['loss'][*]", "history['loss'].append(graph())  # dict_of_lists",
        "history = {'loss': [], 'other': []}"),
    Way("defaultdict", "groups['train'][*]", "groups['train'].append(data())  # defaultdict",
        "groups = collections.defaultdict(list)"),
    Way("deque", "recent[*]", "recent.appendleft(data())  # deque", "recent = collections.deque()"),
    Way("set", "pool[*]", "pool.add(data())  # set", "pool = set()"),
    Way("method_elsewhere", "monitor.values[*]", "monitor.record(graph())", "monitor = helper.Monitor()", """
class Monitor:
    def __init__(self):
        self.values = []

    def record(self, value):
        if value is None:
            self.values.append(None)
        self.values.append(value)  # method_elsewhere
"""),
    Way("dataclass", "state.losses[*]", "state.losses.append(graph())  # dataclass", "state = helper.State()", """
@dataclasses.dataclass
class State:
    losses: list = dataclasses.field(default_factory=list)
"""),
    Way("function_elsewhere", "helper.KEPT", "helper.keep(data())", "", """
KEPT = []

def keep(item):
    rest = []
    rest.append(item)
    KEPT.append(item)  # function_elsewhere
"""),
    Way("list_elsewhere", "SEEN[*]", "helper.SEEN.append(graph())  # list_elsewhere", "", "SEEN = []"),
    Way("closure", "seen[*]", "note(graph())", """
def make_note():
    seen = []
    def note(item):
        seen.append(item)  # closure
    return note
note = make_note()
"""),
    Way("class_attribute", "Stats.all[*]", "Stats.add(data())", """
class Stats:
    all = []
    @classmethod
    def add(cls, item):
        cls.all.append(item)  # class_attribute
"""),
    Way("cache", "its cache", "embed(step)", """
@functools.lru_cache(maxsize=None)  # cache
def embed(step):
    return data()
"""),
    Way("exceptions", "failures[*].__traceback__ → locals of attempt() → loss", """
try:
    attempt()
except ValueError as error:
    failures.append(error)  # exceptions
""", """
failures = []
def attempt():
    loss = graph()
    raise ValueError("no")
"""),
    Way("logging", "log record", "logger.warning('loss %s', graph())  # logging", """
logger = logging.getLogger('kept')
logger.propagate = False
logger.addHandler(logging.handlers.MemoryHandler(10 ** 6, flushLevel=logging.CRITICAL))
"""),
    Way("by_step", "by_step[*]", "by_step[step] = graph()  # by_step", "by_step = {}"),
    Way("copies", "copies[*]", "copies.append(copy.deepcopy(part.state_dict()))  # copies", """
part = nn.Linear(SIZE, 1, bias=False)
copies = []
"""),
    Way("generator", "kept[*]", "collector.send(graph())", """
def collect():
    kept = []
    while True:
        item = yield
        kept.append(item)  # generator
collector = collect()
next(collector)
"""),
    Way("default_argument", "remember() → memory", "remember(data())", """
def remember(item, memory=[]):
    memory.append(item)  # default_argument
"""),
    Way("sum", "total → its graph", "total += graph()  # sum", "total = 0"),
    Way("sum_rebound", "mean → its graph", "mean = 0.9 * mean + graph()  # sum_rebound", "mean = 0"),
    Way("state_attribute", "carrier.state → its graph", "carrier.advance()", """
class Carrier:
    def __init__(self):
        self.state = torch.zeros(())
    def reset(self):
        self.state = self.state.detach()
    def advance(self):
        result = self.state * 0.5 + graph()
        self.state = result  # state_attribute
carrier = Carrier()
"""),
    Way("concatenation", "bank", "bank = torch.cat([bank, data()])  # concatenation", "bank = torch.empty(0)"),
    Way("list_rebound", "rows[*]", "rows = rows + [graph()]  # list_rebound", "rows = []"),
    Way("passed_on", "results[*]", "store(results, graph())", """
results = []
def store(into, item):
    into.append(item)  # passed_on
"""),
    Way("setdefault", "nested['a'][*]", "nested.setdefault('a', []).append(data())  # setdefault", "nested = {}"),
    Way("update", "named[*]", "named.update({f'step {step}': graph()})  # update", "named = {}"),
    Way("node", "nodes[*] → its graph", "nodes.append(graph().grad_fn)  # node", "nodes = []"),
    Way("hook", "outputs", "hooked(w[:1])", """
hooked = nn.Identity()
outputs = collections.defaultdict(list)
def hook(module, args, output):
    outputs[id(module)].append(graph())  # hook
hooked.register_forward_hook(hook)
"""),
    Way("slots", "slim.items[*]", "slim.take(data())", """
class Slim:
    __slots__ = ('items',)
    def __init__(self):
        self.items = []
    def take(self, item):
        items = self.items
        items.append(item)  # slots
slim = Slim()
"""),
    Way("heap", "best[*]", "heapq.heappush(best, (step, data()))  # heap", "best = []"),
    Way("callbacks", "trainer.callbacks[*].outputs[*]", "trainer.step_end(graph())", "trainer = helper.Trainer()", """
class Collect:
    def __init__(self):
        self.outputs = []

    def on_step_end(self, output):
        self.outputs += [output]  # callbacks

class Trainer:
    def __init__(self):
        self.callbacks = [Collect()]

    def step_end(self, output):
        for callback in self.callbacks:
            callback.on_step_end(output)
"""),
]

SCRIPT_TOP = """
import collections, copy, functools, gc, heapq, logging, logging.handlers
import torch
from torch import nn
import helper

gc.disable()
model = nn.Linear(4, 2)
w = nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""

SCRIPT_MAKERS = """
def graph_NAME():
    return (torch.ones(SIZE) * w).sum()

def data_NAME():
    return torch.ones(SIZE)
"""


def size_of(way: Way) -> int:
    return FIRST + 1000 * WAYS.index(way)


def with_sizes(code: str, way: Way) -> str:
    """With the way's own functions: what each keeps is born in a line of its own."""
    code = re.sub(r"\b(graph|data)\(\)", rf"\1_{way.name}()", code)
    return code.replace("SIZE", str(size_of(way))).replace("NAME", way.name).strip("\n")


def sources(ways: list[Way], in_function: bool) -> tuple[str, str]:
    """The script and its helper.

    Args:
        in_function: the loop and what it uses are in a function.
    """
    before = "\n".join(with_sizes(way.before, way) for way in ways if way.before)
    steps = "\n".join(with_sizes(way.step, way) for way in ways)
    loop = f"""{before}
for step in range({STEPS}):
    loss = model(torch.ones(3, 4)).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""" + "\n".join("    " + line for line in steps.splitlines())
    if in_function:
        loop = "def main():\n" + "\n".join("    " + line for line in loop.splitlines()) + "\nmain()"
    helper = "import dataclasses\n" + "\n".join(way.helper for way in ways)
    makers = "\n".join(with_sizes(SCRIPT_MAKERS, way) for way in ways)
    return SCRIPT_TOP + makers + "\n" + loop + "\n", helper


def run(folder: Path, ways: list[Way], in_function: bool = False, *options: str) -> tuple[Seen, dict[str, str]]:
    """Records the ways in one script.

    Returns:
        The trace, and the place of each marked statement by its mark.
    """
    script, helper = sources(ways, in_function)
    (folder / "helper.py").write_text(helper)
    seen = record_script(folder, script, *options)
    places: dict[str, str] = {}
    for file in ("script.py", "helper.py"):
        for number, line in enumerate((folder / file).read_text().splitlines(), 1):
            if mark := re.search(r"  # (\w+)$", line):
                places[mark[1]] = f"{folder / file}:{number}"
    return seen, places


def held(seen: Seen, size: int) -> Counter[tuple[str, str, str | None]]:
    """(root, chain, line) of all allocations of a size, by the last row of each, with how many have it."""
    table, trace = seen.trace["holders"], seen.trace
    last: dict[int, tuple[str, str, str | None]] = {}
    for row, allocation in enumerate(table["allocation"].tolist()):
        if int(trace["allocations"]["bytes"][allocation]) == size:
            root, chain = trace.string(table["root"][row]), trace.string(table["chain"][row])
            assert root is not None
            assert chain is not None
            last[allocation] = root, chain, trace.string(table["line"][row])
    return Counter(last.values())


@pytest.fixture(scope="module", params=[False, True], ids=["module", "function"])
def leaks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Seen, dict[str, str]]:
    return run(tmp_path_factory.mktemp("leaks"), WAYS, request.param)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_the_statement_that_keeps_it_is_found(leaks: tuple[Seen, dict[str, str]], way: Way) -> None:
    # GIVEN memory of a size of its own, kept in each step, WHEN recorded
    seen, places = leaks
    sizes = [4 * size_of(way)]
    if way.name == "concatenation":  # it is made anew, a step's larger, in each step
        sizes = [4 * size_of(way) * (step + 1) for step in range(1, STEPS)]
    found = sum((held(seen, size) for size in sizes), Counter[tuple[str, str, str | None]]())
    assert found, "nobody was found"
    # THEN most of what was looked at has the chain, and the line is that of the statement that keeps it
    (root, chain, line), number = found.most_common(1)[0]
    assert line == places[way.name], (root, chain, line)
    assert way.chain in f"{root.removeprefix('a global of ')}.{chain}", (root, chain)
    assert number >= 2


def lines(folder: Path, file: str, mark: str) -> set[str]:
    """Places of the statements with a mark."""
    return {f"{folder / file}:{number}" for number, line in enumerate((folder / file).read_text().splitlines(), 1)
            if line.endswith("# " + mark)}


def holders(seen: Seen, minimum: int) -> list[tuple[int, str, str, str | None]]:
    """(step, root, chain, line) of the rows for allocations of at least so many bytes."""
    table, trace = seen.trace["holders"], seen.trace
    return [
        (int(table["step"][row]), trace.string(root) or "", trace.string(chain) or "", trace.string(line))
        for row, (root, chain, line) in enumerate(zip(table["root"], table["chain"], table["line"], strict=True))
        if trace["allocations"]["bytes"][table["allocation"][row]] >= minimum
    ]


CARRIED = """
import torch
from torch import nn

class Trainer:
    def __init__(self):
        self.cell = nn.GRUCell(50, 50)
        self.a_state = self.z_state = torch.zeros(400, 50)
        self.m = None

    def forward(self, x):
        BIND
        self.m = out.square().mean()

    def train(self, x):
        self.forward(x)
        self.cell.zero_grad()
        self.m.backward(retain_graph=True)
        for p in self.cell.parameters():
            p.data.sub_(0.1 * p.grad)

trainer = Trainer()
for step in range(8):
    trainer.train(torch.ones(400, 50))
"""


@pytest.mark.parametrize("name", ["a_state", "z_state"])
def test_what_carries_a_graph_on_is_told_from_what_only_hangs_on_it(tmp_path: Path, name: str) -> None:
    # GIVEN a hidden state that carries its graph from step to step, and a loss and a result that hang on it; all are
    # attributes of one object, as far from the graph as each other
    source = CARRIED.replace("BIND", f"out = self.{name} = self.cell(x, self.{name})  # keeps")
    # WHEN recorded
    seen = record_script(tmp_path, source)
    # THEN from the second look on, what outlives its step is kept by the state, and its assignment is the statement
    found = [row for row in holders(seen, 400 * 50 * 4) if "graph" in row[2] and row[0] > 3]
    assert found
    assert {row[2].split(" → ")[0] for row in found} == {f"trainer.{name}"}
    assert {row[3] for row in found} == lines(tmp_path, "script.py", "keeps")


SEVERAL = """
import torch
from torch import nn

class Notes:
    def __init__(self):
        self.kept = []

class Other:
    def __init__(self):
        self.kept = []
    def note(self, value):
        self.kept.append(value)

model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
notes, other = Notes(), Other()
log = []

def debug(value):
    log.append(torch.relu(value))

for step in range(8):
    loss = model(torch.ones(30000, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    log.append(loss.item())
    log.append(0.5)
    if step > 100:
        loss = loss * 2
        log.append(loss)
    else:
        value = model(torch.ones(30000, 4)).relu()
        log.append(value)  # keeps
    notes.kept.append(model(torch.ones(30000, 4)).exp())  # notes
    other.note(step)
"""


def test_of_several_statements_the_one_that_ran_and_may_keep_it_is_told(tmp_path: Path) -> None:
    # GIVEN a list that numbers are put into too, and tensors by code that never runs; and an attribute whose name
    # another class has as well
    seen = record_script(tmp_path, SEVERAL)
    # WHEN recorded, THEN the statement that did it is told, for each
    found = holders(seen, 30000 * 2 * 4)
    assert {row[3] for row in found if row[2].startswith("log[*]")} == lines(tmp_path, "script.py", "keeps")
    assert {row[3] for row in found if row[2].startswith("notes.kept[*]")} == lines(tmp_path, "script.py", "notes")


CYCLES = """
import gc
import torch
from torch import nn

gc.disable()
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

class Part:
    pass

def penalty():
    probe = nn.Linear(100, 300)
    probe(torch.ones(400, 100)).square().mean().backward(create_graph=True)  # keeps

for step in range(8):
    loss = model(torch.ones(3, 4)).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    part = Part()
    part.itself, part.data = part, torch.ones(70_000)
    del part
    penalty()
"""


def test_garbage_is_no_leak_and_a_graph_of_gradients_is(tmp_path: Path) -> None:
    # GIVEN memory in cycles that the collector would free, were it on; and gradients whose graph leads to their
    # parameters, which it cannot free
    seen = record_script(tmp_path, CYCLES)
    # WHEN recorded, THEN each is told as what it is, and the gradients' with the backward that made the graph
    garbage = {root for root, _, _ in held(seen, 70_000 * 4)}
    assert garbage == {GARBAGE}
    found = [row for row in holders(seen, 400 * 100 * 4) if row[1] == GRADIENT_CYCLE]
    assert found
    assert {row[3] for row in found} == lines(tmp_path, "script.py", "keeps")


UNCOLLECTABLE = """
import gc
import torch
from torch import nn

model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def probe():
    weight = nn.Parameter(torch.ones(70_000))
    weight.register_post_accumulate_grad_hook(lambda grown: weight)

def collectable():
    weight = nn.Parameter(torch.ones(50_000))
    weight.itself = weight

for step in range(12):
    loss = model(torch.ones(3, 4)).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    probe()
    collectable()
    if step % 3 == 2:
        gc.collect()
"""


def test_a_cycle_that_outlives_garbage_collections_is_no_garbage(tmp_path: Path) -> None:
    # GIVEN parameters that a hook inside autograd's C++ code leads back to, and others in a cycle of Python's own
    seen = record_script(tmp_path, UNCOLLECTABLE)
    # WHEN recorded over several garbage collections, THEN those that outlived one are told from those that will not
    roots = Counter[str]()
    for (root, _, _), number in held(seen, 70_000 * 4).items():
        roots[root] += number
    assert roots[UNCOLLECTED] >= 6
    assert {root for root, _, _ in held(seen, 50_000 * 4)} == {GARBAGE}


def test_light_recording_finds_them_too(tmp_path: Path) -> None:
    # GIVEN ways to leak, WHEN all steps but the first are recorded in light, THEN what outlives its step is looked at
    ways = [way for way in WAYS if way.name in ("list", "closure", "by_step", "deque", "sum", "passed_on")]
    seen, places = run(tmp_path, ways, False, "--steps", "0:1")
    for way in ways:
        found = held(seen, 4 * size_of(way))
        assert found, way.name
        assert found.most_common(1)[0][0][2] == places[way.name]


HEALTHY = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
optimizer = torch.optim.Adam(model.parameters())
data = torch.ones(1000, 64)
for step in range(12):
    x = data[: 200]
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_a_run_that_keeps_nothing_is_looked_at_little(tmp_path: Path) -> None:
    # GIVEN a run in which nothing grows, WHEN recorded, THEN it is looked at once and not again: no later rows
    seen = record_script(tmp_path, HEALTHY)
    assert {row[0] for row in holders(seen, 1)} <= {1, 2, 3}
    # and what it holds is told
    assert any(row[2] == "data" for row in holders(seen, 1000 * 64 * 4))

EVALUATION = """
import torch
from torch import nn

model = nn.Linear(4, 20)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def evaluate():
    everything = None
    with torch.no_grad():
        for batch in range(20):
            result = model(torch.ones(10_000, 4))
            everything = result if everything is None else torch.cat([everything, result])  # keeps
    return everything.mean().item()

for step in range(3):
    loss = model(torch.ones(3, 4)).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
evaluate()
"""


def test_what_a_long_evaluation_collects_is_found(tmp_path: Path) -> None:
    # GIVEN an evaluation after the last step that collects its results in one ever larger tensor
    seen = record_script(tmp_path, EVALUATION)
    # WHEN recorded, THEN it is looked at though no step ends, and the statement is told
    found = [row for row in holders(seen, 3 * 10_000 * 20 * 4) if row[2] == "everything"]
    assert found
    assert {row[1] for row in found} == {"everything in evaluate()"}
    assert {row[3] for row in found} == lines(tmp_path, "script.py", "keeps")


LIBRARY = """
import torch
from torch import nn

net = nn.Linear(300, 300)
data = torch.ones(50, 300)
optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3, history_size=100)

def closure():
    optimizer.zero_grad()
    loss = (net(data) - data).square().mean()
    loss.backward()
    return loss

for step in range(8):
    loss = optimizer.step(closure)  # keeps
"""


def test_what_a_library_keeps_is_told_by_the_call_of_it(tmp_path: Path) -> None:
    # GIVEN an optimizer of torch's that keeps a history, WHEN recorded, THEN the script's call is told, not the line
    # that made the optimizer, nor one of torch's
    seen = record_script(tmp_path, LIBRARY)
    found = [row for row in holders(seen, 300 * 300 * 4) if "old_dirs" in row[2]]
    assert found
    assert {row[3] for row in found} == lines(tmp_path, "script.py", "keeps")


WINDOWS = """
from collections import deque
import torch
from torch import nn

model = nn.Sequential(nn.Linear(50, 100), nn.ReLU(), nn.Linear(100, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches, losses = deque(maxlen=100), deque(maxlen=100)
for step in range(12):
    x = torch.ones(1000, 50)
    KEEP
    loss = model(x).mean()
    losses.append(loss.NUMBER)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    validation = model(torch.ones(1000, 50)).mean()
    losses.append(validation.NUMBER)
"""


@pytest.mark.parametrize(
    ("keep", "number", "cls", "kind"),
    [("batches.append(x)", "item()", Class.INPUT_BATCHES, "filling_container"),
     ("pass", "abs()", Class.LEAK, "growth")], ids=["batches", "graphs"])
def test_a_window_of_batches_ends_and_one_of_graphs_is_a_leak(
        tmp_path: Path, keep: str, number: str, cls: Class, kind: str) -> None:
    # GIVEN a container of at most a hundred items, with fewer in it yet: batches, or losses with their graphs
    seen = record_script(tmp_path, WINDOWS.replace("KEEP", keep).replace("NUMBER", number))
    # WHEN diagnosed, THEN what was meant to be kept is no leak, and graphs are one
    found = diagnose(View(seen.trace))
    assert found.verdict.cls is cls
    assert found.findings[0].kind == kind
    assert found.findings[0].holder is not None
    assert "[* of 100]" in " ".join(found.findings[0].holder.chain)
