"""What one run of a script leaves behind to be compared: digests in the order in which they were taken."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple


class Stage(Enum):
    """What is compared, in the order in which a step comes to it."""

    INPUTS = "inputs"
    OUTPUTS = "outputs"
    GRADIENTS = "gradients"
    BUFFERS = "buffers"
    RANDOM_STATE = "random_state"
    PARAMETERS = "parameters"
    SCHEDULE = "schedule"


# What is noted besides: no stage of its own, but it tells what made one differ.
BEGAN_RANDOM = "random_state_before"
BEGAN_PARAMETERS = "parameters_before"
NEXT = "next_micro_batch"
BUFFERS_MIDWAY = "buffers_after_forward"
CALL = "call"
RECOMPUTED = "recomputed_call"
RETURNED = "call_returned"
RECOMPUTED_RETURNED = "recomputed_call_returned"

Key = tuple[str, str, int]
"""Of an entry in its step: stage, name, and its number among those of that name."""


Moment = tuple[float, int]
"""In a step: its micro-batch, and the place of the stage; parameters and schedule come after all of them."""


class Entry(NamedTuple):
    """Something that was looked at.

    Attributes:
        stage: of the comparison, or what is noted besides.
        value: a digest of the bits of a tensor; of a single number or of other things, what they are.
        shape, dtype: of a tensor.
        own: of a module call, a digest of the module's own parameters.
    """

    stage: str
    name: str
    nth: int
    value: str
    shape: str | None = None
    dtype: str | None = None
    own: str | None = None

    @property
    def key(self) -> Key:
        return self.stage, self.name, self.nth


NOTHING = "None"
"""The value of what could be there and is not: a parameter without a gradient."""
OWN_GENERATOR = "generator "
"""How the name of a random generator begins that a module keeps."""
UNREADABLE = "unreadable"
"""The value of a tensor that has no bits of its own to look at."""


@dataclass
class Segment:
    """A step of an optimizer, and all that led to it.

    Attributes:
        whole: it came to its end.
    """

    entries: list[Entry] = field(default_factory=list)
    whole: bool = True

    def by_key(self, stage: str) -> dict[Key, Entry]:
        return {entry.key: entry for entry in self.entries if entry.stage == stage}

    @property
    def micro_batches(self) -> int:
        """That began where another one had been backward through."""
        return sum(entry.stage == NEXT for entry in self.entries)

    def moments(self) -> dict[Key, Moment]:
        """When each entry was taken."""
        order = {stage.value: number for number, stage in enumerate(Stage)}
        micro_batch = 0
        found: dict[Key, Moment] = {}
        for entry in self.entries:
            micro_batch += entry.stage == NEXT
            if entry.stage in order:
                last = entry.stage in (Stage.PARAMETERS.value, Stage.SCHEDULE.value)
                found[entry.key] = (math.inf if last else micro_batch, order[entry.stage])
        return found

    def of(self, stage: str) -> Iterator[Entry]:
        return (entry for entry in self.entries if entry.stage == stage)


@dataclass(frozen=True)
class Failure:
    """How a run ended, where it did not end well.

    Attributes:
        kind: the class of the exception.
        line: of the script's own code where it was raised.
        out_of_memory: an allocator had none.
    """

    kind: str
    text: str
    line: str | None
    out_of_memory: bool = False


@dataclass
class Run:
    """What a run left.

    Attributes:
        about: versions, device and what the numbers of the run are.
        problem: why it cannot be compared, where that is not the script's doing.
        unreadable: tensors whose values were not seen.
    """

    about: dict[str, Any]
    segments: list[Segment]
    failure: Failure | None = None
    problem: str | None = None
    unreadable: list[str] = field(default_factory=list)


class RunWriter:
    """Writes a run as it goes: a line for each step, so that what came before a sudden end is there."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")

    def segment(self, segment: Segment) -> None:
        self._put({"whole": segment.whole, "entries": [list(entry) for entry in segment.entries]})

    def end(self, about: dict[str, Any], failure: Failure | None, problem: str | None, unreadable: list[str]) -> None:
        self._put({"about": about, "failure": None if failure is None else vars(failure), "problem": problem,
                   "unreadable": unreadable})
        self._file.close()

    def _put(self, what: dict[str, Any]) -> None:
        self._file.write(json.dumps(what) + "\n")
        self._file.flush()


def read_run(path: Path) -> Run:
    """What a run has left; of one that was killed, up to there."""
    segments: list[Segment] = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                held = json.loads(line)
            except ValueError:  # cut short
                break
            if "about" in held:
                failure = held["failure"]
                return Run(held["about"], segments, None if failure is None else Failure(**failure), held["problem"],
                           held["unreadable"])
            segments.append(Segment([Entry(*entry) for entry in held["entries"]], held["whole"]))
    return Run({}, segments, problem="the run ended without a word")
