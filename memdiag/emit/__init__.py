"""A plan as what a person writes by hand: text, from the plan and the facts of a trace."""

FORMS = ("code", "diff", "fsdp", "hf", "compile")
"""What :func:`memdiag.emit.emit.emit` can write."""
