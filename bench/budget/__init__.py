"""Hold the most frequent paths to a budget that is counted, not timed: calls of Python functions, and bytes."""
