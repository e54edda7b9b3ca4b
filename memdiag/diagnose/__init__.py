"""What a run is short of, and why: rules, findings, and the verdict chosen from them."""

from memdiag.diagnose.compare import ComparedLine, Comparison, compare
from memdiag.diagnose.diagnose import diagnose
from memdiag.diagnose.model import Advice, Class, Diagnosis, Earlier, Finding, Growth, Oom, RunnerUp, Severity, Verdict

__all__ = [
    "Advice", "Class", "ComparedLine", "Comparison", "Diagnosis", "Earlier", "Finding", "Growth", "Oom", "RunnerUp",
    "Severity", "Verdict", "compare", "diagnose",
]
