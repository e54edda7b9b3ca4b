"""Plans put onto live models, which train as they did.

The other side of each comparison is PyTorch itself: the bare model, or a checkpoint written by hand.
"""

from __future__ import annotations

import copy
import gc
import inspect
import io
import json
import pickle
import random
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from planned import MODELS, random_plan
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import memdiag
from memdiag.errors import MemdiagError
from memdiag.runfile import MAGIC

MM = ["aten::mm", "aten.addmm.default"]


class Block(nn.Module):
    def __init__(self, width: int = 8, dropout: float = 0.5) -> None:
        super().__init__()
        self.inside, self.outside, self.drop = nn.Linear(width, width), nn.Linear(width, width), nn.Dropout(dropout)
        self.calls = 0

    def forward(self, x: torch.Tensor, debug: float = 1.0) -> torch.Tensor:
        if not torch.compiler.is_compiling():  # a checkpoint that writes to attributes is not compiled whole
            self.calls += 1
        return x + self.drop(self.outside(F.gelu(self.inside(x)))) * debug


class Net(nn.Module):
    """Blocks in a chain, and blocks that its own code runs."""

    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__()
        self.chain = nn.Sequential(*(Block(dropout=dropout) for _ in range(4)))
        self.loop = nn.ModuleList(Block(dropout=dropout) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.chain(x)
        for block in self.loop:
            x = block(x, debug=2.0)  # an argument of checkpoint() is named so too
        return x


def net(dropout: float = 0.5) -> Net:
    torch.manual_seed(0)
    return Net(dropout)


def region(*modules: str, keep: tuple[str, ...] | list[str] = ()) -> dict[str, Any]:
    return {"modules": list(modules), "kind": "selective" if keep else "full", "keep": list(keep)}


def plan(*regions: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"schema_version": 1, "plans": [{"name": "none", "regions": []}, {"regions": list(regions)}], "chosen": 1,
            **more}


def trained(model: nn.Module, run: nn.Module | None = None) -> dict[str, Any]:
    """What two steps of training come to: losses, gradients, parameters, random state."""
    torch.manual_seed(1)
    optimizer, losses = torch.optim.AdamW(model.parameters()), []
    for _ in range(2):
        optimizer.zero_grad()
        losses.append((model if run is None else run)(torch.randn(5, 8)).square().mean())
        losses[-1].backward()
        optimizer.step()
    return {"losses": losses, "gradients": [one.grad for one in model.parameters()],
            "parameters": list(model.parameters()), "random": torch.get_rng_state()}


def assert_same(found: Any, bare: Any) -> None:
    torch.testing.assert_close(found, bare, rtol=0, atol=0)


def calls(model: nn.Module) -> dict[str, int]:
    return {name: module.calls for name, module in model.named_modules() if isinstance(module, Block)}


PLANS: dict[str, Any] = {
    "modules": ["chain.0", "loop.1", "loop.2.drop"],
    "whole": [""],
    "run": plan(region("chain.0", "chain.1"), region("chain.2"), region("loop.0")),
    "runs": plan(region("chain.2", "chain.3"), region("chain.0", "chain.1")),
    "selective": plan(region("chain.1", keep=MM), region("loop.0", keep=MM)),
    "selective run": plan(region("chain.1", "chain.2", keep=MM)),
}


class TestTraining:
    @pytest.mark.parametrize("which", PLANS)
    def test_it_is_as_without_a_plan(self, which: str) -> None:
        bare, model = net(), net()
        memdiag.apply_plan(model, PLANS[which])
        assert_same(trained(model), trained(bare))
        # AND blocks really ran again
        assert sum(calls(model).values()) > sum(calls(bare).values()) or which == "modules"

    def test_regions_run_twice_and_nothing_else(self) -> None:
        model = net()
        memdiag.apply_plan(model, PLANS["run"])
        trained(model)
        twice = {"chain.0", "chain.1", "chain.2", "loop.0"}
        assert calls(model) == {name: 4 if name in twice else 2 for name in calls(model)}

    @pytest.mark.parametrize("name", [name for name in MODELS if name != "resnet"])  # batch norm counts twice
    def test_models_of_many_shapes(self, name: str) -> None:
        found = []
        for planned in (False, True):
            torch.manual_seed(0)
            make, batch = MODELS[name]
            model = make()
            if planned:
                paths = [path for path, module in model.named_modules()
                         if path and type(module).forward is not nn.Module.forward]
                memdiag.apply_plan(model, random_plan(paths, seed=3))
            inputs, target = batch()
            loss = F.cross_entropy(model(*inputs).flatten(0, -2), target)
            loss.backward()
            found.append([loss, [one.grad for one in model.parameters()], torch.get_rng_state()])
        assert_same(found[1], found[0])

    @pytest.mark.parametrize("which", PLANS)
    def test_without_gradients_it_is_a_plain_call(self, which: str, monkeypatch: pytest.MonkeyPatch) -> None:
        model = net()
        memdiag.apply_plan(model, PLANS[which])
        monkeypatch.setattr("memdiag.apply.regions.checkpoint", None)
        with torch.no_grad():
            model(torch.randn(5, 8))
        assert set(calls(model).values()) == {1}


class Counts(TorchDispatchMode):
    """How often operators were called."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[Any, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[func] = self.found.get(func, 0) + 1
        return func(*args, **(kwargs or {}))


class TestKeep:
    @pytest.mark.parametrize("modules", [["chain.1"], ["chain.1", "chain.2"]])
    def test_what_is_kept_is_not_computed_again(self, modules: list[str]) -> None:
        # GIVEN the number of matrix products of a bare step
        def products(*regions: dict[str, Any], of: Any = lambda model: model) -> int:
            model = net()
            memdiag.apply_plan(model, plan(*regions))
            with Counts() as counts:
                of(model)(torch.randn(5, 8)).sum().backward()
            return counts.found[torch.ops.aten.addmm.default]

        # THEN a full region has its own once more, a selective one and its copies none
        assert products(region(*modules)) == products() + 2 * len(modules)
        for of in (lambda model: model, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))):
            assert products(region(*modules, keep=MM), of=of) == products()

    def test_it_is_what_a_context_written_by_hand_keeps(self) -> None:
        def saved(selective: Any, model: nn.Module) -> int:
            tensors: dict[int, weakref.ref[Any]] = {}
            y = selective(torch.randn(5, 8, requires_grad=True))
            gc.collect()
            for one in gc.get_objects():
                if isinstance(one, torch.Tensor):
                    tensors[one.untyped_storage().data_ptr()] = weakref.ref(one)
            del y
            return len(tensors)

        block = Block()
        context = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
        by_hand = saved(lambda x: checkpoint(block, x, use_reentrant=False, context_fn=context), block)
        memdiag.apply_plan(block, plan(region("", keep=["aten::addmm"])))
        assert saved(block, block) == by_hand

    @pytest.mark.parametrize(("keep", "why"), [
        ("aten::mmm", "no such operator"), ("mm", "no such operator"), ("aten::mm.nothing", "no such operator"),
        ("aten::linear", "made of other operators"), ("aten::bernoulli_.float", "writes to its arguments"),
        ("aten::native_dropout", "random")])
    def test_what_cannot_be_kept_is_refused(self, keep: str, why: str) -> None:
        model = net()
        with pytest.raises(MemdiagError, match=why):
            memdiag.apply_plan(model, plan(region("chain.0"), region("loop.0", keep=[keep])))
        assert "forward" not in vars(model.chain[0])

    @pytest.mark.parametrize("dropout", [0.0, 0.5])
    def test_attention_is_kept_unless_it_drops_out(self, dropout: float) -> None:
        # GIVEN an attention that drops out by itself, as those of accelerators do
        name = f"memdiag_test::attention_{int(10 * dropout)}"  # once each: PyTorch does not tell two of a name apart

        @torch.library.custom_op(name, mutates_args=())
        def attention(x: torch.Tensor, dropout_p: float = 0.0) -> torch.Tensor:
            return x.clone() if not dropout_p else F.dropout(x, dropout_p)

        attention.register_autograd(lambda context, gradient: (gradient, None))

        class Attends(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return F.dropout(attention(x, dropout) * x).sin()

        model, x = Attends(), torch.randn(100, requires_grad=True)
        torch.manual_seed(0)
        bare, = torch.autograd.grad(model(x).sum(), x)
        memdiag.apply_plan(model, plan(region("", keep=[name])))
        torch.manual_seed(0)
        if dropout:
            with pytest.raises(MemdiagError, match="cannot be kept with dropout"):
                model(x)
        else:
            assert_same(torch.autograd.grad(model(x).sum(), x)[0], bare)


class TestModel:
    """It stays what it was to those who use it."""

    def test_names_keys_and_classes(self) -> None:
        bare, model = net(), net()
        memdiag.apply_plan(model, PLANS["run"])
        assert list(model.state_dict()) == list(bare.state_dict())
        assert [(name, type(module)) for name, module in model.named_modules()] == [
            (name, type(module)) for name, module in bare.named_modules()]
        model.load_state_dict(bare.state_dict())

    def test_hooks_fire_as_on_a_checkpoint_written_by_hand(self) -> None:
        def fired(by_hand: bool) -> list[str]:
            seen: list[str] = []
            model = net()
            for name in ("chain.1", "chain.1.inside"):
                module = model.get_submodule(name)
                module.register_forward_pre_hook(lambda *_, name=name: seen.append(f"before {name}"))
                module.register_forward_hook(lambda *_, name=name: seen.append(f"after {name}"))
                module.register_full_backward_hook(lambda *_, name=name: seen.append(f"backward {name}"))
            if by_hand:
                model.chain[1].forward = partial(  # type: ignore[method-assign]
                    checkpoint, partial(Block.forward, model.chain[1]), use_reentrant=False)
            else:
                memdiag.apply_plan(model, ["chain.1"])
            model(torch.randn(5, 8)).sum().backward()
            return seen

        assert fired(False) == fired(True)
        assert fired(False).count("before chain.1") == fired(False).count("after chain.1") == 1

    @pytest.mark.parametrize("how", ["deepcopy", "torch.save"])
    @pytest.mark.parametrize("which", PLANS)
    def test_a_copy_checkpoints_its_own_modules(self, how: str, which: str) -> None:
        bare, model = trained(net()), net()
        memdiag.apply_plan(model, PLANS[which])
        if how == "deepcopy":
            other = copy.deepcopy(model)
        else:
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            other = torch.load(file, weights_only=False)
        # GIVEN that the first one is spoilt, and gone
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(torch.nan)
        before = calls(model)
        del model
        assert_same(trained(other), bare)
        assert sum(calls(other).values()) > 2 * len(before) or which == "modules"

    def test_it_goes_when_it_is_dropped(self) -> None:
        model = net()
        memdiag.apply_plan(model, PLANS["run"])
        trained(model)
        modules = [weakref.ref(module) for module in model.modules()]
        gc.disable()
        try:
            del model
            assert not any(module() for module in modules)
        finally:
            gc.enable()

    def test_a_forward_that_it_had_is_run_and_comes_back(self) -> None:
        model = net()
        block = model.chain[1]
        own = partial(Block.forward, block, debug=3.0)
        block.forward = own  # type: ignore[method-assign]
        bare = trained(copy.deepcopy(model))
        applied = memdiag.apply_plan(model, ["chain.1"])
        assert_same(trained(model), bare)
        applied.undo()
        assert vars(block)["forward"] is own

    @pytest.mark.parametrize("which", PLANS)
    def test_undo(self, which: str) -> None:
        model, bare = net(), trained(net())
        applied = memdiag.apply_plan(model, PLANS[which])
        applied.undo()
        applied.undo()
        assert not any("forward" in vars(module) for module in model.modules())
        assert_same(trained(model), bare)
        assert set(calls(model).values()) == {2}
        memdiag.apply_plan(model, PLANS[which])

    def test_it_is_called_as_before(self) -> None:
        model, bare = net(), net()
        memdiag.apply_plan(model, ["chain.0", "loop.0"])
        for path in ("chain.0", "loop.0"):
            assert inspect.signature(model.get_submodule(path).forward) == inspect.signature(
                bare.get_submodule(path).forward)

    def test_undo_does_not_take_away_what_others_put_there(self) -> None:
        model = net()
        applied = memdiag.apply_plan(model, ["chain.0", "chain.1"])
        model.chain[1].forward = ours = partial(model.chain[1].forward, debug=3.0)  # type: ignore[method-assign]
        with pytest.raises(MemdiagError, match="forward of a Block was exchanged"):
            applied.undo()
        assert model.chain[1].forward is ours
        assert "forward" in vars(model.chain[0])

    def test_compiled(self) -> None:
        bare = trained(net(dropout=0.0))
        model = net(dropout=0.0)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        memdiag.apply_plan(model, plan(region("chain.0", "chain.1"), region("chain.2", keep=MM), region("loop.0")))
        assert_same(trained(model, compiled), bare)

    def test_compiled_and_run_before_the_plan_and_after_it(self) -> None:
        torch._dynamo.reset()
        model = net(dropout=0.0)
        compiled = torch.compile(model, backend="aot_eager")
        bare = trained(copy.deepcopy(model))
        compiled(torch.randn(5, 8)).sum().backward()
        model.zero_grad()
        applied = memdiag.apply_plan(model, PLANS["run"])
        graphs: list[Any] = []
        again = torch.compile(model, backend=lambda graph, inputs: graphs.append(graph) or graph)
        again(torch.randn(5, 8))
        assert "checkpoint" in str(graphs[0].graph)
        assert_same(trained(model, compiled), bare)
        applied.undo()
        again(torch.randn(5, 8))
        assert "checkpoint" not in str(graphs[1].graph)

    def test_distributed(self, tmp_path: Path) -> None:
        torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
        try:
            bare, model = net(), net()
            memdiag.apply_plan(model, PLANS["run"])
            wrap = nn.parallel.DistributedDataParallel
            found, expected = wrap(model), wrap(bare)
            assert_same(trained(model, found), trained(bare, expected))
            assert calls(model)["chain.0"] == 4
            with pytest.raises(MemdiagError, match="DistributedDataParallel in it"):
                memdiag.apply_plan(expected, [""])
            memdiag.apply_plan(expected, ["module.chain.0"])
        finally:
            torch.distributed.destroy_process_group()


class TestPlan:
    def test_from_a_file_or_what_it_holds(self, tmp_path: Path) -> None:
        path = tmp_path / "plan.json"
        path.write_text(json.dumps(plan(region("chain.0", "chain.1"), region("loop.0", keep=MM))))
        for given in (path, str(path), json.loads(path.read_text())):
            applied = memdiag.apply_plan(net(), given)
            assert [(one.modules, one.keep) for one in applied.regions] == [
                (("chain.0", "chain.1"), ()), (("loop.0",), tuple(MM))]

    @pytest.mark.parametrize(("given", "modules"), [
        (["chain.0-2"], ["chain.0", "chain.1", "chain.2"]), (["loop.*"], ["loop.0", "loop.1", "loop.2"]),
        (["chain.0,3.*side", "loop.1"], ["chain.0.inside", "chain.0.outside", "chain.3.inside", "chain.3.outside",
                                         "loop.1"])])
    def test_ranges_and_patterns_stand_for_a_region_each(self, given: list[str], modules: list[str]) -> None:
        applied = memdiag.apply_plan(net(), given)
        assert [one.modules for one in applied.regions] == [(path,) for path in modules]

    def test_one_without_regions(self) -> None:
        model = net()
        assert memdiag.apply_plan(model, plan()).regions == []
        assert_same(trained(model), trained(net()))

    def test_an_unsafe_region_is_refused_unless_allowed(self) -> None:
        unsafe = {"module": "chain.0", "verdict": "unsafe", "with": [],
                  "reasons": [{"text": "draws from random", "line": "net.py:7"}]}
        given = plan(region("chain.0"), region("chain.1"),
                     safety=[unsafe, {"module": "chain.1", "verdict": "safe", "with": [], "reasons": []}])
        with pytest.raises(MemdiagError, match=r"chain\.0: is unsafe .* draws from random \(net\.py:7\).*allow_unsafe"):
            memdiag.apply_plan(net(), given)
        assert len(memdiag.apply_plan(net(), given, allow_unsafe=["chain.0"]).regions) == 2

    @pytest.mark.parametrize(("given", "why"), [
        ({}, "is not a plan as"), ({"schema_version": 2, "whatever": 1}, "is of a newer memdiag"),
        ({"schema_version": 1, "verdict": {}}, "KeyError: 'chosen'"), ({**plan(), "chosen": 7}, "IndexError"),
        ({**plan(), "chosen": -1}, "chosen is -1"),
        ({**plan(), "chosen": None}, "none fits the budget"), (plan({"modules": [], "kind": "full"}), "is not a plan"),
        (plan({"modules": ["chain.0"], "kind": "half"}), "kind 'half'"),
        (plan({"modules": ["chain.0"], "kind": "selective", "keep": []}), "that keeps"),
        (plan({"modules": "chain.0", "kind": "full", "keep": []}), "is not a plan"),
        (3, "a plan is the path"), ([1], "a plan is the path"), ("chain.0", "No such file.*in a list")])
    def test_what_is_no_plan_is_refused(self, given: Any, why: str) -> None:
        with pytest.raises(MemdiagError, match=why):
            memdiag.apply_plan(net(), given)

    def test_a_run_file(self, tmp_path: Path) -> None:
        (tmp_path / "run.mdiag").write_bytes(MAGIC + bytes(range(256)))
        with pytest.raises(MemdiagError, match=r"run\.mdiag: is a run file; .*`memdiag plan .*run\.mdiag --json plan"):
            memdiag.apply_plan(net(), tmp_path / "run.mdiag")

    def test_one_of_another_model(self) -> None:
        # GIVEN a plan of which nothing is in the model THEN that is said
        of_another = plan(region("layers.0"), region("layers.1", "layers.2"))
        with pytest.raises(MemdiagError, match=r"of another model: this Net has none of its modules, such as "
                                               r"layers\.0; there is chain, chain\.0, chain\.0\.inside"):
            memdiag.apply_plan(net(), of_another)
        # AND not where some is, or all is under a wrapper
        for model, given in ((net(), plan(region("chain.0"), region("layers.0"))),
                             (nn.Sequential(net()), plan(region("chain.0"), region("loop.1")))):
            with pytest.raises(MemdiagError, match="the model has no such module"):
                memdiag.apply_plan(model, given)

    @pytest.mark.parametrize("text", ["", "{", "[1]", "\0"])
    def test_a_file_of_something_else(self, text: str, tmp_path: Path) -> None:
        (tmp_path / "plan.json").write_text(text)
        with pytest.raises(MemdiagError, match=r"plan\.json: is not a plan"):
            memdiag.apply_plan(net(), tmp_path / "plan.json")


class TestRefused:
    """Nothing is changed then."""

    @pytest.mark.parametrize(("given", "why"), [
        (["chain.9"], r"no such module; there is chain\.[0-3]"), (["chain.0.insid"], r"there is chain\.0\.inside"),
        (["chain.2-9"], r"chain\.4: the model has no such module; there is chain\.[0-3]"),
        (["stem.*"], r"stem\.\*: the model has no such module"),
        (["chain.0", "chain.0"], r"chain\.0: is in the plan twice"),
        (plan(region("chain.0"), region("chain.0", "chain.1")), r"chain\.0: is in the plan twice"),
        (["chain.0", "chain.0.inside"], r"chain\.0\.inside: is in chain\.0 too"),
        (["chain.0.inside", "chain.0"], r"chain\.0\.inside: is in chain\.0 too"),
        (["chain.0", ""], r"chain\.0: is in the whole model too"),
        (plan(region("chain.0", "chain.1"), region("chain.1.drop")), r"chain\.1\.drop: is in chain\.0, chain\.1 too"),
        (plan(region("chain"), region("chain.0", "chain.1")), r"chain\.0, chain\.1: is in chain too"),
        (["loop"], "has no forward, for a ModuleList only holds modules"),
        (plan(region("chain.0", "chain.2")), "do not follow each other in chain"),
        (plan(region("chain.1", "chain.0")), "do not follow each other in chain"),
        (plan(region("chain.0", "loop.0")), "are not children of one module")])
    def test_regions_that_do_not_go(self, given: Any, why: str) -> None:
        model = net()
        with pytest.raises(MemdiagError, match=why):
            memdiag.apply_plan(model, given)
        assert not any("forward" in vars(module) for module in model.modules())

    def test_one_module_under_two_names(self) -> None:
        model = nn.ModuleDict({"a": (shared := Block()), "b": shared})
        with pytest.raises(MemdiagError, match="a: is in b too"):
            memdiag.apply_plan(model, ["a", "b"])

    def test_a_second_plan(self) -> None:
        model = net()
        memdiag.apply_plan(model, ["chain.0"])
        with pytest.raises(MemdiagError, match="has a plan already"):
            memdiag.apply_plan(model, ["loop.0"])

    def test_a_chain_whose_forward_is_another(self) -> None:
        class Backwards(nn.Sequential):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                for module in reversed(self):
                    x = module(x)
                return x

        with pytest.raises(MemdiagError, match="called by code of the model's own"):
            memdiag.apply_plan(Backwards(Block(), Block()), plan(region("0", "1")))
        chain = nn.Sequential(Block(), Block())
        chain.forward = lambda x: x  # type: ignore[method-assign,assignment]
        with pytest.raises(MemdiagError, match="the forward of the model was exchanged"):
            memdiag.apply_plan(chain, plan(region("0", "1")))

    def test_scripted_and_copied_modules(self) -> None:
        traced = torch.jit.trace(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(2, 8))
        for model, path in ((nn.Sequential(traced), "0"), (nn.Sequential(traced), "0.0"), (traced, "")):
            with pytest.raises(MemdiagError, match="ScriptModule"):
                memdiag.apply_plan(model, [path])
        with pytest.raises(MemdiagError, match="DataParallel"):
            memdiag.apply_plan(nn.DataParallel(Block()), ["module"])

    def test_a_compiled_module_has_to_be_named_inside(self) -> None:
        model = nn.Sequential(torch.compile(Block(dropout=0.0), backend="aot_eager"))
        with pytest.raises(MemdiagError, match="_orig_mod"):
            memdiag.apply_plan(model, ["0"])
        bare = trained(copy.deepcopy(model))
        memdiag.apply_plan(model, ["0._orig_mod"])
        assert_same(trained(model), bare)

    @pytest.mark.parametrize("keep", [[], MM])
    def test_what_has_to_be_written_by_hand_is_said_and_does_the_same(self, keep: list[str]) -> None:
        # GIVEN modules that the model's own code runs
        model, bare = net(dropout=0.0), net(dropout=0.0)
        with pytest.raises(MemdiagError, match="which only you can put into one checkpoint") as refused:
            memdiag.apply_plan(model, plan(region("loop.1", "loop.2", keep=keep)))
        # WHEN the code of the message is run
        code, x = str(refused.value).partition("\n\n")[2], torch.randn(5, 8)
        scope: dict[str, Any] = {"model": model, "x": x}
        exec(code, scope)
        scope["x"].sum().backward()
        # THEN it comes to the same, and ran the modules twice
        bare.loop[2](bare.loop[1](x)).sum().backward()
        assert_same([one.grad for one in model.parameters()], [one.grad for one in bare.parameters()])
        assert (model.loop[1].calls, model.loop[2].calls, model.loop[0].calls) == (2, 2, 0)


def test_random_plans_onto_random_chains() -> None:
    for seed in range(20):
        choose = random.Random(seed)
        count, regions, at = choose.randint(2, 9), [], 0
        while at < count:
            length = choose.randint(1, 3)
            if choose.random() < 0.6 and at + length <= count:
                regions.append(region(*(str(at + n) for n in range(length)), keep=choose.choice(((), MM))))
            at += length
        choose.shuffle(regions)
        torch.manual_seed(seed)
        model = nn.Sequential(*(Block() for _ in range(count)))
        bare = copy.deepcopy(model)
        memdiag.apply_plan(model, plan(*regions))
        assert_same(trained(model), trained(bare))
        inside = {path for one in regions for path in one["modules"]}
        assert calls(model) == {str(n): 4 if str(n) in inside else 2 for n in range(count)}


class TestOtherModels:
    def test_regions_of_one_of_several_models_go_by_its_own_names(self) -> None:
        # GIVEN a plan of a script in which the model is the second one, a variable `student`
        model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4))
        assert [region.modules for region in memdiag.apply_plan(model, ["student.0"]).regions] == [("0",)]

    def test_those_of_two_are_refused(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for plan in (["student.0", "teacher.0"], ["student.0", "1"], ["student.7"]):
            with pytest.raises(MemdiagError, match="the model has no such module"):
                memdiag.apply_plan(model, plan)
