"""What most likely makes two runs differ, and which compared quantity proves it. Pure: rules on what the runs left.

In the words of these rules the first run is the one as it is, and the second the one with checkpoints, or the other
script's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from memdiag.check import entries as e
from memdiag.check.compare import Compared, Pair, began_otherwise
from memdiag.check.entries import Entry, Run, Segment, Stage

_OFF = " (gradients off)"
_FEW = 3


@dataclass(frozen=True)
class Cause:
    """Why two runs differ.

    Attributes:
        text: the likely cause.
        proved_by: the compared quantity that shows it.
        names: of the modules, or of the tensors, that it is about.
        last_resort: nothing points to it but that no other rule holds.
    """

    text: str
    proved_by: str
    names: tuple[str, ...] = ()
    last_resort: bool = False


@dataclass(frozen=True)
class _Seen:
    """One step of both runs, what differs in it, and by which factor."""

    a: Segment
    b: Segment
    different: Mapping[Stage, Sequence[Pair]]
    ratios: Mapping[str, float]
    put_in: tuple[str, ...] = ()  # modules that were made checkpoints

    def pair(self, stage: Stage, start: str) -> Pair | None:
        """The first thing of a name that begins so, among what differs."""
        return next((pair for pair in self.different[stage] if pair.name.startswith(start)), None)


def likely_cause(a: Run, b: Run, compared: Compared, ratios: Mapping[str, float]) -> Cause:
    """The cause of the first difference.

    Args:
        ratios: by name, of what differs in the first stage, how many times the first value the second is; those that
            are no multiples are not in it.
    """
    if compared.step is None or compared.first is None:
        raise ValueError("the runs do not differ")
    if compared.step >= compared.steps:
        return _other_number(a, b)
    seen = _Seen(a.segments[compared.step], b.segments[compared.step], compared.different, ratios, _put_in(b))
    rules: dict[Stage, tuple[Callable[[_Seen], Cause | None], ...]] = {
        Stage.INPUTS: (_drawn_before, _other_data),
        Stage.OUTPUTS: (_began_otherwise, _other_mode, _scaled_loss, _drawn_before, _diverges),
        Stage.GRADIENTS: (_accumulates, _cleared, _weights_changed, _given_changed, _recomputed_otherwise, _no_gradient,
                          _drew_otherwise, _scaled_gradients, _read_its_own_state, _at_the_boundary),
        Stage.BUFFERS: (_accumulates, _updated_twice, _other_state),
        Stage.RANDOM_STATE: (_accumulates, _draws_more),
        Stage.PARAMETERS: (_began_otherwise, _other_groups, _other_settings, _other_update),
        Stage.SCHEDULE: (_accumulates, _other_mode, _other_groups, _other_settings, _other_schedule),
    }
    for rule in rules[compared.first]:
        cause = rule(seen)
        if cause is not None:
            return cause
    raise AssertionError("the last rule of each stage always holds")


def _put_in(b: Run) -> tuple[str, ...]:
    return tuple(module for modules, _ in b.about.get("regions", ()) for module in modules)


# --- inputs -------------------------------------------------------------------------------------------------------


def _drawn_before(seen: _Seen) -> Cause | None:
    which = _first_of(seen, e.BEGAN_RANDOM)
    if which is None:
        return None
    return Cause(
        f"random numbers that were drawn before this forward differ ({_whose(which.name)}): other seeds, or one "
        "run draws more of them, so that data, order or dropout are others",
        f"the state of {_whose(which.name)} when the forward began", _names(seen.different[Stage.INPUTS]))


def _other_data(seen: _Seen) -> Cause:
    pairs = seen.different[Stage.INPUTS]
    return Cause("the models are given other data, though no random generator differs: another order, another data "
                 "set, or something that changes from run to run, such as the time", f"{pairs[0].name}", _names(pairs))


# --- outputs ------------------------------------------------------------------------------------------------------


def _began_otherwise(seen: _Seen) -> Cause | None:
    names = began_otherwise(seen.a, seen.b)
    if not names:
        return None
    return Cause("the models begin with other parameters: other seeds, or layers made in another order",
                 f"{_some(names)} before the first forward", names)


def _other_mode(seen: _Seen) -> Cause | None:
    pair = seen.pair(Stage.SCHEDULE, "mode of") or seen.pair(Stage.SCHEDULE, "autocast of")
    if pair is None or pair.a is None or pair.b is None:
        return None
    return Cause(f"{pair.name} is not the same: {pair.a.value}, and {pair.b.value} in the second run",
                 f"{pair.name}", (pair.name.partition(" of ")[2],))


def _scaled_loss(seen: _Seen) -> Cause | None:
    pairs = seen.different[Stage.OUTPUTS]
    if not all(pair.name.startswith("loss") for pair in pairs):
        return None
    name = pairs[0].name
    ratio = seen.ratios.get(name)
    if ratio is None:
        return Cause("the loss is computed in another way from equal outputs", f"{name}, while outputs of models are "
                     "equal", (name,))
    return Cause(f"the loss is {ratio:g} times that of the first run, though the models' outputs are equal: it is "
                 "scaled once more or once less, such as by the number of micro-batches",
                 f"{name}: {_values(pairs[0])}", (name,))


def _diverges(seen: _Seen) -> Cause:
    """The first module call that is not the same."""
    others = {entry.key: entry for stage in (e.CALL, e.RETURNED) for entry in seen.b.of(stage)}
    around: list[Entry] = []  # calls that are open, as they are in the second run
    for entry in seen.a.entries:
        other = others.get(entry.key)
        if entry.stage not in (e.CALL, e.RETURNED) or other is None:
            continue
        same = entry.value == other.value if entry.stage == e.RETURNED else (
            _given(entry) == _given(other) and entry.own == other.own)
        if not same:
            off = [call for call in around if call.value.endswith(_OFF)]
            if off:
                return _without_gradients(off[0], entry)
            return _otherwise(entry, other)
        if entry.stage == e.CALL:
            around.append(other)
        elif around:
            around.pop()
    names = _names(seen.different[Stage.OUTPUTS])
    return Cause("code around the modules computes something else", f"{_some(names)}, while what the modules return is "
                 "equal", names)


def _without_gradients(call: Entry, entry: Entry) -> Cause:
    what = "is given" if entry.stage == e.CALL else "returns"
    return Cause(
        f"`{call.name}` does something else where gradients are off, and in the second run they are off in its first "
        "forward: the reentrant kind of checkpoint does that; use use_reentrant=False",
        f"what `{entry.name}` {what}, in a forward of `{call.name}` that is given the same, with gradients on and off",
        (call.name,))


def _otherwise(entry: Entry, other: Entry) -> Cause:
    if entry.stage == e.RETURNED:
        return Cause(f"`{entry.name}` returns something else, though it is given the same and has the same parameters: "
                     "random numbers, or a state that is not among its buffers", f"what `{entry.name}` returns",
                     (entry.name,))
    if _given(entry) != _given(other):
        return _given_otherwise(entry, other)
    return Cause(f"`{entry.name}` has other parameters when it is called", f"the parameters of `{entry.name}`",
                 (entry.name,))


def _given_otherwise(entry: Entry, other: Entry) -> Cause:
    mine, others = (dict(part.partition("=")[::2] for part in _given(one).split()) for one in (entry, other))
    lost = [label for label, value in mine.items() if value != e.NOTHING and others.get(label, e.NOTHING) == e.NOTHING]
    if lost:
        what = f"argument {lost[0]}" if lost[0].isdecimal() else f"the argument `{lost[0]}`"
        return Cause(f"`{entry.name}` is not given {what} in the second run: what wraps it does not hand it on",
                     f"what `{entry.name}` is given", (entry.name,))
    changed = [label for label in mine if mine[label] != others.get(label)] or list(others)
    return Cause(f"`{entry.name}` is given something else, though what the modules before it return is equal",
                 f"argument {changed[0]} of `{entry.name}`", (entry.name,))


# --- gradients ----------------------------------------------------------------------------------------------------


def _accumulates(seen: _Seen) -> Cause | None:
    pair = seen.pair(Stage.SCHEDULE, "backward calls")
    if pair is None or pair.a is None or pair.b is None:
        return None
    return Cause(
        f"before this step of the optimizer the first run goes backward {pair.a.value} times, the second "
        f"{pair.b.value}: gradients of another number of micro-batches are summed; checkpointing is not the cause",
        f"backward calls before the optimizer's step: {_values(pair)}")


def _cleared(seen: _Seen) -> Cause | None:
    """Gradients that a micro-batch had left are gone when the next one begins."""
    later = {entry.name for entry in seen.b.of(Stage.GRADIENTS.value) if entry.nth and entry.value != e.NOTHING}
    found = [pair.name for pair in seen.different[Stage.GRADIENTS]
             if pair.b is not None and pair.b.value == e.NOTHING and pair.name in later]
    if not found:
        return None
    return Cause(f"the gradients of {_some(found)} are cleared between two micro-batches of a step in the second run",
                 f"the gradients of {_some(found)} when a later micro-batch begins: none, though there are some at the "
                 "optimizer's step", tuple(found))


def _weights_changed(seen: _Seen) -> Cause | None:
    for entry, calls in _recomputed(seen):
        if entry.own and calls and all(entry.own != call.own for call in calls):
            return Cause(
                f"the parameters of `{entry.name}` had changed when it ran again for backward: they were written to "
                "after its forward, so that its gradients are those of other weights",
                f"the parameters of `{entry.name}`, in its forward and when it ran again", (entry.name,))
    return None


def _given_changed(seen: _Seen) -> Cause | None:
    before: set[str] = set()  # what ran again by then
    for entry, calls in _recomputed(seen):
        if calls and all(_given(entry) != _given(call) for call in calls):
            first = _first_returned_otherwise(seen)
            if first is not None and first.name != entry.name and _comes_before(seen, first, entry):
                return None  # it follows from that
            parent = entry.name.rpartition(".")[0]
            if parent in before or parent in seen.put_in and any(name.startswith(f"{parent}.") for name in before):
                return _between_otherwise(seen, entry, parent)
            return Cause(
                f"`{entry.name}` was given something else when it ran again for backward: a tensor that it is given "
                "was written to in place after its forward, or a variable that it reads was bound anew",
                f"what `{entry.name}` is given, in its forward and when it ran again", (entry.name,))
        before.add(entry.name)
    return None


def _between_otherwise(seen: _Seen, entry: Entry, parent: str) -> Cause:
    """What a module computes by itself, before it calls one that is in it."""
    proof = (f"what `{entry.name}` is given, in its forward and when it ran again, while all that ran again before it "
             "was given the same")
    if seen.different[Stage.RANDOM_STATE]:
        return Cause(f"`{parent}` drew other random numbers when it ran again for backward: {_to_keep(seen)}",
                     f"{proof}; and the random state after the step", (parent,))
    return Cause(f"`{parent}` did not compute the same when it ran again for backward: it depends on a state or a "
                 "variable that had changed, or draws from a generator of its own", proof, (parent,))


def _recomputed_otherwise(seen: _Seen) -> Cause | None:
    entry = _first_returned_otherwise(seen)
    if entry is None:
        return None
    proof = f"what `{entry.name}` returns, in its forward and when it ran again"
    if seen.different[Stage.RANDOM_STATE]:
        return Cause(f"`{entry.name}` drew other random numbers when it ran again for backward: {_to_keep(seen)}",
                     f"{proof}; and the random state after the step", (entry.name,))
    return Cause(f"`{entry.name}` did not compute the same when it ran again for backward: it depends on a state that "
                 "had changed, or draws from a generator of its own", proof, (entry.name,))


def _drew_otherwise(seen: _Seen) -> Cause | None:
    """What runs again ends where its last tensor for backward is there, so what drew it has returned nothing."""
    again = list(dict.fromkeys(entry.name for entry in seen.b.of(e.RECOMPUTED)))
    if not again or not seen.different[Stage.RANDOM_STATE]:
        return None
    regions = tuple(name for name in again if not any(name.startswith(f"{other}.") for other in again))
    return Cause(f"{_some(regions)} drew other random numbers when run again for backward: {_to_keep(seen)}",
                 f"the random state after the step, and that {_some(regions)} ran again", regions)


def _to_keep(seen: _Seen) -> str:
    """What keeps random numbers alike."""
    own = seen.pair(Stage.RANDOM_STATE, e.OWN_GENERATOR)
    if own is None:
        return "keep preserve_rng_state=True"
    return (f"`{own.name.removeprefix(e.OWN_GENERATOR)}` is a generator of its own, which a checkpoint does not set "
            "back; draw from PyTorch's own, or before the region")


def _no_gradient(seen: _Seen) -> Cause | None:
    lost = [pair.name for pair in seen.different[Stage.GRADIENTS]
            if (pair.b is None or pair.b.value == e.NOTHING) and pair.a is not None]
    if not lost:
        return None
    off = [entry.name for entry in seen.b.of(e.CALL) if entry.value.endswith(_OFF)]
    on = {entry.name for entry in seen.a.of(e.CALL) if not entry.value.endswith(_OFF)}
    off = [name for name in dict.fromkeys(off) if name in on]
    proof = f"the gradients of {_some(lost)}: none"
    if off:
        top = [name for name in off if not any(name.startswith(f"{other}.") for other in off)]
        return Cause(
            f"no gradient reaches {_some(lost)}: `{top[0]}` runs in a reentrant checkpoint whose inputs need no "
            "gradient; use use_reentrant=False", f"{proof}; and `{top[0]}` ran with gradients off and not again",
            tuple(top))
    return Cause(f"no gradient reaches {_some(lost)}: a tensor on the way is detached, or comes out of a reentrant "
                 "checkpoint in a container", proof, tuple(lost))


def _scaled_gradients(seen: _Seen) -> Cause | None:
    pairs = seen.different[Stage.GRADIENTS]
    ratios = [seen.ratios.get(pair.name) for pair in pairs]
    first = ratios[0] if ratios else None
    if first is None or any(ratio is None or abs(ratio / first - 1) > _NEAR for ratio in ratios):
        return None
    return Cause(f"all gradients are {first:g} times those of the first run: they are scaled once more or once less",
                 f"the ratio of gradients of {_some([pair.name for pair in pairs])}", _names(pairs))


_NEAR = 1e-4


def _read_its_own_state(seen: _Seen) -> Cause | None:
    """A state that a region has changed itself by the time it runs again."""
    again = {entry.name for entry in seen.b.of(e.RECOMPUTED)}
    found: list[Pair] = []
    for pair in _moved_again(seen):
        module, _, key = pair.name.rpartition(".")
        # What a plan makes a checkpoint runs again without a call of the module itself.
        ran_again = module in again or any(name.startswith(f"{module}.") for name in again)
        if ran_again and key not in _STATISTICS:
            found.append(pair)
    if not found:
        return None
    modules = tuple(dict.fromkeys(pair.name.rpartition(".")[0] for pair in found))
    return Cause(f"{_some(modules)} kept another state when run again for backward than in the forward, and changes it "
                 "by running: what depends on it is computed otherwise",
                 f"`{found[0].name}`{_told(found[0])} after backward, equal after the forward; and that "
                 f"`{modules[0]}` ran again", modules)


_STATISTICS = frozenset(("running_mean", "running_var", "num_batches_tracked"))
"""Of a batch norm: moved by a recomputation too, but nothing that is trained depends on them."""


def _at_the_boundary(seen: _Seen) -> Cause:
    pairs = seen.different[Stage.GRADIENTS]
    return Cause("backward differs where forward does not: a tensor is detached or written to in place at the edge of "
                 "a region, or a function has a backward of its own that depends on more than its inputs",
                 f"the gradients of {_some([pair.name for pair in pairs])}", _names(pairs), last_resort=True)


def _recomputed(seen: _Seen) -> list[tuple[Entry, list[Entry]]]:
    """Module calls that ran again in the second run, each with the forward's calls of that module."""
    calls: dict[str, list[Entry]] = defaultdict(list)
    for entry in seen.b.of(e.CALL):
        calls[entry.name].append(entry)
    return [(entry, calls[entry.name]) for entry in seen.b.of(e.RECOMPUTED)]


def _first_returned_otherwise(seen: _Seen) -> Entry | None:
    """What ran again and returned what no forward of it did, though all before it was as in the forward."""
    returned: dict[str, set[str]] = defaultdict(set)
    for entry in seen.b.of(e.RETURNED):
        returned[entry.name].add(entry.value)
    return next((entry for entry in seen.b.of(e.RECOMPUTED_RETURNED)
                 if entry.name in returned and entry.value not in returned[entry.name]), None)


def _comes_before(seen: _Seen, one: Entry, other: Entry) -> bool:
    return seen.b.entries.index(one) < seen.b.entries.index(other)


# --- buffers, random state, parameters, schedule ------------------------------------------------------------------


def _moved_again(seen: _Seen) -> list[Pair]:
    """State that is equal after the first forward, and in the second run something else after backward."""
    midway = [_midway(segment) for segment in (seen.a, seen.b)]
    last: dict[str, str] = {}  # what forwards have left
    after: dict[e.Key, str | None] = {}  # and of that, what was there when a backward had left something else
    for entry in seen.b.entries:
        if entry.stage == e.BUFFERS_MIDWAY:
            last[entry.name] = entry.value
        elif entry.stage == Stage.BUFFERS.value:
            after[entry.key] = last.get(entry.name)
    # Later forwards of a step find what a backward before them has left.
    return [pair for pair in seen.different[Stage.BUFFERS]
            if pair.b is not None and midway[0].get(pair.name) == midway[1].get(pair.name)
            and pair.b.value != after.get(pair.key)]


def _midway(segment: Segment) -> dict[str, str]:
    """State after the first forward."""
    return {entry.name: entry.value for entry in segment.of(e.BUFFERS_MIDWAY) if not entry.nth}


def _updated_twice(seen: _Seen) -> Cause | None:
    found = _moved_again(seen)
    if not found:
        return None
    plainest = next((pair for pair in found if pair.b is not None and pair.b.shape in (None, "[]")), found[0])
    modules = tuple(dict.fromkeys(pair.name.rpartition(".")[0] for pair in found))
    plain = plainest.b is not None and plainest.b.shape in (None, "[]")
    known = _midway(seen.b).get(plainest.name) if plain else None
    told = f": {known} after the first forward in both, {_values(plainest)} after backward" if known else (
        ": equal after the first forward, and not after backward")
    follows = ("what later forwards of the step return is something else" if seen.different[Stage.OUTPUTS] else
               "what is trained is the same, what is evaluated later is not")
    return Cause(
        f"the state of {_some(modules)} is updated twice: once more when the region runs again for backward (the "
        f"running statistics of a batch norm, a counter); {follows}",
        f"`{plainest.name}`{told}", modules)


def _other_state(seen: _Seen) -> Cause:
    pairs = seen.different[Stage.BUFFERS]
    return Cause("modules keep something else after the step, and do so already after the forward",
                 f"`{pairs[0].name}`{_told(pairs[0])}", _names(pairs))


def _draws_more(seen: _Seen) -> Cause:
    pairs = seen.different[Stage.RANDOM_STATE]
    return Cause("the second run draws another number of random numbers in a step: a region that runs again without "
                 "its random state put back, or one generator more; what is drawn from then on is other",
                 f"the state of {_whose(pairs[0].name)} after backward", _names(pairs))


def _whose(name: str) -> str:
    if name.startswith(e.OWN_GENERATOR):
        return f"the generator `{name.removeprefix(e.OWN_GENERATOR)}`"
    return f"{name}'s random generator"


def _other_groups(seen: _Seen) -> Cause | None:
    pair = next((pair for pair in seen.different[Stage.SCHEDULE] if ": parameters of group" in pair.name), None)
    if pair is None:
        return None
    mine, others = ((set() if entry is None else set(entry.value.split(", ")) - {""}) for entry in (pair.a, pair.b))
    moved = sorted(mine ^ others)
    return Cause("the optimizer's groups hold other parameters: they are chosen by names, and the names are not the "
                 "same in the second run", f"{pair.name}: {_some(moved)}", tuple(moved))


def _other_settings(seen: _Seen) -> Cause | None:
    pair = next((pair for pair in seen.different[Stage.SCHEDULE]
                 if " of group " in pair.name or "gradient scaler" in pair.name), None)
    if pair is None:
        return None
    return Cause("the optimizer's step is made with other settings, from equal gradients: a schedule that is stepped "
                 "more or less often, or another scale", f"{pair.name}{_told(pair)}", (pair.name,))


def _other_update(seen: _Seen) -> Cause:
    pairs = seen.different[Stage.PARAMETERS]
    state = [pair for pair in pairs if ": " in pair.name]
    first = state[0] if state else pairs[0]
    return Cause("parameters are updated otherwise, from equal gradients and with equal settings: the state of the "
                 "optimizer differs, or something else writes to parameters", f"{first.name}{_told(first)}",
                 _names(pairs))


def _other_schedule(seen: _Seen) -> Cause:
    pairs = seen.different[Stage.SCHEDULE]
    return Cause("the steps are not made up alike", f"{pairs[0].name}{_told(pairs[0])}", _names(pairs))


def _other_number(a: Run, b: Run) -> Cause:
    return Cause("one run makes more steps of its optimizers than the other",
                 f"steps of optimizers: {len(a.segments)} and {len(b.segments)}")


# --- a second run that failed -------------------------------------------------------------------------------------


def why_failed(b: Run) -> Cause | None:
    """Why a region could not run again, from what it did in its forward and then; None where that does not tell."""
    if b.failure is None or b.failure.kind != "CheckpointError" or not b.segments:
        return None
    seen = _Seen(b.segments[-1], b.segments[-1], defaultdict(list), {})
    again = [entry.name for entry in seen.b.of(e.RECOMPUTED)]
    put_in = _put_in(b)
    if again:
        region = again[-1]
        for name in reversed(again):
            if region.startswith(f"{name}."):
                region = name
            elif not name.startswith(f"{region}.") and name != region:
                break
        # What a plan makes a checkpoint runs again without a call of the module itself.
        region = next((name for name in put_in if region.startswith(f"{name}.")), region)
    elif len(put_in) == 1:
        region = put_in[0]
    else:
        return None
    forward = [entry.name for entry in seen.b.of(e.CALL) if entry.name.startswith(f"{region}.")]
    lost = [name for name in dict.fromkeys(forward) if name not in again]
    more = [name for name in again if name.startswith(f"{region}.") and name not in forward]
    if lost and not any(name.startswith(f"{region}.") for name in again) or more:
        told = f"`{lost[0]}` ran in its forward, and not when it ran again" if lost else (
            f"`{more[0]}` ran when it ran again, and not in its forward")
        return Cause(f"`{region}` took another path when it ran again for backward: its forward depends on something "
                     "that it, or the script, had changed by then, such as a global variable or a counter", told,
                     (region,))
    return Cause(f"`{region}` did not save the same tensors when it ran again for backward: its forward depends on "
                 "something that had changed by then", "the number, shapes or types of the tensors that PyTorch "
                 "compared", (region,))


# --- words --------------------------------------------------------------------------------------------------------


def _first_of(seen: _Seen, stage: str) -> Entry | None:
    others = seen.b.by_key(stage)
    return next((entry for key, entry in seen.a.by_key(stage).items()
                 if key in others and others[key].value != entry.value), None)


def _given(entry: Entry) -> str:
    return entry.value.removesuffix(_OFF)


def _value(entry: Entry | None) -> str | None:
    return None if entry is None else entry.value


def _values(pair: Pair) -> str:
    return f"{_value(pair.a)} and {_value(pair.b)}"


def _told(pair: Pair) -> str:
    """The two values, where they are not digests."""
    plain = all(entry is None or entry.shape in (None, "[]") for entry in (pair.a, pair.b))
    return f": {_values(pair)}" if plain else ""


def _names(pairs: Sequence[Pair]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(pair.name for pair in pairs))


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _FEW} more" if len(names) > _FEW else ""
    return ", ".join(f"`{name}`" for name in names[:_FEW]) + more
