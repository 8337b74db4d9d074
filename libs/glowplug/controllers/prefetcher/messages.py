"""Messages between the prefetcher's shell and its controller: stimuli and effects. Bytes and epoch seconds."""

from dataclasses import dataclass

from glowplug.domain.hardware import CachedWeights
from glowplug.domain.model import WeightsRef
from glowplug.events.commands import FetchWeights
from glowplug.events.envelope import Event

WAITED_FOR = 1_000_000  # urgency of a fetch that an instance waits for, above any priority
CANCELLED = "cancelled"  # code of a FetchEnded after StopFetch


@dataclass(frozen=True, slots=True)
class Want:
    """`cause` None: a person asks, or the controller, for a starting instance without a fetch."""

    command: FetchWeights
    cause: Event | None

    @property
    def urgency(self) -> int:
        is_awaited = self.command.instance_id and not self.command.background
        return self.command.priority + (WAITED_FOR if is_awaited else 0)

    def within(self, part: FetchWeights) -> bool:
        """Return whether the fetch of `part`, a stage's or a byte range (last 0: the end), covers it."""
        mine = self.command
        if max(part.num_stages, mine.num_stages) > 1:
            return (mine.stage, mine.num_stages) == (part.stage, part.num_stages)
        if mine.first_byte < part.first_byte:
            return False
        return part.last_byte == 0 or (mine.last_byte != 0 and mine.last_byte <= part.last_byte)

    def repeats(self, other: "Want") -> bool:
        return bool(self.command.instance_id) and self.command == other.command


# Stimuli


@dataclass(frozen=True, slots=True)
class FetchSized:
    """A running fetch knows its size (0: unknown) and waits for host memory."""

    digest: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class FetchProgressed:
    digest: str
    num_bytes_done: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchEnded:
    """A fetch task is over. `code` "": success. `num_bytes` stay allocated: all when `whole`, else for a resume."""

    digest: str
    num_bytes: int
    whole: bool = False
    code: str = ""
    message: str = ""
    seconds: float = 0.0
    source: str = ""
    resumed_bytes: int = 0
    num_retries: int = 0


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of one whole fetch, from `source` ("disk": the node's own copy)."""

    digest: str
    num_bytes: int
    seconds: float
    source: str


@dataclass(frozen=True, slots=True)
class RegionsFound:
    """Regions at the start. `partial`: (digest, allocated bytes, changed_at); `failed`: instances whose fetch had
    failed; `on_disk`: whole copies; `measured`: past fetches."""

    complete: tuple[CachedWeights, ...]
    partial: tuple[tuple[str, int, float], ...] = ()
    failed: tuple[str, ...] = ()
    on_disk: tuple[CachedWeights, ...] = ()
    measured: tuple[Measured, ...] = ()


@dataclass(frozen=True, slots=True)
class RegionLost:
    """`want` found a region gone or damaged that was thought complete."""

    digest: str
    want: Want


@dataclass(frozen=True, slots=True)
class RegionChanged:
    """The source of complete weights, pinned by no checksum, has changed."""

    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyEnded:
    """A copy task is over. `code` "": success; `is_needless`: no copy of these weights is of use (their source is the
    same disk), so none is tried again."""

    digest: str
    num_bytes: int = 0
    code: str = ""
    message: str = ""
    seconds: float = 0.0
    is_needless: bool = False


@dataclass(frozen=True, slots=True)
class CopyLost:
    """A copy on disk is unreadable, damaged or of a changed source. The fetch goes on from the source."""

    digest: str
    reason: str


@dataclass(frozen=True, slots=True)
class DiskFailed:
    """The disk fails. `digest`, `num_bytes`: of a copy that could not be removed."""

    message: str
    digest: str = ""
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class FetchAsked:
    """A person asks for weights. Raises InvalidModelFile (bad checksum)."""

    weights: WeightsRef
    model_key: str


@dataclass(frozen=True, slots=True)
class DropAsked:
    """A person asks to drop weights. Raises NotFound or Conflict (in use)."""

    digest: str
    reason: str


# Effects


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFetch:
    """Run one fetch as a task, for the most urgent want, with the peers of all."""

    digest: str
    want: Want
    from_disk: bool = False  # then the source, if that fails


@dataclass(frozen=True, slots=True)
class GrantRoom:
    """Let the fetch take this many bytes of host memory."""

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
    """Check requested weights that are here, and remember the use. Outcome RegionLost where they are not."""

    digest: str
    want: Want


@dataclass(frozen=True, slots=True)
class NameRegion:
    """Add a requesting model to the inventory of these weights."""

    digest: str
    model_key: str


@dataclass(frozen=True, slots=True)
class MarkFailed:
    """Write failed.json for the waiting instances; `keep` leaves the fetched bytes for a resume."""

    digest: str
    code: str
    message: str
    instance_ids: tuple[str, ...]
    keep: bool


@dataclass(frozen=True, slots=True)
class DropRegion:
    """Remove the directory of a digest. `evicted`: other weights need its bytes."""

    digest: str
    evicted: bool = False


@dataclass(frozen=True, slots=True)
class WriteCopy:
    """Write a whole region to disk, as a task; it answers with CopyEnded."""

    digest: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class StopCopy:
    """Stop writing a copy; the task answers with CopyEnded(code=CANCELLED)."""

    digest: str


@dataclass(frozen=True, slots=True)
class DropCopy:
    """Remove a copy from disk. `evicted`: other copies need its bytes."""

    digest: str
    evicted: bool = False
    num_bytes: int = 0


EFFECTS: tuple[type, ...] = (
    StartFetch,
    GrantRoom,
    RaiseUrgency,
    StopFetch,
    UseRegion,
    NameRegion,
    MarkFailed,
    DropRegion,
    WriteCopy,
    StopCopy,
    DropCopy,
)
