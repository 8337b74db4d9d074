"""What a client of Redis or Valkey needs to be allowed for the tables it reads and writes: the rules of its ACL.

A table is one hash, a log one list: who may write a table may write every row of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from glowplug.state.redis_store import PREFIX

# What the connection itself asks for. No user gets CONFIG, KEYS, SCAN, FLUSHALL, DEBUG, ACL or another user's keys.
_CONNECTING = ("ping", "hello", "auth", "client|setinfo", "client|setname")
_READING = ("hget", "hgetall")
_WRITING = ("hset", "hdel")
_COUNTING = ("eval", "get", "set")  # redis_store.py; a script runs under the rules of the user that calls it
_LEADING = ("hget", "hset", "hmget", "pttl", "pexpire", "del")
_INSPECTING = ("info", "get", "multi", "exec", "discard")

# Health checks need no password and may do nothing else.
NOBODY = "user default on nopass resetkeys resetchannels -@all +ping"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAccess:
    """What one client does in the store. `logs`: which of its tables are logs."""

    reads: Sequence[str] = ()
    writes: Sequence[str] = ()
    logs: Sequence[str] = ()
    counts: str = ""  # the service whose epoch it takes
    leads: bool = False  # and for the lead of which it stands
    inspects: Sequence[str] = ()  # services whose epochs it reads, and the server itself, as `glowplug doctor` does


def rules(access: StoreAccess) -> list[str]:
    """The rules of an ACL after the user's name and password."""
    commands = {*_CONNECTING}
    reads, writes = set(access.reads) | set(access.writes), set(access.writes)
    logs = set(access.logs)
    commands |= {*_READING} if reads - logs else set()
    commands |= {"lrange"} if reads & logs else set()
    commands |= {*_WRITING} if writes - logs else set()
    commands |= {"lpush", "ltrim"} if writes & logs else set()
    keys = [f"%R~{PREFIX}:{name}" for name in sorted(reads - writes)]
    keys += [f"~{PREFIX}:{name}" for name in sorted(writes)]
    if access.counts:
        commands |= {*_COUNTING}
        keys.append(f"~{PREFIX}:epoch:{access.counts}")
    if access.leads:
        commands |= {*_LEADING}
        keys.append(f"~{PREFIX}:lease:{access.counts}")
    if access.inspects:
        commands |= {*_INSPECTING}
        keys += [f"%R~{PREFIX}:epoch:{service}" for service in access.inspects]
    return ["resetkeys", "resetchannels", *keys, "-@all", *(f"+{command}" for command in sorted(commands))]
