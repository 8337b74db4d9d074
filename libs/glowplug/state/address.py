"""Parse addresses of a store: one server, or a master and its replicas under Sentinel.

    redis://[USER:PASSWORD@]HOST:PORT/DB     rediss:// with TLS     unix:///path/to/socket
    redis+sentinel://[USER:PASSWORD@]HOST:PORT,HOST:PORT,.../MASTER[/DB]     rediss+sentinel:// with TLS

`+sentinel` hosts are the sentinels, which name the master; user and password are the master's.
"""

from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import unquote, urlsplit

from redis import Redis as SyncRedis
from redis.asyncio import Redis
from redis.asyncio.sentinel import Sentinel
from redis.sentinel import Sentinel as SyncSentinel

SENTINEL_PORT = 26379


@dataclass(frozen=True, slots=True, kw_only=True)
class Sentinels:
    """A `+sentinel` address. `hosts`: (name, port) of each sentinel."""

    hosts: tuple[tuple[str, int], ...]
    master: str
    db: int = 0
    user: str = ""
    password: str = ""
    tls: bool = False

    @classmethod
    def of(cls, url: str) -> "Sentinels | None":
        """Parse; None for one server. Raises ValueError."""
        parts = urlsplit(url)
        if not parts.scheme.endswith("+sentinel"):
            return None
        if parts.scheme not in ("redis+sentinel", "rediss+sentinel"):
            raise ValueError(
                f"the address of a store begins with redis+sentinel or rediss+sentinel, not {parts.scheme}"
            )
        who, _, hosts = parts.netloc.rpartition("@")
        user, _, password = who.partition(":")
        master, _, db = parts.path.strip("/").partition("/")
        named = tuple(_host(one) for one in hosts.split(","))
        if not master or not (db or "0").isdigit():
            raise ValueError("the address of a store under Sentinel ends with /MASTER or /MASTER/DB")
        return cls(
            hosts=named,
            master=unquote(master),
            db=int(db or 0),
            user=unquote(user),
            password=unquote(password),
            tls=parts.scheme.startswith("rediss"),
        )

    def options(self, given: dict[str, Any]) -> dict[str, Any]:
        """Options of a connection to the master."""
        who = {"username": self.user or None, "password": self.password or None}
        return {**given, **who, "db": self.db, **({"ssl": True} if self.tls else {})}

    def sentinel_options(self, given: dict[str, Any]) -> dict[str, Any]:
        timeouts = {name: value for name, value in given.items() if name.startswith("socket_")}
        return {**timeouts, **({"ssl": True} if self.tls else {})}


def _host(text: str) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError(f"the address of a store under Sentinel names its hosts as HOST:PORT,HOST:PORT, not {text!r}")
    return parts.hostname, parts.port or SENTINEL_PORT


def connect(url: str, **options: Any) -> Redis:
    """Create a lazily connecting client. Raises ValueError."""
    if (under := Sentinels.of(url)) is None:
        return Redis.from_url(url, **options)
    asked: Any = cast(Any, Sentinel)(under.hosts, sentinel_kwargs=under.sentinel_options(options))
    client: Redis = asked.master_for(under.master, **under.options(options))
    return client


def connect_sync(url: str, **options: Any) -> SyncRedis:
    """As `connect`, without a loop."""
    if (under := Sentinels.of(url)) is None:
        return SyncRedis.from_url(url, **options)
    asked: Any = cast(Any, SyncSentinel)(under.hosts, sentinel_kwargs=under.sentinel_options(options))
    client: SyncRedis = asked.master_for(under.master, **under.options(options))
    return client
