"""The local fleet: one command starts NATS, Valkey and every service as child processes, and keeps them alive.

`child.py` one process and its restarts · `embedded.py` NATS and Valkey · `plan.py` who is started with what ·
`statedir.py` the lock, the secrets and fleet.json · `sweep.py` what a killed run left · `fleet.py` the whole.
"""
