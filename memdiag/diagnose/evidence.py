"""What the allocations of a run are, as rules ask of them: classes, and kinds within a class. Each computed once."""

from __future__ import annotations

import math
import re
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from memdiag.diagnose.growth import Growing, growing, swelling
from memdiag.diagnose.model import Advice, Class, Finding, Holder, Ints, Mask, Severity
from memdiag.diagnose.moment import Moment
from memdiag.diagnose.saves import Shape
from memdiag.policy import LEAK_STEPS, PATTERN_SHARE, SAMPLES, SNAPSHOT_PARAMETERS, SPARSE_ROWS
from memdiag.trace import NONE, Kind, Phase, Role, Trace
from memdiag.trace.model import SNAPSHOT, STEPPED
from memdiag.trace.nesting import span_rows
from memdiag.trace.places import at

_CLASS_OF_ROLE = {
    Role.PARAMETERS: Class.PARAMETERS,
    Role.BUFFERS: Class.PARAMETERS,
    Role.GRADIENTS: Class.GRADIENTS,
    Role.OPTIMIZER_STATE: Class.OPTIMIZER_STATE,
    Role.OPTIMIZER_TEMPORARIES: Class.WORKSPACE,
    Role.INPUTS: Class.INPUT_BATCHES,
    Role.SAVED_ACTIVATIONS: Class.ACTIVATION,
    Role.OTHER_ACTIVATIONS: Class.ACTIVATION,
    Role.RECOMPUTED_ACTIVATIONS: Class.ACTIVATION,
    Role.BACKWARD_TEMPORARIES: Class.ACTIVATION,  # gradients of activations, on their way through backward
    Role.WORKSPACE: Class.WORKSPACE,
}

# Operators that put tensors together, by copying them.
_GATHERING = ("aten::cat", "aten::concat", "aten::concatenate", "aten::stack", "aten::vstack", "aten::hstack")

# Operators that compare what was found with what was wanted, one by one.
_DIFFERENCES = (
    "aten::sub", "aten::mse_loss", "aten::l1_loss", "aten::smooth_l1_loss", "aten::huber_loss",
    "aten::binary_cross_entropy", "aten::binary_cross_entropy_with_logits")

_BROADCASTS = ("aten::broadcast_tensors",)
_EMBEDDINGS = ("EmbeddingBackward0", "EmbeddingBagBackward0")
_ITEM = re.compile(r"\[[^\]]*\]$")  # of a container, in the name of what it holds
_SHAPE = re.compile(r"\[([\d, ]*)\]")  # in the signature of an operator


class Evidence(Moment):
    """The moment of the peak, and what is what. Masks are over all allocations, as those of a moment are."""

    @cached_property
    def growing(self) -> Growing:
        return growing(self.run)

    @cached_property
    def classes(self) -> NDArray[np.object_]:
        """The class of each allocation: by its role, or by what became of it."""
        found = np.full(len(self.size), Class.UNDETERMINED, dtype=object)
        for role, cls in _CLASS_OF_ROLE.items():
            found[self.role == role] = cls
        found[self.scratch] = Class.WORKSPACE
        found[self.copies] = Class.PARAMETERS
        found[self.arriving | self.dense_embeddings[0] | self.per_sample[0]] = Class.GRADIENTS
        found[self.filling & (self.role == Role.HELD)] = Class.INPUT_BATCHES
        found[self.leaked] = Class.LEAK
        return found

    def of(self, cls: Class) -> Mask:
        found: Mask = self.classes == cls
        return found

    @cached_property
    def by_class(self) -> dict[Class, int]:
        """Bytes at the peak of each class that has any, largest first; they sum to the peak."""
        found = {cls: self.bytes_of(self.of(cls)) for cls in Class}
        return dict(sorted(((cls, size) for cls, size in found.items() if size), key=lambda item: -item[1]))

    @cached_property
    def leaked(self) -> Mask:
        """What grows, and was left by an earlier step than that of the peak."""
        earlier = (self.step == NONE) | (self.at.born_step < self.step)
        if self.at is not self.run:  # it tells of that step alone
            earlier = self.at.life.born == NONE
        found: Mask = self._of_run(self.growing.leaks) & earlier
        return found

    def _of_run(self, chosen: Mask) -> Mask:
        """Which allocations are these of the run's."""
        rows = self.at.rows_in_run
        found = np.zeros(len(rows), dtype=bool)
        found[rows != NONE] = chosen[rows[rows != NONE]]
        return found

    @cached_property
    def filling(self) -> Mask:
        """What containers of a fixed capacity keep, that are not full yet."""
        return self._of_run(self.growing.filling)

    @property
    def leak_rate(self) -> float:
        """Bytes that leak with every step."""
        return self.growing.leak_rate

    @cached_property
    def swelling(self) -> Ints:
        """Bytes of each allocation that it has only because something that it is made from grows."""
        return swelling(self.run, self.growing.leaks) if self.at is self.run else np.zeros_like(self.size)

    @property
    def leaking(self) -> bool:
        """Whether what leaks would double the peak in a real run, or is much of it after so many steps."""
        soon = self.leak_rate * LEAK_STEPS >= self.peak_bytes > 0
        return self.leak_rate > 0 and (soon or self.matters(self.leaked))

    @cached_property
    def scratch(self) -> Mask:
        """Made by code that runs without gradients: nothing keeps it for a backward."""
        trace, nest = self.at.trace, self.at.nest
        phase = nest.of(nest.phase, self.at.born_in)
        names = trace.numbers(Phase.EVALUATION.label, Phase.OTHER.label)
        found: Mask = np.isin(at(trace["spans"]["name"], phase), names)
        found &= self.role == Role.OTHER_ACTIVATIONS
        return found

    @cached_property
    def gathered(self) -> Mask:
        """Concatenations outside modules that no backward needs, and that no step leaves to the next."""
        outside = self.at.nest.of(self.at.nest.module, self.at.born_in) == NONE
        found: Mask = outside & (self.role == Role.OTHER_ACTIVATIONS) & ~self.leaked & self.concatenated
        return found

    @cached_property
    def concatenated(self) -> Mask:
        """Made by operators that put tensors together."""
        return self.made_by(*_GATHERING)

    @cached_property
    def broadcast(self) -> tuple[Mask, tuple[Shape, Shape, Shape] | None]:
        """Differences of each element of one operand from each of another: of a column and a row, [n, 1] and [n].

        Returns:
            Which they are, where they matter; and of the largest the operands and the result, None where they do not.
        """
        spans = self.at.trace["spans"]
        differences, before = (
            np.isin(spans["name"], self.at.trace.numbers(*names)) for names in (_DIFFERENCES, _BROADCASTS))
        texts = np.unique(spans["signature"][differences | before]).tolist()
        found = {text: shapes for text in texts if (shapes := _each_with_each(self.at.trace.string(text))) is not None}
        results = [result for _, _, result in found.values()]
        # The losses of torch.nn.functional broadcast first, and then take two operands of one shape.
        expanded = [text for text in texts if (of := _shapes(self.at.trace.string(text))) and of[0] in results]
        alike = self.saves.alike(results)
        made = self.flow.made_in(differences & np.isin(spans["signature"], [*found, *expanded]))
        # The losses' results have the storage of their differences (`mean_out` into it), and a variable may hold one.
        mine = (self._passing | (self.role == Role.HELD)) & self.flow.together(made & alike, alike)
        if not found or not self.matters(mine):
            return np.zeros(len(self.size), dtype=bool), None
        return mine, max(found.values(), key=lambda shapes: math.prod(shapes[-1]))

    @cached_property
    def written_softmax(self) -> Mask:
        """What makes a softmax that is written out in single operators, and is made of it, where that is much.

        An argument of the exponential that a variable holds beyond the forward would be there all the same.
        """
        written = self.saves.written_softmaxes
        alike = self.saves.alike(written.shapes)
        divided = self.around(written) & self.flow.divided_by_sums(alike)
        mine: Mask = self._passing | self.saves.saved & (self.role == Role.INPUTS)
        mine &= self.flow.together(divided, alike)
        born, step = self.at.life.born, self.at.born_step
        exponential = mine & self.made_by("aten::exp")
        first = np.full(int(step.max(initial=0)) + 2, np.iinfo(np.int64).max)  # in each step; the last is for none
        np.minimum.at(first, step[exponential], born[exponential])
        over = at(self.at.trace["spans"]["end_event"], self.at.nest.of(self.at.nest.phase, self.at.born_in))
        mine &= (self.role != Role.OTHER_ACTIVATIONS) | (born >= first[step]) | (self.at.life.died <= over)
        return mine if self.matters(mine) else np.zeros(len(self.size), dtype=bool)

    @cached_property
    def _passing(self) -> Mask:
        """What a step makes for itself, in forward and backward."""
        found: Mask = (self.of(Class.ACTIVATION) | self.of(Class.WORKSPACE)) & (self.role != Role.OPTIMIZER_TEMPORARIES)
        return found

    @cached_property
    def single(self) -> Mask:
        """What findings tell that are about one kind of code, whatever its classes."""
        found = self.gathered | self.broadcast[0] | self.written_softmax | self.filling
        return found | self.unstepped[1] if self.matters(self.unstepped[1]) else found

    @cached_property
    def per_sample(self) -> tuple[Mask, int]:
        """Gradients of the samples one by one: made in backward, and as many times as large as the parameters.

        Returns:
            Which they are, and how many times; 0 where they are not, for at least half of the parameters' bytes.
        """
        nothing = np.zeros(len(self.size), dtype=bool)
        sizes, number = np.unique(self.size[self.alive & (self.role == Role.PARAMETERS)], return_counts=True)
        phase = self.at.nest.of(self.at.nest.phase, self.at.born_in)
        made = np.isin(at(self.at.trace["spans"]["name"], phase), self.at.trace.numbers(Phase.BACKWARD.label))
        made &= ~self.saves.saved & ~np.isin(self.role, (Role.GRADIENTS, Role.PARAMETERS))
        # What has the size of something that a forward made is its gradient.
        forward = np.isin(at(self.at.trace["spans"]["name"], phase), self.at.trace.numbers(Phase.FORWARD.label))
        made &= ~np.isin(self.size, np.unique(self.size[forward]))
        there, count = np.unique(self.size[made & self.alive], return_counts=True)
        if len(sizes) < SNAPSHOT_PARAMETERS or not len(there) or not sizes.all():
            return nothing, 0
        times, rest = np.divmod(there[:, None], sizes[None, :])
        fits = (rest == 0) & (times >= SAMPLES) & (count[:, None] >= number[None, :])
        covered = {
            int(k): sizes[(fits & (times == k)).any(axis=0)] for k in np.unique(times[fits])}
        weight = {k: int((mine * number[np.isin(sizes, mine)]).sum()) for k, mine in covered.items()
                  if len(mine) >= SNAPSHOT_PARAMETERS}
        best = max(weight, key=lambda k: weight[k], default=0)
        if not best or weight[best] < PATTERN_SHARE * int((sizes * number).sum()):
            return nothing, 0
        mine: Mask = made & np.isin(self.size, best * covered[best])
        return mine, best

    @cached_property
    def unstepped(self) -> tuple[Mask, Mask]:
        """Gradients of parameters that no optimizer has stepped, while others have been.

        Returns:
            Which they are; and with them what the forwards saved, and their backwards made, that train only such.
        """
        trace, nest, nothing = self.at.trace, self.at.nest, np.zeros(len(self.size), dtype=bool)
        claims, spans = trace["claims"], trace["spans"]
        parameters = claims["role"] == Role.PARAMETERS
        stepped = np.unique(claims["name"][parameters & np.isin(claims["proof"], trace.numbers(STEPPED))])
        idle = np.setdiff1d(claims["name"][parameters], np.append(stepped, NONE))
        if not len(stepped) or not len(idle):
            return nothing, nothing
        gradients = nothing.copy()
        gradients[claims["allocation"][(claims["role"] == Role.GRADIENTS) & np.isin(claims["name"], idle)]] = True
        gradients &= self.role == Role.GRADIENTS
        if not gradients.any():
            return nothing, nothing
        calls = np.flatnonzero(spans["kind"] == Kind.MODULE)
        outer = nest.outer_module[calls]
        trained, untrained = (
            np.unique(outer[np.isin(spans["name"][calls], _owners(trace, names))]) for names in (stepped, idle))
        calls = np.setdiff1d(untrained, trained)
        born = self.at.born_in
        forward = nest.of(nest.outer_module, span_rows(trace, at(spans["forward"], nest.of(nest.node, born))))
        # Without a graph, a forward needs what it saves until the last operator that saves it.
        inside = np.isin(nest.of(nest.outer_module, born), calls) & self.saves.saved | np.isin(forward, calls)
        return gradients, gradients | inside & (self._passing | self.arriving)

    @cached_property
    def copies(self) -> Mask:
        """Storages of the parameters' sizes that the script holds, also where each step makes them anew: copies of the
        model."""
        sizes, number = np.unique(self.size[self.alive & (self.role == Role.PARAMETERS)], return_counts=True)
        found: Mask = (self.role == Role.HELD) & np.isin(self.size, sizes)
        anew = (self.role == Role.OTHER_ACTIVATIONS) & ~self.saves.saved & np.isin(self.size, sizes)
        anew &= self.at.nest.of(self.at.nest.module, self.at.born_in) == NONE
        anew &= self.at.life.died > self.step_ends()
        # A single one may have its size by chance: it is to be most of a model.
        copied, times = np.unique(self.size[anew & self.alive], return_counts=True)
        of_each = np.minimum(times, number[np.searchsorted(sizes, copied)])
        if len(copied) >= SNAPSHOT_PARAMETERS and (copied * of_each).sum() >= PATTERN_SHARE * (sizes * number).sum():
            found = found | anew
        return found

    @cached_property
    def arriving(self) -> Mask:
        """Temporaries of backward of a gradient's size: gradients that are added to one that is there already."""
        sizes = np.unique(self.size[self.alive & (self.role == Role.GRADIENTS)])
        found: Mask = (self.role == Role.BACKWARD_TEMPORARIES) & np.isin(self.size, sizes)
        return found

    @cached_property
    def dense_embeddings(self) -> tuple[Mask, int, int]:
        """Gradients that are as large as an embedding's table, though few of its rows were looked up.

        Returns:
            Which they are; and of the largest, the indices that were looked up at once, and the rows of the table.
        """
        trace = self.at.trace
        spans = trace["spans"]
        names = trace.numbers(*_EMBEDDINGS)
        lookup = span_rows(trace, spans["forward"])  # of a node of backward, the operator that it undoes
        nodes = np.flatnonzero(np.isin(spans["name"], names) & (lookup != NONE))
        elements = np.zeros(len(spans["id"]), dtype=np.int64)  # of the table, where it is much larger than the lookup
        indices = rows = 0
        for node, operator in zip(nodes.tolist(), lookup[nodes].tolist(), strict=True):
            table, wanted = [*_shapes(trace.string(int(spans["signature"][operator]))), (), ()][:2]
            if len(table) == 2 and table[0] >= SPARSE_ROWS * math.prod(wanted):
                elements[node] = math.prod(table)
                indices, rows = max((indices, rows), (math.prod(wanted), table[0]), key=lambda found: found[1])
        table_size = at(elements, self.at.nest.of(self.at.nest.node, self.at.born_in))
        mine: Mask = (table_size > 0) & (self.size > 0) & (self.size % np.maximum(table_size, 1) == 0)
        return mine, indices, rows

    @cached_property
    def reachable(self) -> Mask:
        """What checkpointing could free at most: saved activations that were made inside modules, also those that are
        made anew in backward for a checkpoint that is too large. Of a light step, and in a snapshot, no modules are
        known: all saved ones.
        """
        found = self.of(Class.ACTIVATION) & np.isin(self.role, (Role.SAVED_ACTIVATIONS, Role.RECOMPUTED_ACTIVATIONS))
        if self.at is self.run and self.at.trace.about.get("source") != SNAPSHOT:
            found &= self.at.nest.of(self.at.nest.module, self.at.born_in) != NONE
        return found

    def main_class(self, chosen: Mask, *classes: Class) -> Class:
        """Of some classes, the one that most bytes of ``chosen`` at the peak are of; of equals the first."""
        return max(classes, key=lambda cls: self.bytes_of(chosen & self.of(cls)))

    def held_by(self, chosen: Mask) -> str:
        """The variable that leads to the largest of them; the items of a container are one."""
        claims = self.at.trace["claims"]
        largest = int(np.where(chosen & self.alive, self.size, 0).argmax())
        mine = {allocation: self.at.trace.string(name) for allocation, name in zip(
            claims["allocation"].tolist(), claims["name"].tolist(), strict=True) if name != NONE and chosen[allocation]}
        name = mine.get(largest)
        if not name:
            return "variables of the script"
        items = _ITEM.sub("[*]", name)
        others = any(allocation != largest and _ITEM.sub("[*]", other or "") == items
                     for allocation, other in mine.items())
        return f"`{items if others else name}`"

    def finding(
        self, cls: Class, kind: str, title: str, chosen: Mask, evidence: list[str], advice: list[Advice],
        severity: Severity | None = None, holder: Holder | None = None, since: Ints | None = None,
    ) -> Finding:
        """A finding about some allocations, with its bytes, share, severity and line of birth."""
        size = self.bytes_of(chosen)
        share = size / self.peak_bytes if self.peak_bytes else 0.0
        if severity is None:
            severity = Severity.HIGH if share >= PATTERN_SHARE else Severity.MEDIUM
        return Finding(
            cls, kind, title, severity, size, share, evidence, advice, self.main_birth(chosen).line, holder,
            chosen, since)


def _shapes(signature: str | None) -> list[tuple[int, ...]]:
    """Of the tensors that an operator was given."""
    return [tuple(int(n) for n in text.split(",") if n.strip()) for text in _SHAPE.findall(signature or "")]


def _each_with_each(signature: str | None) -> tuple[Shape, Shape, Shape] | None:
    """Shapes of two operands and their result, where each is broadcast along a dimension that the other has."""
    shapes = sorted(_shapes(signature), key=lambda shape: (-len(shape), shape))
    if len(shapes) != 2:
        return None
    first, second = shapes
    pairs = list(zip(first, (1,) * (len(first) - len(second)) + second, strict=True))
    if not any(a > b for a, b in pairs) or not any(a < b for a, b in pairs):
        return None
    return first, second, tuple(max(pair) for pair in pairs)


def _owners(trace: Trace, names: Ints) -> list[int]:
    """Numbers of the names of the modules that have these parameters."""
    return trace.numbers(*{(trace.string(name) or "").rpartition(".")[0] for name in names.tolist()} - {""})
