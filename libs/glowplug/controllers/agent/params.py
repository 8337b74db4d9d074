"""What an agent is configured with: the engines of its node, and the bounds of its waits in seconds."""

from dataclasses import dataclass
from typing import Literal

from glowplug.domain.bounds import check_bounds

RESERVATIONS = ("", "paper", "literal_code")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    """An engine this node knows. `unavailable` is why it cannot start here, or ""."""

    name: str
    emulated: bool = False
    unavailable: str = ""
    abilities: frozenset[str] = frozenset()  # of "prewarm", "swap", "stages", "share": see Node.can
    groups_lack: frozenset[str] = frozenset()  # abilities that an instance over several GPUs does not have
    holds_layers: bool = True  # a replica of the first layers holds them alone; False: it holds all of its weights
    refuses: bool = False  # what comes while one of its engines sleeps or falls asleep: routers send it elsewhere
    asleep_bytes: int = 0  # that one of its engines may keep of its GPUs while it sleeps; 0: that is not looked at


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentParams:
    """Bounds of the agent's waits, seconds, and how many misses make a hang."""

    beat_s: float = 1.0
    start_deadline_s: float = 180.0  # command -> READY
    sleep_deadline_s: float = 30.0  # drained -> asleep
    wake_deadline_s: float = 30.0  # command -> READY, of a start from what lies dormant
    drain_quiet_s: float = 0.3  # routers hear of the drain before the first count; not of an engine that refuses
    stop_grace_s: float = 5.0  # SIGTERM -> SIGKILL
    stop_retry_s: float = 5.0  # a process that would not die is killed again
    health_every_s: float = 1.0
    health_misses: int = 3
    keep_gone_s: float = 180.0  # longer than a command lives on the bus
    max_tick_gap_s: float = 5.0  # a longer time between two ticks is a jump of the clock, or a machine that slept
    consolidate_deadline_s: float = 600.0  # asked to become whole -> whole, or given up; then -> its stages are over
    consolidate_retry_s: float = 10.0  # a stage that failed to become whole tries no sooner; twice as long each time
    consolidate_retry_max_s: float = 300.0
    reservation: Literal["", "paper", "literal_code"] = ""  # how a draining KV cache shrinks (WarmServe Eq. 1)
    reservation_step_bytes: int = 64 << 20  # less than this is not worth a beat
    swap_host_bytes: int = 0  # host memory for engines that sleep outside the GPUs; 0: unlimited
    snapshot_ratio: float = 1.4  # host bytes of a sleeping engine per byte of its weights (papers.md section 7)

    def __post_init__(self) -> None:
        check_bounds(self, health_misses=1)
        if self.reservation not in RESERVATIONS:
            raise ValueError(f"reservation is one of {RESERVATIONS}, not {self.reservation!r}")
