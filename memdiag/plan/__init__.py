"""Where to checkpoint: what each boundary saves and costs."""
