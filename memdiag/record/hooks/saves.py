"""Tensors that autograd keeps for backward: when they are packed, unpacked and let go."""

from __future__ import annotations

import functools
import re
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from time import time_ns
from typing import Any, TypeVar

import torch
from torch.autograd.graph import get_gradient_edge
from torch.utils import checkpoint

from memdiag.record.facts import Saved, SaveTimes, device_name, storage_of
from memdiag.record.frames import user_line
from memdiag.record.marks import SAVE, Marks
from memdiag.record.patch import replaced

_autograd: Any = torch._C._autograd
_sequence_number: Callable[[], int] = _autograd._get_sequence_nr
_NO_OVERRIDES: Any = torch._C.DisableTorchFunction
F = TypeVar("F", bound=Callable[..., Any])


def not_the_scripts(pack: F) -> F:
    """Marks the first of a pair of saved-tensor hooks as none of the script's.

    From PyTorch 2.14 on, a selective checkpoint looks for the script's hooks around it: it warns where it finds some,
    or calls them for what it keeps. It passes over those that have these attributes, to the ones beneath, which are
    none here: ours are the outermost, or run where the script's would not.
    """
    marked: Any = pack
    marked._checkpoint_internal, marked._user_hooks = True, None
    return pack


class Saves:
    """One pair of saved-tensor hooks around the whole run.

    Known limitations: only the innermost hooks run, so what happens inside a checkpointed region, or under
    ``save_on_cpu`` of the user's, is not seen here.

    Args:
        forbidden: called where torch.func, or the script, forbids hooks.

    Attributes:
        recording: whether tensors are noted at all.
        resting: the hooks are off for a while.
        suspended: how often the hooks had to be taken off, for torch.func and its like.
        light: note only when and where, not what.
        count: tensors packed so far, in full recording.
    """

    def __init__(self, marks: Marks, active: Callable[[], bool], forbidden: Callable[[], None]) -> None:
        self._marks = marks
        self.active, self._forbidden = active, forbidden
        self._installed = False
        self._above = 0  # pairs of the script's own, inside ours
        self._undo: list[Callable[[], None]] = []
        self.suspended = 0
        self.recording = self.light = self.resting = False
        self.times = SaveTimes()
        self._releases = _Releases()
        self.count = 0

    def start(self) -> None:
        self.recording = True
        if not self._undo:
            self._push()
            self._undo = [
                replaced(_autograd, "_saved_tensors_hooks_disable", self._watch_disable),
                replaced(_autograd, "_saved_tensors_hooks_enable", self._watch_enable),
                replaced(_autograd.SavedTensor, "register_hooks", _watch_register),
                replaced(checkpoint._CheckpointFrame, "__init__", _watch_checkpoint),
            ]
            if not hasattr(_autograd, "_top_saved_tensors_default_hooks"):  # torch before 2.7: we have to count
                self._undo += [
                    replaced(_autograd, "_push_saved_tensors_default_hooks", self._count(1)),
                    replaced(_autograd, "_pop_saved_tensors_default_hooks", self._count(-1)),
                ]

    def rest(self, resting: bool) -> bool:
        """Takes the hooks off for a while, or puts them back. Returns whether they are as asked: where the script has
        hooks of its own, nothing changes."""
        if resting is not self.resting and self._undo:
            if resting:
                self.resting = self._pop()
            elif self._alone():
                self.resting = False  # or the push would count as the script's
                self._push()
        return resting is self.resting

    def stop(self) -> None:
        self.recording = self.resting = False
        while self._undo:
            self._undo.pop()()
        self._pop()

    def _push(self) -> None:
        self._installed = False
        _autograd._push_saved_tensors_default_hooks(self._pack, _unpack)
        self._installed = True

    def _pop(self) -> bool:
        """Takes our hooks off, if they are the innermost. Returns whether they were."""
        if not self._installed or not self._innermost():
            return False
        self._installed = False
        _autograd._pop_saved_tensors_default_hooks()
        return True

    def _innermost(self) -> bool:
        if not hasattr(_autograd, "_top_saved_tensors_default_hooks"):
            return self._above == 0
        top = _autograd._top_saved_tensors_default_hooks(True)
        return top is not None and top[0] == self._pack

    def _alone(self) -> bool:
        """Whether nobody has hooks, and we may."""
        if not _autograd._saved_tensors_hooks_is_enabled():
            return False
        if not hasattr(_autograd, "_top_saved_tensors_default_hooks"):
            return self._above == 0
        return _autograd._top_saved_tensors_default_hooks(True) is None

    def _count(self, change: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def watch(original: Callable[..., Any]) -> Callable[..., Any]:
            def push_or_pop(*hooks: Any) -> Any:
                if (self._installed or self.resting) and self.active():
                    self._above += change
                return original(*hooks)

            return push_or_pop

        return watch

    def _watch_disable(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def disable(message: str, *args: Any, **kwargs: Any) -> Any:
            # torch.func's transforms, and scripts, forbid hooks for a while, and would find ours.
            popped = self.active() and self._pop()
            if popped:
                self._forbidden()
            try:
                result = original(message, *args, **kwargs)
            except BaseException:
                if popped:
                    self._push()
                raise
            if popped:
                self.suspended += 1
            return result

        return disable

    def _watch_enable(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def enable() -> None:
            original()
            if self._undo and not self._installed and not self.resting and self.active():
                self._push()

        return enable

    def take(self) -> SaveTimes:
        """The times so far; they start anew."""
        taken, self.times = self.times, SaveTimes()
        taken.released = self._releases.take()
        return taken

    @not_the_scripts
    def _pack(self, tensor: torch.Tensor) -> Any:
        with _NO_OVERRIDES():
            return self._note(tensor)

    def _note(self, tensor: torch.Tensor) -> Any:
        found = storage_of(tensor) if self.recording else None
        if found is None:
            return Packed(tensor, None, -1)
        address, size, foreign = found
        if self.light:
            packed = Packed(tensor, None, -1)
            self.times.packed.append((time_ns(), address, packed.history is not None))
            return packed
        save = self.count
        self.count += 1
        entry = Saved(
            save, address, size, foreign, device_name(tensor.device), tuple(tensor.shape), tensor.stride(),
            str(tensor.dtype).removeprefix("torch."), tensor.nbytes, tensor.requires_grad, tensor.grad_fn is None,
            user_line(sys._getframe(2)),
        )
        with self._marks.range((SAVE, entry)):
            return self._releases.watch(Packed(tensor, self, save))


class Packed:
    """What autograd keeps in a tensor's stead.

    A tensor with a history is kept detached: an operator that saves its own result would otherwise keep itself
    alive for good if backward never runs. Autograd does not check for changes in place under hooks, so the version
    is kept and compared here.

    Attributes:
        tensor: what is kept; None where the script has hooks of its own on this one.
        history: name of the node that made the tensor, and which of its outputs it is; None for one without history.
        sequence: autograd's number of the node that keeps it: the newest one, save for a custom Function whose
            forward made nodes itself.
    """

    __slots__ = ("__weakref__", "history", "original", "owner", "save", "sequence", "tensor", "users", "version")

    def __init__(self, tensor: torch.Tensor, owner: Saves | None, save: int) -> None:
        node = tensor.grad_fn
        self.tensor: torch.Tensor | None = tensor if node is None else tensor.detach()
        self.version = -1 if tensor.is_inference() else tensor._version
        self.history = None if node is None else (node.name(), tensor.output_nr)
        # An operator that keeps its own result names itself, whatever is done to the result later; one that keeps an
        # argument names what made it last.
        self.sequence: int = _sequence_number() - 1
        own_result = node is not None and node._sequence_nr() == self.sequence
        self.original = None if own_result else weakref.ref(tensor)
        self.owner = owner
        self.save = save
        self.users: tuple[Callable[[Any], torch.Tensor], Any] | None = None  # the script's own unpack, and its packed


class _Release(weakref.ref["Packed"]):
    __slots__ = ("save",)
    save: int


class _Releases:
    """When packed tensors are let go.

    Most go while autograd's C++ code frees a graph. A signal that arrived in the meantime is raised by the first
    Python code that runs after it, and an exception inside a destructor is lost: a Ctrl-C would be. So what runs here
    is C code alone: one weak reference that appends itself to a list, and one that appends the time.
    """

    def __init__(self) -> None:
        self._gone: list[_Release] = []
        self._times: list[int] = []
        self._tick = partial(next, map(self._times.append, iter(time_ns, -1)))
        self._watched: dict[int, tuple[_Release, weakref.ref[Packed]]] = {}

    def watch(self, packed: Packed) -> Packed:
        release = _Release(packed, self._gone.append)
        release.save = packed.save
        self._watched[packed.save] = release, weakref.ref(packed, self._tick)
        return packed

    def take(self) -> list[tuple[int, int]]:
        """(save, time) of those that went since the last time."""
        number = min(len(self._gone), len(self._times))
        taken = [(release.save, time) for release, time in zip(self._gone[:number], self._times[:number], strict=True)]
        del self._gone[:number], self._times[:number]
        for save, _ in taken:
            del self._watched[save]
        return taken


def _unpack(packed: Packed) -> torch.Tensor:
    if packed.owner is not None:
        packed.owner.times.unpacked.append((packed.save, time_ns()))
    if packed.users is not None:
        unpack, kept = packed.users
        return unpack(kept)
    tensor = packed.tensor
    assert tensor is not None
    if packed.version >= 0 and tensor._version != packed.version:
        raise RuntimeError(_changed_in_place(packed, tensor))
    return tensor


def _watch_register(original: Callable[..., Any]) -> Callable[..., Any]:
    def register_hooks(saved: Any, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> None:
        """Hooks of the script's own on one saved tensor: autograd allows one pair, and ours is there."""
        try:
            original(saved, pack, unpack)
        except RuntimeError:
            packed = getattr(saved, "data", None)  # torch before 2.9 does not show it
            if not isinstance(packed, Packed) or packed.tensor is None:
                raise
            packed.users, packed.tensor = (unpack, pack(packed.tensor)), None

    return register_hooks


def _watch_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    def begin(frame: Any, recompute_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        original(frame, _as_one(recompute_fn), *args, **kwargs)

    return begin


def _as_one(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a checkpoint, for when it runs again.

    Under hooks autograd makes a variable of its own of each tensor that it unpacks. Arguments that were one tensor, as
    keys and values of attention are, must be one again: code that asks ``key is value`` would go another way.
    """

    @functools.wraps(forward)
    def again(*args: Any) -> Any:
        seen: dict[tuple[Any, ...], torch.Tensor] = {}
        return forward(*(_first(arg, seen) if isinstance(arg, torch.Tensor) else arg for arg in args))

    return again


def _first(tensor: torch.Tensor, seen: dict[tuple[Any, ...], torch.Tensor]) -> torch.Tensor:
    """The first of the tensors that are the same variable."""
    with _NO_OVERRIDES():
        found = storage_of(tensor) if tensor.requires_grad else None
        if found is None:
            return tensor  # without a gradient autograd hands out the very tensor that was kept
        first = seen.setdefault((found[0], tensor.storage_offset(), tensor.shape, tensor.stride()), tensor)
        same = tensor.grad_fn is first.grad_fn and tensor.output_nr == first.output_nr
        if tensor.is_leaf and first is not tensor:
            same = get_gradient_edge(tensor) == get_gradient_edge(first)
        return first if same else tensor


def _changed_in_place(packed: Packed, tensor: torch.Tensor) -> str:
    """What autograd would have said, in the words of the PyTorch that runs."""
    example, name, shape, kind = _wording()
    original = None if packed.original is None else packed.original()
    if original is not None and original.grad_fn is not None:
        packed.history = original.grad_fn.name(), original.output_nr
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
            torch.autograd.backward(changed.sum())
        except RuntimeError as error:
            said.append(str(error))

    thread = threading.Thread(target=provoke)
    thread.start()
    thread.join()
    name = re.search(r"which is output 0 of (\w+)", said[0])
    return said[0], name[1] if name else "", "[3]", "torch.FloatTensor"
