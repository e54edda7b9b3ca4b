"""From what the hooks and the profiler saw to rows of the trace."""
