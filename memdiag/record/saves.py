"""Tensors that autograd keeps for backward: when they are packed, unpacked and let go."""

from __future__ import annotations

import re
import sys
import threading
from time import time_ns
from typing import Any

import torch

from memdiag.record.facts import Saved, SaveTimes, plain, storage_of
from memdiag.record.frames import user_line
from memdiag.record.marks import SAVE, Marks


class Saves:
    """One pair of saved-tensor hooks around the whole run.

    Known limitations: only the innermost hooks run, so what happens inside a checkpointed region, or under
    ``save_on_cpu`` of the user's, is not seen here.

    Attributes:
        recording: whether tensors are noted at all.
        light: note only when and where, not what.
        count: tensors packed so far, in full recording.
    """

    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self._hooks: Any = None
        self.recording = self.light = False
        self.times = SaveTimes()
        self.count = 0

    def start(self) -> None:
        self.recording = True
        if self._hooks is None:
            self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
            self._hooks.__enter__()

    def stop(self) -> None:
        self.recording = False
        if self._hooks is not None:
            self._hooks.__exit__()
            self._hooks = None

    def take(self) -> SaveTimes:
        """The times so far; they start anew."""
        taken, self.times = self.times, SaveTimes()
        return taken

    @plain
    def _pack(self, tensor: torch.Tensor) -> Any:
        found = storage_of(tensor) if self.recording else None
        if found is None:
            return _Packed(tensor, None, -1)
        address, size, foreign = found
        if self.light:
            self.times.packed.append((time_ns(), address))
            return _Packed(tensor, None, -1)
        save = self.count
        self.count += 1
        entry = Saved(
            save, address, size, foreign, str(tensor.device), tuple(tensor.shape), tensor.stride(),
            str(tensor.dtype).removeprefix("torch."), tensor.nbytes, tensor.requires_grad, tensor.grad_fn is None,
            user_line(sys._getframe(2)),
        )
        with self._marks.range((SAVE, entry)):
            return _Packed(tensor, self, save)


class _Packed:
    """What autograd keeps in a tensor's stead.

    A tensor with a history is kept detached: an operator that saves its own result would otherwise keep itself
    alive for good if backward never runs. Autograd does not check for changes in place under hooks, so the version
    is kept and compared here.
    """

    __slots__ = ("history", "owner", "save", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, owner: Saves | None, save: int) -> None:
        node = tensor.grad_fn
        self.tensor = tensor if node is None else tensor.detach()
        self.version = -1 if torch.is_inference(tensor) else tensor._version
        self.history = None if node is None else (node.name(), tensor.output_nr)
        self.owner = owner
        self.save = save

    def __del__(self) -> None:
        if self.owner is not None:
            self.owner.times.released.append((self.save, time_ns()))


def _unpack(packed: _Packed) -> torch.Tensor:
    tensor = packed.tensor
    if packed.version >= 0 and tensor._version != packed.version:
        raise RuntimeError(_changed_in_place(packed))
    if packed.owner is not None:
        packed.owner.times.unpacked.append((packed.save, time_ns()))
    return tensor


def _changed_in_place(packed: _Packed) -> str:
    """What autograd would have said, in the words of the PyTorch that runs."""
    example, name, shape, kind = _wording()
    tensor = packed.tensor
    if packed.history is None:
        example = example.replace(f", which is output 0 of {name},", "")
    else:
        node, output = packed.history
        # Versions differ in whether they print the node's suffix.
        node = node if name.startswith("ExpBackward") else re.sub(r"Backward\d*$", "", node)
        example = example.replace(f"output 0 of {name},", f"output {output} of {node},")
    return example.replace(f"[{kind} {shape}]", f"[{tensor.type()} {list(tensor.shape)}]").replace(
        "is at version 1; expected version 0", f"is at version {tensor._version}; expected version {packed.version}")


def _wording() -> tuple[str, str, str, str]:
    """The message for a known case: on a thread of its own, where no hooks are installed."""
    said: list[str] = []

    def provoke() -> None:
        changed = torch.ones(3, requires_grad=True).exp()
        changed.add_(1)
        try:
            changed.sum().backward()
        except RuntimeError as error:
            said.append(str(error))

    thread = threading.Thread(target=provoke)
    thread.start()
    thread.join()
    name = re.search(r"which is output 0 of (\w+)", said[0])
    return said[0], name[1] if name else "", "[3]", "torch.FloatTensor"
