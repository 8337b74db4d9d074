"""Run a local fleet: NATS, Valkey and every service as child processes, kept alive.

`child.py` one process and its restarts · `embedded.py` NATS and Valkey · `plan.py` processes and their settings ·
`statedir.py` lock, secrets, fleet.json · `sweep.py` leftovers of killed runs · `fleet.py` the whole.
"""
