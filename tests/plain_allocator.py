"""The caching allocator's rules once more, as plainly as can be: every question is answered by looking at everything.

It shares nothing with ``memdiag.allocator`` but the settings, and is what the model is held against.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from memdiag.allocator import Settings

KIB, MIB = 1 << 10, 1 << 20
USED, WAITING, FREE, UNMAPPED = "used", "waiting", "free", "unmapped"


class Failed(Exception):
    """No memory for a request."""


class Places:
    """A driver whose addresses are in no order: the next is far below or above the one before."""

    def __init__(self, memory: int | None = None) -> None:
        self.memory, self.used, self.count = memory, 0, 0

    def _place(self, size: int) -> int:
        self.count += 1
        return (self.count * 7 % 1009) << 44

    def _has(self, size: int) -> bool:
        if self.memory is not None and self.used + size > self.memory:
            return False
        self.used += size
        return True

    def allocate(self, size: int) -> int | None:
        return self._place(size) if self._has(size) else None

    def release(self, address: int, size: int) -> None:
        self.used -= size

    def reserve(self, size: int) -> int:
        return self._place(size)

    def unreserve(self, address: int, size: int) -> None:
        pass

    def map(self, address: int, size: int) -> bool:
        return self._has(size)

    def unmap(self, address: int, size: int) -> None:
        self.used -= size

    def free(self) -> int | None:
        return None if self.memory is None else self.memory - self.used


@dataclass
class Piece:
    start: int
    size: int
    state: str
    requested: int = 0
    since: int = 0
    streams: set[int] = field(default_factory=set)

    @property
    def end(self) -> int:
        return self.start + self.size


@dataclass
class Space:
    """A segment, or the virtual range of an expandable one."""

    kind: tuple[Any, int, bool]  # private pool, stream, small
    pieces: list[Piece]
    page: int = 0  # 0 where it is not expandable

    def tidy(self) -> None:
        """Neighbours that are both free, or both unmapped, become one."""
        pieces: list[Piece] = []
        for piece in self.pieces:
            if pieces and pieces[-1].state == piece.state and piece.state in (FREE, UNMAPPED):
                pieces[-1].size += piece.size
                pieces[-1].since = max(pieces[-1].since, piece.since)
            else:
                pieces.append(piece)
        self.pieces = pieces

    def cut(self, at: int) -> None:
        """Makes a border between pieces at an address."""
        for number, piece in enumerate(self.pieces):
            if piece.start < at < piece.end:
                rest = Piece(at, piece.end - at, piece.state, since=piece.since)
                piece.size = at - piece.start
                self.pieces.insert(number + 1, rest)
                return

    def room(self, piece: Piece) -> int:
        number = self.pieces.index(piece)
        after = self.pieces[number + 1:number + 2]
        return piece.size + sum(next_.size for next_ in after if next_.state == UNMAPPED)


class Plain:
    def __init__(self, settings: Settings, driver: Places, limit: int | None, capacity: int) -> None:
        self.settings, self.driver, self.limit, self.capacity = settings, driver, limit, capacity
        self.spaces: list[Space] = []
        self.searches: dict[tuple[Any, bool], int] = {}
        self.pending: list[tuple[int, Piece, Space]] = []
        self.over: list[tuple[int, Piece, Space]] = []
        self.released: list[Any] = []
        self.retries = self.ooms = 0

    # Sizes

    def rounded(self, size: int) -> int:
        index = 0
        while index < 15 and size >= (2 * MIB) << index:
            index += 1
        parts = self.settings.roundup_power2_divisions[index]
        if parts > 1 and size > 512 * parts:
            power = 1
            while power * 2 <= size:
                power *= 2
            steps = [power + power * part // parts for part in range(parts + 1)]
            return min(step for step in steps if step >= size)
        return max(512, -(-size // 512) * 512)

    def segment(self, size: int) -> int:
        if size <= MIB:
            return 2 * MIB
        return self.settings.large_segment_size if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB

    # Requests

    def malloc(self, requested: int, stream: int, pool: Any) -> int:
        if pool is None:
            for entry in list(self.over):
                self._waited(*entry)
        size = self.rounded(requested)
        kind = (pool, stream, size <= MIB)
        found = self._search(kind, size)
        if found is None:
            found = self._more(kind, size)
        space, piece = found
        left = piece.size - size
        whole = not (left >= 512 if kind[2] or self.settings.expandable_segments else (
            size < self.settings.max_split_size and left > MIB))
        if not whole:
            space.cut(piece.start + size)
            for other in space.pieces:
                if other.start == piece.end and other.state == FREE:
                    other.since = self.searches.get((pool, kind[2]), 0)
        piece.state, piece.requested = USED, requested
        return piece.start

    def _search(self, kind: tuple[Any, int, bool], size: int) -> tuple[Space, Piece] | None:
        self.searches[kind[0], kind[2]] = self.searches.get((kind[0], kind[2]), 0) + 1
        free = sorted(((piece.size, piece.start, space, piece) for space in self.spaces if space.kind == kind
                       for piece in space.pieces if piece.state == FREE and piece.size >= size), key=lambda x: x[:2])
        if not free:
            return None
        number = 0
        if self.settings.expandable_segments:
            while number + 1 < len(free) and free[number + 1][2].room(free[number + 1][3]) < free[number][2].room(
                    free[number][3]):
                number += 1
        block, _, space, piece = free[number]
        most = self.settings.max_split_size
        if size < most <= block or size >= most and block >= size + self.settings.max_non_split_rounding:
            return None
        return space, piece

    def free(self, address: int) -> None:
        space, piece = self._at(address)
        if not piece.streams:
            self._freed(piece, space)
            return
        piece.state = WAITING
        self.pending += [(stream, piece, space) for stream in piece.streams]

    def record_stream(self, address: int, stream: int) -> None:
        space, piece = self._at(address)
        if stream != space.kind[1]:
            piece.streams.add(stream)

    def finish(self, stream: int) -> None:
        self.over += [entry for entry in self.pending if entry[0] == stream and entry not in self.over]

    def _at(self, address: int) -> tuple[Space, Piece]:
        return next((space, piece) for space in self.spaces for piece in space.pieces
                    if piece.start == address and piece.state == USED)

    def _waited(self, stream: int, piece: Piece, space: Space) -> None:
        entry = (stream, piece, space)
        self.pending.remove(entry)
        if entry in self.over:
            self.over.remove(entry)
        piece.streams.discard(stream)
        if not piece.streams:
            self._freed(piece, space)

    def _freed(self, piece: Piece, space: Space) -> None:
        piece.state, piece.requested, piece.since = FREE, 0, self.searches.get((space.kind[0], space.kind[2]), 0)
        space.tidy()

    # Memory from the device and back

    def reserved(self) -> int:
        return sum(piece.size for space in self.spaces for piece in space.pieces if piece.state != UNMAPPED)

    def _more(self, kind: tuple[Any, int, bool], size: int) -> tuple[Space, Piece]:
        if self.limit is not None and self.settings.garbage_collection_threshold:
            self._collect()
        found = self._new(kind, size)
        if found is None and self.settings.max_split_size < 1 << 63 and self._oversize(kind, size):
            found = self._new(kind, size)
        if found is None and kind[0] is None:
            self.empty_cache()
            self.retries += 1
            found = self._new(kind, size)
        if found is None:
            self.ooms += 1
            raise Failed
        return found

    def _new(self, kind: tuple[Any, int, bool], size: int) -> tuple[Space, Piece] | None:
        if self.limit is not None and self.reserved() + self.segment(size) > self.limit:
            return None
        if self.settings.expandable_segments:
            return self._grow(kind, size)
        address = self.driver.allocate(self.segment(size))
        if address is None:
            return None
        self.spaces.append(Space(kind, [Piece(address, self.segment(size), FREE)]))
        return self.spaces[-1], self.spaces[-1].pieces[0]

    def _grow(self, kind: tuple[Any, int, bool], size: int) -> tuple[Space, Piece] | None:
        page = 2 * MIB if kind[2] else self.settings.large_segment_size
        places = []
        for space in self.spaces:
            for number, piece in enumerate(space.pieces):
                if space.kind == kind and space.page and piece.state == UNMAPPED:
                    first = number - 1 if number and space.pieces[number - 1].state == FREE else number
                    stretch = 0
                    for following in space.pieces[first:]:
                        if following.state not in (FREE, UNMAPPED):
                            break
                        stretch += following.size
                    if stretch >= size:
                        places.append((piece.start, space, space.pieces[first].start))
        if not places:
            length = -(-(self.capacity * 9 // 8) // page) * page
            base = self.driver.reserve(length)
            self.spaces.append(Space(kind, [Piece(base, length, UNMAPPED)], page))
            places = [(base, self.spaces[-1], base)]
        _, space, start = min(places, key=lambda place: place[0])
        while True:
            piece = next(piece for piece in space.pieces if piece.start == start)
            have = piece.size if piece.state == FREE else 0
            if have >= size:
                return space, piece
            hole = piece if piece.state == UNMAPPED else space.pieces[space.pieces.index(piece) + 1]
            need = -(-min(size - have, hole.size) // page) * page
            if not self.driver.map(hole.start, need):
                return None
            space.cut(hole.start + need)
            hole.state = FREE
            space.tidy()

    def _give_back(self, space: Space) -> None:
        self.driver.release(space.pieces[0].start, space.pieces[0].size)
        self.spaces.remove(space)

    def _whole(self, kinds: Any) -> list[Space]:
        found = [space for space in self.spaces if kinds(space.kind) and not space.page and len(space.pieces) == 1 and
                 space.pieces[0].state == FREE]
        return sorted(found, key=lambda space: (space.kind[1], space.pieces[0].size, space.pieces[0].start))

    def empty_cache(self) -> None:
        for entry in list(self.pending):
            self._waited(*entry)
        for space in self._whole(lambda kind: kind[0] is None or kind[0] in self.released):
            self._give_back(space)
        for space in list(self.spaces):
            if space.page and (space.kind[0] is None or space.kind[0] in self.released):
                self._unmap(space)

    def _unmap(self, space: Space) -> None:
        base, before = space.pieces[0].start, len(space.pieces)
        for piece in [piece for piece in space.pieces if piece.state == FREE]:
            first = base + -(-(piece.start - base) // space.page) * space.page
            last = base + (piece.end - base) // space.page * space.page
            if first < last:
                space.cut(first)
                space.cut(last)
                next(part for part in space.pieces if part.start == first).state = UNMAPPED
                self.driver.unmap(first, last - first)
        space.tidy()
        # A range that was never mapped, because memory was short at once, stays.
        if before > 1 and len(space.pieces) == 1 and space.pieces[0].state == UNMAPPED:
            self.spaces.remove(space)

    def _oversize(self, kind: tuple[Any, int, bool], size: int) -> bool:
        most = self.settings.max_split_size
        wanted = max(size, most)
        free = sorted(((piece.size, piece.start, space) for space in self.spaces if space.kind == kind
                       for piece in space.pieces if piece.state == FREE and piece.size >= most), key=lambda x: x[:2])
        larger = [entry for entry in free if entry[0] >= wanted]
        if larger and not larger[0][2].page:
            self._give_back(larger[0][2])
            return True
        total = 0
        for block, _, space in reversed([entry for entry in free if entry[0] < wanted]):
            if total < wanted and not space.page:
                total += block
                self._give_back(space)
        return total >= wanted

    def _collect(self) -> None:
        assert self.limit is not None
        wanted = self.reserved() - int(self.settings.garbage_collection_threshold * self.limit)
        now = self.searches.get((None, False), 0)
        while wanted > 0:
            whole = self._whole(lambda kind: kind[0] is None and not kind[2])
            if not whole:
                return
            average = sum(now - space.pieces[0].since for space in whole) / len(whole)
            for space in whole:
                if now - space.pieces[0].since >= average:
                    wanted -= space.pieces[0].size
                    self._give_back(space)

    # What is there

    def numbers(self) -> dict[str, int]:
        pieces = [(space, piece) for space in self.spaces for piece in space.pieces]
        used = [piece for _, piece in pieces if piece.state == USED]
        active = [piece for _, piece in pieces if piece.state in (USED, WAITING)]
        split = [piece for space, piece in pieces if piece.state == FREE and not space.page and len(space.pieces) > 1]
        return {
            "allocation": len(used), "allocated_bytes": sum(piece.size for piece in used),
            "active": len(active), "active_bytes": sum(piece.size for piece in active),
            "requested_bytes": sum(piece.requested for piece in active),
            "inactive_split": len(split), "inactive_split_bytes": sum(piece.size for piece in split),
            "reserved_bytes": self.reserved(), "segment": sum(not space.page for space in self.spaces),
        }

    def layout(self) -> list[tuple[int, int, str, int]]:
        return sorted((piece.start, piece.size, piece.state, piece.requested)
                      for space in self.spaces for piece in space.pieces if piece.state != UNMAPPED)
