"""A recorded device's requests made once more to the allocator's model: does each land where it really did?

The model is handed the addresses that the driver gave, and decides all else itself: which free block serves a request,
when a new segment is asked for and of what size, what is given back. Replay ends at the first event that it disagrees
with, since nothing after that can be held against the model.

Two things are not in a record. A limit: where blocks have a largest size to be split, a request may have failed by it
that expandable segments had room for. And of a free that was completed next, whether it had waited for other streams
until memory was short: it is taken for one that had not.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from memdiag.allocator import Allocator, OutOfMemory, RangeState, SegmentState, Settings, rules
from memdiag.allocator.state import (
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    OOM,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    PoolId,
)

_NEW, _BACK = (SEGMENT_ALLOC, SEGMENT_MAP), (SEGMENT_FREE, SEGMENT_UNMAP)
_FURTHEST = 1 << 45  # bytes of virtual space taken for a range that nothing follows
_NOWHERE = 1 << 62
_PAGE = rules.SMALL_SEGMENT


@dataclass(frozen=True)
class Replayed:
    """How far the model and the record agree.

    Attributes:
        allocator: the model after the last event that agrees.
        allocations: requests that landed at their real address.
        segments: segments and mapped ranges that were taken and given back as they really were.
        singly: of these, segments and ranges given back that were not all there was to give back. With a garbage
            collection or a largest size to split that is so; which ones is then taken from the record.
        failures: requests that failed as they really did.
        disagreement: what the model would have done otherwise, and at which event; None where all agrees.
    """

    allocator: Allocator
    allocations: int
    segments: int
    singly: int
    failures: int
    disagreement: str | None


class _Disagreement(Exception):
    """What is not as recorded."""


class _Recorded:
    """A driver that does what is next in the record.

    Attributes:
        events: what was recorded of segments and is still to be done.
        beginning: where an expandable segment begins, if the next request begins one.
        done: how much of that was done.
        singly: how much was given back because the record says so.
    """

    def __init__(self) -> None:
        self.events: deque[Mapping[str, Any]] = deque()
        self.beginning = 0
        self.done = self.singly = 0

    def allocate(self, size: int) -> int | None:
        if not self._is_next(SEGMENT_ALLOC):
            return None
        self._expect(SEGMENT_ALLOC, self.events[0]["addr"], size)
        return int(self._next()["addr"])

    def release(self, address: int, size: int) -> None:
        self._expect(SEGMENT_FREE, address, size)
        self._next()

    def reserve(self, size: int) -> int:
        return self.beginning

    def unreserve(self, address: int, size: int) -> None:
        pass

    def map(self, address: int, size: int) -> bool:
        if not self._is_next(SEGMENT_MAP):
            return False
        self._expect(SEGMENT_MAP, address, size)
        self._next()
        return True

    def unmap(self, address: int, size: int) -> None:
        self._expect(SEGMENT_UNMAP, address, size)
        self._next()

    def free(self) -> int | None:
        return None

    def back(self) -> list[tuple[int, int]]:
        """Address and size of what is given back next, up to anything else."""
        found = []
        for event in self.events:
            if event["action"] not in _BACK:
                break
            found.append((event["addr"], event["size"]))
        return found

    def _is_next(self, action: str) -> bool:
        return bool(self.events) and self.events[0]["action"] == action

    def _expect(self, action: str, address: int, size: int) -> None:
        if not self._is_next(action) or (self.events[0]["addr"], self.events[0]["size"]) != (address, size):
            recorded = "nothing" if not self.events else _told(self.events[0])
            raise _Disagreement(f"recorded is {recorded}, not {action} of {size} bytes at {address:#x}")

    def _next(self) -> Mapping[str, Any]:
        self.done += 1
        return self.events.popleft()


def replay(start: Sequence[SegmentState], events: Sequence[Mapping[str, Any]], settings: Settings,
           end: Sequence[SegmentState] = ()) -> Replayed:
    """The requests of one device's record, made to the model.

    Args:
        start: what was there before the first event.
        events: as PyTorch wrote them (``device_traces``).
        end: what was there after the last; it tells private pools of events that do not name theirs.
    """
    driver, pools = _Recorded(), _Pools(start, end)
    mapped = _mapped(events, settings, pools)
    allocator = Allocator(settings, driver=driver, segments=start, ranges=_ranges(start, events, settings, mapped))
    beginnings = _Beginnings(events, mapped)
    counts = {ALLOC: 0, OOM: 0}
    number, disagreement, late = 0, None, False
    try:
        for number, event in enumerate(events):
            if event["action"] in _NEW + _BACK:
                driver.events.append(event)
            elif event["action"] in counts:
                driver.beginning = beginnings.of(_group(event, settings, pools), number - len(driver.events))
                _request(allocator, driver, event, pools.of(event), late)
                counts[event["action"]] += 1
                late = False
            elif event["action"] in (FREE_REQUESTED, FREE_COMPLETED):
                _settle(allocator, driver)
                late |= _free(allocator, event, events[number - 1])
        _settle(allocator, driver)
    except (_Disagreement, ValueError) as error:
        disagreement = f"event {number}, {_told(events[number])}: {error}"
    return Replayed(allocator, counts[ALLOC], driver.done, driver.singly, counts[OOM], disagreement)


def _told(event: Mapping[str, Any]) -> str:
    return f"{event['action']} of {event.get('size')} bytes at {event.get('addr', 0):#x}"


def _request(allocator: Allocator, driver: _Recorded, event: Mapping[str, Any], pool: PoolId | None,
             late: bool) -> None:
    """Makes a request.

    Args:
        late: whether frees that had waited for other streams were completed right before.
    """
    size, stream = event["size"], event["stream"]
    # Whether the script emptied the cache or the allocator did so to try again is not recorded, and what comes of the
    # request is the same. So what was given back first goes first. Where it was to try again, the allocator looks for
    # no free block any more, though there may be one by then.
    tried = late or bool(driver.back())
    _give_back(allocator, driver)
    again = tried and (event["action"] == OOM or bool(driver.events)) and allocator.fits(size, stream, pool)
    try:
        address = allocator.malloc(size, stream, pool, again=again)
    except OutOfMemory:
        if event["action"] != OOM:
            raise _Disagreement("it would need a new segment" if not driver.events else
                                f"it would need another segment than by {_told(driver.events[0])}") from None
        address = None
    if event["action"] == OOM and address is not None:
        raise _Disagreement(f"it would serve it at {address:#x}")
    if driver.events:
        raise _Disagreement(f"it would not need {_told(driver.events[0])}")
    if address is not None and address != event["addr"]:
        raise _Disagreement(f"it would serve it at {address:#x}")


def _give_back(allocator: Allocator, driver: _Recorded) -> None:
    """What is given back next: all there is, in its order; else a part, piece by piece, as only the record knows it."""
    while back := driver.back():
        if back == allocator.releasable():
            allocator.empty_cache()
        else:
            driver.singly += 1
            allocator.release(back[0][0])


def _settle(allocator: Allocator, driver: _Recorded) -> None:
    """What was recorded of segments, and no request followed."""
    _give_back(allocator, driver)
    if driver.events:
        raise _Disagreement(f"there is no request for {_told(driver.events[0])}")


def _free(allocator: Allocator, event: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """One half of a free, or both where the first was not recorded. Whether it completes one that had waited."""
    address = event["addr"]
    if in_use := allocator.in_use(address):
        allocator.request_free(address)
    if event["action"] == FREE_REQUESTED:
        if not in_use:
            raise _Disagreement(f"no block in use begins at {address:#x}")
        return False
    allocator.complete_free(address)
    return not in_use and (before["action"], before.get("addr")) != (FREE_REQUESTED, address)


class _Pools:
    """Which private pool an event is about."""

    def __init__(self, *segments: Iterable[SegmentState]) -> None:
        known = sorted((segment.address, segment.address + segment.size, segment.pool)
                       for state in segments for segment in state if segment.pool is not None)
        self._known, self._starts = known, [start for start, _, _ in known]

    def of(self, event: Mapping[str, Any]) -> PoolId | None:
        pool = event.get("pool_id")
        if pool is not None:
            return tuple(pool) if any(pool) else None
        at = bisect_right(self._starts, event.get("addr", 0)) - 1
        return self._known[at][2] if at >= 0 and event.get("addr", 0) < self._known[at][1] else None


class _Group(NamedTuple):
    """What shares the virtual range of an expandable segment."""

    pool: PoolId | None
    stream: int
    small: bool


def _group(event: Mapping[str, Any], settings: Settings, pools: _Pools) -> _Group:
    small = rules.is_small(rules.round_size(event["size"], settings))
    return _Group(pools.of(event), event["stream"], small)


def _mapped(events: Sequence[Mapping[str, Any]], settings: Settings, pools: _Pools) -> dict[int, _Group]:
    """Whose the mapped ranges are, by number of their event: the request that follows tells."""
    found: dict[int, _Group] = {}
    waiting: list[int] = []
    for number, event in enumerate(events):
        if event["action"] == SEGMENT_MAP:
            waiting.append(number)
        elif event["action"] in (ALLOC, OOM) and waiting:
            found |= dict.fromkeys(waiting, _group(event, settings, pools))
            waiting = []
    return found


class _Beginnings:
    """Where an expandable segment begins that is made at some event: where something is next mapped in it."""

    def __init__(self, events: Sequence[Mapping[str, Any]], mapped: Mapping[int, _Group]) -> None:
        self._of: dict[_Group, list[tuple[int, int]]] = {}
        for number, group in mapped.items():
            self._of.setdefault(group, []).append((number, events[number]["addr"]))
        self._never = 0

    def of(self, group: _Group, number: int) -> int:
        found = self._of.get(group, [])
        at = bisect_left(found, (number, 0))
        if at < len(found):
            return found[at][1]
        # Nothing is ever mapped there, so any place will do that is nobody's.
        self._never += 1
        return _NOWHERE + self._never * 2 * _FURTHEST


def _ranges(start: Sequence[SegmentState], events: Sequence[Mapping[str, Any]], settings: Settings,
            mapped: Mapping[int, _Group]) -> list[RangeState]:
    """The virtual ranges that were there before the first event, each from the first address that was ever mapped in it
    to the next. A range whose pages are all given back is gone: what is mapped after that is in another.
    """
    owner = {page: _Group(segment.pool, segment.stream, segment.small) for segment in start if segment.expandable
             for page in range(segment.address, segment.address + segment.size, _PAGE)}
    first: dict[_Group, int] = {}
    pages: Counter[_Group] = Counter(owner.values())
    for page, group in owner.items():
        first[group] = min(first.get(group, page), page)
    for number, event in enumerate(events):
        covered = range(event.get("addr", 0), event.get("addr", 0) + event.get("size", 0), _PAGE)
        if event["action"] == SEGMENT_UNMAP:
            pages.subtract(owner.pop(page) for page in covered if page in owner)
        elif number in mapped and pages[mapped[number]]:
            group = mapped[number]
            first[group] = min(first[group], event["addr"])
            owner |= dict.fromkeys(covered, group)
            pages[group] += len(covered)
    own = {(segment.address, _Group(segment.pool, segment.stream, segment.small)) for segment in start
           if segment.expandable}
    others = sorted({*first.values(), *(segment.address for segment in start)})
    found = []
    for group, address in first.items():
        # Real ranges do not reach into each other; where one ends is not recorded.
        end = next((other for other in others if other > address and (other, group) not in own), address + _FURTHEST)
        page = rules.page_size(group.small, settings)
        found.append(RangeState(address, (end - address) // page * page, group.stream, group.small, group.pool))
    return found
