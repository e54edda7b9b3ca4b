"""What is allocated now, by address, and the rows that its coming and going makes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from memdiag.record.facts import Claim
from memdiag.record.reading.failures import UNKNOWN, Request
from memdiag.record.reading.rows import Rows
from memdiag.trace import NONE, Phase, Pool, Role
from memdiag.trace.model import ACCUMULATED, COMMUNICATION, COPIED, MIRRORS, REPLAYED, STEPPED, UNSEEN, USED, ZEROED

_MAX_MARKS = 1000  # of one recording: beyond it the text of the first ones says enough


class Birth(NamedTuple):
    """Where an allocation was born: span, line and kernel as in the table of allocations.

    Attributes:
        loose: outside modules and backward, so that it says little of what the allocation is.
    """

    span: int
    line: int
    kernel: int
    loose: bool


@dataclass(slots=True, eq=False)
class Live:
    """An allocation that has not been freed.

    Attributes:
        id: its row in the trace; NONE while light recording has not yet written one.
        step: that it was born in.
        birth: where it was born.
        saved: kept by autograd: it wants gradients, or has a history.
        history: a tensor of it was seen that autograd would lead back from.
        sources: addresses that the script's own operator read to make it.
        mirrors: buffers, itself included, that the script writes gradients into and that it is or was made from.
        wants_gradients: the tensor that a variable leads to is a parameter, or one in all but name.
        collections: full garbage collections that there had been when only a cycle was seen to keep it.
        claims: role -> (name, proof, from birth).
    """

    id: int
    bytes: int
    device: int
    pool: Pool
    time_ns: int
    step: int
    birth: Birth
    saved: bool = False
    history: bool = False
    sources: tuple[int, ...] = ()
    mirrors: tuple[Live, ...] = ()
    wants_gradients: bool = False
    collections: int | None = None
    claims: dict[Role, tuple[str | None, str, bool]] = field(default_factory=dict)


UNRECORDED = Birth(NONE, NONE, NONE, True)


class Heap:
    """Live allocations, numbered as rows of the trace.

    Args:
        failed_requests: of the current chunk, in order of time.

    Attributes:
        devices: names by index.
        next_event: the number that the next memory event gets.
        next_id: the number that the next allocation gets.
        peak_bytes: the most that any one device's allocator held at once; ``full_peak_bytes`` while all was recorded.
    """

    def __init__(self, rows: Rows, failed_requests: Callable[[], list[Request]] = list) -> None:
        self._rows = rows
        self._failed_requests = failed_requests
        self._failed: Iterator[Request] | None = None
        self.devices: list[str] = []
        self._index: dict[str, int] = {}
        self.next_event = 0
        self.next_id = 0
        self.peak_bytes = self.full_peak_bytes = 0
        self._at: dict[int, Live] = {}
        self._live: list[int] = []  # bytes in the allocator's pool, by device
        self._total: list[int | None] = []  # the same in the allocator's own words
        self._times: list[int] = []  # of this chunk's events
        self._first = 0  # the first of them
        self._marks = 0
        self._replayed: set[str] = set()  # buffers that a recomputation wrote to
        self._mirrored = False  # the script writes gradients into buffers of its own
        self._last_used: tuple[int, str] | None = None  # phase and operator that used gradients last

    def new_chunk(self) -> None:
        self._times, self._first = [], self.next_event
        self._failed = None

    def event_at(self, time_ns: int) -> int:
        """The number of memory events before a moment of this chunk."""
        return self._first + bisect_right(self._times, time_ns)

    def live_bytes(self) -> int:
        """Bytes that the allocator holds now: the accelerator's where one is in use, else the CPU's."""
        used = [bytes_ for name, bytes_ in zip(self.devices, self._live, strict=True) if name != "cpu"]
        return max(used) if used else sum(self._live)

    def cpu_bytes(self) -> int:
        """Bytes of the CPU's allocator that are alive now."""
        return sum(bytes_ for name, bytes_ in zip(self.devices, self._live, strict=True) if name == "cpu")

    # --- coming and going --------------------------------------------------------------------------------------

    def allocated(
        self, address: int, size: int, total: int, device: str, time_ns: int, step: int, birth: Birth | None
    ) -> Live:
        """An event of the stream: memory was allocated.

        Args:
            total: the allocator's own count after it. It checks ours: a difference is booked as ``unseen``.
            birth: where it was born; None in light recording, which writes rows only for what lives on.
        """
        found = self._at.get(address)
        if found is not None:
            # Freed on a thread that the profiler does not watch: we learn of it when the address comes back.
            self._free(address, found, time_ns)
            self._mark("memory freed by another thread: counted as live until its address was used again",
                       -found.bytes)
        pool = Pool.MAPPED if total == 0 else Pool.ALLOCATOR
        live = self._comes(address, size, device, pool, time_ns, step, UNRECORDED if birth is None else birth)
        if birth is not None:
            self._row(address, live, self.next_event, birth)
            self._happens(time_ns)
            if self._live[live.device] > self.full_peak_bytes:
                self.full_peak_bytes = self._live[live.device]
        self._check(live, size, total)
        return live

    def freed(self, address: int, size: int, total: int, time_ns: int) -> Live | None:
        """An event of the stream: memory was freed; ``size`` is negative, ``total`` as above.

        Returns:
            What was freed; None where it was never seen to come.
        """
        live = self._at.get(address)
        if live is None:
            self._mark("a free of memory whose allocation was not seen", size)
            return None
        self._free(address, live, time_ns)
        self._check(live, size, total)
        return live

    def _check(self, live: Live, size: int, total: int) -> None:
        if live.pool is Pool.ALLOCATOR:
            expected = self._total[live.device]
            if expected is not None and total != expected + size:
                self._mark("the allocator's total changed without an event", total - expected - size)
            self._total[live.device] = total

    def _comes(
        self, address: int, size: int, device: str, pool: Pool, time_ns: int, step: int, birth: Birth
    ) -> Live:
        index = self.device_number(device)
        live = self._at[address] = Live(NONE, size, index, pool, time_ns, step, birth)
        if pool is Pool.ALLOCATOR:
            now = self._live[index] = self._live[index] + size
            if now > self.peak_bytes:
                self.peak_bytes = now
        return live

    def device_number(self, name: str) -> int:
        """The index of a device among those of the trace."""
        index = self._index.get(name)
        if index is None:
            index = self._index[name] = len(self.devices)
            self.devices.append(name)
            self._live.append(0)
            self._total.append(None)
        return index

    def _row(self, address: int, live: Live, event: int, birth: Birth) -> None:
        live.id = self.next_id
        self.next_id += 1
        self._rows["allocations"].append((
            live.device, live.pool, address, live.bytes, event, live.time_ns, birth.span, birth.line, birth.kernel,
            NONE))

    def _free(self, address: int, live: Live, time_ns: int) -> None:
        del self._at[address]
        if live.pool is Pool.ALLOCATOR:
            self._live[live.device] -= live.bytes
        if live.id != NONE:
            self._rows["frees"].append((live.id, self.next_event, time_ns))
            self._happens(time_ns)

    def register(self, address: int, live: Live) -> None:
        """Writes a row for what light recording saw come and live on: as of now, where it has no event."""
        self._row(address, live, self.next_event, UNRECORDED)
        self._happens(self._times[-1] if self._times else live.time_ns)
        for role, (name, proof, from_birth) in live.claims.items():
            self._claim_row(live, role, name, proof, from_birth)

    def is_live(self, address: int, live: Live) -> bool:
        return self._at.get(address) is live

    def everything(self) -> list[tuple[int, Live]]:
        """All live allocations with their addresses."""
        return list(self._at.items())

    def _happens(self, time_ns: int) -> None:
        self.next_event += 1
        self._times.append(time_ns)

    def was_there(self, address: int, size: int, device: str, foreign: bool, time_ns: int) -> None:
        """Memory from before the recording, or from a gap in it, found by an inventory."""
        if address in self._at:
            return
        pool = Pool.NUMPY if foreign else Pool.ALLOCATOR
        live = self._comes(address, size, device, pool, time_ns, 0, UNRECORDED)
        if self.next_event == 0:
            self._row(address, live, NONE, UNRECORDED)
        else:
            self._row(address, live, self.next_event, UNRECORDED)
            self._happens(time_ns)

    def is_gone(self, address: int, size: int, time_ns: int) -> None:
        """Memory without events of its own was freed: what a finalizer of ours saw."""
        found = self._at.get(address)
        if found is None:
            return
        # Devices other than the CPU hand out more than was asked for.
        if found.bytes == size or found.bytes > size and self.devices[found.device] != "cpu":
            self._free(address, found, time_ns)

    def _mark(self, text: str, size: int) -> None:
        if self._marks < _MAX_MARKS:
            self._marks += 1
            self._rows["marks"].append((self.next_event, self._rows.intern(UNSEEN), self._rows.intern(text), size))

    def out_of_memory(self, time_ns: int, step: int, phase: Phase, birth: Birth, caller: int) -> None:
        """An event of the stream: an allocator had no memory for a request.

        Args:
            birth: where the allocation would have been born.
            caller: number of the line of the backward call or optimizer step around it.
        """
        if self._failed is None:
            self._failed = iter(self._failed_requests())
        request = next(self._failed, UNKNOWN)
        device = NONE if request.device is None else self.device_number(request.device)
        self._rows["out_of_memory"].append((
            self.next_event, time_ns, device, request.bytes, NONE if device == NONE else self._live[device],
            request.reserved, step, phase, birth.span, birth.line, birth.kernel, caller))

    # --- what it is --------------------------------------------------------------------------------------------

    def find(self, address: int) -> Live | None:
        """The live allocation whose range holds an address."""
        exact = self._at.get(address)
        if exact is not None:
            return exact
        # Rare: a storage that begins inside an allocation (a slice of a flat buffer).
        return next((live for start, live in self._at.items() if start < address < start + live.bytes), None)

    def find_or_foreign(self, address: int, size: int, device: str, foreign: bool) -> Live | None:
        """The same, where a storage that is not PyTorch's own becomes an allocation when it is first seen."""
        found = self.find(address)
        if found is None and foreign:
            time = self._times[-1] if self._times else 0
            found = self._comes(address, size, device, Pool.NUMPY, time, 0, UNRECORDED)
            self._row(address, found, self.next_event, UNRECORDED)
            self._happens(time)
        return found

    def claim(self, claims: list[Claim], step: int) -> None:
        """Live objects say what they are, in a step."""
        for c in claims:
            live = self.find_or_foreign(c.address, c.bytes, c.device, c.foreign)
            if live is None or c.role is Role.INPUTS and live.history and live.step == step:
                continue  # what this step computed may be an argument without its history, and is no input for that
            self.say(live, c.role, c.name, c.proof, c.from_birth)

    def computed(self, addresses: list[int]) -> None:
        """Tensors with a history are there."""
        for address in addresses:
            live = self.find(address)
            if live is not None:
                live.history = True

    def say(self, live: Live, role: Role, name: str | None, proof: str, from_birth: bool = True) -> None:
        if role in live.claims:
            had, said, _ = live.claims[role]
            if (name is None or had is not None) and (proof != STEPPED or said == STEPPED):
                return
            name = had or name
        live.claims[role] = name, proof, from_birth
        if live.id != NONE:
            self._claim_row(live, role, name, proof, from_birth)
        if role is Role.INPUTS:
            for address in live.sources:
                source = self._at.get(address)
                if source is not None and source.birth.loose and not source.saved and not source.claims:
                    self.say(source, Role.INPUTS, None, "what an input was made from")

    def _claim_row(self, live: Live, role: Role, name: str | None, proof: str, from_birth: bool) -> None:
        intern = self._rows.intern
        self._rows["claims"].append(
            (live.id, NONE if from_birth else self.next_event, role, intern(name), intern(proof)))

    def has_role(self, address: int, role: Role) -> bool:
        live = self._at.get(address)
        return live is not None and role in live.claims

    def read(self, span: int, addresses: tuple[int, ...]) -> None:
        """An operator was given storages at these addresses."""
        at, rows = self._at, self._rows["reads"]
        for address in addresses:
            live = at.get(address)
            if live is not None:
                rows.append((span, live.id))

    def made_from(self, since_id: int, sources: tuple[int, ...], copy: bool, gathers: bool) -> None:
        """The script's own operator has ended: what it read, for the live allocations that it made.

        Args:
            since_id: the first allocation that is its.
            copy: it only copies or moves: what comes of an input is an input, and of a gradient a gradient.
            gathers: it puts together what it reads: gradients, where all of it are.
        """
        # The youngest entries of the dictionary come last.
        for live in reversed(self._at.values()):
            if live.id < since_id:
                break
            live.sources = sources
            if self._mirrored:
                live.mirrors = tuple({id(m): m for a in sources if a in self._at for m in self._at[a].mirrors}.values())
            if copy and any(self.has_role(address, Role.INPUTS) for address in sources):
                self.say(live, Role.INPUTS, None, "a copy of an input")
            elif (copy or gathers) and sources and all(self.has_role(address, Role.GRADIENTS) for address in sources):
                self.say(live, Role.GRADIENTS, None, COPIED)

    def written(self, target_address: int, sources: tuple[int, ...]) -> None:
        """The script's own operator wrote in place, having read ``sources``.

        A buffer that gradients are written into mirrors them (a sum over micro-batches, those of the step before),
        unless it turns out to want gradients itself. If parameters are updated from it, it is an optimizer's state; and
        so is what that is updated from, such as the moments behind a copy of the parameters in full precision.
        """
        target = self._at.get(target_address)
        read = [self._at[address] for address in sources if address in self._at]
        if target is None:
            return
        if Role.PARAMETERS in target.claims or Role.OPTIMIZER_STATE in target.claims:
            for buffer in {id(m): m for live in read for m in live.mirrors}.values():
                self.say(buffer, Role.OPTIMIZER_STATE, None, "the script updates the parameters from it")
        elif (
            target.birth.loose and not target.saved and not target.wants_gradients
            and all(role is Role.HELD or proof == COPIED for role, (_, proof, _) in target.claims.items())
            and any(Role.GRADIENTS in live.claims or live.mirrors for live in read)
        ):
            self._mirrored = True
            target.mirrors = (target,)
            if target.claims:  # looked at before, when nothing had been written into it
                self.say(target, Role.GRADIENTS, None, MIRRORS)

    def replayed(self, address: int) -> None:
        """A forward that runs again for a checkpoint wrote in place: where that is a module's state, it is told."""
        live = self._at.get(address)
        if live is not None and Role.BUFFERS in live.claims:
            name = live.claims[Role.BUFFERS][0] or "a buffer"
            if name not in self._replayed:
                self._replayed.add(name)
                self._rows["marks"].append((self.next_event, self._rows.intern(REPLAYED), self._rows.intern(name), 0))

    def gradients_touched(self, addresses: tuple[int, ...], operator: str, zeroes: bool, phase: int) -> None:
        """The script's own operator read storages or wrote to them: where they are gradients, it is told.

        Args:
            zeroes: it sets what it is given to zero.
            phase: span of the phase that it ran in.
        """
        gradients = [
            live for address in addresses
            if (live := self._at.get(address)) is not None and Role.GRADIENTS in live.claims]
        if not gradients or not zeroes and self._last_used == (phase, operator):
            return
        if not zeroes:
            self._last_used = phase, operator
        intern = self._rows.intern
        self._rows["marks"].append((
            self.next_event, intern(ZEROED if zeroes else USED), intern(operator),
            sum({id(live): live.bytes for live in gradients}.values())))

    def gradient_arrives(self, address: int | None) -> None:
        """A storage was handed to AccumulateGrad: it becomes a parameter's gradient, or is added to it."""
        live = self._at.get(address) if address else None
        if live is not None:
            self.say(live, Role.GRADIENTS, None, ACCUMULATED)

    def exchanges_gradients(self, addresses: tuple[int, ...], operator: str) -> None:
        """A collective runs inside backward: what it works on are gradients, in buckets of their own or flat."""
        for address in addresses:
            live = self.find(address)
            if live is not None and not live.saved and not live.claims:
                self.say(live, Role.GRADIENTS, COMMUNICATION, f"given to {operator} in backward")

    def unexplained(self) -> dict[int, Live]:
        """Live allocations that only a look at who holds them can explain, by address."""
        return {
            address: live for address, live in self._at.items()
            if live.birth.loose and not live.saved and not live.claims and live.pool is Pool.ALLOCATOR
        }
