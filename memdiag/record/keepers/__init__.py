"""Who keeps what survives: a walk from tensors, or containers, to the variable and the statement."""
