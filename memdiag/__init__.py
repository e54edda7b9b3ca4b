"""memdiag: where the memory of a PyTorch training step goes, and what to do about it."""

__version__ = "0.1.0"
