"""What a diagnosis is made of: findings with their numbers, and the verdict chosen from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from memdiag.trace.places import Place

Mask = NDArray[np.bool_]
Ints = NDArray[np.int64]


class Class(Enum):
    """What a shortage can be. The value is the word in JSON."""

    ACTIVATION = "activation"
    OPTIMIZER_STATE = "optimizer_state"
    GRADIENTS = "gradients"
    PARAMETERS = "parameters"
    WORKSPACE = "workspace"
    LEAK = "leak"
    INPUT_BATCHES = "input_batches"
    FRAGMENTATION = "fragmentation"
    HOST_MEMORY = "host_memory"
    OUTSIDE_PYTORCH = "outside_pytorch"
    NONE = "none"
    UNDETERMINED = "undetermined"

    @property
    def words(self) -> str:
        return {
            Class.ACTIVATION: "activations", Class.LEAK: "a leak", Class.INPUT_BATCHES: "inputs kept on the device",
            Class.OUTSIDE_PYTORCH: "memory outside PyTorch",
        }.get(self, self.value.replace("_", " "))


class Severity(Enum):
    """How much a finding matters: ``HIGH`` ends runs or is most of the peak, ``LOW`` is worth knowing."""

    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"


@dataclass(frozen=True)
class Advice:
    """What to do.

    Attributes:
        bytes: by which that would lower the peak; None where it cannot be told.
        at_most: it is the most that can be had: what the cure itself takes, or leaves, cannot be told.
    """

    text: str
    bytes: int | None
    at_most: bool = False


@dataclass(frozen=True)
class Holder:
    """Who keeps it: the statement, and the chain from a root to the tensor."""

    line: str | None
    chain: list[str]

    @property
    def sentence(self) -> str:
        return "kept by " + " → ".join(self.chain) + (f" ({self.line})" if self.line else "")


@dataclass(frozen=True)
class Finding:
    """One thing that a rule found.

    Attributes:
        kind: finer than the class, and open.
        bytes: alive at the peak on its account.
        allocations: which they are, all of the run that are of their kind, over the allocations of the trace that
            holds the peak; None where the finding is not about allocations.
        since: of each, the event from which on it need not be there; None where it need not be there at all.
        cured: what the first advice takes away, where that is more than ``allocations``; of others, ``part`` says how
            many bytes.
        birth: line that the most of it was allocated at.
    """

    cls: Class | None
    kind: str
    title: str
    severity: Severity
    bytes: int
    share: float
    evidence: list[str]
    advice: list[Advice]
    birth: str | None = None
    holder: Holder | None = None
    allocations: Mask | None = field(default=None, repr=False, compare=False)
    since: Ints | None = field(default=None, repr=False, compare=False)
    cured: Mask | None = field(default=None, repr=False, compare=False)
    part: Ints | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class ClassShare:
    """A class's bytes at the peak; those of all classes, ``undetermined`` included, sum to the peak."""

    cls: Class
    bytes: int
    share: float


@dataclass(frozen=True)
class Verdict:
    """What the shortage is.

    Attributes:
        classes: those with any bytes at the peak, the verdict's own first, then by bytes.
        phase: of the moment.
        moment: what it is about, and the findings too: "peak", or "failure" where the run died for want of memory;
            all that is said of the peak is then true of the moment at which the request failed.
    """

    cls: Class
    classes: list[ClassShare]
    phase: str | None
    sentence: str
    moment: str = "peak"


@dataclass(frozen=True)
class Site:
    """A place in the code whose allocations survive, more of them with every step."""

    operator: str | None
    module: str | None
    line: str | None
    bytes_per_step: float


@dataclass(frozen=True)
class Growth:
    """Live memory at the ends of steps, once the warm-up is over.

    Attributes:
        bytes_per_step: 0 where it does not grow; None where too few steps were seen to tell.
        host_bytes_per_step: of the process, tensors on the CPU not counted; None as above.
        sites: largest first; they sum to ``bytes_per_step``.
    """

    bytes_per_step: float | None
    host_bytes_per_step: float | None
    sites: list[Site]


@dataclass(frozen=True)
class Scaling:
    """How bytes of a role at the peak follow a dimension of the inputs.

    Attributes:
        by: "batch" for the first dimension of the first input, "sequence" for its second.
        bytes_per_unit: more for each unit, near the size that was seen.
        fixed_bytes: what does not follow it.
        source: "measured" over steps of different shapes, or told by the "shapes" of what was saved.
    """

    role: str
    by: str
    bytes_per_unit: int
    fixed_bytes: int
    source: str


@dataclass(frozen=True)
class RunnerUp:
    """The peak that would be left without what the leading finding is about."""

    allocated_bytes: int
    step: int | None
    phase: str | None
    module: str | None
    operator: str | None
    line: str | None
    without: str


@dataclass(frozen=True)
class Earlier:
    """How far the step had come, measured by a step before it that was whole.

    Attributes:
        step: that one; ``warm_up`` where it is the first.
        operators: outermost operators, and nodes of backward, that the failing step had begun; ``of`` are those of
            the other.
        allocated_bytes: what was alive at the same point of the other; None where the two had come another way.
    """

    step: int
    warm_up: bool
    operators: int
    of: int
    allocated_bytes: int | None


@dataclass(frozen=True)
class Oom:
    """A request that failed. What is not known is None.

    Attributes:
        requested_bytes: as the allocator rounds them.
        step: None outside steps.
        module, operator: as of an allocation; in backward the module is that whose forward is undone.
        line: that was running; in backward that of the call of ``backward``, where no Python code ran inside it.
        forward_line: in backward, of the operator that was being undone.
        allocated_bytes: alive in the allocator then.
        reserved_bytes: of the device, taken by the allocator then, free blocks included.
        free_bytes: of the device then, by what others had at the end of the step before.
        outside_pytorch_bytes: of the device, in use by others at the end of the step before.
        largest_hole_bytes: the largest free block.
        remedies: what would have helped, best first, each with the bytes that it frees at this moment.
        roles: bytes alive by role; None where the step's events were folded away.
        places: the same by place of birth, largest first.
        earlier: None where no step before was recorded in full, or the request was made outside operators.
        failures: requests of the run that failed; this is the last.
        ended_run: the script went on after it where not.
    """

    device: str | None
    requested_bytes: int | None
    step: int | None
    phase: str | None
    module: str | None
    operator: str | None
    line: str | None
    forward_line: str | None
    allocated_bytes: int | None
    reserved_bytes: int | None
    free_bytes: int | None
    outside_pytorch_bytes: int | None
    largest_hole_bytes: int | None
    remedies: list[Advice]
    roles: dict[str, int] | None
    places: dict[Place, int] | None
    earlier: Earlier | None
    failures: int
    ended_run: bool


@dataclass(frozen=True)
class Diagnosis:
    """All that is diagnosed of a run.

    Attributes:
        reachable_bytes: saved activations inside modules at the peak: an upper bound of what checkpointing could
            free. None where the peak's events were folded away.
        oom: the last request that failed for want of memory; None where none did.
    """

    verdict: Verdict
    findings: list[Finding]
    growth: Growth
    scaling: list[Scaling]
    runner_up: RunnerUp | None
    reachable_bytes: int | None
    oom: Oom | None = None
