"""Configuration of an agent: the engines of its node, and the bounds of its waits in seconds."""

from dataclasses import dataclass
from typing import Literal

from glowplug.domain.bounds import check_bounds

RESERVATIONS = ("", "paper", "literal_code")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    """An engine this node knows. `unavailable`: why it cannot start here, or ""."""

    name: str
    emulated: bool = False
    unavailable: str = ""
    abilities: frozenset[str] = frozenset()  # of "prewarm", "swap", "stages", "share": see Node.can
    groups_lack: frozenset[str] = frozenset()  # abilities that an instance over several GPUs does not have
    holds_layers: bool = True  # a replica may hold the first layers alone; False: it holds all weights
    refuses: bool = False  # requests while it sleeps or falls asleep: routers send them elsewhere
    asleep_bytes: int = 0  # most GPU bytes that a sleeping engine may keep; 0: not checked


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentParams:
    """Bounds of the agent's waits in seconds, and the number of missed health checks that make a hang."""

    beat_s: float = 1.0
    start_deadline_s: float = 180.0  # command -> READY
    sleep_deadline_s: float = 30.0  # drained -> asleep
    wake_deadline_s: float = 30.0  # command -> READY, of a start from a dormant instance
    drain_quiet_s: float = 0.3  # for routers to learn of the drain; not for an engine that refuses
    stop_grace_s: float = 5.0  # SIGTERM -> SIGKILL
    stop_retry_s: float = 5.0  # a process that would not die is killed again
    health_every_s: float = 1.0
    health_misses: int = 3
    keep_gone_s: float = 180.0  # longer than a command lives on the bus
    max_tick_gap_s: float = 5.0  # a longer gap between ticks means a clock jump or a machine that slept
    consolidate_deadline_s: float = 600.0  # command -> whole or given up; then -> its stages have ended
    consolidate_retry_s: float = 10.0  # pause of a stage that failed to become whole; doubles each time
    consolidate_retry_max_s: float = 300.0
    reservation: Literal["", "paper", "literal_code"] = ""  # how a draining KV cache shrinks (WarmServe Eq. 1)
    reservation_step_bytes: int = 64 << 20  # less than this is not worth a beat
    swap_host_bytes: int = 0  # host memory for engines that sleep outside the GPUs; 0: unlimited
    snapshot_ratio: float = 1.4  # host bytes of a sleeping engine per byte of its weights (papers.md section 7)

    def __post_init__(self) -> None:
        check_bounds(self, health_misses=1)
        if self.reservation not in RESERVATIONS:
            raise ValueError(f"reservation is one of {RESERVATIONS}, not {self.reservation!r}")
