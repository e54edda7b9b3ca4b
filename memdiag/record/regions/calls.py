"""Module calls of a forward that runs aside, and the facts about them."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from memdiag.apply.regions import is_chain
from memdiag.record.frames import in_torch, is_users
from memdiag.record.hooks.modules import unwrapped
from memdiag.record.regions.before import hooks_of, variables
from memdiag.record.regions.state import Reached, code_of, items_of, picture, reached
from memdiag.record.regions.statements import definition, forward_line, stores, uses, uses_of_local
from memdiag.record.stream import has_accelerator
from memdiag.trace import model as m

Key = tuple[str, int]
_cuda: Any = torch.cuda


class Fact(NamedTuple):
    """Something about a module call: ``call`` counts those of the module in its forward."""

    module: str
    call: int
    kind: str
    text: str | None
    line: str | None


class _Name(NamedTuple):
    """Of a piece of state: the kind of fact if it changes, its text, and what tells it from others of that text."""

    kind: str
    text: str
    of: int = 0


@dataclass
class _Open:
    module: nn.Module
    key: Key
    began: int  # the number of operators that had run before
    random: dict[str, Any]
    state: dict[_Name, Any]
    owners: dict[_Name, nn.Module | None]
    variables: list[Reached]
    given: list[tuple[str, Any]]
    devices: set[torch.device]
    needs: set[int] = field(default_factory=set)


class Calls:
    """The calls that are open, and what is known about all.

    Args:
        name_of: the path of a module.
    """

    def __init__(self, name_of: Callable[[nn.Module], str]) -> None:
        self._name_of = name_of
        self._open: list[_Open] = []
        self._count: Counter[str] = Counter()
        self._over: list[tuple[_Open, dict[_Name, Any]]] = []  # calls, and what was there when they were over
        self._variables: dict[nn.Module, list[Reached]] = {}
        self.facts: dict[Fact, None] = {}

    @property
    def line(self) -> str | None:
        """Of the forward of the innermost call that is the script's own."""
        return next((line for call in reversed(self._open) if (line := forward_line(call.module))), None)

    @property
    def innermost(self) -> Key:
        return self._open[-1].key if self._open else ("", 0)

    def note(self, kind: str, text: str | None, line: str | None, since: int | None = None) -> None:
        """A fact about all calls that are open; with ``since``, about those that began after operator ``since``."""
        for call in self._open:
            if since is None or since <= call.began:
                self.note_of(call.key, kind, text, line)

    def note_of(self, key: Key, kind: str, text: str | None, line: str | None) -> None:
        self.facts[Fact(*key, kind, text, line)] = None

    def needs(self, address: int, born: int) -> list[Key]:
        """The open calls that a storage was made before; they would need it again."""
        found = [call for call in self._open if born <= call.began]
        for call in found:
            call.needs.add(address)
        return [call.key for call in found]

    def begins(self, module: nn.Module, given: Any, devices: set[torch.device], operators: int) -> Key:
        path = self._name_of(module)
        key = path, self._count[path]
        self._count[path] += 1
        self.note_of(key, m.PROBED, None, None)
        if is_chain(module):
            self.note_of(key, m.CHAIN, None, None)
        if self._open and unwrapped(self._open[0].module) is module:
            self.note_of(key, m.WRAPPED, None, None)
        for hook in hooks_of(module):
            self._hook(hook)
        if module not in self._variables:
            self._variables[module] = variables(module)
        args, kwargs = given
        named = [*zip(_arguments(module, len(args)), args, strict=True), *kwargs.items()]
        # What a function that it is given has captured may be bound anew, as the variable of a loop is.
        captured = reached(_functions(tree_leaves(given)))
        call = _Open(
            module, key, operators, _random_states(), {}, {}, [*self._variables[module], *captured], named, devices)
        for name, owner, value in self._state(call):
            call.state[name], call.owners[name] = picture(value), owner
        self._open.append(call)
        return key

    def unwind(self, module: nn.Module) -> None:
        """Forgets calls inside one of a module that an exception ended, which the script has caught."""
        while self._open[-1].module is not module:
            self._open.pop()

    def ends(self, module: nn.Module) -> tuple[Key, set[int]]:
        """The innermost call ends: its key, and addresses of what it would need again."""
        call = self._open[-1]
        now, owners = {}, dict(call.owners)
        for name, owner, value in self._state(call):
            now[name] = picture(value)
            owners.setdefault(name, owner)
        for name in dict.fromkeys((*call.state, *now)):
            if name not in call.state or name not in now or call.state[name] != now[name]:
                where = self._where(name, owners[name])
                self.note_of(call.key, name.kind, name.text, where)
        self._compare_random(call)
        self._open.pop()
        call.given = [(name, value) for name, value in call.given if _may_change(value)]  # tensors may go
        kept = {name for name, _ in call.given}
        self._over.append((call, {
            name: value for name, value in now.items() if name.kind != m.ARGUMENT or name.text in kept}))
        if not self._open:
            self._changed_later(module)
        return call.key, call.needs

    def _changed_later(self, outermost: nn.Module) -> None:
        """The forward is over: what has changed since each call of it was."""
        pictures: dict[_Name, Any] = {}
        for call, then in self._over:
            for name, owner, value in self._state(call):
                if name.kind == m.ARGUMENT:
                    now = picture(value)  # each call has its own
                elif name not in pictures:
                    now = pictures[name] = picture(value)
                else:
                    now = pictures[name]
                if name in then and then[name] != now:
                    where = self._where(name, owner, outermost)
                    self.note_of(call.key, m.CHANGED_LATER, f"{name.kind} `{name.text}`", where)
        self._over.clear()

    # --- state --------------------------------------------------------------------------------------------------

    def _state(self, call: _Open) -> Iterator[tuple[_Name, nn.Module | None, Any]]:
        """What a call may leave changed, by kind and name."""
        for part in _may_be_changed(call.module):
            path = self._name_of(part)
            ignored = _of_torchs_hooks(part)
            for name, value in vars(part).items():
                if name in ("_buffers", "_parameters"):
                    for inner, tensor in value.items():
                        yield _Name(m.ATTRIBUTE, f"{path}.{inner}", id(part)), part, tensor
                elif name not in _HOOKS and name not in ignored:
                    yield _Name(m.ATTRIBUTE, f"{path}.{name}", id(part)), part, value
        for variable in call.variables:
            yield _Name(m.VARIABLE, variable.name, id(variable.scope)), None, variable.value()
        for name, value in call.given:
            yield _Name(m.ARGUMENT, name), call.module, value

    def _where(self, name: _Name, owner: nn.Module | None, outermost: nn.Module | None = None) -> str | None:
        """The line that changes something; where the outermost module is over, the last that does."""
        later = outermost is not None
        around = [module for module in (owner, *(call.module for call in reversed(self._open)), outermost)
                  if module is not None]
        if name.kind == m.ARGUMENT:
            found = uses_of_local(name.text, (f for f in code_of(type(around[0])) if f.__name__ == "forward"))
        else:
            label = name.text.rpartition(".")[2]
            functions = list(dict.fromkeys(
                f for module in (*around, *around[0].modules())
                for f in (*code_of(type(module)), *_functions(hooks_of(module)))))
            found = stores(label, functions)[-1 if later else 0:] or uses(label, functions)
        return found[0] if found else next((line for line in map(forward_line, around) if line is not None), None)

    def _hook(self, hook: Any) -> None:
        """A hook of the script's own runs with each call of what is around its module."""
        for function in _functions([hook]):
            if is_users(function.__code__.co_filename):
                self.note(m.HOOK, function.__name__, definition(function))

    # --- random states ------------------------------------------------------------------------------------------

    def _compare_random(self, call: _Open) -> None:
        now = _random_states()
        for name, before in call.random.items():
            if now.get(name) == before:
                continue
            if name in _OTHERS:
                self.note_of(call.key, _OTHERS[name], None, self._draws(call.module, name))
            elif name == "cpu" or torch.device(name) in call.devices:
                self.note_of(call.key, m.RANDOM, name, None)
            else:
                self.note_of(call.key, m.RANDOM_ELSEWHERE, name, forward_line(call.module))

    def _draws(self, module: nn.Module, source: str) -> str | None:
        """The line that draws from Python's or NumPy's own random state."""
        for part in module.modules():
            functions = (*code_of(type(part)), *_functions(hooks_of(part)))
            names = {one.name for one in self._reached(part) if _is_source(one.value(), source)}
            for name in names:
                if found := uses(name, functions):
                    return found[0]
        return forward_line(module)

    def _reached(self, module: nn.Module) -> list[Reached]:
        if module not in self._variables:
            self._variables[module] = variables(module)
        return self._variables[module]


_HOOKS = frozenset((
    "_modules", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
    "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs"))
_OTHERS = {"random": m.PYTHON_RANDOM, "numpy": m.NUMPY_RANDOM}


def _may_be_changed(module: nn.Module) -> Iterator[nn.Module]:
    """Modules whose attributes a call may change: its own, its children, and all below with code of the script's."""
    children = {id(child) for child in module.children()}
    for part in module.modules():
        if part is module or id(part) in children or code_of(type(part)):
            yield part


def _of_torchs_hooks(module: nn.Module) -> set[str]:
    """Attributes that torch's own hooks set anew before each forward, such as a normed weight."""
    hooks: list[Any] = list(module._forward_pre_hooks.values())
    return {hook.name for hook in hooks
            if isinstance(getattr(hook, "name", None), str) and in_torch(type(hook).__call__.__code__)}


def _arguments(module: nn.Module, count: int) -> list[str]:
    """The names of the positional arguments of a forward; their numbers, where it takes any or is not Python's."""
    code = getattr(type(module).forward, "__code__", None)
    names = [] if code is None else list(code.co_varnames[1:code.co_argcount])
    return [names[place] if place < len(names) else str(place) for place in range(count)]


def _may_change(value: Any) -> bool:
    """Whether something that was given may change and stay the same object: a container, or an object."""
    if isinstance(value, tuple):
        return any(map(_may_change, value))
    return items_of(value) is not None


def _functions(hooks: Iterable[Any]) -> list[FunctionType]:
    found = []
    for hook in hooks:
        hook = hook.__func__ if isinstance(hook, MethodType) else getattr(hook, "func", hook)
        if isinstance(hook, FunctionType):
            found.append(hook)
    return found


def _random_states() -> dict[str, Any]:
    states: dict[str, Any] = {"cpu": torch.default_generator.get_state().numpy().tobytes()}
    if has_accelerator() and _cuda.is_initialized():
        for number, generator in enumerate(torch.cuda.default_generators):
            states[f"cuda:{number}"] = generator.get_state().numpy().tobytes()
    states["random"] = random.getstate()
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        state = numpy.get_state(legacy=False)
        states["numpy"] = state["state"]["key"].tobytes(), state["state"]["pos"], state["has_gauss"]
    return states


def _is_source(value: Any, source: str) -> bool:
    modules = (random,) if source == "random" else (sys.modules.get("numpy"), sys.modules.get("numpy.random"))
    owner = getattr(value, "__self__", None)
    return any(value is module for module in modules if module is not None) or (
        isinstance(owner, random.Random) if source == "random" else type(owner).__module__.startswith("numpy.random"))
