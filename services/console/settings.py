"""Settings of the console."""

from pydantic import Field

from glowplug.runtime.rest import MAX_BODY_BYTES
from glowplug.runtime.settings import ServiceSettings


class ConsoleSettings(ServiceSettings):
    """Every bound of the trace store, the receiver and the stream has its name here."""

    console_key: str = ""  # asked of every reader; empty: the API key; both empty: none is asked
    console_session_s: float = Field(12 * 3600.0, gt=0)  # how long a login lasts
    trace_max_traces: int = Field(2000, ge=1)
    trace_max_bytes: int = Field(32 << 20, ge=1 << 16)
    trace_max_spans: int = Field(2000, ge=1)  # of one trace
    trace_disk: bool = True  # traces are in <state_dir>/console/traces.sqlite and survive a restart
    otlp_max_body_bytes: int = Field(4 << 20, ge=1024, le=MAX_BODY_BYTES)  # as sent
    otlp_max_plain_bytes: int = Field(16 << 20, ge=1024)  # once unpacked
    otlp_max_held_bytes: int = Field(32 << 20, ge=1024)  # bodies of all exports being read; past it they get 503
    events_kept: int = Field(4000, ge=1)  # of each class: facts, commands, telemetry
    events_max_bytes: int = Field(8 << 20, ge=1 << 16)  # of each class
    events_beat_s: float = Field(0.25, gt=0)  # an open view of events is sent something at most this often
    events_per_beat: int = Field(60, ge=1)  # ... and at most so many; the others are counted
    events_max_watchers: int = Field(16, ge=1)
    decisions_kept: int = Field(2000, ge=1)
    stream_beat_s: float = Field(0.05, gt=0)
    stream_queue: int = Field(64, ge=2)
    stream_max_clients: int = Field(64, ge=1)
    router_url: str = ""  # its OpenAI API, for the playground; empty, here and below: learned when the service starts
    autoscaler_url: str = ""  # where operator actions on models go
    placer_url: str = ""  # where operator actions on nodes go
    predictor_url: str = ""  # whose windows and forecasts are shown
    action_timeout_s: float = Field(15.0, gt=0)
    chat_max_body_bytes: int = Field(2 << 20, ge=1024, le=MAX_BODY_BYTES)
    chat_max_streams: int = Field(64, ge=1)  # through this console at once
    chat_silence_s: float = Field(600.0, gt=0)  # a router that sends nothing at all; a held stream gets comments
    requests_shown: int = Field(2000, ge=1)  # ended ones that are remembered
