"""Configuration of an agent; times in seconds."""

from dataclasses import dataclass
from typing import Literal

from glowplug.domain.bounds import check_bounds

RESERVATIONS = ("", "paper", "literal_code")


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
class AgentParams:
    beat_s: float = 1.0
    start_deadline_s: float = 180.0  # command -> READY
    sleep_deadline_s: float = 30.0  # drained -> asleep
    wake_deadline_s: float = 30.0  # command -> READY, from a dormant instance
    drain_quiet_s: float = 0.3  # for routers to learn of the drain
    stop_grace_s: float = 5.0  # SIGTERM -> SIGKILL
    stop_retry_s: float = 5.0  # before another kill
    health_every_s: float = 1.0
    health_misses: int = 3
    keep_gone_s: float = 180.0  # longer than a command lives on the bus
    max_tick_gap_s: float = 5.0  # longer: a clock jump or a machine asleep
    consolidate_deadline_s: float = 600.0  # command -> whole or given up; then -> its stages have ended
    consolidate_retry_s: float = 10.0  # after a failure; doubles each time
    consolidate_retry_max_s: float = 300.0
    reservation: Literal["", "paper", "literal_code"] = ""  # of a draining KV cache (WarmServe Eq. 1)
    reservation_step_bytes: int = 64 << 20  # less is not worth a beat
    swap_host_bytes: int = 0  # for sleeping engines; 0: unlimited
    snapshot_ratio: float = 1.4  # host bytes of a sleeping engine per byte of its weights (papers.md section 7)

    def __post_init__(self) -> None:
        check_bounds(self, health_misses=1)
        if self.reservation not in RESERVATIONS:
            raise ValueError(f"reservation is one of {RESERVATIONS}, not {self.reservation!r}")
