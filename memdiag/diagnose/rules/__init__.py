"""The rules: each a function from the evidence to findings, one file for what belongs together.

To add one, write it in a file here, put it in ``RULES``, and test it on a trace told by hand and on a real run.
"""

from collections.abc import Callable, Iterable

from memdiag.diagnose.evidence import Evidence
from memdiag.diagnose.model import Finding
from memdiag.diagnose.rules.accumulation import accumulation
from memdiag.diagnose.rules.activations import activations
from memdiag.diagnose.rules.elementwise import elementwise
from memdiag.diagnose.rules.failures import failures
from memdiag.diagnose.rules.fairness import fairness
from memdiag.diagnose.rules.host import host_memory
from memdiag.diagnose.rules.leaks import leaks
from memdiag.diagnose.rules.persistent import persistent
from memdiag.diagnose.rules.recompute import recompute
from memdiag.diagnose.rules.temporary import temporary

RULES: tuple[Callable[[Evidence], Iterable[Finding]], ...] = (
    leaks, host_memory, failures, elementwise, activations, persistent, temporary, recompute, accumulation, fairness)
"""In the order in which findings of equal bytes are told."""

OUT_OF_MEMORY = "out_of_memory"
"""Kind of the finding for a request that a run died of, which is no rule's: it is about the whole diagnosis."""

KINDS = frozenset((
    OUT_OF_MEMORY,
    "growth", "garbage_cycle", "filling_container", "host_growth", "kept_failure", "activations", "evaluation_graph",
    "hidden_states", "gathered_results", "broadcast", "written_softmax", "retained_graph", "attention_matrix", "logits",
    "worst_batch", "optimizer_state", "gradients", "gradient_buffers", "per_sample_gradients", "unstepped_gradients",
    "dense_embedding", "parameters", "model_copy", "inputs", "kept_batches", "optimizer_temporaries", "scratch",
    "workspace", "checkpoint_frees_nothing", "costly_recompute", "replay_hazard", "reentrant_pitfall",
    "accumulation_error", "unfair_comparison"))
"""Every kind that a rule may give."""
