"""Files and batches of requests: OpenAI's API for them on the data port, and the router that runs them.

A batch is a row of the state store, with results as parts in an object store. The router with the lease runs every
batch (runner.py); each router answers the API (api.py). lines.py and progress.py are pure. Reasons:
docs/adr/0030-batches-run-inside-a-router.md.
"""
