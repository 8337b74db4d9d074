"""Settings that every service shares, and how they are read. Precedence: environment `GLOWPLUG_*`, then the system that
`GLOWPLUG_POLICIES` names, then the default.

A service's settings are fields that only a process has (ports, addresses, folders, tokens) and the marked
params of its parts (domain/reading.py)."""

import logging
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from glowplug.domain.bounds import Bounded, Bounds, Checked, Count, OutOfBounds, Positive, kinds_of, marks_of, word
from glowplug.domain.reading import ADVANCED, CONSTANT, SETTING, Misread, Setting, laid_over, nested
from glowplug.policies.registry import choose
from glowplug.policies.systems import DEFAULT, installed, system
from glowplug.runtime.errors import WrongSetting
from glowplug.runtime.web import AllowedHosts, WebRules, parse_origins
from glowplug.weights.source import SourceOptions

S = TypeVar("S", bound="Settings")
SHORTEST_LEASE_S = 1.0  # below it a busy machine's pauses would look like deaths
LOCAL_NATS, LOCAL_REDIS = "nats://127.0.0.1:4222", "redis://127.0.0.1:6379/0"


def _level(given: str) -> None:
    if given not in (levels := logging.getLevelNamesMapping()):
        raise ValueError(f"no level of that name (there are: {', '.join(levels)})")


def a_policy(kind: str) -> Checked:
    return Checked(partial(choose, kind))


Port = Annotated[int, Bounds(most=65535)]
NodeId = Annotated[str, word(r"[a-z0-9][a-z0-9.-]*|", 64)]
"""A server's name as one word of a subject, where dots divide: `ip-10-0-0-1.internal` is `ip-10-0-0-1-internal`."""
GpuKind = Literal["host", "cuda", "auto", "emulated"]
Hosts = Annotated[str, Checked(AllowedHosts.parse)]
Origins = Annotated[str, Checked(parse_origins)]
SystemName = Annotated[str, Checked(lambda name: system(name or DEFAULT))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """Where a setting is: `path` from the settings class, `owner` declares it."""

    name: str
    path: tuple[str, ...]
    owner: type
    default: Any
    kind: Any
    mark: Setting

    @property
    def env(self) -> str:
        return self.name if self.name.isupper() else f"GLOWPLUG_{self.name.upper()}"


@dataclass(kw_only=True)
class Settings(Bounded):
    """Every field is a setting; of one that is a dataclass, the marked ones are."""

    @classmethod
    def read(cls, **stated: Any) -> Self:
        """Read the environment; `stated` values go before it. Raises WrongSetting."""
        found = {one.name: os.environ[one.env] for one in cls.variables() if one.env in os.environ}
        return cls.of(found | stated)

    @classmethod
    def of(cls, named: Mapping[str, Any]) -> Self:
        """Lay settings by name over the defaults. Raises WrongSetting."""
        known = {one.name: one for one in cls.variables()}
        try:
            return laid_over(_default(cls, named), nested({known[name].path: given for name, given in named.items()}))
        except Misread as error:
            wrong = next((one for one in known.values() if one.path == error.path), None)
            if wrong is None:
                raise WrongSetting(str(error)) from error
            given = repr(named.get(wrong.name))
            told = "" if given in error.problem or wrong.name not in named else f", not {given}"
            raise WrongSetting(f"{wrong.env}: {error.problem}{told}") from error

    @classmethod
    def variables(cls) -> list[Variable]:
        """Every setting, in order."""
        return list(_variables(cls(), ()))


def _variables(owner: Any, path: tuple[str, ...]) -> Iterator[Variable]:
    for name, kind in kinds_of(owner.__class__).items():
        value, here = getattr(owner, name), (*path, name)
        mark = next((mark for mark in marks_of(kind) if isinstance(mark, Setting)), None if path else SETTING)
        if is_dataclass(value):
            yield from _variables(value, here)
        elif mark is not None and mark.read:
            yield Variable(name=mark.name or name, path=here, owner=type(owner), default=value, kind=kind, mark=mark)


def _default(cls: type[S], named: Mapping[str, Any]) -> S:
    """With the policies and params of the named system."""
    made, chosen = cls(), named.get("policies")
    if not chosen or chosen not in installed():
        return made
    found, service = system(chosen), cls.__name__.removesuffix("Settings").lower()
    laid: dict[str, Any] = {f"policy_{kind}": name for kind, name in found.policies.items()}
    laid["params"] = found.params.get(service, {})
    return laid_over(made, {name: value for name, value in laid.items() if hasattr(made, name)})


@dataclass(kw_only=True)
class SharedSettings(Settings):
    """Of every service and of `glowplug up`, which generates the keys and embeds the servers that it is not given."""

    host: str = "127.0.0.1"  # address the ports listen on
    nats_url: str = ""  # several of one cluster: with commas; users: docs/network.md; empty: local
    redis_url: str = ""  # redis://, rediss://, unix:///path, redis+sentinel://HOST:PORT,.../MASTER; empty: local
    state_dir: Path = Path(".glowplug")  # what the process keeps on disk
    admin_token: str = ""  # asked of every changing call of an admin port; empty: none
    api_key: str = ""  # asked of every call of the data port; empty: none
    drain_s: float = 10.0  # how long a stopping service may finish its work


@dataclass(kw_only=True)
class EngineSecret(Settings):
    engine_secret: str = ""  # keys of engines are made from it; set it on routers first; empty: no keys


@dataclass(kw_only=True)
class ServiceSettings(SharedSettings):
    """Base of each service's settings; a service adds its own fields and params."""

    service_id: Annotated[str, word(r"[A-Za-z0-9_-]*", 128)] = ""  # one per process; empty: "<service>-1"
    advertise_host: Annotated[str, word(r"[A-Za-z0-9._:-]*")] = ""  # name that others use; empty: `host`
    port: Port = 0  # admin REST; 0 lets the kernel choose
    nats_replicas: Annotated[int, Bounds(least=1, most=5)] = 1  # copies of each stream in a NATS cluster
    allowed_hosts: Hosts = ""  # further names its ports answer to: a.example,*.example.org; `*`: any
    allowed_origins: Origins = ""  # other sites whose pages may use its ports: https://a.example; `*`: any
    policies: SystemName = ""  # a system of docs/policies.md; empty: the union; settings of its own go before it
    log_level: Annotated[str, Checked(_level)] = "INFO"
    log_json: bool = False  # one JSON object per line instead of text
    tick_s: Annotated[Positive, CONSTANT] = 0.5  # how often a controller sees time pass
    resync_s: Annotated[Positive, ADVANCED] = 2.0  # how often tables are read again

    def __post_init__(self) -> None:
        super().__post_init__()
        self.nats_url = self.nats_url or LOCAL_NATS
        self.redis_url = self.redis_url or LOCAL_REDIS

    def own_names(self) -> tuple[str, ...]:
        """Hosts by which others reach this process."""
        return (self.host, self.advertise_host, socket.gethostname())

    def web_rules(self) -> WebRules:
        """Which requests its ports answer."""
        return WebRules(AllowedHosts.parse(self.allowed_hosts, self.own_names()), parse_origins(self.allowed_origins))


@dataclass(kw_only=True)
class NodeSettings(ServiceSettings):
    """Of a service that runs on every node."""

    node_id: NodeId = ""  # a dot becomes a dash
    shm_dir: Path = Path("/dev/shm/glowplug")  # weights in host memory
    host_cache_bytes: Count = 8 << 30  # of weights

    def __post_init__(self) -> None:
        self.node_id = self.node_id.replace(".", "-") or "node-1"
        super().__post_init__()


@dataclass(kw_only=True)
class SourceSettings(ServiceSettings):
    """Of a service that asks sources of weights."""

    redirect_hosts: str = "huggingface.co,*.huggingface.co,*.hf.co"  # hosts that another host's redirect may lead to
    sources: SourceOptions = field(default_factory=SourceOptions)

    def source_options(self) -> SourceOptions:
        """How sources are asked."""
        hosts = tuple(host.strip() for host in self.redirect_hosts.split(",") if host.strip())
        return replace(self.sources, redirect_hosts=hosts)


@dataclass(kw_only=True)
class ElectedSettings(ServiceSettings):
    """Of a service whose processes elect one leader among them."""

    leader_lease_s: float = 0.0  # after this long without its leader, a standby leads; 0: no election

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0 < self.leader_lease_s < SHORTEST_LEASE_S:
            raise OutOfBounds("leader_lease_s", f"0 (no election) or at least {SHORTEST_LEASE_S:g}")
