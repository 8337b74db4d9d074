"""Configuration of an agent; times in seconds."""

from dataclasses import dataclass
from typing import Annotated, Literal

from glowplug.domain.bounds import Bounded, Count, Positive
from glowplug.domain.reading import ADVANCED, SETTING, Setting


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    """`unavailable`: why it cannot start here, or ""."""

    name: str
    emulated: bool = False
    unavailable: str = ""
    abilities: frozenset[str] = frozenset()  # of "prewarm", "swap", "stages", "share": see Node.can
    groups_lack: frozenset[str] = frozenset()  # lacking over several GPUs
    holds_layers: bool = True  # a replica may hold the first layers alone
    refuses: bool = False  # requests while it sleeps or falls asleep
    asleep_bytes: int = 0  # limit per sleeping engine; 0: unchecked


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentParams(Bounded):
    beat_s: Positive = 1.0
    start_deadline_s: Annotated[Positive, ADVANCED] = 180.0  # command -> READY
    sleep_deadline_s: Positive = 30.0  # drained -> asleep; then it is stopped
    wake_deadline_s: Annotated[Positive, ADVANCED] = 30.0  # command -> READY, from a dormant instance
    drain_quiet_s: float = 0.05  # for routers to learn of the drain
    stop_grace_s: Annotated[float, ADVANCED] = 3.0  # SIGTERM -> SIGKILL
    stop_retry_s: float = 5.0  # before another kill
    health_every_s: Positive = 1.0
    health_misses: Count = 3
    keep_gone_s: float = 180.0  # longer than a command lives on the bus
    consolidate_deadline_s: Positive = 600.0  # command -> whole or given up; then -> its stages have ended
    consolidate_retry_s: float = 10.0  # after a failure; doubles each time
    consolidate_retry_max_s: float = 300.0
    # of a draining KV cache (WarmServe Eq. 1)
    reservation: Annotated[Literal["", "paper", "literal_code"], Setting(name="kv_reservation", advanced=True)] = ""
    reservation_step_bytes: int = 64 << 20  # less is not worth a beat
    swap_host_bytes: Annotated[int | None, SETTING] = None  # host memory of sleepers; 0: none sleeps; unset: a quarter
