"""What a run is short of, and why: rules, findings, and the verdict chosen from them."""

from memdiag.diagnose.diagnose import diagnose
from memdiag.diagnose.model import Advice, Class, Diagnosis, Finding, Growth, RunnerUp, Severity, Verdict

__all__ = ["Advice", "Class", "Diagnosis", "Finding", "Growth", "RunnerUp", "Severity", "Verdict", "diagnose"]
