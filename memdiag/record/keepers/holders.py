"""Who keeps memory: a walk from tensors back to the variables that lead to them."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import compress
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn

from memdiag import policy
from memdiag.record.facts import plain, storage_of
from memdiag.record.frames import is_ours
from memdiag.record.hooks.saves import Packed
from memdiag.record.keepers import chains
from memdiag.record.keepers.chains import ANY, GRADIENT, GRAPH, Hops, Link
from memdiag.record.keepers.graph import Graph
from memdiag.record.keepers.referrers import Referrers
from memdiag.record.keepers.roots import GLOBAL, LOCAL, Root, Roots
from memdiag.record.keepers.statements import Keeper, Statements
from memdiag.trace.model import GARBAGE, GRADIENT_CYCLE, GRAPH_CYCLE

_MOST_LEVELS = 16
_FURTHER_LEVELS = 4  # beyond the shortest way: a container behind an object is a few links further than a variable
_MOST_PER_STORAGE = 4  # of the first, and of the last, tensors that share it


@dataclass(frozen=True)
class Holder:
    """The chain that best says who keeps a tensor.

    Attributes:
        address: of the tensor's storage.
        root: what the chain starts from, with the place it lives in; or GARBAGE, GRADIENT_CYCLE, GRAPH_CYCLE where
            nothing but a cycle keeps it. (That a cycle is garbage shows at the next garbage collection.)
        chain: from the root to the tensor, as the script would write it; what varies in it is shown as ``[*]``.
        line: of the statement that keeps it, ``file.py:12``; None where none was found.
        owners: types of the objects that the chain passes through.
        parameter: the tensor is an ``nn.Parameter``, or has no history and wants gradients.
        gradient: address of the gradient with a graph that the chain passes through, where it does.
    """

    address: int
    root: str
    chain: str
    line: str | None
    owners: tuple[type, ...] = ()
    parameter: bool = False
    gradient: int | None = None


@dataclass(frozen=True)
class Ends:
    """Where the graphs ended that a walk came through: the next walk sees which of them have been continued.

    Attributes:
        last: autograd's number of the newest node.
        ways: number of the node of a tensor -> (root, chain) of the ways to the tensor.
    """

    last: int
    ways: dict[int, set[tuple[str, str]]]


@dataclass(frozen=True)
class Walked:
    """What a walk found.

    Attributes:
        holders: one for each address that somebody was found for.
        stopped: what the walk had no time for; None where it saw all.
        ends: for the next walk.
    """

    holders: list[Holder]
    stopped: str | None
    ends: Ends | None = None


@plain
def walk(
    wanted: Mapping[int, Hashable], births: Mapping[int, str | None] | None = None,
    ran: Callable[[str], bool] = lambda line: False, before: Ends | None = None,
) -> Walked:
    """Finds who holds storages, among all that Python can reach.

    Storages without a Python object, or whose chain is cut by an extension type that does not show what it refers
    to, are not found.

    Args:
        wanted: addresses of storages. Those with the same value came from one place, one after the other: what holds
            the most of them is preferred, and the statement is the one that put each there.
        births: lines where they were allocated, for choosing among statements.
        ran: whether a line, ``file.py:12``, was seen to run.
        before: of the walk before, on the same thread. Of several tensors whose graphs go back through the steps, the
            one that the graph has since been continued from is what carries it on.
    """
    return _Walk(wanted, Statements(ran)).result(births or {}, before)


@plain
def walk_from(
    ends: Mapping[int, tuple[Any, ...]], groups: Mapping[int, Hashable],
    ran: Callable[[str], bool] = lambda line: False,
) -> Walked:
    """Finds who holds objects that are no tensors, such as the list of an array that the collector does not know.

    Args:
        ends: the last objects of the chains that are looked for, by a number: one that the collector knows, and the way
            down from it. The holder's ``address`` is the number.
        groups: of each number, as those of :func:`walk`.
        ran: as of :func:`walk`.
    """
    return _Walk(groups, Statements(ran), ends).result({}, None)


@dataclass
class _Way:
    """A way from a root to a tensor: all objects, and the links that they make."""

    root: Root
    index: int
    things: list[Any] = field(repr=False)
    links: list[Link]

    @property
    def kind(self) -> tuple[str, str]:
        """What it has in common with the ways to others of its place."""
        items = (ANY if link.kind == chains.ITEM else link.text for link in self.links)
        return self.root.text, "".join(items)

    @property
    def to_graph(self) -> tuple[tuple[str, str], Any] | None:
        """The way as far as the first graph on it, and what the graph is reached from."""
        at = next((at for at, link in enumerate(self.links) if link.kind == GRAPH), None)
        if at is None:
            return None
        text = "".join(ANY if link.kind == chains.ITEM else link.text for link in self.links[:at])
        return (self.root.text, text), self.things[self.links[at - 1].at if at else 0]


class _Walk:
    """One walk. All that refers to the script's objects in here is known to it and overlooked among referrers."""

    def __init__(
        self, wanted: Mapping[int, Hashable], statements: Statements, ends: Mapping[int, tuple[Any, ...]] | None = None,
    ) -> None:
        self._wanted = wanted
        self._statements = statements
        self._members: dict[Hashable, int] = defaultdict(int)
        for group in wanted.values():
            self._members[group] += 1
        self._hidden: set[int] = set()
        self._kept: list[Any] = []  # all that is known by its id: what goes leaves its id to something else
        self._hops: Hops = {}
        self._below: dict[tuple[int, int], Any] = {}  # one step down from an object towards a tensor
        self._reached: dict[int, set[int]] = {}
        self._has_referrer: set[int] = set()
        self._tops: list[tuple[int, Root, Any, Any]] = []
        self._branches: set[tuple[int, int, int]] = set()
        self._last: dict[int, int] = {}  # the level at which enough is known of a tensor
        self._graph: Graph | None = None
        self._too_deep = False
        self._hidden.add(id(self._kept))  # and not in itself: nothing would ever be let go
        self._hide(self._below, self._tops)
        self._addresses: list[int] = []
        packed = self._take_census()
        self._start: dict[int, Any] = {}
        self._first: list[Any] = []  # a tensor of each address
        self._hide(self._start, self._first)
        if ends is None:
            self._start_at_storages(packed)
        else:
            self._start_at(ends)
        self._roots = Roots(self._start)
        self._climb()

    def _hide(self, *containers: Any) -> None:
        self._kept.extend(containers)
        self._hidden.update(map(id, containers))

    def _take_census(self) -> list[Packed]:
        """Finds all tensors and nodes. Returns what autograd has in the stead of tensors."""
        things = gc.get_objects()
        self._referrers = Referrers(len(things))
        # type(), not isinstance(): some objects answer for what they stand for, and wake up when asked.
        types = set(map(type, things))
        tensors = {kind for kind in types if issubclass(kind, torch.Tensor)}
        nodes = {kind for kind in types if issubclass(kind, torch.autograd.graph.Node)}
        self._node_types = nodes
        wanted = tensors | nodes | {Packed}
        found = list(compress(things, map(wanted.__contains__, map(type, things))))
        del things
        self._tensors = [thing for thing in found if type(thing) in tensors]
        self._nodes = [thing for thing in found if type(thing) in nodes]
        packed = [thing for thing in found if type(thing) is Packed]
        del found
        self._saved: list[Packed] = []
        self._hide(self._tensors, self._nodes, packed, self._saved)
        return packed

    def _start_at(self, ends: Mapping[int, tuple[Any, ...]]) -> None:
        self._hide(ends, *ends.values())
        for number, things in ends.items():
            index = len(self._addresses)
            self._addresses.append(number)
            self._first.append(things[-1])
            self._start[id(things[0])] = things[0]
            for at, thing in enumerate(things):
                self._reached.setdefault(id(thing), set()).add(index)
                if at:
                    self._below[id(things[at - 1]), index] = thing

    def _start_at_storages(self, packed: list[Packed]) -> None:
        """The tensors of the wanted storages, and what autograd has in their stead."""
        of: dict[int, list[Any]] = defaultdict(list)
        stand_ins: set[int] = set()
        self._hide(of)
        for thing in packed:
            tensor = thing.tensor
            storage = None if tensor is None else storage_of(tensor)
            if storage is not None and storage[0] in self._wanted:
                of[storage[0]].append(thing)
                self._saved.append(thing)
                if thing.history is not None:
                    stand_ins.add(id(tensor))
        for tensor in self._tensors:
            storage = storage_of(tensor)
            if storage is not None and storage[0] in self._wanted and id(tensor) not in stand_ins:
                of[storage[0]].append(tensor)
        for address, listed in of.items():
            self._hide(listed)
            index = len(self._addresses)
            self._addresses.append(address)
            self._first.append(next((t for t in listed if not isinstance(t, Packed)), listed[0]))
            if len(listed) > 2 * _MOST_PER_STORAGE:
                del listed[_MOST_PER_STORAGE:-_MOST_PER_STORAGE]
            for thing in listed:
                self._start[id(thing)] = thing
                self._reached.setdefault(id(thing), set()).add(index)
                if isinstance(thing, Packed):
                    self._below[id(thing), index] = thing.tensor
        if self._saved or any(thing.requires_grad for thing in self._first):
            self._build_graph()

    # --- up, level by level -----------------------------------------------------------------------------------------

    def _climb(self) -> None:
        """Breadth first, all tensors at once. An object is looked at again when it turns out to lead to further ones:
        what many share, such as a module's variables, is first met on the shortest way to one of them."""
        frontier = self._start
        reaching = {key: set(indices) for key, indices in self._reached.items()}
        for key, thing in self._start.items():
            own = self._roots.that_is(thing)
            for index in reaching[key] if own is not None else ():
                assert own is not None
                self._top(index, own, thing, self._below.get((key, index)), 0)
        for level in range(_MOST_LEVELS):
            for key, thing in frontier.items():
                for root in self._roots.bound_to(thing):
                    for index in reaching[key]:
                        self._top(index, root, thing, None, level)
            over = {index for index, at in self._last.items() if level >= at}
            going = {key: thing for key, thing in frontier.items() if reaching[key] - over}
            self._hide(going)
            if not going:
                return
            above: dict[int, Any] = {}
            fresh: dict[int, set[int]] = {}
            self._hide(above)
            self._expand(level + 1, going, reaching, over, above, fresh)
            frontier, reaching = above, fresh
        self._too_deep = True

    def _top(self, index: int, root: Root, thing: Any, child: Any, level: int) -> None:
        """A way has come to a root. One for which something better may still come is followed by a few levels more."""
        found = index, root, thing, child
        self._tops.append(found)
        self._hidden.add(id(found))
        alone = self._members[self._wanted[self._addresses[index]]] == 1
        further = 0 if alone and not self._passing(root, thing, child) else _FURTHER_LEVELS
        self._last[index] = min(level + further, self._last.get(index, _MOST_LEVELS))

    def _passing(self, root: Root, thing: Any, child: Any) -> bool:
        """Whether a root is a variable that is bound anew in each step."""
        name, value = root.name, thing
        if root.kind == GLOBAL:
            value = child
            name = next((str(key) for key, one in thing.items() if one is value), "")
        return self._statements.passing(root, name, isinstance(value, (torch.Tensor, tuple)))

    def _expand(
        self, level: int, going: dict[int, Any], reaching: dict[int, set[int]], over: set[int], above: dict[int, Any],
        fresh: dict[int, set[int]],
    ) -> None:
        def lead(parent: Any, child: Any) -> None:
            key = id(parent)
            self._has_referrer.add(id(child))
            # A module's variables are many ways: each child is one.
            root = self._roots.that_is(parent)
            if root is not None:
                for index in reaching[id(child)] - over:
                    if (key, id(child), index) not in self._branches:
                        self._branches.add((key, id(child), index))
                        self._top(index, root, parent, child, level)
                if self._roots.ends(parent):
                    return
            for index in reaching[id(child)] - over - self._reached.get(key, set()):
                self._reached.setdefault(key, set()).add(index)
                fresh.setdefault(key, set()).add(index)
                self._below[key, index] = child
                above[key] = parent

        for child in list(going.values()):
            for parent, hop in self._through_graph(child):
                self._hops.setdefault((id(parent), id(child)), hop)
                lead(parent, child)
        targets = {key: thing for key, thing in going.items() if not isinstance(thing, Packed)}
        self._hide(targets)
        referrers = self._referrers.of(targets)
        self._hide(referrers)
        for parent in referrers:
            if id(parent) in self._hidden or self._is_ours(parent):
                continue
            for child in gc.get_referents(parent):
                if id(child) in targets:
                    lead(parent, child)

    def _through_graph(self, child: Any) -> list[tuple[Any, int]]:
        """What leads to an object through autograd's graph, which the collector does not see."""
        if self._graph is None:
            if type(child) not in self._node_types:
                return []
            self._build_graph()
        graph = self._graph
        assert graph is not None
        found = [(head, GRAPH) for head in graph.above(child)]
        parameter = graph.parameter_of(child)
        if parameter is not None:
            found.append((parameter, GRADIENT))
        self._hide(found, *found, *graph.ours)
        graph.ours.clear()
        return found

    def _build_graph(self) -> None:
        self._graph = Graph(self._tensors, self._nodes, self._saved, policy.WALK_NODES)
        self._hide(*self._graph.ours)

    def _is_ours(self, parent: Any) -> bool:
        if isinstance(parent, FrameType):
            return id(parent) in self._roots.running or is_ours(parent.f_code)
        return str(type(parent).__module__).startswith("memdiag.") and not isinstance(parent, Packed)

    @property
    def _cut(self) -> bool:
        return self._too_deep or self._referrers.cut

    # --- what was found ---------------------------------------------------------------------------------------------

    def result(self, births: Mapping[int, str | None], before: Ends | None) -> Walked:
        groups: dict[Hashable, list[_Way]] = defaultdict(list)
        for index, root, top, child in self._tops:
            groups[self._wanted[self._addresses[index]]].append(self._way(index, root, top, child))
        holders: list[Holder] = []
        found: set[int] = set()
        continued = self._continued(before)
        for ways in groups.values():
            for kind, chosen in _best(ways, self._statements, continued):
                holders += self._holders(kind[0], chosen, ways, births)
                found.update(way.index for way in chosen)
        if not self._cut and (self._graph is None or not self._graph.stopped):
            holders += [holder for index in range(len(self._addresses)) if index not in found
                        for holder in self._cycle(index)]
        return Walked(holders, self._stopped(), self._ends(way for ways in groups.values() for way in ways))

    def _continued(self, before: Ends | None) -> set[tuple[str, str]]:
        """Ways to tensors that the graph has been continued from since the walk before."""
        if before is None or self._graph is None:
            return set()
        return {way for number, ways in before.ways.items() if self._graph.continued(number, before.last)
                for way in ways}

    def _ends(self, ways: Iterable[_Way]) -> Ends:
        found: dict[int, set[tuple[str, str]]] = defaultdict(set)
        for way in ways:
            reached = way.to_graph
            if reached is not None and isinstance(reached[1], torch.Tensor) and not reached[1].is_leaf:
                node = reached[1].grad_fn
                assert node is not None
                found[node._sequence_nr()].add(reached[0])
        return Ends(torch._C._autograd._get_sequence_nr() - 1, dict(found))

    def _stopped(self) -> str | None:
        if self._graph is not None and self._graph.stopped:
            return f"autograd's graph beyond {policy.WALK_NODES:,} nodes, in the look for who keeps what"
        if self._cut and len({index for index, *_ in self._tops}) < len(self._addresses):
            return "chains of references beyond what a walk has time for, in the look for who keeps what"
        return None

    def _way(self, index: int, root: Root, top: Any, child: Any) -> _Way:
        things = [top] if child is None else [top, child]
        while (id(things[-1]), index) in self._below:
            things.append(self._below[id(things[-1]), index])
        return _Way(root, index, things, chains.links(root, things, self._hops))

    def _holders(
        self, root: str, ways: list[_Way], others: list[_Way], births: Mapping[int, str | None]
    ) -> list[Holder]:
        common = _common(ways)
        gradient = next((thing for way in ways for link in way.links if link.kind == GRADIENT
                         for thing in (way.things[link.at],)), None)
        through = None if gradient is None else storage_of(gradient)
        aliases = dict.fromkeys(
            way.root for way in others if way.root.kind == LOCAL and way.things[0] is ways[0].things[0])
        line = self._statements.find(
            _keeper(ways[0], common, tuple(aliases), births.get(self._addresses[ways[0].index])))
        text = _text(ways)
        return [
            Holder(
                self._addresses[way.index], root, text, line,
                tuple(type(thing) for thing in way.things[:-1] if not isinstance(thing, (dict, list, tuple, set))),
                self._is_parameter(way.index), None if through is None else through[0])
            for way in ways
        ]

    def _is_parameter(self, index: int) -> bool:
        tensor = self._first[index]
        if not isinstance(tensor, torch.Tensor):
            return False
        return isinstance(tensor, nn.Parameter) or tensor.is_leaf and tensor.requires_grad

    def _cycle(self, index: int) -> list[Holder]:
        """Nobody was found: a cycle of references, where each object that leads to the tensor is led to."""
        members = {key for key, indices in self._reached.items() if index in indices}
        if not members <= self._has_referrer:
            return []  # something that Python does not show
        objects = {id(thing): thing for kept in self._kept if isinstance(kept, dict) for key, thing in kept.items()
                   if key in members and id(thing) == key}
        self._hide(objects)
        children = {
            key: [id(child) for child in gc.get_referents(thing) if id(child) in members]
            for key, thing in objects.items()
        }
        python = {(key, child) for key, below in children.items() for child in below}
        for parent, child in self._hops:
            if parent in members and child in members:
                children.setdefault(parent, []).append(child)
        through = [hop for hop in self._hops if hop not in python and hop[0] in _reachable(hop[1], children)]
        address = self._addresses[index]
        if not through:
            return [Holder(address, GARBAGE, GARBAGE, None)]
        gradient = next((hop for hop in through if self._hops[hop] == GRADIENT), None)
        if gradient is not None:
            storage = storage_of(objects[gradient[1]])
            return [Holder(address, GRADIENT_CYCLE, "parameter.grad → its graph → the parameter → saved tensor", None,
                           gradient=None if storage is None else storage[0])]
        return [Holder(address, GRAPH_CYCLE, GRAPH_CYCLE, None)]


def _reachable(start: int, children: dict[int, list[int]]) -> set[int]:
    seen = {start}
    todo = [start]
    while todo:
        for child in children.get(todo.pop(), ()):
            if child not in seen:
                seen.add(child)
                todo.append(child)
    return seen


def _best(
    ways: list[_Way], statements: Statements, continued: set[tuple[str, str]]
) -> list[tuple[tuple[str, str], list[_Way]]]:
    """Ways of one kind after the other, until each tensor has one: those to the most tensors, the most lasting and the
    shortest first."""
    kinds: dict[tuple[str, str], dict[int, _Way]] = defaultdict(dict)
    for way in ways:
        kinds[way.kind].setdefault(way.index, way)
    chosen: list[tuple[tuple[str, str], list[_Way]]] = []
    left = {way.index for way in ways}
    while left:
        def rank(kind: tuple[str, str], left: set[int] = left) -> tuple[int, bool, bool, bool, int, int]:
            covered = [way for index, way in kinds[kind].items() if index in left]
            if not covered:
                return 0, True, True, True, 0, 0
            way = covered[0]
            passing = statements.passing(way.root, *_variable(way))
            reached = way.to_graph
            ended = bool(continued) and reached is not None and reached[0] not in continued
            return -len(covered), ended, passing, way.root.argument, len(way.things), len(way.kind[1])

        best = min(kinds, key=rank)
        covered = [way for index, way in kinds[best].items() if index in left]
        chosen.append((best, covered))
        left = left - {way.index for way in covered}
    return chosen


def _variable(way: _Way) -> tuple[str, bool]:
    """The variable that a way begins with, and whether it refers to a tensor, or a tuple, that it was bound to."""
    if not way.links or way.links[0].kind not in (chains.VARIABLE, chains.MODULE_VARIABLE):
        return "", False
    link = way.links[0]
    return link.name, isinstance(way.things[link.at], (torch.Tensor, tuple))


def _common(ways: list[_Way]) -> int:
    """Position of the last object that all ways of a kind pass through: what each tensor was put into.

    With one way alone it is the last container that has a name, or else what holds the tensor or the graph.
    """
    things = ways[0].things
    if len(ways) == 1:
        end = _traceback(ways[0])
        for link in reversed(ways[0].links):
            thing = things[link.at]
            if link.at < end and link.kind in chains.NAMED and isinstance(
                    thing, (dict, *chains.CONTAINERS)) and not isinstance(thing, tuple):
                return link.at
        return len(things) - 1
    at = 0
    while all(at + 1 < len(way.things) and way.things[at + 1] is things[at + 1] for way in ways):
        at += 1
    return at


def _traceback(way: _Way) -> int:
    """Position of the first traceback on a way; beyond its end where there is none."""
    return next((at for at, thing in enumerate(way.things) if isinstance(thing, TracebackType)), len(way.things))


def _keeper(way: _Way, common: int, aliases: tuple[Root, ...], birth: str | None) -> Keeper:
    links = way.links
    graph_at = next((link.at for link in links if link.kind == GRAPH), len(way.things))
    # What all ways share may be the tensor itself, or the graph: then the binding of it is what is looked for.
    bound = common >= graph_at - 1 or isinstance(way.things[min(common, len(way.things) - 1)], torch.Tensor)
    furthest = max(common, links[0].at if links else 0)
    named = [link for link in links if link.kind in chains.NAMED and (
        link.at <= furthest or link.kind in (chains.CACHE, chains.RECORD))]
    end = _traceback(way)
    if named and end < len(way.things):
        # What the frames of a traceback have in their variables is kept by who keeps the exception.
        named = [link for link in named if link.at < end] or named[:1]
        bound = isinstance(way.things[named[-1].at], (BaseException, TracebackType))
    return Keeper(tuple(reversed(named)), aliases, bound, graph_at < len(way.things), birth)


def _text(ways: list[_Way]) -> str:
    parts: list[str] = []
    for at, link in enumerate(ways[0].links):
        same = all(way.links[at].text == link.text for way in ways)
        parts.append(link.text if same else ANY)
    return "".join(parts)
