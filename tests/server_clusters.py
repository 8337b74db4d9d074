"""Redundant servers: three of NATS, three of Valkey (a master and two replicas) and three sentinels."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from redis import Redis
from redis.exceptions import RedisError

from glowplug.state.address import connect_sync
from tests import ports
from tests.servers import NatsProcess, ServerFailed, _Server, valkey_binary
from tests.waiting import WAIT_S, wait_until

MASTER = "glowplug"


@dataclass
class ClusteredNats(NatsProcess):
    name: str = ""
    route_port: int = 0
    routes: tuple[int, ...] = ()

    def start(self, *, emptied: bool = False) -> "ClusteredNats":
        routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in self.routes)
        self.users = (
            f'server_name: "{self.name}"\n'
            f'cluster {{ name: "test", listen: "127.0.0.1:{self.route_port}", routes: [{routes}] }}\n'
        )
        super().start(emptied=emptied)
        return self


@dataclass
class TcpValkey(_Server):
    """It rewrites its own configuration when its role changes."""

    port: int = field(default_factory=ports.free_port)
    options: tuple[str, ...] = ()
    is_sentinel: bool = False

    def start(self) -> "TcpValkey":
        self.folder.mkdir(parents=True, exist_ok=True)
        config = self.folder / "valkey.conf"
        if not config.exists():
            lines = [f"port {self.port}", "bind 127.0.0.1", f"dir {self.folder}", *self.options]
            config.write_text("\n".join(lines) + "\n")
        self._spawn([valkey_binary(), str(config), *(["--sentinel"] if self.is_sentinel else [])])
        self._wait_until_it_answers()
        return self

    def _answers(self) -> bool:
        try:
            with Redis(port=self.port, socket_timeout=2.0) as client:
                return bool(client.ping())
        except RedisError:
            return False


@dataclass
class Clusters:
    folder: Path
    nats: list[ClusteredNats] = field(default_factory=list)
    valkeys: list[TcpValkey] = field(default_factory=list)
    sentinels: list[TcpValkey] = field(default_factory=list)

    @property
    def env(self) -> dict[str, str]:
        hosts = ",".join(f"127.0.0.1:{one.port}" for one in self.sentinels)
        return {
            "GLOWPLUG_NATS_URL": ",".join(one.url for one in self.nats),
            "GLOWPLUG_NATS_REPLICAS": "3",
            "GLOWPLUG_REDIS_URL": f"redis+sentinel://{hosts}/{MASTER}",
        }

    @property
    def members(self) -> Iterable[_Server]:
        return [*self.nats, *self.valkeys, *self.sentinels]

    def __enter__(self) -> "Clusters":
        try:
            return self._started()
        except BaseException:
            self.__exit__()
            raise

    def _started(self) -> "Clusters":
        routes = tuple(ports.free_port() for _ in range(3))
        for number, port in enumerate(routes):
            folder = self.folder / f"nats-{number}"
            self.nats.append(ClusteredNats(folder, name=f"n{number}", route_port=port, routes=routes))
        durable = ("save ''", "appendonly yes", "repl-diskless-sync-delay 0", "min-replicas-to-write 1")
        for number in range(3):
            of = (f"replicaof 127.0.0.1 {self.valkeys[0].port}",) if number else ()
            self.valkeys.append(TcpValkey(self.folder / f"valkey-{number}", options=(*durable, *of)))
        watch = (
            f"sentinel monitor {MASTER} 127.0.0.1 {self.valkeys[0].port} 2",
            f"sentinel down-after-milliseconds {MASTER} 1500",
            f"sentinel failover-timeout {MASTER} 6000",
        )
        for number in range(3):
            self.sentinels.append(TcpValkey(self.folder / f"sentinel-{number}", options=watch, is_sentinel=True))
        for server in self.members:
            server.start()
        wait_until("two replicas follow the master", lambda: self.num_replicas() == 2)
        wait_until("the sentinels know each other", lambda: all(map(self._knows_others, self.sentinels)))
        return self

    def _knows_others(self, sentinel: TcpValkey) -> bool:
        with Redis(port=sentinel.port, socket_timeout=2.0, decode_responses=True) as client:
            state = client.execute_command("SENTINEL", "MASTER", MASTER)
        return int(state["num-other-sentinels"]) == 2 and int(state["num-slaves"]) == 2

    def num_replicas(self) -> int:
        try:
            with connect_sync(self.env["GLOWPLUG_REDIS_URL"], socket_timeout=2.0) as client:
                return int(client.info("replication")["connected_slaves"])
        except (RedisError, OSError):
            return 0

    def master(self) -> TcpValkey:
        """The master by the sentinels' word. Raises ServerFailed after WAIT_S without one."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            try:
                with connect_sync(self.env["GLOWPLUG_REDIS_URL"], socket_timeout=2.0) as client:
                    port = int(client.config_get("port")["port"])
                return next(one for one in self.valkeys if one.port == port)
            except (RedisError, OSError):
                time.sleep(0.1)
        raise ServerFailed("the sentinels name no master")

    def __exit__(self, *_: object) -> None:
        for server in self.members:
            server.kill()
