"""What the paths that are gone through most may cost, counted and not timed: calls of Python functions, and bytes."""
