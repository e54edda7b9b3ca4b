"""Whether module calls do the same when they run again: what they read, change and leave behind."""
