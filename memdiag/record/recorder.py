"""Records one process: installs the hooks, cuts the stream into chunks, writes the run file."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import monotonic, time_ns
from types import TracebackType
from typing import Any

import torch

from memdiag import policy
from memdiag.apply.operators import keeping_ns
from memdiag.apply.regions import checkpoint_ns
from memdiag.errors import MemdiagError
from memdiag.garbage import uncollected
from memdiag.record import inventory
from memdiag.record.facts import StepEnd
from memdiag.record.frames import defines, inside_torch_call
from memdiag.record.gathering import Gathering
from memdiag.record.hooks.children import Children
from memdiag.record.hooks.lines import Lines
from memdiag.record.hooks.loop import Loop
from memdiag.record.hooks.modules import Modules
from memdiag.record.hooks.others import OtherProfilers
from memdiag.record.hooks.saves import Saves
from memdiag.record.hooks.threads import Threads
from memdiag.record.keepers.containers import Containers
from memdiag.record.keepers.holders import Ends, Holder, walk, walk_from
from memdiag.record.keepers.survivors import FIRST_LOOK, Survivors
from memdiag.record.marks import WATCHED, Marks
from memdiag.record.options import Options
from memdiag.record.process import machine
from memdiag.record.process.signals import SignalsWait
from memdiag.record.reading.consume import Consumer
from memdiag.record.reading.heap import Live
from memdiag.record.reading.rows import Rows
from memdiag.record.regions.rehearsal import Rehearsals
from memdiag.record.stream import Stream, has_accelerator
from memdiag.trace import NONE, Level, Role, Trace, Writer, load
from memdiag.trace.file import PEAK_STEP
from memdiag.trace.model import GARBAGE, GRADIENT_CYCLE, GRAPH_CYCLE, MIRRORS, UNCOLLECTED
from memdiag.trace.models import as_facts

_MANY_PARAMETERS = 32  # of an optimizer, from which two more cuts cost less than the shapes of what it works on
_PROGRESS_SECONDS = 0.25
_NO_SHAPES = "what operators read, from step {step} on: recording it would keep what torch.func's transforms make alive"
_STILL_OPEN = "everything after step {step}: an operator was running where the stream had to be cut"
_FIRST_EVALUATION_LOOK = 4  # forwards without gradients; then at twice as many each time
_CYCLES = frozenset({GARBAGE, GRADIENT_CYCLE, GRAPH_CYCLE, UNCOLLECTED})
_LOOK_GROWTH = 1.1  # steps between looks at who holds what: every one of the first twenty, then ever rarer


class Recorder:
    """Records from ``__enter__`` to ``__exit__``, on the thread that enters.

    Args:
        path: of the run file; it is replaced.
        options: what to record in full, and when to stop.
        argv: the command, for the report.
        script: the file that it runs, where it is one.

    Attributes:
        path: of the run file.
        problem: what kept the recording from being whole, such as a full disk; None where nothing did.

    Raises:
        OSError: the run file cannot be created.
        MemdiagError: a recording is going on in this process.
    """

    def __init__(
        self, path: str | os.PathLike[str], options: Options | None = None, argv: Sequence[str] = (),
        script: str | None = None,
    ) -> None:
        self.path = Path(path)
        self.problem: str | None = None
        self._options = options or Options()
        self._argv, self._script = list(argv), script
        self._on = False
        self._level: Level | None = None
        self._gathering = Gathering()
        self._read_to = 0  # steps that had ended when the stream was last read
        self._said: list[str] = []
        self._kept = 0  # steps that ended before what the file has
        self._left = False
        self._ending: dict[str, Any] = {}
        self._open_on: int | None = None  # the thread on which an operator was running when the stream was cut
        self._devices_told: list[str] = []
        self._models_told: list[dict[str, Any]] = []
        self._away_since: int | None = None  # the step at which a profiler of the script's own took over
        self._last_progress = 0.0
        self._next_look = 1
        self._evaluated = 0  # forwards without gradients, one after the other
        self._next_evaluation_look = _FIRST_EVALUATION_LOOK
        self._survivors = Survivors()
        self._containers = Containers()
        self._rss: int | None = None  # resident bytes at the end of the step that has just ended
        self._ends: Ends | None = None  # of the graphs that the last walk came through
        self._held: dict[int, tuple[str, str, str | None]] = {}  # the last row of an allocation that was looked at
        self._statements: set[str] = set()  # lines that the run file has from looks alone
        self._progress_shown = False
        self._is_aside = False  # a forward runs that is none of the run's
        self._rehearsals: Rehearsals | None = None

    # --- beginning and end --------------------------------------------------------------------------------------

    def __enter__(self) -> Recorder:
        if _current is not None:
            raise MemdiagError(f"this process is being recorded already, into {_current.path}; end that first")
        now = time_ns()
        self._writer = Writer(self.path, machine.about(self._argv, self._script, now))
        self._threads = Threads(self._may_cut, self._begin_here, self._end_here)
        self._rows = Rows()
        self._marks = Marks()
        self._stream = Stream(self._marks)
        self._consumer = Consumer(self._rows, now, has_accelerator(), self._stream.failed_requests)
        self._lines = Lines(self._marks)
        self._saves = Saves(self._marks, self._active, self._transform_begins)
        self._loop = Loop(
            self._marks, self._lines, self._active, lambda p: self._modules.names.of_parameter(p), self._step_ended,
            self._stepping)
        self._others = OtherProfilers(self._make_way, lambda: self._loop.steps.closed)
        self._modules = Modules(
            self._marks, self._lines, self._active, lambda: self._loop.in_backward, self._forward_begins,
            self._loop.owns, self._elsewhere)
        self._children = Children()
        self._gone: list[tuple[int, int, int]] = []
        self._take_inventory(now)
        self._on = True
        _track(self)
        self._threads.start()
        self._others.start()
        self._children.start()
        self._loop.start()
        self._modules.start()
        if self._options.plan_step is not None:
            self._rehearsals = Rehearsals(
                self._options.plan_step, self._rows, self._marks, self._modules, self._lines, self._loop,
                self._consumer, self._active, self._aside, self._say)
            self._rehearsals.start()
        self._begin_here()
        return self

    def _begin_here(self) -> None:
        """Opens the stream on the calling thread."""
        if not self._on:
            return
        if self._open_on == threading.get_ident():
            self._give_up(_STILL_OPEN.format(step=self._loop.steps.closed))
            return
        if self._threads.moved:
            self._take_inventory(time_ns())
        self._saves.start()
        self._open(self._wanted_level())

    def _may_cut(self, in_module: bool = False, in_function: bool = False) -> bool:
        """Whether the stream may be cut here: no backward, optimizer, module or torch function is running.

        Args:
            in_module, in_function: module calls, torch functions may be running, since their marks are suspended.
        """
        return (
            not self._loop.busy
            and (in_module or not self._modules.depth)
            and (in_function or not self._lines.depth)
            and not inside_torch_call(sys._getframe(1))
        )

    def _end_here(self) -> None:
        """Closes the stream on the calling thread, and takes off what is the thread's own."""
        self._modules.unwind()
        if self._saves.resting:
            self._marks.instant(WATCHED, True)  # where the stream is opened again, the hooks are on
        self._saves.stop()
        self._lines.stop()
        self._cut(reopen=False)

    def trace(self) -> Trace:
        """The run, read back from its file.

        Raises:
            MemdiagError: the file cannot be read.
        """
        return load(self.path)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._left:
            return  # a forked child, or ended already
        with SignalsWait():  # until the file is closed
            self._left = True
            self._ending = machine.ending(error)
            self._end()

    def _end(self) -> None:
        """Ends the recording and closes the file."""
        if self._active():
            self._loop.broken_off()
            self._loop.steps.settle()
            if self._loop.steps.forward_begins():
                self._loop.mark_step_end(StepEnd())  # a backward with no optimizer: nothing else will close its step
            self._end_here()
        self._end_hooks()
        self._clear_progress()
        self._finish()

    def _take_inventory(self, now: int) -> None:
        heap = self._consumer.heap
        for address, size, device, foreign in inventory.take(lambda a: heap.find(a) is not None, self._note_gone):
            heap.was_there(address, size, device, foreign, now)

    def _note_gone(self, time: int, address: int, size: int) -> None:
        self._gone.append((time, address, size))

    def _note_gone_meanwhile(self, time: int, address: int, size: int) -> None:
        if self._stream.level is None:
            self._gone.append((time, address, size))

    def _end_hooks(self) -> None:
        """Takes off what is the process's."""
        self._threads.stop()
        self._modules.stop()
        self._loop.stop()
        self._others.stop()
        self._children.stop()
        if self._rehearsals is not None:
            self._rehearsals.stop()

    def _finish(self) -> None:
        self._on = False
        _untrack(self)
        heap = self._consumer.heap
        peak_step = self._consumer.finish(time_ns())
        facts = {
            "devices": heap.devices, "device_names": machine.device_names(heap.devices), "not_seen": self._not_seen(),
            **machine.settings(), **self._ending, "steps": self._loop.steps.closed,
            "events_read": self._consumer.events_read, "end_ns": time_ns(),
        }
        if self._rehearsals is not None:
            facts["random_state_bytes"] = torch.get_rng_state().nbytes
            facts["keeping_ns"] = keeping_ns()
            facts["checkpoint_ns"], facts["checkpointed_save_ns"] = checkpoint_ns()

        def write() -> None:
            self._flush()
            if peak_step is not None:
                peak_step.flush(self._writer, of=PEAK_STEP)
            self._writer.about(facts)
            self._writer.close()

        self._write(write)

    def _not_seen(self) -> list[str]:
        said = list(self._said)
        if self._away_since is not None:
            said.append(f"everything from step {self._away_since} on: the script's own profiler ran")
        if self._threads.missed:
            said.append(
                f"{self._threads.missed} module calls with gradients on other threads, while this one was recorded")
        if self._threads.moved:
            said.append("what other threads did before the one that trains was recorded, and after it ended")
        if self._children.started:
            said.append(f"processes that the script started through multiprocessing ({self._children.started})")
        if self._saves.suspended:
            said.append(
                f"what autograd saved inside torch.func transforms and where the script forbids hooks "
                f"({self._saves.suspended} times)")
        return said

    # --- the stream ---------------------------------------------------------------------------------------------

    def _active(self) -> bool:
        return self._on and not self._is_aside and self._threads.is_recorded()

    def _elsewhere(self, grad: bool) -> None:
        if not self._is_aside:
            self._threads.elsewhere(grad)

    def _wanted_level(self) -> Level:
        steps, done = self._options.steps, self._loop.steps.closed
        if steps is not None:
            first, last = steps
            inside = (first is None or done >= first) and (last is None or done < last)
            return Level.FULL if inside else Level.LIGHT
        return Level.FULL if self._consumer.events_read < self._options.max_events else Level.LIGHT

    def _full_to_come(self) -> bool:
        """Whether light recording may give way to full again."""
        if self._options.steps is None:
            return False  # the budget is spent
        _, last = self._options.steps
        return last is None or self._loop.steps.closed < last

    def _open(self, level: Level, shapes: bool = True) -> None:
        self._level = level
        self._marks.enabled = True
        full = level is Level.FULL
        self._modules.light = not full
        self._saves.light = not full
        if full:
            self._lines.start()
        elif self._full_to_come():
            self._lines.pause()
        else:
            self._lines.stop()  # even paused it costs each torch function some microseconds
        self._stream.open(level, shapes)

    def _cut(
        self, reopen: bool, level: Level | None = None, look: bool = True, midway: bool = False, shapes: bool = True
    ) -> None:
        """Ends the chunk, reads and writes it, and goes on at a level, or at the one that is wanted then.

        Args:
            midway: the step goes on: what was read is written when it ends.
            shapes: what goes on has them, where it is in full.

        No garbage is collected in between: the script's would be freed unseen. Signals wait until it is done.
        """
        if self._stream.level is None:
            return
        with uncollected(), SignalsWait():
            self._read_chunk(reopen, level, look, midway, shapes)

    def _read_chunk(
        self, reopen: bool, next_level: Level | None, look: bool, midway: bool, shapes: bool
    ) -> None:
        roots = self._stream.close()
        self._marks.enabled = False
        entries = self._marks.take()
        saves = self._saves.take()
        level, self._level = self._level, None
        assert level is not None
        gone, self._gone = self._gone, []
        read_before = self._consumer.events_read
        closed = self._consumer.chunk(level, roots, entries, saves, gone)
        if not midway:  # a part of a step, such as its optimizer's, says nothing of the others
            self._gathering.read(
                level, self._loop.steps.closed - self._read_to, len(entries), self._consumer.events_read - read_before)
        self._read_to = self._loop.steps.closed
        del roots
        self._stream.forget()
        if look:
            self._explain()
            self._explain_beside()
        if not midway:
            self._write(self._flush)
        self._open_on = None if closed else threading.get_ident()
        if not closed and reopen:
            self._give_up(_STILL_OPEN.format(step=self._loop.steps.closed))
        elif reopen and self._on:
            self._open(next_level or self._wanted_level(), shapes)

    def _flush(self) -> None:
        devices = list(self._consumer.heap.devices)
        if devices != self._devices_told:
            self._devices_told = devices
            self._writer.about({"devices": devices})
        models = as_facts(self._modules.names.models.values())
        if models != self._models_told:
            self._models_told = models
            self._writer.about({"models": models})
        self._rows.flush(self._writer)
        self._kept = self._loop.steps.closed

    def _explain(self) -> None:
        """Looks for who holds what nothing else explains, while the functions that hold it are running."""
        consumer, done = self._consumer, self._loop.steps.closed
        collections: int = gc.get_stats()[-1]["collections"]
        candidates = {
            address: live for address, live in consumer.heap.unexplained().items()
            if live.collections != collections}
        if sum(live.bytes for live in candidates.values()) * policy.UNEXPLAINED_SHARE < consumer.heap.live_bytes():
            candidates = {}
        kept = self._survivors.due(consumer.heap, done)
        if not candidates and not kept:
            return
        wanted: dict[int, Hashable] = {address: address for address in candidates}
        wanted |= {address: site for address, (site, _) in kept.items()}
        births = {address: self._rows.text(live.birth.line) for address, (_, live) in kept.items()}
        walked = walk(wanted, births, self._ran, self._ends)
        self._ends = walked.ends
        self._say(walked.stopped)
        writers = {text for text in (self._rows.text(line) for line in consumer.writers) if text}
        for holder in walked.holders:
            address = holder.address
            live = candidates[address] if address in candidates else kept[address][1]
            if holder.root == GARBAGE:
                if live.collections not in (None, collections):
                    holder = replace(holder, root=UNCOLLECTED, chain=UNCOLLECTED)
                live.collections = collections
            if address in candidates or done > FIRST_LOOK:  # the first look is there for the second to compare with
                self._note_holder(live, done, holder)
            if address not in candidates or holder.root in _CYCLES:
                continue
            live.wants_gradients = holder.parameter
            role, proof = Role.HELD, f"reached from {holder.root}"
            if holder.parameter and not self._modules.names.model_seen:
                role, proof = Role.PARAMETERS, f"wants gradients, has no history, and is reached from {holder.root}"
            elif any(defines(owner, line) for owner in holder.owners for line in writers):
                role, proof = Role.OPTIMIZER_STATE, "kept by the object that updates the parameters"
            elif live in live.mirrors and not holder.parameter:
                role, proof = Role.GRADIENTS, MIRRORS
            consumer.heap.say(live, role, holder.chain, proof)

    def _note_holder(self, live: Live, done: int, holder: Holder) -> None:
        """A row for who keeps an allocation, where it is news; what has no row itself yet gets none."""
        if live.id == NONE:
            return
        line = holder.line
        if line is None and holder.gradient is not None:
            # A gradient has a graph because of the backward that made it.
            gradient = self._consumer.heap.find(holder.gradient)
            line = None if gradient is None else self._consumer.loop.graph_backward_before(gradient.time_ns)
        news = holder.root, holder.chain, line
        if self._held.get(live.id) != news:
            self._held[live.id] = news
            self._add_holder(live.id, done, holder.root, holder.chain, line, NONE)

    def _add_holder(self, allocation: int, done: int, root: str, chain: str, line: str | None, size: int) -> None:
        if line is not None and not self._rows.knows(line):
            self._statements.add(line)
        intern = self._rows.intern
        self._rows["holders"].append((allocation, done, intern(root), intern(chain), intern(line), size))

    def _explain_beside(self) -> None:
        """Looks for who keeps what the process gains beside its tensors, where a step has just ended."""
        rss, self._rss = self._rss, None
        if rss is None or not self._containers.due(rss - self._consumer.heap.cpu_bytes()):
            return
        parts, stopped = self._containers.look()
        self._say(stopped)
        if not parts:
            return
        walked = walk_from(
            {number: part.things for number, part in enumerate(parts)},
            {number: part.group for number, part in enumerate(parts)}, self._ran)
        self._say(walked.stopped)
        told: set[int] = set()
        for holder in walked.holders:  # of each group, who holds the most of it comes first
            part = parts[holder.address]
            if part.group not in told and holder.root not in _CYCLES:
                told.add(part.group)
                self._add_holder(
                    NONE, self._loop.steps.closed, holder.root, holder.chain, holder.line, part.bytes)

    def _say(self, what: str | None) -> None:
        """Notes what was not seen, once."""
        if what is not None and what not in self._said:
            self._said.append(what)

    def _ran(self, line: str) -> bool:
        """Whether a torch function was called, or a module, from a line."""
        return line not in self._statements and self._rows.knows(line)

    def _give_up(self, what: str) -> None:
        self._said.append(what)
        self._on = False

    def _write(self, action: Callable[[], Any]) -> None:
        """Writes to the run file; a disk that is full ends the recording, never the user's run."""
        if self.problem is not None:
            return
        try:
            action()
        except OSError as error:
            self.problem = (
                f"{self.path}: cannot be written any more ({error.strerror}); the run went on unrecorded; what was "
                f"written before can be read: the first {self._kept} steps")
            self._on = False
            self._writer.abandon(full=True)

    # --- what the hooks report ----------------------------------------------------------------------------------

    def _forward_begins(self, grad: bool) -> None:
        if grad:
            self._threads.trains()
        self._loop.forward_begins(grad)
        if self._saves.resting:
            self._watch_or_rest()  # the script's own hooks may have been in the way when the step began
        if self._rehearsals is not None:
            self._rehearsals.forward_begins()
        # An evaluation has no steps: what it keeps is looked for when it has become longer than any before.
        self._evaluated = 0 if grad else self._evaluated + 1
        look = self._evaluated >= self._next_evaluation_look
        if (look or self._enough(at_step_end=False)) and self._may_cut(in_module=True):
            if look:
                self._next_evaluation_look *= 2
            self._modules.suspend()
            self._cut(reopen=True, level=self._level, look=look)  # levels change where steps end
            self._modules.resume()

    @contextmanager
    def _aside(self) -> Iterator[bool]:
        """The stream is closed, and what happens is none of the run's; False where the stream cannot be cut."""
        if self._level is not Level.FULL or not self._may_cut():
            yield False
            return
        self._cut(reopen=False, look=False, midway=True)
        self._is_aside = True
        try:
            yield True
        finally:
            self._is_aside = False
            self._open(Level.FULL)

    def _transform_begins(self) -> None:
        """torch.func is at work: from here on, no shapes."""
        if not self._stream.shapes:
            return
        self._stream.shapes = False
        self._say(_NO_SHAPES.format(step=self._loop.steps.closed))
        if self._stream.level is Level.FULL and not self._loop.busy and not self._modules.depth:
            self._lines.suspend()
            self._cut(reopen=True, level=self._level)
            self._lines.resume()

    def _step_ended(self, end: StepEnd) -> None:
        if self._rehearsals is not None:
            self._rehearsals.forward_over()
        end.host_rss = machine.host_rss()
        end.device_stats = machine.device_stats()
        end.input_shapes, self._modules.step_inputs = self._modules.step_inputs, None
        # A step without module calls ends where the next backward begins: inside a torch function, but no operator.
        if end.closes and self._may_cut(in_function=True):
            if self._away_since is not None and self._others.quiet_since(self._loop.steps.closed):
                self._come_back()
            elif (
                self._enough(at_step_end=True) or self._look_now()
                or self._wanted_level() is not self._level
            ):
                self._lines.suspend()
                self._rss = end.host_rss
                self._cut(reopen=True)
                self._lines.resume()
            self._watch_or_rest()
            self._show_progress()
        wanted = self._options.stop_after
        if wanted is not None and self._loop.steps.closed >= wanted and not self._left:
            raise SystemExit(0)

    def _watch_or_rest(self) -> None:
        """A step begins: whether to note what autograd keeps. In light recording, of steps that do the same one in some
        is enough."""
        rest = (
            self._level is Level.LIGHT and self._consumer.steady
            and self._loop.steps.closed % policy.WATCHED_LIGHT_STEPS != 0)
        if rest is not self._saves.resting and self._level is not None and self._saves.rest(rest):
            self._marks.instant(WATCHED, not rest)

    def _stepping(self, parameters: int | None) -> None:
        """The step of an optimizer begins, or is over. What its operators read are the parameters and their state, and
        it costs more to read than all that a forward and a backward read: it is recorded without."""
        shapes = parameters is None
        if (
            self._stream.level is Level.FULL and self._stream.shapes and self._stream.with_shapes is not shapes
            and (parameters is None or parameters >= _MANY_PARAMETERS) and self._may_cut(in_function=True)
        ):
            self._lines.suspend()
            self._cut(reopen=True, level=self._level, look=False, midway=True, shapes=shapes)
            self._lines.resume()

    def _enough(self, at_step_end: bool) -> bool:
        """Whether so much has gathered in the stream that it is to be read."""
        return self._level is not None and self._gathering.enough(
            self._level, self._loop.steps.closed - self._read_to, len(self._marks.entries), at_step_end)

    def _look_now(self) -> bool:
        """Whether to read the stream at this step's end, small as it is, to see who holds what: often at first."""
        done = self._loop.steps.closed
        if done < self._next_look:
            return False
        self._next_look = max(done + 1, int(done * _LOOK_GROWTH))
        return True

    # --- profilers of the user's own ----------------------------------------------------------------------------

    def _make_way(self) -> None:
        """Another profiler starts on this thread: the stream ends, or it would be wiped."""
        if self._active() and self._stream.level is not None:
            self._modules.suspend()
            self._cut(reopen=False)
            self._away_since = self._loop.steps.closed
            # What goes until the stream is back makes no event.
            inventory.take(lambda _: False, self._note_gone_meanwhile, no_events=True)

    def _come_back(self) -> None:
        """A step has ended with no other profiler in its way."""
        now = time_ns()
        since, self._away_since = self._away_since, None
        self._said.append(
            f"steps {since} to {self._loop.steps.closed - 1}: the script's own profiler ran; memory freed then "
            "that Python did not hold counts as live until its address is used again")
        gone, self._gone = self._gone, []
        self._consumer.skip_to(self._loop.steps.closed, now, gone)
        self._take_inventory(now)
        self._open(self._wanted_level())

    # --- progress -----------------------------------------------------------------------------------------------

    def _show_progress(self) -> None:
        if not self._options.progress or monotonic() - self._last_progress < _PROGRESS_SECONDS:
            return
        self._last_progress = monotonic()
        self._progress_shown = True
        heap = self._consumer.heap
        sys.stderr.write(
            f"\rmemdiag: step {self._loop.steps.closed}, live {heap.live_bytes() / 2**20:,.1f} MiB, "
            f"peak {heap.peak_bytes / 2**20:,.1f} MiB\x1b[K")
        sys.stderr.flush()

    def _clear_progress(self) -> None:
        if self._progress_shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    # --- forks --------------------------------------------------------------------------------------------------

    def _forked(self) -> None:
        """In a child: it is not recorded, must not grow, and must not touch the run file."""
        was_recorded = self._active()
        self._on = False
        self._level = None
        self._marks.enabled = False
        self._left = True
        self._writer.abandon()
        if was_recorded:
            self._stream.drop()
            self._saves.stop()
            self._lines.stop()
        self._end_hooks()


_current: Recorder | None = None
_fork_hook_installed = False


def _track(recorder: Recorder) -> None:
    global _current, _fork_hook_installed
    _current = recorder
    if not _fork_hook_installed:
        _fork_hook_installed = True
        os.register_at_fork(after_in_child=_after_fork)


def _untrack(recorder: Recorder) -> None:
    global _current
    if _current is recorder:
        _current = None


def _after_fork() -> None:
    if _current is not None:
        _current._forked()
