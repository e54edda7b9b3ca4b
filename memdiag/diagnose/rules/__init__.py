"""The rules: each a function from the evidence to findings, one file for what belongs together.

To add one, write it in a file here, put it in ``RULES``, and test it on a trace told by hand and on a real run.
"""

from collections.abc import Callable, Iterable

from memdiag.diagnose.evidence import Evidence
from memdiag.diagnose.model import Finding
from memdiag.diagnose.rules.activations import activations
from memdiag.diagnose.rules.host import host_memory
from memdiag.diagnose.rules.leaks import leaks
from memdiag.diagnose.rules.persistent import persistent
from memdiag.diagnose.rules.recompute import recompute
from memdiag.diagnose.rules.temporary import temporary

RULES: tuple[Callable[[Evidence], Iterable[Finding]], ...] = (
    leaks, host_memory, activations, persistent, temporary, recompute)
"""In the order in which findings of equal bytes are told."""

KINDS = frozenset((
    "growth", "garbage_cycle", "host_growth", "activations", "evaluation_graph", "hidden_states", "retained_graph",
    "attention_matrix",
    "logits", "worst_batch", "optimizer_state", "gradients", "gradient_buffers", "parameters", "model_copy", "inputs",
    "kept_batches", "optimizer_temporaries", "scratch", "workspace",
    "checkpoint_frees_nothing", "costly_recompute", "replay_hazard", "reentrant_pitfall"))
"""Every kind that a rule may give."""
