"""PyTorch's own memory snapshots: read, rolled back to where their events begin, and followed event by event."""
