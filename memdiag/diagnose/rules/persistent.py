"""What lives as long as training: parameters, their gradients, the optimizer's state, inputs that stay."""

from __future__ import annotations

from collections.abc import Iterable

from memdiag.diagnose.evidence import Evidence
from memdiag.diagnose.model import Advice, Class, Finding, Mask
from memdiag.trace import Role
from memdiag.units import format_bytes


def persistent(found: Evidence) -> Iterable[Finding]:
    parameters = found.role == Role.PARAMETERS
    for cls, rule in ((Class.OPTIMIZER_STATE, _state), (Class.GRADIENTS, _gradients), (Class.PARAMETERS, _parameters),
                      (Class.INPUT_BATCHES, _inputs)):
        chosen = found.of(cls)
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
        [Advice("an optimizer that keeps less: SGD without momentum keeps none and needs no temporaries, which is the "
                "most that can be had; factored or 8-bit state keeps a part, sharding over ranks a share",
                found.saving(chosen | temporaries))])


def _gradients(found: Evidence, chosen: Mask, parameters: int) -> Finding:
    size = found.bytes_of(chosen)
    extra = chosen & (found.role != Role.GRADIENTS)
    mirrors = found.bytes_of(extra)
    kind = "gradient_buffers" if size > 1.5 * parameters else "gradients"
    evidence = [f"{format_bytes(size)} of gradients for {format_bytes(parameters)} of parameters"]
    if mirrors:
        evidence.append(f"{format_bytes(mirrors)} of it mirrors the gradients in buffers of its own")
    advice = [Advice("`optimizer.zero_grad(set_to_none=True)`, so that they are not there in the forward", None)]
    if kind == "gradient_buffers":
        advice.insert(0, Advice("accumulate in `.grad` itself, and keep no second copy of it", None))
    return found.finding(Class.GRADIENTS, kind, "Gradients hold most of what stays", chosen, evidence, advice)


def _parameters(found: Evidence, chosen: Mask, parameters: int) -> Finding:
    copies = chosen & (found.role == Role.HELD)
    size = found.bytes_of(copies)
    if size >= parameters // 2:
        return found.finding(
            Class.PARAMETERS, "model_copy", "Copies of the model stay in memory", chosen,
            [f"{format_bytes(size)} in storages of the parameters' sizes, that variables of the script hold",
             f"the parameters themselves are {format_bytes(parameters)}"],
            [Advice("keep the copy in host memory or on disk", found.saving(copies))])
    return found.finding(
        Class.PARAMETERS, "parameters", "The parameters themselves hold much of the peak", chosen,
        [f"{format_bytes(found.bytes_of(chosen))} of parameters and buffers, there whatever the batch"],
        [Advice("a lower precision, sharding over ranks, or offloading", None)])


def _inputs(found: Evidence, chosen: Mask, parameters: int) -> Finding:
    kept = chosen & (found.at.born_step < found.step)
    size = found.bytes_of(kept)
    evidence = [f"{format_bytes(found.bytes_of(chosen))} of inputs at the peak"]
    if size:
        evidence.append(f"{format_bytes(size)} of it was there before this step began")
    return found.finding(
        Class.INPUT_BATCHES, "kept_batches" if 2 * size > found.bytes_of(chosen) else "inputs",
        "Input batches stay on the device", chosen, evidence,
        [Advice("move each batch to the device when its turn comes (`pin_memory`, `non_blocking`)",
                found.saving(kept) if size else None)])
