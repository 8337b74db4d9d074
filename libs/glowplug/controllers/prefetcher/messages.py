"""What the prefetcher's controller hears from its shell and asks of it. Bytes and epoch seconds."""

from dataclasses import dataclass, field
from enum import StrEnum

from glowplug.domain.hardware import CachedWeights
from glowplug.domain.model import WeightsRef
from glowplug.events.envelope import Event

CANCELLED = "cancelled"  # code of a FetchEnded that StopFetch caused

# Stimuli


@dataclass(frozen=True, slots=True)
class FetchSized:
    """A running fetch knows its size (0: unknown) and waits for room."""

    digest: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class FetchProgressed:
    digest: str
    num_bytes_done: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchEnded:
    """A fetch task is over. `code` is "" on success. `num_bytes` stay allocated: all of them when `whole`, what can
    be resumed (or 0) otherwise."""

    digest: str
    num_bytes: int
    whole: bool = False
    code: str = ""
    message: str = ""
    seconds: float = 0.0
    source: str = ""


@dataclass(frozen=True, slots=True)
class RegionsFound:
    """What lay in host memory when the process started. `partial`: (digest, allocated bytes, changed_at);
    `failed`: instances whose fetch had failed by then."""

    complete: tuple[CachedWeights, ...]
    partial: tuple[tuple[str, int, float], ...] = ()
    failed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RegionLost:
    """A region thought complete is gone or damaged; `want` asked for it."""

    digest: str
    want: "Want"


@dataclass(frozen=True, slots=True)
class RegionChanged:
    """The source of complete weights holds other bytes by now (only asked where no checksum pins them)."""

    digest: str


@dataclass(frozen=True, slots=True)
class DropAsked:
    """A person asks for a drop. Raises NotFound or Conflict (in use)."""

    digest: str
    reason: str


# Effects


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFetch:
    """Run one fetch as a task. `urgency` orders it on the link. `cause` is the command it is for, None when the
    controller itself noticed that a starting instance lacks its weights."""

    digest: str
    weights: WeightsRef
    model_key: str
    urgency: int
    first_byte: int
    last_byte: int
    cause: Event | None


@dataclass(frozen=True, slots=True)
class GrantRoom:
    """The fetch may take this many bytes of host memory."""

    digest: str
    max_bytes: int


@dataclass(frozen=True, slots=True)
class RaiseUrgency:
    digest: str
    urgency: int


@dataclass(frozen=True, slots=True)
class StopFetch:
    """Cancel the task; it answers with FetchEnded(code=CANCELLED)."""

    digest: str


@dataclass(frozen=True, slots=True)
class UseRegion:
    """A fetch was asked for and the weights are here: check, remember the use, answer RegionLost if not."""

    digest: str
    want: "Want"


@dataclass(frozen=True, slots=True)
class NameRegion:
    """A model that asked for these weights, for the inventory."""

    digest: str
    model_key: str


@dataclass(frozen=True, slots=True)
class MarkFailed:
    """Write failed.json for the instances that wait; `keep` leaves landed bytes for a resume."""

    digest: str
    code: str
    message: str
    instance_ids: tuple[str, ...]
    keep: bool


@dataclass(frozen=True, slots=True)
class DropRegion:
    """Remove the directory. `evicted` when it was for room."""

    digest: str
    evicted: bool = False


# State


class Stage(StrEnum):
    QUEUED = "queued"
    SIZING = "sizing"  # task runs; size unknown yet, or waits for room
    MOVING = "moving"  # room granted
    STOPPING = "stopping"


@dataclass(frozen=True, slots=True)
class Want:
    """One asking that a fetch answers. `cause` is None when no command is known (see StartFetch)."""

    weights: WeightsRef
    model_key: str
    instance_id: str
    first_byte: int
    last_byte: int
    urgency: int
    cause: Event | None

    def within(self, first_byte: int, last_byte: int) -> bool:
        """Whether [first_byte, last_byte) covers it; last 0 is the end."""
        if self.first_byte < first_byte:
            return False
        return last_byte == 0 or (self.last_byte != 0 and self.last_byte <= last_byte)


@dataclass(slots=True)
class FetchJob:
    """One digest on its way in, however many asked."""

    digest: str
    wants: list[Want]
    order: int
    stage: Stage = Stage.QUEUED
    first_byte: int = 0
    last_byte: int = 0
    started_at: float = 0.0
    wants_room_bytes: int | None = None  # size told, room not granted
    room_asked_at: float = 0.0
    num_bytes: int = 0
    num_bytes_done: int = 0
    is_counted: bool = False  # the cache's order has heard of the miss
    is_resumed: bool = False  # some bytes were here before: its seconds are no measure of a whole fetch
    is_squeezed: bool = False  # idle weights have left for it already because memory was fuller than it seemed

    @property
    def urgency(self) -> int:
        return max((w.urgency for w in self.wants), default=0)

    @property
    def instance_ids(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(w.instance_id for w in self.wants if w.instance_id))


@dataclass(slots=True)
class Cached:
    """Bytes of host memory one digest takes: complete, left partial, or reserved by a running fetch."""

    digest: str
    num_bytes: int
    complete: bool
    last_used_at: float
    model_keys: set[str] = field(default_factory=set)
    stale: bool = False  # its source has changed; dropped as soon as nobody uses it


EFFECTS: tuple[type, ...] = (
    StartFetch,
    GrantRoom,
    RaiseUrgency,
    StopFetch,
    UseRegion,
    NameRegion,
    MarkFailed,
    DropRegion,
)
