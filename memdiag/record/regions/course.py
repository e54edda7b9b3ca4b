"""What a forward does, operator by operator, and whether it does the same the second time."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memdiag.apply.operators import can_be_kept
from memdiag.record.facts import device_name, innermost, plain, storage_of
from memdiag.record.frames import user_line
from memdiag.record.hooks.saves import not_the_scripts
from memdiag.record.regions.calls import Calls
from memdiag.record.regions.digests import Digest, Digests
from memdiag.trace import model as m

_NO_DISPATCH: Any = torch._C._DisableTorchDispatch

_EMPTY = frozenset(("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty",
                    "aten::new_empty_strided", "aten::resize_", "aten::_resize_output_"))
_VALUE_READS = frozenset(("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero",
                          "aten::masked_select", "aten::_unique2", "aten::unique_dim"))
_LIFTED = "aten::lift_fresh"  # what torch.tensor has made of Python's numbers
_TORCHS = frozenset(("aten", "prims", "prim", "torchvision"))


class Op(NamedTuple):
    """One operator of a forward, or one tensor that autograd saved.

    Attributes:
        given: what it was called with: numbers and the like, and of tensors shape, type and device.
        reads: checksums of tensors that nothing in the forward had made, parameters and buffers apart.
        makes: checksums of what it made or wrote to.
    """

    name: str
    given: tuple[Any, ...]
    reads: tuple[Digest | None, ...]
    makes: tuple[Digest | None, ...]


Course = dict[tuple[str, int], list[Op]]
"""What each module call did itself, by its path and number."""


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what each operator of a forward reads and writes, and compares it with an earlier course.

    Where a difference comes from an earlier one, as what follows random noise does, only that earlier one is told.

    Args:
        calls: the module calls that are open.
        constant: addresses of parameters and buffers: name, and whether it is a buffer.
        first: the course to compare with.

    Attributes:
        course: what was done.
        written: of storages that were there before the forward and were written to, as bytes: the storage and what it
            held, for the way back.
        generators: random generators of the script's own that operators drew from, and their states before.
        making: operators that made something; those of them whose results a checkpoint cannot keep are
            ``not_keepable``: by what they are, by how they were called, or because what they made was written to.
    """

    supports_higher_order_operators = True

    def __init__(
        self, calls: Calls, constant: dict[int, tuple[str, bool]], first: Course | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls, self._constant, self._first = calls, constant, first
        self._digests = Digests()
        self._known: dict[tuple[Any, ...], Digest | None] = {}  # what was read that the forward had not made
        self._born: dict[int, int] = {}  # storages that the forward has made, and the operator that made them
        self._tainted: set[int] = set()  # storages that hold something else than the first time
        self._readers: dict[int, list[tuple[str, int]]] = {}  # calls that are over, by storages they need again
        self._broken: set[tuple[str, int]] = set()  # calls that have gone another way
        self._number = 0
        self.course: Course = {}
        self.written: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.generators: dict[int, tuple[torch.Generator, torch.Tensor]] = {}
        self.read: dict[int, tuple[weakref.ref[torch.Tensor], set[tuple[str, int]]]] = {}
        self._makers: dict[int, str] = {}  # operators, by the storages that they have made
        self.making: set[str] = set()
        self.not_keepable: set[str] = set()
        self.busy = False

    @property
    def number(self) -> int:
        """How many operators have run."""
        return self._number

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.busy or not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        frame = sys._getframe(1)
        before = self._before(func, args, kwargs, lambda: user_line(frame))
        result = func(*args, **kwargs)
        self._after(before, result)
        return result

    # --- one operator -------------------------------------------------------------------------------------------

    @plain
    def _before(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], line: Callable[[], str | None]
    ) -> _Running:
        self._number += 1
        name = str(func._schema.name)
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        for leaf in leaves:
            if isinstance(leaf, torch.Generator):
                self._draws(leaf, name, line)
        if name in _VALUE_READS or (
            name in ("aten::index", "aten::index_put_") and any(t.dtype is torch.bool for t in tensors[1:])
        ):
            self._calls.note(m.READS_VALUE, name, line())
        given = tuple(_told(leaf) for leaf in leaves)
        reads = tuple(self._read(tensor, name) for tensor in tensors)
        writes = [tensor for tensor in _written(func, args, kwargs) if storage_of(tensor) is not None]
        for tensor in writes:
            self._write(tensor, name, line)
        buffers = []
        for tensor in tensors:
            address = _address(tensor)
            if address in self._constant and self._constant[address][1] and not any(tensor is w for w in writes):
                buffers.append((self._constant[address][0], tensor, self._digest(tensor)))
        return _Running(name, given, reads, tensors, writes, buffers, line, can_be_kept(func, args, kwargs))

    @plain
    def _after(self, running: _Running, result: Any) -> None:
        given = set() if running.name == _LIFTED else {_address(tensor) for tensor in running.tensors}
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        fresh = [tensor for tensor in made if (at := _address(tensor)) is not None and at not in given]
        for tensor in fresh:
            address = _address(tensor)
            assert address is not None
            self._born[address] = self._number
            self._makers[address] = running.name
            self._readers.pop(address, None)
            self._tainted.discard(address)
        if fresh:
            self.making.add(running.name)
            if not running.keepable:
                self.not_keepable.add(running.name)
        for path, tensor, before in running.buffers:
            if self._digest(tensor) != before:
                self._calls.note(m.BUFFER, path, running.line())
        self._moves(running, fresh)
        changed = [*([] if running.name in _EMPTY else _meant(running.name, fresh)), *running.writes]
        if running.name.endswith(("resize_", "_resize_output_")):
            changed = []
        makes = tuple(self._digest(tensor) for tensor in changed)
        self._step(Op(running.name, running.given, running.reads, makes), running.tensors, [*fresh, *running.writes],
                   running.line)

    @not_the_scripts
    def saves(self, tensor: torch.Tensor) -> None:
        """Autograd saves a tensor for backward."""
        frame = sys._getframe(1)
        self.busy = True
        try:
            reads = (self._read(tensor, ""),)
            self._step(Op(m.SAVE, (_told(tensor),), reads, ()), [tensor], [], lambda: user_line(frame))
        finally:
            self.busy = False

    def _step(
        self, op: Op, given: list[torch.Tensor], made: list[torch.Tensor], line: Callable[[], str | None]
    ) -> None:
        key = self._calls.innermost
        mine = self.course.setdefault(key, [])
        mine.append(op)
        if self._first is None:
            return
        theirs = self._first.get(key, [])
        other = theirs[len(mine) - 1] if len(mine) <= len(theirs) else None
        tainted = any(_address(tensor) in self._tainted for tensor in given)
        differs = True
        if key in self._broken:
            pass
        elif other is None or other.name != op.name:
            self._broken.add(key)
            self._calls.note(m.OTHER_COURSE, op.name if other is None else f"{op.name}|{other.name}", line())
        elif other.given != op.given and not tainted:
            self._calls.note(m.OTHER_COURSE, op.name, line())
        elif other.reads != op.reads:
            self._calls.note(m.OTHER_VALUE, op.name, line())
        elif other == op:
            differs = False
        elif not tainted:
            known = op.name.split("::")[0] in _TORCHS and op.name != _LIFTED
            self._calls.note(m.ROUNDING if known else m.OTHER_VALUE, op.name, line())
        for tensor in made:
            address = _address(tensor)
            if address is not None:
                (self._tainted.add if differs else self._tainted.discard)(address)

    def ends(self) -> None:
        """The innermost call ends; its operators are all there."""
        key = self._calls.innermost
        if self._first is not None and key not in self._broken:
            missing = self._first.get(key, [])[len(self.course.get(key, [])):]
            if missing:
                self._calls.note(m.OTHER_COURSE, f"|{missing[0].name}", self._calls.line)

    # --- storages -----------------------------------------------------------------------------------------------

    def calls(self, path: str) -> None:
        """A module is about to be called."""
        line = self._calls.line
        self._step(Op(f"{m.CALL}{path}", (), (), ()), [], [], lambda: line)

    def begins(self, tensors: Iterable[torch.Tensor]) -> None:
        """A module call has begun, and is given tensors: a checkpoint keeps them."""
        for tensor in tensors:
            self._needed(tensor)

    def over(self, key: tuple[str, int], addresses: set[int]) -> None:
        """A module call is over that would need these again."""
        for address in addresses:
            self._readers.setdefault(address, []).append(key)

    def _needed(self, tensor: torch.Tensor) -> None:
        address = _address(tensor)
        if address is None:
            return
        born = self._born.get(address, -1)
        keys = self._calls.needs(address, born)
        if born < 0 and keys:  # it was there before the forward, and may be after it
            base = tensor if tensor._base is None else tensor._base
            known = self.read.get(address)
            if known is None or known[0]() is None:
                known = self.read[address] = weakref.ref(base), set()
            known[1].update(keys)

    def _read(self, tensor: torch.Tensor, name: str) -> Digest | None:
        """The checksum of a tensor that has not been seen in this forward; None for others."""
        self._needed(tensor)
        address = _address(tensor)
        if address is None or address in self._born or address in self._constant or name == _LIFTED:
            return None
        place = address, tensor.storage_offset(), tensor.shape, tensor._version
        if place not in self._known:
            self._known[place] = self._digest(tensor)
        return self._known[place]

    def _write(self, tensor: torch.Tensor, name: str, line: Callable[[], str | None]) -> None:
        address = _address(tensor)
        assert address is not None
        born = self._born.get(address, -1)
        if address in self._makers:
            self.not_keepable.add(self._makers[address])
        owner = self._constant.get(address)
        if owner is not None and owner[1]:
            self._calls.note(m.BUFFER, owner[0], line())
        elif name != _LIFTED:
            self._calls.note(m.WRITES, name if owner is None else f"{name}, on `{owner[0]}`,", line(), since=born)
        for key in self._readers.get(address, ()):
            self._calls.note_of(key, m.WRITTEN_LATER, name, line())
        if born < 0 and address not in self.written:
            storage = innermost(tensor).untyped_storage()
            with _NO_DISPATCH():
                flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                self.written[address] = flat, flat.clone()

    def _draws(self, generator: torch.Generator, name: str, line: Callable[[], str | None]) -> None:
        if any(generator is one for one in _default_generators()):
            return
        self._calls.note(m.GENERATOR, name, line())
        if id(generator) not in self.generators:
            self.generators[id(generator)] = generator, generator.get_state()

    def _moves(self, running: _Running, fresh: list[torch.Tensor]) -> None:
        for tensor in fresh:
            for source in running.tensors if running.name in ("aten::_to_copy", "aten::copy_") else ():
                if source.device != tensor.device:
                    self._calls.note(
                        m.MOVES, f"{device_name(source.device)} to {device_name(tensor.device)}", running.line())

    def _digest(self, tensor: torch.Tensor) -> Digest | None:
        self.busy = True
        try:
            with _NO_DISPATCH(), torch.no_grad():
                return self._digests.of(tensor)
        finally:
            self.busy = False

    def put_back(self) -> None:
        """What was there before the forward, and was written to, gets its values back."""
        with _NO_DISPATCH(), torch.no_grad():
            for flat, held in self.written.values():
                flat.copy_(held)
        for generator, state in self.generators.values():
            generator.set_state(state)


class _Running(NamedTuple):
    """An operator that is about to run; buffers with their names and checksums before."""

    name: str
    given: tuple[Any, ...]
    reads: tuple[Digest | None, ...]
    tensors: list[torch.Tensor]
    writes: list[torch.Tensor]
    buffers: list[tuple[str, torch.Tensor, Digest | None]]
    line: Callable[[], str | None]
    keepable: bool


def _address(tensor: torch.Tensor) -> int | None:
    found = storage_of(tensor)
    return None if found is None else found[0]


def _told(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.device
    if isinstance(leaf, float):
        return repr(leaf)
    return leaf if isinstance(leaf, (type(None), bool, int, str, torch.dtype, torch.device)) else type(leaf).__name__


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors that an operator writes to, by its schema."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _meant(name: str, fresh: list[torch.Tensor]) -> list[torch.Tensor]:
    """Those results of an operator that have values; others are room for its backward, filled or not."""
    if "scaled_dot_product" in name:
        return fresh[:2]
    return [tensor for place, tensor in enumerate(fresh) if not place or tensor.dtype is not torch.uint8]


def _default_generators() -> Iterator[torch.Generator]:
    yield torch.default_generator
    yield from torch.cuda.default_generators
