"""Settings every service shares. Precedence: environment `GLOWPLUG_*`, then default."""

import logging
import socket
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from glowplug.domain.errors import BadRequest
from glowplug.policies.registry import choose
from glowplug.policies.systems import DEFAULT, System, installed, system
from glowplug.runtime.web import AllowedHosts, WebRules, parse_origins
from glowplug.weights.source import SourceOptions

T = TypeVar("T")
SHORTEST_LEASE_S = 1.0  # below it a busy machine's pauses would look like deaths


def _without_dots(name: Any) -> Any:
    return name.replace(".", "-") if isinstance(name, str) else name


NodeId = Annotated[str, BeforeValidator(_without_dots)]
"""A server's name, which may have dots, as one word of a subject, where dots divide: `ip-10-0-0-1.internal` is
`ip-10-0-0-1-internal`."""


def advanced(default: Any, **bounds: Any) -> Any:
    """A field of a settings class that docs/configuration.md lists by name and default only."""
    return Field(default, json_schema_extra={"advanced": True}, **bounds)


class ServiceSettings(BaseSettings):
    """Base of each service's settings; a service adds its own fields."""

    model_config = SettingsConfigDict(
        env_prefix="GLOWPLUG_", extra="ignore", allow_inf_nan=False, populate_by_name=True
    )

    service_id: str = Field("", pattern=r"^[A-Za-z0-9_-]*$", max_length=128)  # one per process; empty: "<service>-1"
    host: str = "127.0.0.1"  # address the ports listen on
    advertise_host: str = Field("", pattern=r"^[A-Za-z0-9._:-]*$")  # name that others use; empty: `host`
    port: int = Field(0, ge=0, le=65535)  # admin REST; 0 lets the kernel choose
    nats_url: str = "nats://127.0.0.1:4222"  # several of one cluster: with commas; users: docs/network.md
    nats_replicas: int = Field(1, ge=1, le=5)  # copies of each stream in a NATS cluster
    redis_url: str = "redis://127.0.0.1:6379/0"  # rediss://, unix:///path, redis+sentinel://HOST:PORT,.../MASTER
    state_dir: Path = Path(".glowplug")  # what the process keeps on disk
    admin_token: str = ""  # asked of every changing call of an admin port; empty: none
    api_key: str = ""  # asked of every call of the data port; empty: none
    allowed_hosts: str = ""  # further names its ports answer to: a.example,*.example.org; `*`: any
    allowed_origins: str = ""  # other sites whose pages may use its ports: https://a.example; `*`: any
    policies: str = ""  # a system of docs/policies.md; empty: the union; settings of its own go before it
    log_level: str = "INFO"
    log_json: bool = False  # one JSON object per line instead of text
    tick_s: float = advanced(0.5, gt=0)  # how often a controller sees time pass
    resync_s: float = advanced(2.0, gt=0)  # how often tables are read again
    drain_s: float = Field(10.0, ge=0)  # how long a stopping service may finish its work

    @field_validator("allowed_hosts")
    @classmethod
    def _are_hosts(cls, given: str) -> str:
        AllowedHosts.parse(given)
        return given

    @field_validator("allowed_origins")
    @classmethod
    def _are_origins(cls, given: str) -> str:
        parse_origins(given)
        return given

    def own_names(self) -> tuple[str, ...]:
        """Hosts by which others reach this process."""
        return (self.host, self.advertise_host, socket.gethostname())

    def filled(self, kind: type[T], **others: Any) -> T:
        """A dataclass of `kind`: each of its fields that is a setting by the same name, and `others`."""
        assert is_dataclass(kind)
        same = {field.name for field in fields(kind)} & type(self).model_fields.keys()
        return kind(**{name: getattr(self, name) for name in same} | others)

    def web_rules(self) -> WebRules:
        """Which requests its ports answer."""
        return WebRules(AllowedHosts.parse(self.allowed_hosts, self.own_names()), parse_origins(self.allowed_origins))

    @field_validator("log_level")
    @classmethod
    def _is_a_level(cls, given: str) -> str:
        levels = logging.getLevelNamesMapping()
        if given not in levels:
            raise ValueError(f"no level of that name (there are: {', '.join(levels)})")
        return given

    @field_validator("*")
    @classmethod
    def _is_a_policy(cls, given: Any, info: ValidationInfo) -> Any:
        kind = str(info.field_name).removeprefix("policy_")
        if kind != info.field_name:
            try:
                choose(kind, given)
            except BadRequest as error:
                raise ValueError(error.message) from error
        return given

    @field_validator("policies")
    @classmethod
    def _is_a_system(cls, given: str) -> str:
        try:
            system(given or DEFAULT)
        except BadRequest as error:
            raise ValueError(error.message) from error
        return given

    @model_validator(mode="before")
    @classmethod
    def _of_its_system(cls, given: dict[str, Any]) -> dict[str, Any]:
        named = str(given.get("policies", ""))
        chosen = settings_of_system(system(named)) if named and named in installed() else {}
        return {name: value for name, value in chosen.items() if name in cls.model_fields} | given


def settings_of_system(chosen: System) -> dict[str, Any]:
    """Setting -> value, of all services."""
    params = {name: value for part in chosen.params.values() for name, value in part.items()}
    params["kv_reservation"] = params.pop("reservation")
    return params | {f"policy_{kind}": name for kind, name in chosen.policies.items()}


class SourceSettings(ServiceSettings):
    """Of a service that asks sources of weights."""

    redirect_hosts: str = "huggingface.co,*.huggingface.co,*.hf.co"  # hosts that another host's redirect may lead to
    s3_endpoint: str = ""  # of `s3:` weights; empty: the AWS variables'

    def source_options(self) -> SourceOptions:
        """How sources are asked."""
        return SourceOptions(
            redirect_hosts=tuple(host.strip() for host in self.redirect_hosts.split(",") if host.strip()),
            s3_endpoint=self.s3_endpoint,
        )


class ElectedSettings(ServiceSettings):
    """Of a service whose processes elect one leader among them."""

    leader_lease_s: float = Field(0.0, ge=0)  # after this long without its leader, a standby leads; 0: no election

    @field_validator("leader_lease_s")
    @classmethod
    def _is_long_enough(cls, given: float) -> float:
        if 0 < given < SHORTEST_LEASE_S:
            raise ValueError(f"0 (no election) or at least {SHORTEST_LEASE_S:g}")
        return given


def explain(error: ValidationError) -> str:
    """One line that names the first wrong setting as its owner writes it: `GLOWPLUG_PORT: Input should be ...`."""
    first = error.errors()[0]
    message = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:
        return message
    name = str(first["loc"][0])
    return f"{name if name.isupper() else 'GLOWPLUG_' + name.upper()}: {message}, not {first.get('input')!r}"
