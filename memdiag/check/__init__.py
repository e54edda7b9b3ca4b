"""Runs a script as it is and with checkpoints, and compares the two."""
