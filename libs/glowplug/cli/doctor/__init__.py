"""`glowplug doctor`: faults of a machine, a running fleet or a cluster, and their remedies.

Each module gathers facts first (bounded in time, changing nothing), then judges them by pure functions, one finding per
thing that was looked at: `machine.py`, `cluster.py`, `servers.py`, and for the facts of `fleet.py` `services.py` and
`rows.py`.
"""
