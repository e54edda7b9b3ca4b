"""The process: starting a script in it, what it is, and how it ends."""
