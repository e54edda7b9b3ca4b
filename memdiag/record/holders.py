"""Who keeps memory that nothing else explains: a walk from tensors back to the variables that hold them."""

from __future__ import annotations

import gc
import inspect
import sys
from dataclasses import dataclass
from types import BuiltinFunctionType, CellType, FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from memdiag.record.facts import all_tensors, plain, storage_of
from memdiag.record.frames import in_torch, locals_of, user_line

_MOST_LEVELS = 12
_MOST_WIDTH = 20_000  # objects looked at per level: what is held by more is held by something that all share


@dataclass(frozen=True)
class Holder:
    """The shortest chain found from a root to a tensor.

    Attributes:
        address: of the tensor's storage.
        root: the variable that the chain starts from, with the place it lives in.
        chain: from the root to the tensor, as the script would write it; indices of lists are shown as ``[*]``.
        line: of the running function that has the variable, where it is a local one.
        owners: types of the objects that the chain passes through.
        parameter: the tensor is an ``nn.Parameter``, or has no history and wants gradients.
    """

    address: int
    root: str
    chain: str
    line: str | None
    owners: tuple[type, ...]
    parameter: bool


@plain
def walk(addresses: set[int]) -> list[Holder]:
    """Finds who holds the storages at these addresses, among all that Python can reach.

    Storages without a Python object, or whose chain is cut by an extension type that does not show what it refers
    to, are not found.
    """
    found = _tensors(addresses)
    if not found:
        return []
    variables = _Variables()
    holders: list[Holder] = []
    # Breadth first, all tensors at once. An object is looked at again when it turns out to lead to further ones: what
    # many share, such as a module's variables, is first met on the shortest way to one of them.
    frontier: dict[int, Any] = {id(tensor): tensor for tensor, _ in found}
    reaching: dict[int, set[int]] = {id(tensor): {i} for i, (tensor, _) in enumerate(found)}
    reached: dict[int, set[int]] = {key: set(indices) for key, indices in reaching.items()}
    below: dict[tuple[int, int], Any] = {}  # one step down from an object towards a tensor
    done: set[int] = set()
    kept: list[Any] = [frontier]  # all that is known by its id: what goes leaves its id to something else
    ignored = {id(kept), id(found), id(frontier), id(below), id(variables.local), id(variables.shared), id(variables)}
    ignored.update(id(pair) for pair in found)
    for _ in range(_MOST_LEVELS):
        for key, thing in frontier.items():
            root = variables.of(thing)
            if root is not None:
                for index in reaching[key] - done:
                    holders.append(_holder(index, found[index], root, thing, below))
                done |= reaching[key]
        frontier = {key: thing for key, thing in frontier.items() if reaching[key] - done}
        if not frontier or len(frontier) > _MOST_WIDTH:
            break
        parents = gc.get_referrers(*frontier.values())
        kept += [parents, frontier]
        ignored.update((id(parents), id(frontier)))
        above: dict[int, Any] = {}
        fresh: dict[int, set[int]] = {}
        for parent in parents:
            key = id(parent)
            if key in ignored or isinstance(parent, FrameType) and parent.f_code.co_filename == __file__:
                continue
            for child in gc.get_referents(parent):
                if id(child) not in frontier:
                    continue
                for index in reaching[id(child)] - done - reached.get(key, set()):
                    reached.setdefault(key, set()).add(index)
                    fresh.setdefault(key, set()).add(index)
                    below[key, index] = child
                    above[key] = parent
        kept.append(above)
        ignored.add(id(above))
        frontier, reaching = above, fresh
    return holders


def _tensors(addresses: set[int]) -> list[tuple[torch.Tensor, int]]:
    """One tensor per address."""
    found: dict[int, torch.Tensor] = {}
    for thing in all_tensors():
        storage = storage_of(thing)
        if storage is not None and storage[0] in addresses:
            found.setdefault(storage[0], thing)
    return [(tensor, address) for address, tensor in found.items()]


class _Variables:
    """Where chains end: variables of running functions, and of modules."""

    def __init__(self) -> None:
        self.local: dict[int, tuple[str, str, str | None]] = {}
        self.shared: dict[int, str] = {}
        for name, module in list(sys.modules.items()):
            if isinstance(module, ModuleType):
                self.shared.setdefault(id(vars(module)), name)  # the script's own is there under two names
        for frame in sys._current_frames().values():
            running: FrameType | None = frame
            while running is not None:
                code = running.f_code
                if code.co_flags & inspect.CO_OPTIMIZED and code.co_filename != __file__ and not in_torch(code):
                    for name, value in locals_of(running).items():
                        if isinstance(value, (torch.Tensor, list, dict, tuple, set)) or hasattr(value, "__dict__"):
                            self.local.setdefault(id(value), (name, code.co_name, user_line(running)))
                running = running.f_back
        # A frame that refers to itself, and all that its callers' frames hold, would live until the next collection.
        del frame

    def of(self, thing: Any) -> tuple[str, str | None] | None:
        """The root that a thing is: ("loss in train()", line) or ("globals of __main__", None)."""
        if id(thing) in self.shared and isinstance(thing, dict):
            return f"a global of {self.shared[id(thing)]}", None
        found = self.local.get(id(thing))
        if found is not None:
            return f"{found[0]} in {found[1]}()", found[2]
        if isinstance(thing, type):
            return f"class {thing.__qualname__}", None
        return None


def _holder(
    index: int, found: tuple[torch.Tensor, int], root: tuple[str, str | None], top: Any,
    below: dict[tuple[int, int], Any],
) -> Holder:
    tensor, address = found
    text = "" if isinstance(top, dict) and root[0].startswith("a global") else root[0].split(" in ")[0]
    owners: list[type] = []
    thing, above = top, None
    while thing is not tensor:
        child = below[id(thing), index]
        text += _step(thing, child, not text, isinstance(thing, dict) and getattr(above, "__dict__", None) is thing)
        above = thing
        if not isinstance(thing, (dict, list, tuple, set)):
            owners.append(type(thing))
        thing = child
    parameter = isinstance(tensor, nn.Parameter) or tensor.is_leaf and tensor.requires_grad
    return Holder(address, root[0], text, root[1], tuple(owners), parameter)


def _step(parent: Any, child: Any, first: bool, attributes_of_one: bool) -> str:
    """How the script would get from a parent, which may be the attributes of something, to its child."""
    if isinstance(parent, dict):
        key = next((k for k, v in parent.items() if v is child), "?")
        return str(key) if first else f".{key}" if attributes_of_one else f"[{key!r}]" if isinstance(
            key, (str, int)) else "[*]"
    if isinstance(parent, (list, tuple, set)):
        return "[*]"
    if isinstance(parent, torch.Tensor):
        return ".grad" if parent.grad is child else "._base"
    if isinstance(parent, (FunctionType, BuiltinFunctionType)):
        return f"{'' if first else ' → '}{parent.__qualname__}()"
    if isinstance(parent, CellType):
        return " closure"
    attributes = getattr(parent, "__dict__", None)
    if attributes is child:
        return ""  # the next step names one of them
    if isinstance(attributes, dict):
        for key, value in attributes.items():
            if value is child:
                return f".{key}"
    return f" → {type(child).__name__}"
