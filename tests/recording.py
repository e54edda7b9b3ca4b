"""For tests that record something real: running it, and asking its trace.

Tests mark places with memory of an odd size (``mark(1_000_003)``), and look it up by that size afterwards: where it
came, in which phase, from which line.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from memdiag.record import Options, Recorder
from memdiag.trace import NONE, Kind, Phase, Role, Trace, load
from memdiag.trace.ledger import Roles, ledger, roles
from memdiag.trace.nesting import Nesting, nesting, span_rows
from memdiag.trace.timeline import Lives, Timeline, lives, timeline

ROOT = Path(__file__).parent.parent


def record(function: Callable[[], Any], **options: Any) -> Seen:
    """Records a function in this process. What it returns is let go before the recording ends.

    Args:
        options: of :class:`memdiag.record.Options`.
    """
    gc.collect()
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(os.path.join(folder, "run.mdiag"), Options(**options))
        with recorder:
            function()
        assert recorder.problem is None
        return Seen(recorder.trace(), os.path.getsize(recorder.path))


def record_script(folder: Path, source: str, *options: str) -> Seen:
    """Records a script in a process of its own, from its first line on. It is ``folder/script.py``."""
    script, run = folder / "script.py", folder / "run.mdiag"
    script.write_text(textwrap.dedent(source))
    done = subprocess.run(
        [sys.executable, "-m", "memdiag", "profile", "-q", "--no-report", "-f", "-o", str(run), *options, str(script)],
        capture_output=True, text=True, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
    assert done.returncode == 0, done.stderr
    return Seen(load(run), run.stat().st_size, done.stdout)


def mark(size: int) -> torch.Tensor:
    """Memory of a size that nothing else has."""
    return torch.empty(size, dtype=torch.uint8)


def here() -> int:
    """The line of the caller."""
    return sys._getframe(1).f_lineno


class Seen:
    """A trace, and what tests ask of it.

    Attributes:
        trace: the run's.
        file_bytes: size of the run file.
        output: what the script printed, where it was one.
    """

    def __init__(self, trace: Trace, file_bytes: int = 0, output: str = "") -> None:
        self.trace, self.file_bytes, self.output = trace, file_bytes, output
        self.nest: Nesting = nesting(trace)
        self.life: Lives = lives(trace)
        self.line: Timeline = timeline(trace, "cpu")
        self._roles: Roles | None = None

    # ---- the whole

    @property
    def peak(self) -> int:
        """Bytes at the peak, above what was there before."""
        return self.line.peak_bytes - self.line.start_bytes

    @property
    def roles(self) -> Roles:
        if self._roles is None:
            self._roles = roles(self.trace)
        return self._roles

    @property
    def step_ends(self) -> list[int]:
        """Live bytes at each step's end, above what was there before."""
        return [int(b) - self.line.start_bytes for b in self.trace["steps"]["end_bytes"]]

    @property
    def steps(self) -> int:
        """How many steps ended."""
        return self.trace.rows("steps")

    def closes(self) -> None:
        """Asserts that the roles sum to the live bytes after each event."""
        sums = ledger(self.trace, self.roles, "cpu")
        assert (sums >= 0).all()
        assert np.array_equal(sums.sum(axis=0), self.line.live)

    def phases(self, step: int | None = None) -> list[str]:
        """Names of the phases in which something was allocated, in order; of one step, or of all.

        Those that only free are left out: where a name goes out of scope says little of what a loop does.
        """
        spans, found = self.trace["spans"], []
        born = self.nest.of(self.nest.phase, span_rows(self.trace, self.trace["allocations"]["span"]))
        for row in np.unique(born[born != NONE]):
            name = str(self.trace.text[spans["name"][row]])
            if (step is None or self._step(row) == step) and found[-1:] != [name]:
                found.append(name)
        return found

    # ---- one allocation

    def rows(self, size: int) -> list[int]:
        """Allocations of this size, in order of birth."""
        return [int(r) for r in np.flatnonzero(self.trace["allocations"]["bytes"] == size)]

    def row(self, size: int) -> int:
        found = self.rows(size)
        assert len(found) == 1, f"{len(found)} allocations of {size} bytes"
        return found[0]

    def phase(self, size: int) -> str:
        """The phase that the one allocation of this size was born in."""
        return self.phase_of(self.row(size))

    def phase_of(self, row: int) -> str:
        at = self.nest.phase[self._span(row)]
        return str(self.trace.text[self.trace["spans"]["name"][at]])

    def step(self, size: int) -> int:
        return self._step(self._span(self.row(size)))

    def line_of(self, size: int) -> int | None:
        """The number of the line that the one allocation of this size came from."""
        return self.line_number(int(self.trace["allocations"]["line"][self.row(size)]))

    def role(self, size: int) -> list[Role]:
        """The roles of the one allocation of this size, in order."""
        return self.role_of(self.row(size))

    def role_of(self, row: int) -> list[Role]:
        return [Role(r) for r in self.roles.role[self.roles.allocation == row]]

    # ---- saves

    def saves(self, size: int) -> list[int]:
        """Rows of the saves of the one allocation of this size."""
        return [int(r) for r in np.flatnonzero(self.trace["saves"]["allocation"] == self.row(size))]

    def ends(self, save: int) -> tuple[int, int, int]:
        """Events at which a save (by row) was packed, unpacked and released; NONE where it never was."""
        ends, number = self.trace["save_ends"], self.trace["saves"]["id"][save]
        at = np.flatnonzero(ends["save"] == number)
        packed = int(self.trace["saves"]["packed_event"][save])
        if not len(at):
            return packed, NONE, NONE
        return packed, int(ends["unpacked_event"][at[0]]), int(ends["released_event"][at[0]])

    def saved(self, step: int, *wanted: Role) -> Counter[str]:
        """Bytes of storages first saved in a step, by the module whose call saved them ("" outside), each once.

        Args:
            wanted: only of these roles; saved and recomputed activations where none is given.
        """
        wanted = wanted or (Role.SAVED_ACTIVATIONS, Role.RECOMPUTED_ACTIVATIONS)
        spans, saves = self.trace["spans"], self.trace["saves"]
        found: Counter[str] = Counter()
        seen: set[int] = set()
        for row, span in enumerate(span_rows(self.trace, saves["span"])):
            allocation = int(saves["allocation"][row])
            if allocation == NONE or allocation in seen or self._step(span) != step:
                continue
            seen.add(allocation)
            if self.role_of(allocation)[0] not in wanted:
                continue
            module = self.nest.module[span]
            path = "" if module == NONE else self.trace.text[spans["name"][module]]
            found[path] += int(self.trace["allocations"]["bytes"][allocation])
        return found

    # ---- text

    def line_number(self, text: int) -> int | None:
        line = self.trace.string(text)
        return None if line is None else int(line.rpartition(":")[2])

    def file_of(self, text: int) -> str | None:
        line = self.trace.string(text)
        return None if line is None else os.path.basename(line.rpartition(":")[0])

    def spans(self, kind: Kind, name: str | None = None) -> list[int]:
        """Rows of the spans of a kind, and of a name."""
        spans = self.trace["spans"]
        return [int(r) for r in np.flatnonzero(spans["kind"] == kind)
                if name is None or self.trace.text[spans["name"][r]] == name]

    def in_phase(self, event: int) -> str:
        """The phase around an event; "other" where it lies in none."""
        spans = self.trace["spans"]
        around = [r for r in self.spans(Kind.PHASE)
                  if spans["start_event"][r] <= event < spans["end_event"][r]]
        return str(self.trace.text[spans["name"][around[0]]]) if around else Phase.OTHER.label

    def _span(self, row: int) -> int:
        span = int(span_rows(self.trace, self.trace["allocations"]["span"][[row]])[0])
        assert span != NONE, "the allocation was there before the recording"
        return span

    def _step(self, span: int) -> int:
        at = self.nest.step[span]
        return NONE if at == NONE else int(self.trace.text[self.trace["spans"]["name"][at]])


# --- models ---------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A transformer block as written by hand: layer norm, attention, layer norm, MLP, residuals."""

    def __init__(self, width: int = 16, heads: int = 2, fused: bool = True) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.act, self.fc2 = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.proj(self.attention(self.qkv(self.ln1(x))))
        return x + self.fc2(self.act(self.fc1(self.ln2(x))))

    def attention(self, qkv: torch.Tensor) -> torch.Tensor:
        batch, length, width = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in qkv.split(width, dim=2))
        if self.fused:
            out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) * (width // self.heads) ** -0.5
            out = scores.softmax(dim=-1) @ v
        return out.transpose(1, 2).reshape(batch, length, width)


class GPT(nn.Module):
    def __init__(self, vocabulary: int = 50, width: int = 16, blocks: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(blocks)])
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(tokens)))


class Last(nn.Module):
    """An LSTM and a layer on its last output."""

    def __init__(self, features: int = 6, hidden: int = 8) -> None:
        super().__init__()
        self.rnn = nn.LSTM(features, hidden, num_layers=2, batch_first=True)
        self.fc = nn.Linear(hidden, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.rnn(x)[0][:, -1])


def mlp(width: int = 32) -> nn.Module:
    return nn.Sequential(nn.Linear(20, width), nn.ReLU(), nn.Linear(width, 4))


def convnet() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
                         nn.Linear(8 * 4 * 4, 4))
