"""Settings every service shares. Precedence: environment `GLOWPLUG_*`, then default."""

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class ServiceSettings(BaseSettings):
    """Base of each service's settings; a service adds its own fields."""

    model_config = SettingsConfigDict(env_prefix="GLOWPLUG_", extra="ignore", populate_by_name=True)

    service_id: str = ""
    host: str = "127.0.0.1"
    port: int = Field(0, ge=0, le=65535)  # admin REST; 0 lets the kernel choose
    nats_url: str = "nats://127.0.0.1:4222"
    nats_replicas: int = Field(1, ge=1, le=5)
    redis_url: str = "redis://127.0.0.1:6379/0"
    state_dir: Path = Path(".glowplug")
    admin_token: str = ""
    api_key: str = ""
    log_level: str = "INFO"
    log_json: bool = False
    log_prompts: bool = False
    otlp_endpoint: str = Field("", validation_alias="OTEL_EXPORTER_OTLP_ENDPOINT")
    tick_s: float = Field(0.5, gt=0)  # how often a controller sees time pass
    resync_s: float = Field(2.0, gt=0)  # how often tables are read again
    drain_s: float = Field(10.0, ge=0)  # how long a stopping service finishes what it has
