"""Which ready instance a request goes to. A target at its `max_concurrency` is never chosen; ties break by id."""
