"""Settings of the console."""

from ipaddress import ip_address
from typing import Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from glowplug.runtime.settings import ServiceSettings, advanced
from glowplug.runtime.web import MAX_BODY_BYTES


class ConsoleSettings(ServiceSettings):
    """Every bound of what is kept and of the stream has its name here."""

    console_key: str = ""  # asked of every reader; empty: the API key, if any
    console_session_s: float = Field(12 * 3600.0, gt=0)  # how long a login lasts
    oidc_issuer: str = ""  # where people log in by OpenID Connect: https://id.example; empty: nowhere
    oidc_client_id: str = ""  # of the console at the issuer
    oidc_client_secret: str = ""  # likewise; empty: a public client
    oidc_scope: str = "openid profile email"  # what is asked for at a login; some issuers send groups for `groups`
    oidc_role_claim: str = "groups"  # of the ID token; dots lead into objects: realm_access.roles
    oidc_viewers: str = ""  # values of that claim, with commas: who may read; `*`: everybody who can log in
    oidc_operators: str = ""  # who may change models and nodes, too
    oidc_admins: str = ""  # who may change tenants and keys, too
    trace_disk: bool = True  # keep sampled traces over a restart, in <state_dir>/console/stories.log
    otlp_endpoint: str = Field("", validation_alias="OTEL_EXPORTER_OTLP_ENDPOINT")  # of spans; empty: none are sent
    events_kept: int = advanced(4000, ge=1)  # of each class: facts, commands, telemetry
    events_per_beat: int = advanced(60, ge=1)  # shown of each class per beat; the rest are counted
    events_max_watchers: int = advanced(16, ge=1)
    decisions_kept: int = advanced(2000, ge=1)
    stream_beat_s: float = advanced(0.05, gt=0)
    stream_queue: int = advanced(64, ge=2)
    stream_max_clients: int = advanced(64, ge=1)
    router_url: str = ""  # of the playground; empty, here and below: learned from the service's announcement
    autoscaler_url: str = ""  # of actions on models
    placer_url: str = ""  # of actions on nodes
    predictor_url: str = ""  # of forecasts
    action_timeout_s: float = advanced(15.0, gt=0)
    chat_max_body_bytes: int = advanced(2 << 20, ge=1024, le=MAX_BODY_BYTES)
    chat_max_streams: int = advanced(64, ge=1)  # through this console at once
    chat_silence_s: float = advanced(600.0, gt=0)  # until a router that sends nothing is given up
    requests_shown: int = advanced(2000, ge=1)  # finished ones kept
    usage_database_url: str = ""  # of SQLAlchemy; empty: SQLite in <state_dir>/console/usage.db
    usage_kept_days: float = Field(90.0, gt=0)  # records of single requests; hourly totals are kept for good
    usage_prices: str = ""  # file with the prices of models; empty: nothing has a cost
    prometheus_url: str = ""  # of a Prometheus that scrapes the fleet, for charts; empty: the console's own history

    @model_validator(mode="after")
    def _has_a_client(self) -> Self:
        if not self.oidc_issuer:
            return self
        where = urlsplit(self.oidc_issuer)
        if where.scheme != "https" and not (where.scheme == "http" and _is_loopback(where.hostname or "")):
            raise ValueError(f"GLOWPLUG_OIDC_ISSUER: expected https://..., not {self.oidc_issuer!r}")
        if not self.oidc_client_id:
            raise ValueError("GLOWPLUG_OIDC_CLIENT_ID is not set, and GLOWPLUG_OIDC_ISSUER is")
        if not (self.oidc_viewers or self.oidc_operators or self.oidc_admins):
            raise ValueError("GLOWPLUG_OIDC_ISSUER is set, and none of GLOWPLUG_OIDC_VIEWERS, _OPERATORS and _ADMINS")
        return self


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
