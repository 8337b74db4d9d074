"""Settings of the console."""

from dataclasses import dataclass
from typing import Annotated
from urllib.parse import urlsplit

from glowplug.domain.address import is_loopback
from glowplug.domain.bounds import Bounds, Count, Positive
from glowplug.domain.reading import CONSTANT, Setting
from glowplug.runtime.settings import ServiceSettings
from glowplug.runtime.web import MAX_BODY_BYTES


@dataclass(kw_only=True)
class ConsoleSettings(ServiceSettings):
    """Every bound of the things kept and of the stream has its name here."""

    console_key: str = ""  # asked of every reader; empty: the API key, if any
    console_session_s: Positive = 12 * 3600.0  # how long a login lasts
    oidc_issuer: str = ""  # where people log in by OpenID Connect: https://id.example; empty: nowhere
    oidc_client_id: str = ""  # of the console at the issuer
    oidc_client_secret: str = ""  # likewise; empty: a public client
    oidc_scope: str = "openid profile email"  # of a login; some issuers send groups for `groups`
    oidc_role_claim: str = "groups"  # of the ID token; dots lead into objects: realm_access.roles
    oidc_viewers: str = ""  # values of that claim, with commas: who may read; `*`: everybody who can log in
    oidc_operators: str = ""  # who may change models and nodes, too
    oidc_admins: str = ""  # who may change tenants and keys, too
    trace_disk: bool = True  # keep sampled traces over a restart, in <state_dir>/console/stories.log
    otlp_endpoint: Annotated[str, Setting(name="OTEL_EXPORTER_OTLP_ENDPOINT")] = ""  # of spans; empty: none are sent
    events_kept: Annotated[Count, CONSTANT] = 4000  # of each class: facts, commands, telemetry
    events_per_beat: Annotated[Count, CONSTANT] = 60  # shown of each class per beat; the rest are counted
    events_max_watchers: Annotated[Count, CONSTANT] = 16
    decisions_kept: Annotated[Count, CONSTANT] = 2000
    stream_beat_s: Annotated[Positive, CONSTANT] = 0.05
    stream_queue: Annotated[int, Bounds(least=2), CONSTANT] = 64
    stream_max_clients: Annotated[Count, CONSTANT] = 64
    data_url: str = ""  # of the playground; empty, here and below: learned from the service's announcement
    autoscaler_url: str = ""  # of actions on models
    placer_url: str = ""  # of actions on nodes
    predictor_url: str = ""  # of forecasts
    action_timeout_s: Annotated[Positive, CONSTANT] = 15.0
    chat_max_body_bytes: Annotated[int, Bounds(least=1024, most=MAX_BODY_BYTES), CONSTANT] = 2 << 20
    chat_max_streams: Annotated[Count, CONSTANT] = 64  # through this console at once
    chat_silence_s: Annotated[Positive, CONSTANT] = 600.0  # until a router that sends nothing is given up
    requests_shown: Annotated[Count, CONSTANT] = 2000  # finished ones kept
    usage_database_url: str = ""  # of SQLAlchemy; empty: SQLite in <state_dir>/console/usage.db
    usage_kept_days: Positive = 90.0  # records of single requests; hourly totals are kept for good
    usage_prices: str = ""  # file with the prices of models; empty: nothing has a cost
    prometheus_url: str = ""  # of a Prometheus that scrapes the fleet, for charts; empty: the console's own history

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.oidc_issuer:
            return
        where = urlsplit(self.oidc_issuer)
        if where.scheme != "https" and not (where.scheme == "http" and is_loopback(where.hostname or "")):
            raise ValueError(f"GLOWPLUG_OIDC_ISSUER: expected https://..., not {self.oidc_issuer!r}")
        if not self.oidc_client_id:
            raise ValueError("GLOWPLUG_OIDC_CLIENT_ID is not set, but GLOWPLUG_OIDC_ISSUER is")
        if not (self.oidc_viewers or self.oidc_operators or self.oidc_admins):
            raise ValueError("GLOWPLUG_OIDC_ISSUER is set, but none of GLOWPLUG_OIDC_VIEWERS, _OPERATORS and _ADMINS")
