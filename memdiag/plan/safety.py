"""Whether a module's forward may run twice, as a checkpoint lets it: told by the facts of a recorded step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from memdiag.trace import Kind, Trace
from memdiag.trace import model as m
from memdiag.trace.model import GRAD_ON
from memdiag.trace.places import relative


class Safety(Enum):
    SAFE = "safe"
    SAFE_WITH = "safe_with"
    UNSAFE = "unsafe"


@dataclass(frozen=True)
class Reason:
    """What makes a checkpoint unsafe.

    Attributes:
        line: ``file.py:12`` of what does so; None where it is not in the script.
    """

    text: str
    line: str | None


@dataclass(frozen=True)
class Verdict:
    """Of one module, for all its calls together.

    Attributes:
        module: its path.
        conditions: with what a checkpoint around it is safe; empty where it is unsafe.
        reasons: why it is not.
    """

    module: str
    safety: Safety
    conditions: tuple[str, ...] = ()
    reasons: tuple[Reason, ...] = ()


_AND = "\n"  # between names in the text of one fact
NOT_PROBED = "it did not run a second time when the run was recorded, so nothing is known"
PRESERVED = "the random state is preserved"

_UNSAFE: dict[str, Callable[[str], str]] = {
    m.BUFFER: lambda text: _buffers(text.split(_AND)),
    m.ATTRIBUTE: lambda text: f"attribute `{text}` changes, and would change twice",
    m.VARIABLE: lambda text: f"variable `{text}`, outside the function, changes, and would change twice",
    m.ARGUMENT: lambda text: f"what it is given as `{text}` changes, and would change twice",
    m.CHANGED_LATER: lambda text: f"{text} changes after it, before backward, and it would run with what is there then",
    m.WRITES: lambda text: f"{text} writes in place to a tensor that was there before",
    m.WRITTEN_LATER: lambda text: f"{text} writes, before backward, to a tensor that it would read again",
    m.PYTHON_RANDOM: lambda _: "draws from Python's `random`, whose state a checkpoint does not set back",
    m.NUMPY_RANDOM: lambda _: "draws from NumPy's random state, which a checkpoint does not set back",
    m.GENERATOR: lambda text: f"{text} draws from a generator of its own, which a checkpoint does not set back",
    m.RANDOM_ELSEWHERE: lambda text: (
        f"draws random numbers on {text}, whose state a checkpoint does not set back: no positional argument is there"),
    m.OTHER_COURSE: lambda text: _course(text),
    m.OTHER_VALUE: lambda text: f"{text} had another value when it ran again from the same state",
    m.HOOK: lambda text: f"the hook `{text}` of a module inside it would run twice",
    m.UNPACKS_TWICE: lambda text: f"the backward of `{text}` asks for `saved_tensors` more than once, which fails",
}
_SAFE_WITH: dict[str, Callable[[str], str]] = {
    m.RANDOM: lambda _: PRESERVED,
    m.ROUNDING: lambda text: f"{text} does not give the same bits each time: gradients differ by rounding",
    m.READS_VALUE: lambda text: f"{text} reads values off tensors, which waits for the device once more",
    m.CHECKPOINT: lambda _: "the checkpoint inside it runs a third time",
}


def verdicts(trace: Trace) -> dict[str, Verdict]:
    """Verdicts on all modules that were called, with gradients on, in the step that plans are made from; by path."""
    facts = trace["region_facts"]
    found: dict[str, set[tuple[str, str, str | None]]] = {path: set() for path in _called(trace)}
    for module, kind, text, line in zip(facts["module"], facts["kind"], facts["text"], facts["line"], strict=True):
        about = found.setdefault(trace.text[module], set())
        about.add((trace.text[kind], trace.string(text) or "", relative(trace, trace.string(line))))
    return {path: _verdict(path, about) for path, about in sorted(found.items())}


def chains(trace: Trace) -> set[str]:
    """Paths of modules that run the modules in them one after the other, and nothing else."""
    return _modules(trace, m.CHAIN)


def with_checkpoints(trace: Trace) -> set[str]:
    """Paths of modules that have a checkpoint of the script's own in them."""
    return _modules(trace, m.CHECKPOINT)


def wrapped(trace: Trace) -> set[str]:
    """What stands for the paths of models that are called inside wrappers, such as ``DistributedDataParallel``."""
    return _modules(trace, m.WRAPPED)


def _modules(trace: Trace, kind: str) -> set[str]:
    facts = trace["region_facts"]
    return {trace.text[module] for module in facts["module"][np.isin(facts["kind"], trace.numbers(kind))]}


def _called(trace: Trace) -> set[str]:
    """The modules of the step, whether or not they ran again."""
    facts, steps, spans = trace["region_facts"], trace["steps"], trace["spans"]
    row = np.flatnonzero(np.isin(steps["step"], facts["step"]))
    if not len(row):
        return set()
    first, last = steps["start_event"][row[0]], steps["end_event"][row[0]]
    mine = (spans["kind"] == Kind.MODULE) & (spans["flags"] & GRAD_ON != 0)
    mine &= (spans["start_event"] >= first) & (spans["end_event"] <= last)
    return {trace.text[name] for name in spans["name"][mine]}


def _verdict(path: str, about: set[tuple[str, str, str | None]]) -> Verdict:
    if not any(kind == m.PROBED for kind, _, _ in about):
        return Verdict(path, Safety.UNSAFE, reasons=(Reason(NOT_PROBED, None),))
    reasons = {Reason(_UNSAFE[kind](text), line) for kind, text, line in _joined(about) if kind in _UNSAFE}
    if reasons:
        ordered = sorted(reasons, key=lambda reason: (reason.line or "", reason.text))
        return Verdict(path, Safety.UNSAFE, reasons=tuple(ordered))
    conditions = sorted({_SAFE_WITH[kind](text) for kind, text, _ in about if kind in _SAFE_WITH})
    return Verdict(path, Safety.SAFE_WITH if conditions else Safety.SAFE, tuple(conditions))


def _joined(about: set[tuple[str, str, str | None]]) -> Iterator[tuple[str, str, str | None]]:
    """The facts, with the buffers of one module that change at one line as one: a batch norm has three."""
    buffers: dict[tuple[str, str | None], list[str]] = defaultdict(list)
    for kind, text, line in about:
        if kind == m.BUFFER:
            buffers[text.rpartition(".")[0], line].append(text)
        else:
            yield kind, text, line
    for (_, line), names in buffers.items():
        yield m.BUFFER, _AND.join(sorted(names)), line


def _buffers(names: Sequence[str]) -> str:
    *most, last = (f"`{name}`" for name in names)
    if not most:
        return f"buffer {last} changes, and would change twice"
    return f"buffers {', '.join(most)} and {last} change, and would change twice"


def _course(text: str) -> str:
    """What it did the second time, and at first."""
    now, _, then = ("a save for backward" if part == m.SAVE else part.replace(m.CALL, "the call of ")
                    for part in text.partition("|"))
    if not now:
        return f"did not come to {then} when it ran again from the same state"
    if not then:
        return f"did otherwise when it ran again from the same state: {now}"
    return f"did otherwise when it ran again from the same state: {now} where {then} was at first"
