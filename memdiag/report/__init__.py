"""What a person or a machine is shown of a trace: a summary of facts, and renderers that only draw."""

from memdiag.report.comparison import comparison_to_json, render_comparison
from memdiag.report.json import to_json
from memdiag.report.plot import draw
from memdiag.report.summary import Summary, summarize
from memdiag.report.text import render_text
from memdiag.report.verdict import render_verdict

__all__ = [
    "Summary", "comparison_to_json", "draw", "render_comparison", "render_text", "render_verdict", "summarize",
    "to_json",
]
