"""Files and batches of requests: OpenAI's API for them on the data port, and the router that has the requests answered.

A batch is one row of the state store, and its results are parts in an object store. Of all routers one holds the lease
and runs every batch (runner.py); each router answers the API (api.py). lines.py and progress.py decide and touch
nothing. Why it is built this way: docs/adr/0030-batches-run-inside-a-router.md.
"""
