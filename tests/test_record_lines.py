"""Source lines: each test notes the line at which it makes memory of a size of its own, and looks the size up."""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recording import Seen, here, record
from torch import nn
from torch.utils.checkpoint import checkpoint

from memdiag.trace import NONE


def lines_of(seen: Seen, floats: int, phase: str | None = None) -> set[int | None]:
    """Numbers of the lines that allocations of so many floats came from; all are in this file."""
    rows = [r for r in seen.rows(4 * floats) if phase is None or seen.phase_of(r) == phase]
    found = [int(seen.trace["allocations"]["line"][r]) for r in rows]
    assert rows
    assert {seen.file_of(line) for line in found} == {os.path.basename(__file__)}
    return {seen.line_number(line) for line in found}


class TestForward:
    @pytest.fixture(scope="class")
    def run(self) -> tuple[Seen, dict[str, int]]:
        at: dict[str, int] = {}

        def train() -> None:
            x = torch.randn(3, 5)
            at["matmul"] = here() + 1
            y = x @ torch.zeros(5, 101)
            at["method"] = here() + 1
            z = y.repeat(1, 2)
            at["index"] = here() + 1
            part = z[:, torch.arange(53)]
            at["mask"] = here() + 1
            few = z[z == 7.5]
            at["function"] = here() + 1
            padded = F.pad(part, (0, 54))
            at["reflected"] = here() + 1
            minus = 1 - padded
            at["in place"] = here() + 1
            minus += torch.ones(3, 107).exp_()
            at["set item"] = here() + 1
            minus[0] = torch.full((107,), 2.0)
            at["broken"] = here() + 2
            long = torch.cat(
                [minus, minus, minus, minus, x.new_zeros(3, 7)],
                dim=1,
            )
            at["inner"] = here() + 2
            long = (
                long.flatten().unsqueeze(0).expand(2, -1).contiguous()
            )
            del few, long

        return record(train), at

    @pytest.mark.parametrize(("what", "floats"), [
        ("matmul", 3 * 101), ("matmul", 5 * 101), ("method", 3 * 202), ("index", 3 * 53), ("function", 3 * 107),
        ("set item", 107), ("inner", 2 * 3 * (4 * 107 + 7)), ("broken", 3 * 7),
    ])
    def test_exact(self, run: tuple[Seen, dict[str, int]], what: str, floats: int) -> None:
        seen, at = run
        assert at[what] in lines_of(seen, floats)
        if what not in ("function",):  # others make memory of that size too
            assert lines_of(seen, floats) == {at[what]}

    def test_operators_with_a_number_first_and_in_place(self, run: tuple[Seen, dict[str, int]]) -> None:
        seen, at = run
        # pad, 1 - padded, ones
        assert lines_of(seen, 3 * 107) == {at["function"], at["reflected"], at["in place"]}

    def test_a_mask(self, run: tuple[Seen, dict[str, int]]) -> None:
        seen, at = run
        rows = seen.rows(3 * 202)  # one byte each
        assert {seen.line_number(int(seen.trace["allocations"]["line"][r])) for r in rows} == {at["mask"]}


class Inner(nn.Module):
    line = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Inner.line = here() + 1
        return x.mul(2).add(torch.ones(x.shape[-1]))


class Outer(nn.Module):
    call = attention = made = 0

    def __init__(self) -> None:
        super().__init__()
        Outer.made = here() + 1
        self.fc, self.inner, self.mha = nn.Linear(7, 127), Inner(), nn.MultiheadAttention(127, 1, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Outer.call = here() + 1
        y = self.fc(x)[None]
        Outer.attention = here() + 1
        z = self.mha(y, y, y, need_weights=False)[0]
        return self.inner(z[0])


class TestInModules:
    @pytest.fixture(scope="class")
    def run(self) -> tuple[Seen, dict[str, int]]:
        at: dict[str, int] = {}

        def train() -> None:
            model = Outer()
            optimizer = torch.optim.Adam(model.parameters(), foreach=False)
            for _ in range(2):
                loss = model(torch.randn(11, 7)).square().sum()
                loss.backward()
                at["step"] = here() + 1
                optimizer.step()

        return record(train), at

    def test_a_torch_module_has_the_line_that_called_it(self, run: tuple[Seen, dict[str, int]]) -> None:
        seen, _ = run
        assert Outer.call in lines_of(seen, 11 * 127, "forward")
        # Projections of query, key and value at once.
        assert lines_of(seen, 3 * 11 * 127, "forward") == {Outer.attention}

    def test_a_user_module_has_lines_of_its_own(self, run: tuple[Seen, dict[str, int]]) -> None:
        seen, _ = run
        assert Inner.line in lines_of(seen, 127, "forward")
        assert {Outer.call, Outer.attention, Inner.line} <= lines_of(seen, 11 * 127, "forward")

    def test_a_parameter_has_the_line_that_made_its_module(self, run: tuple[Seen, dict[str, int]]) -> None:
        seen, _ = run
        assert seen.line_number(int(seen.trace["allocations"]["line"][seen.rows(7 * 127 * 4)[0]])) == Outer.made

    def test_the_optimizer_has_the_line_of_its_step(self, run: tuple[Seen, dict[str, int]]) -> None:
        seen, at = run
        assert lines_of(seen, 7 * 127, "optimizer") == {at["step"]}

    def test_backward_has_the_line_of_the_forward(self, run: tuple[Seen, dict[str, int]]) -> None:
        seen, _ = run
        assert lines_of(seen, 7 * 127, "backward") == {Outer.call}  # the gradient of fc's weight
        assert lines_of(seen, 3 * 127 * 127, "backward") == {Outer.attention}

    def test_saves(self, run: tuple[Seen, dict[str, int]]) -> None:
        seen, _ = run
        saves = seen.trace["saves"]
        by_module: dict[str, set[int | None]] = {}
        for row in range(len(saves["id"])):
            names = [seen.trace.text[seen.trace["spans"]["name"][a]]
                     for a in seen.trace.ancestors(int(saves["span"][row])) if seen.trace["spans"]["kind"][a] == 2]
            by_module.setdefault(names[0] if names else "", set()).add(seen.line_number(int(saves["line"][row])))
        assert by_module["fc"] == {Outer.call}
        assert by_module["mha"] == {Outer.attention}


def test_code_that_runs_inside_backward_has_its_own_lines() -> None:
    at: dict[str, int] = {}

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            at["forward"] = here() + 1
            return x + torch.zeros(137)[0]

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            at["backward"] = here() + 1
            return gradient * torch.ones(139)[0]

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        at["hook"] = here() + 1
        return gradient + torch.zeros(149)[0]

    def region(x: torch.Tensor) -> torch.Tensor:
        at["region"] = here() + 1
        y = x.unsqueeze(0).repeat(151, 1)
        at["after"] = here() + 1
        return y.sin().cos().sum(0)

    def train() -> None:
        x = torch.randn(5, requires_grad=True)
        y = Twice.apply(x * 2)
        y.register_hook(hook)
        checkpoint(region, y * 3, use_reentrant=False).sum().backward()

    seen = record(train)
    for what, floats in (("forward", 137), ("backward", 139), ("hook", 149)):
        assert lines_of(seen, floats) == {at[what]}
    # Once in forward, and again; the sine too, and gradients of both in backward.
    assert lines_of(seen, 151 * 5, "forward") == {at["region"], at["after"]}
    assert lines_of(seen, 151 * 5, "backward") == {at["region"], at["after"]}


def test_what_is_made_by_a_library_has_the_line_that_called_it() -> None:
    # GIVEN a function of torch's that is written in Python, and one of the standard library's that calls back
    at: dict[str, int] = {}

    def train() -> None:
        at["python"] = here() + 1
        torch.nn.utils.parameters_to_vector([torch.ones(157), torch.ones(163)])
        at["map"] = here() + 1
        list(map(torch.zeros, [167]))

    seen = record(train)
    assert lines_of(seen, 157 + 163) == {at["python"]}
    assert lines_of(seen, 167) == {at["map"]}


def test_a_compiled_region_has_the_line_that_called_it() -> None:
    # GIVEN a function that torch.compile takes apart and puts together again, as generated code
    at: dict[str, int] = {}

    def train() -> None:
        torch._dynamo.reset()
        model = torch.compile(nn.Sequential(nn.Linear(29, 43, bias=False), nn.Tanh(), nn.GELU()), backend="aot_eager")
        for _ in range(2):
            at["call"] = here() + 1
            y = model(torch.ones(179, 29))
            at["loss"] = here() + 1
            loss = y.square().sum()
            loss.backward()

    # WHEN it is recorded
    seen = record(train)
    # THEN what it allocates, forward and backward, has the line of its call
    assert lines_of(seen, 179 * 43, "forward") == {at["call"], at["loss"]}
    assert lines_of(seen, 29 * 43, "backward") == {at["call"]}
    # AND no line is of code that was made up
    for table in ("allocations", "spans", "saves"):
        assert {seen.file_of(int(line)) for line in set(seen.trace[table]["line"])} <= {None, Path(__file__).name}


def test_what_the_compiler_wrote_to_a_file_is_no_line_of_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # GIVEN a file in the folder where torch.compile's code is kept, and code that has no file
    (tmp_path / "ab").mkdir()
    (tmp_path / "ab" / "cab.py").write_text("import torch\ndef make(size):\n    return torch.zeros(size)\n")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    written, made_up = runpy.run_path(str(tmp_path / "ab" / "cab.py")), {"torch": torch}
    exec(compile("make = lambda size: torch.zeros(size)", "<eval_with_key>.7", "exec"), made_up)
    at: dict[str, int] = {}

    def train() -> None:
        at["written"] = here() + 1
        written["make"](181)
        at["made up"] = here() + 1
        made_up["make"](191)

    # WHEN they allocate THEN the line is of who called them
    seen = record(train)
    assert lines_of(seen, 181) == {at["written"]}
    assert lines_of(seen, 191) == {at["made up"]}


def test_no_line_is_claimed_where_there_is_none() -> None:
    seen = record(lambda: torch.ones(173))
    line = int(seen.trace["allocations"]["line"][seen.row(173 * 4)])
    assert line != NONE  # this file's: the lambda's


