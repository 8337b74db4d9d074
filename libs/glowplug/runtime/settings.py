"""Settings every service shares. Precedence: environment `GLOWPLUG_*`, then default."""

import logging
import socket
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from glowplug.domain.errors import BadRequest
from glowplug.policies.registry import choose
from glowplug.policies.systems import SYSTEMS, System
from glowplug.runtime.web import AllowedHosts, WebRules, parse_origins
from glowplug.weights.source import SourceOptions

SHORTEST_LEASE_S = 1.0  # below it a busy machine's pauses would look like deaths


def _without_dots(name: Any) -> Any:
    return name.replace(".", "-") if isinstance(name, str) else name


NodeId = Annotated[str, BeforeValidator(_without_dots)]
"""A server's name, which may have dots, as one word of a subject, where dots divide: `ip-10-0-0-1.internal` is
`ip-10-0-0-1-internal`."""


class ServiceSettings(BaseSettings):
    """Base of each service's settings; a service adds its own fields."""

    model_config = SettingsConfigDict(
        env_prefix="GLOWPLUG_", extra="ignore", allow_inf_nan=False, populate_by_name=True
    )

    service_id: str = Field("", pattern=r"^[A-Za-z0-9_-]*$", max_length=128)  # one per process; empty: "<service>-1"
    host: str = "127.0.0.1"  # address the ports listen on
    advertise_host: str = Field("", pattern=r"^[A-Za-z0-9._:-]*$")  # name others reach us by; empty: the one above
    port: int = Field(0, ge=0, le=65535)  # admin REST; 0 lets the kernel choose
    nats_url: str = "nats://127.0.0.1:4222"  # best as a user of this service's own: docs/network.md
    nats_replicas: int = Field(1, ge=1, le=5)  # copies of each stream in a NATS cluster
    redis_url: str = "redis://127.0.0.1:6379/0"  # or unix:///path/to/socket
    state_dir: Path = Path(".glowplug")  # what the process keeps on disk
    admin_token: str = ""  # asked of every changing call of the admin port; empty: none is asked
    api_key: str = ""  # asked of every call of the data port; empty: none is asked
    allowed_hosts: str = ""  # names its ports answer to beside its own: a.example,*.example.org; `*` is any name
    allowed_origins: str = ""  # other sites whose pages may use its ports: https://a.example; `*` is any site
    policies: str = ""  # another system than the union (docs/policies.md); what is set by itself goes before it
    log_level: str = "INFO"
    log_json: bool = False  # one JSON object per line instead of text
    log_prompts: bool = False  # the console keeps message texts that spans bring with them
    otlp_endpoint: str = Field("", validation_alias="OTEL_EXPORTER_OTLP_ENDPOINT")
    tick_s: float = Field(0.5, gt=0)  # how often a controller sees time pass
    resync_s: float = Field(2.0, gt=0)  # how often tables are read again
    drain_s: float = Field(10.0, ge=0)  # how long a stopping service finishes what it has

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
        if given and given not in SYSTEMS:
            raise ValueError(f"no system of that name (there are: {', '.join(sorted(SYSTEMS))})")
        return given

    @model_validator(mode="before")
    @classmethod
    def _of_its_system(cls, given: dict[str, Any]) -> dict[str, Any]:
        system = SYSTEMS.get(str(given.get("policies", "")))
        chosen = settings_of_system(system) if system else {}
        return {name: value for name, value in chosen.items() if name in cls.model_fields} | given


def settings_of_system(system: System) -> dict[str, Any]:
    """Setting -> value, of all services."""
    params = {name: value for part in system.params.values() for name, value in part.items()}
    params["kv_reservation"] = params.pop("reservation")
    return params | {f"policy_{kind}": name for kind, name in system.policies.items()}


class SourceSettings(ServiceSettings):
    """Of a service that asks sources of weights."""

    redirect_hosts: str = "huggingface.co,*.huggingface.co,*.hf.co"  # https hosts that may be redirected to from others
    s3_endpoint: str = ""  # of `s3:` weights; empty: as the AWS variables say
    s3_region: str = ""  # of `s3:` weights; empty: as the AWS variables say

    def source_options(self) -> SourceOptions:
        """How sources are asked."""
        return SourceOptions(
            redirect_hosts=tuple(host.strip() for host in self.redirect_hosts.split(",") if host.strip()),
            s3_endpoint=self.s3_endpoint,
            s3_region=self.s3_region,
        )


class ElectedSettings(ServiceSettings):
    """Of a service whose processes elect one leader among them."""

    leader_lease_s: float = Field(0.0, ge=0)  # a leader silent for so long is replaced by a standby; 0: no election

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
