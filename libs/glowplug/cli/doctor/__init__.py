"""`glowplug doctor`: what is wrong with a machine, a running fleet or a cluster, and what to do about it.

Facts are gathered first (`*_facts.py`, bounded in time, changing nothing), then judged by pure functions
(`machine.py`, `services.py`, `servers.py`, `rows.py`, `cluster.py`): one finding per thing that was looked at.
"""
