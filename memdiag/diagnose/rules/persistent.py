"""What lives as long as training: parameters, their gradients, the optimizer's state, inputs that stay."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from memdiag.diagnose.evidence import Evidence
from memdiag.diagnose.model import Advice, Class, Finding, Mask
from memdiag.policy import FINDING_SHARE
from memdiag.trace import Phase, Role
from memdiag.trace.model import ACCUMULATED, COMMUNICATION, COPIED, GRAD, MIRRORS, RETURNED
from memdiag.units import format_bytes

_HISTORY = (".old_dirs", ".old_stps")  # names in the state of torch.optim.LBFGS


def persistent(found: Evidence) -> Iterable[Finding]:
    parameters = found.role == Role.PARAMETERS
    if found.matters(found.unstepped[1]):
        yield _unstepped(found)
    for cls, rule in ((Class.OPTIMIZER_STATE, _state), (Class.GRADIENTS, _gradients), (Class.PARAMETERS, _parameters),
                      (Class.INPUT_BATCHES, _inputs)):
        chosen = found.of(cls) & ~found.single
        if found.matters(chosen):
            yield rule(found, chosen, max(found.bytes_of(parameters), 1))


def _state(found: Evidence, chosen: Mask, parameters: int) -> Finding:
    size = found.bytes_of(chosen)
    temporaries = found.role == Role.OPTIMIZER_TEMPORARIES
    return found.finding(
        Class.OPTIMIZER_STATE, "optimizer_state", f"The optimizer's state is {size / parameters:.1f} times the "
        "parameters", chosen,
        [f"{format_bytes(size)} of state for {format_bytes(found.bytes_of(found.role == Role.PARAMETERS))} of "
         "parameters", "it is there in every step, whatever the batch: checkpointing cannot lower it"],
        [*_history(found, chosen), Advice(
            "an optimizer that keeps less: SGD without momentum keeps none and needs no temporaries, factored or "
            "8-bit state keeps a part" + _or_shards(found), found.saving(chosen | temporaries), at_most=True)])


def _or_shards(found: Evidence) -> str:
    """What several processes that train one model can do besides."""
    return "; or sharding over the ranks" if (found.run.trace.about.get("world_size") or 1) > 1 else ""


def _history(found: Evidence, chosen: Mask) -> list[Advice]:
    """LBFGS keeps the differences of its last steps: two tensors as large as the model for each."""
    trace, claims = found.at.trace, found.at.trace["claims"]
    named = [number for number in np.unique(claims["name"]).tolist()
             if (trace.string(number) or "").endswith(_HISTORY)]
    history = _claimed(found, np.isin(claims["name"], named))
    if not found.matters(chosen & history):
        return []
    return [Advice(
        "a smaller `history_size`: each item less frees two tensors as large as the model", found.saving(
            chosen & history), at_most=True)]


def _gradients(found: Evidence, chosen: Mask, parameters: int) -> Finding:
    table, indices, rows = found.dense_embeddings
    if 2 * found.bytes_of(chosen & table) > found.bytes_of(chosen):
        return found.finding(
            Class.GRADIENTS, "dense_embedding", "The gradient of an embedding is as large as its table", table,
            [f"{format_bytes(found.bytes_of(table))} of gradients for tables of embeddings",
             f"a lookup reads {indices:,} of {rows:,} rows at most"],
            [Advice("`sparse=True` in the embedding, with an optimizer that takes sparse gradients (SGD, SparseAdam)",
                    found.saving(table))])
    samples, times = found.per_sample
    if 2 * found.bytes_of(chosen & samples) > found.bytes_of(chosen):
        return found.finding(
            Class.GRADIENTS, "per_sample_gradients", "Each sample's gradients are there by themselves", samples,
            [f"{format_bytes(found.bytes_of(samples))} made in backward, of {times:,} times the parameters' sizes"],
            [Advice("take fewer samples at a time; or only the norms of their gradients, and the clipped sum from a "
                    "second backward with weighted losses", found.saving(samples), at_most=True)])
    size = found.bytes_of(chosen)
    own = _proved(found, GRAD, ACCUMULATED)
    buffers, communication = _buffers(found)
    mirroring = buffers & ~own  # a sum that is handed to the parameter is its gradient
    returned = _proved(found, RETURNED) & ~own & np.isin(found.size, np.unique(found.size[own & found.alive]))
    mirrors, asked = found.bytes_of(chosen & mirroring), found.bytes_of(chosen & returned)
    arriving = found.bytes_of(chosen & (found.role != Role.GRADIENTS))
    kind = "gradient_buffers" if 2 * (mirrors + asked) > parameters else "gradients"
    evidence = [f"{format_bytes(size)} of gradients for {format_bytes(parameters)} of parameters"]
    advice = []
    if mirrors:
        evidence.append(f"{format_bytes(mirrors)} of it mirrors the gradients in buffers of its own")
    if asked:
        evidence.append(f"{format_bytes(asked)} of it was returned by `torch.autograd.grad`, and `.grad` holds as much")
    if arriving:
        evidence.append(f"{format_bytes(arriving)} of it are new ones, to be added to those that are there")
    if kind == "gradient_buffers" and communication:
        advice.append(Advice(
            "`gradient_as_bucket_view=True` in DistributedDataParallel: once its buffers are made anew, after the "
            "first step, the gradients are views of them", None))
    elif kind == "gradient_buffers":
        second = found.saving(chosen & (mirroring | returned))
        advice.append(Advice("accumulate in `.grad` itself, and keep no second copy of it", second or None))
    idle = found.saving(
        (found.role == Role.GRADIENTS) & ~buffers, during=(Phase.FORWARD, Phase.EVALUATION, Phase.OTHER))
    if idle >= FINDING_SHARE * found.peak_bytes:
        evidence.append("those of the step before are there until the next backward")
        advice.append(Advice("`optimizer.zero_grad(set_to_none=True)` right after its step", idle))
    if not advice:
        advice.append(Advice(
            "an optimizer that steps inside backward, and lets go of each gradient there" + _or_shards(found), None))
    return found.finding(Class.GRADIENTS, kind, "Gradients hold much of the peak", chosen, evidence, advice)


def _unstepped(found: Evidence) -> Finding:
    gradients, with_forwards = found.unstepped
    since = np.where(found.saves.saved, found.saves.last_saved, found.at.life.born)
    cls = found.main_class(with_forwards, Class.ACTIVATION, Class.GRADIENTS)
    evidence = [f"{format_bytes(found.bytes_of(gradients))} are of parameters that no optimizer of the run has stepped"]
    more = found.bytes_of(with_forwards & ~gradients)
    if more:
        evidence.append(f"{format_bytes(more)} more are there for their backward alone")
    return found.finding(
        cls, "unstepped_gradients", "Gradients are made that no optimizer uses", with_forwards, evidence,
        [Advice("`requires_grad_(False)` for these parameters, or `torch.no_grad()` around their forward, if nothing "
                "that it reads is trained", found.saving(with_forwards, since))], since=since)


def _buffers(found: Evidence) -> tuple[Mask, bool]:
    """What holds gradients a second time, and whether a collective works on any of it."""
    claims = found.at.trace["claims"]
    named = np.isin(claims["name"], found.at.trace.numbers(COMMUNICATION))
    return _proved(found, MIRRORS, COPIED) | _claimed(found, named), bool(named.any())


def _proved(found: Evidence, *proofs: str) -> Mask:
    """Allocations that claims with these proofs are of."""
    return _claimed(found, np.isin(found.at.trace["claims"]["proof"], found.at.trace.numbers(*proofs)))


def _claimed(found: Evidence, claims: Mask) -> Mask:
    """Allocations that these claims are of."""
    mine = np.zeros(len(found.size), dtype=bool)
    mine[found.at.trace["claims"]["allocation"][claims]] = True
    return mine


def _parameters(found: Evidence, chosen: Mask, parameters: int) -> Finding:
    copies = chosen & found.copies
    size = found.bytes_of(copies)
    if size >= parameters // 2:
        return found.finding(
            Class.PARAMETERS, "model_copy", "Copies of the model stay in memory", copies,
            [f"{format_bytes(size)} in storages of the parameters' sizes, held by {found.held_by(copies)}",
             f"the parameters themselves are {format_bytes(parameters)}"],
            [Advice("keep the copy on disk" + ("" if found.at.device == "cpu" else ", or in host memory"),
                    found.saving(copies))])
    return found.finding(
        Class.PARAMETERS, "parameters", "The parameters themselves hold much of the peak", chosen,
        [f"{format_bytes(found.bytes_of(chosen))} of parameters and buffers, there whatever the batch"],
        [Advice("a lower precision, or offloading" + _or_shards(found), None)])


def _inputs(found: Evidence, chosen: Mask, parameters: int) -> Finding:
    kept = chosen & (found.at.life.died > found.step_ends())
    evidence = [f"{format_bytes(found.bytes_of(chosen))} of inputs {found.when}"]
    earlier = found.bytes_of(chosen & (found.at.born_step < found.step))
    if earlier:
        evidence.append(f"{format_bytes(earlier)} of it was there before this step began")
    saving = found.saving(kept, found.replaced(kept))
    title, keep = "Input batches stay in memory", "load each batch when its turn comes"
    if found.at.device != "cpu":
        title = "Input batches stay on the device"
        keep = "move each batch to the device when its turn comes (`pin_memory`, `non_blocking`)"
    return found.finding(
        Class.INPUT_BATCHES, "kept_batches" if 2 * saving > found.bytes_of(chosen) else "inputs",
        title, chosen, evidence, [Advice(keep, saving or None)])
