"""What stacks tell. The stacks here are short; the names in them are those of PyTorch's functions."""

from __future__ import annotations

import doctest
from itertools import groupby
from pathlib import Path

import pytest
import torch

from memdiag.snapshot import frames as frames_module
from memdiag.snapshot.data import Frame
from memdiag.snapshot.frames import Place, place, without_overload
from memdiag.snapshot.read import read_snapshot

LIB = "/env/lib/python3.12/site-packages/torch/"


def cpp(name: str, filename: str = "??") -> Frame:
    return {"name": name, "filename": filename, "line": 0}


def py(name: str, filename: str, line: int = 1) -> Frame:
    return {"name": name, "filename": filename, "line": line}


EMPTY = cpp("at::detail::empty_cuda(c10::ArrayRef<long>, c10::TensorOptions const&)")
ENGINE = cpp("torch::autograd::Engine::evaluate_function(std::shared_ptr<torch::autograd::GraphTask>&)")
MUL = cpp("at::_ops::mul_Tensor::call(at::Tensor const&, at::Tensor const&)")
CALL = py("_call_impl", LIB + "nn/modules/module.py")


@pytest.mark.parametrize(("frames", "expected"), [
    ([], Place(None, None, False, False, None, None)),
    ([EMPTY, cpp("at::_ops::empty_memory_format::call(int)"), cpp("at::_ops::clone::redispatch(int)"),
      cpp("at::_ops::clone::call(int)"), cpp("PyNumber_Add"), py("forward", "/home/me/model.py", 7), CALL,
      py("<module>", "train.py", 99)],
     Place("aten::clone", "aten::empty", False, False, ("/home/me/model.py", 7, "forward"), None)),
    ([EMPTY, MUL, cpp("torch::autograd::generated::MulBackward0::apply(int)"), ENGINE],
     Place("aten::mul", "aten::mul", True, False, None, None)),
    ([py("_engine_run_backward", LIB + "autograd/graph.py"), py("backward", LIB + "autograd/__init__.py"),
      py("backward", LIB + "_tensor.py"), py("main", "train.py", 4)],
     Place(None, None, True, False, ("train.py", 4, "main"), None)),
    ([py("backward", "mine.py", 3)], Place(None, None, False, False, ("mine.py", 3, "backward"), None)),
    ([MUL, py("_init_group", LIB + "optim/adamw.py"), py("step", LIB + "optim/adamw.py"),
      py("wrapper", LIB + "optim/optimizer.py"), py("main", "train.py", 5)],
     Place("aten::mul", "aten::mul", False, True, ("train.py", 5, "main"), None)),
    ([py("step", "my_optimizer.py", 8), py("wrapper", LIB + "optim/optimizer.py"), py("main", "train.py")],
     Place(None, None, False, True, ("my_optimizer.py", 8, "step"), None)),
    ([py("zero_grad", LIB + "optim/optimizer.py"), py("main", "train.py", 2)],
     Place(None, None, False, False, ("train.py", 2, "main"), None)),
    ([py("step", LIB + "optim/lr_scheduler.py"), py("main", "train.py", 2)],
     Place(None, None, False, False, ("train.py", 2, "main"), None)),
    ([py("forward", "model.py", 3), CALL, py("closure", "train.py"), py("step", LIB + "optim/lbfgs.py")],
     Place(None, None, False, False, ("model.py", 3, "forward"), None)),
    ([py("forward", "model.py", 3), CALL, py("step", "loop.py")],
     Place(None, None, False, False, ("model.py", 3, "forward"), None)),
    ([cpp("c10::cuda::CUDACachingAllocator::Native::NativeCachingAllocator::allocate(unsigned long)"),
      cpp("at::cuda::getNewWorkspace()"), cpp("at::cuda::getCurrentCUDABlasHandle()"),
      cpp("at::_ops::bmm::call(at::Tensor const&, at::Tensor const&)")],
     Place("aten::bmm", "aten::bmm", False, False, None, "cuBLAS")),
    ([cpp("at::native::run_conv_plan(cudnnContext*)", "Conv_v8.cpp"), cpp("at::_ops::cudnn_convolution::call(int)")],
     Place("aten::cudnn_convolution", "aten::cudnn_convolution", False, False, None, "cuDNN")),
    ([EMPTY, cpp("at::cuda::getCurrentCUDABlasHandle()")], Place(None, None, False, False, None, None)),
    ([py("f", "<string>", 2), py("run", "/env/lib/python3.12/runpy.py")],
     Place(None, None, False, False, ("<string>", 2, "f"), None)),
])
def test_what_a_stack_tells(frames: list[Frame], expected: Place) -> None:
    # GIVEN a stack WHEN it is looked at THEN this is what it tells
    assert place(frames) == expected


def test_the_examples_hold() -> None:
    # GIVEN the examples in the docstrings WHEN they are run THEN they hold
    assert doctest.testmod(frames_module).failed == 0


def test_names_of_operators_are_told_from_those_of_overloads() -> None:
    # GIVEN all operators that PyTorch has
    right = wrong = 0
    for schema in torch._C._jit_get_all_schemas():
        if schema.name.startswith("aten::") and "Tensor" in str(schema):
            name, overload = schema.name[len("aten::"):], schema.overload_name
            if not overload:

                # THEN none without an overload loses part of its name
                assert without_overload(name) == name
                continue

            # AND of most others the overload is taken away
            found = without_overload(f"{name}_{overload}")
            right += found == name
            wrong += found != name
    assert right > 4 * wrong


@pytest.mark.data
def test_a_real_step_is_told_apart(data_folder: Path) -> None:
    # GIVEN one training step whose optimizer is hand-written
    found = read_snapshot(data_folder / "snapshots" / "lm_medium_train_ctx128.pickle")
    places = [place(event["frames"]) for event in found.traces[0] if event["action"] == "alloc"]

    # THEN every allocation has its operator, and all but those on backward's own thread a line of the script
    assert all(one.operator for one in places)
    first, *others = (one for one in places if one.backward)
    assert first.operator == "aten::ones_like"  # made by the script's thread
    assert first.line is not None
    assert not any(one.line for one in others)
    assert all(one.line for one in places if not one.backward)
    assert not any(one.backward and one.optimizer for one in places)

    # AND phases come one after another
    phases = ["backward" if one.backward else "optimizer" if one.optimizer else "forward" for one in places]
    assert [phase for phase, _ in groupby(phases)] == ["forward", "backward", "optimizer"]
    assert {one.line[2] for one in places if one.optimizer and one.line} == {"step"}


@pytest.mark.data
def test_workspace_of_a_real_attention(data_folder: Path) -> None:
    # GIVEN a run with two cuBLAS workspaces of 8,519,680 bytes WHEN its stacks are looked at THEN these are found
    found = read_snapshot(data_folder / "snapshots" / "attention_from_process_start.pickle")
    assert [event["size"] for event in found.traces[0]
            if event["action"] == "alloc" and place(event["frames"]).workspace == "cuBLAS"] == [8_519_680] * 2
