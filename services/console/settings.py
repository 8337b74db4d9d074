"""Settings of the console."""

from pydantic import Field

from glowplug.runtime.settings import ServiceSettings


class ConsoleSettings(ServiceSettings):
    """Every bound of the trace store, the receiver and the stream has its name here."""

    trace_max_traces: int = Field(2000, ge=1)
    trace_max_bytes: int = Field(32 << 20, ge=1 << 16)
    trace_max_spans: int = Field(2000, ge=1)  # of one trace
    otlp_max_body_bytes: int = Field(4 << 20, ge=1024)  # as sent
    otlp_max_plain_bytes: int = Field(16 << 20, ge=1024)  # once unpacked
    otlp_max_held_bytes: int = Field(32 << 20, ge=1024)  # bodies of all exports being read; past it they get 503
    stream_beat_s: float = Field(0.25, gt=0)
    stream_queue: int = Field(64, ge=2)
    stream_max_clients: int = Field(64, ge=1)
