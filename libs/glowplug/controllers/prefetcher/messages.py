"""Messages between the prefetcher's shell and its controller: stimuli and effects. Bytes and epoch seconds."""

from dataclasses import dataclass, replace

from glowplug.domain.hardware import CachedWeights
from glowplug.domain.model import WeightsRef
from glowplug.events.envelope import Event

CANCELLED = "cancelled"  # code of a FetchEnded after StopFetch


@dataclass(frozen=True, slots=True)
class Want:
    """One request for weights. `cause` is None without a command (see StartFetch)."""

    weights: WeightsRef
    model_key: str
    instance_id: str
    first_byte: int
    last_byte: int
    urgency: int
    cause: Event | None
    stage: int = 0
    num_stages: int = 1
    peers: tuple[str, ...] = ()

    def within(self, first_byte: int, last_byte: int, stage: int = 0, num_stages: int = 1) -> bool:
        """Return whether a stage's part, or [first_byte, last_byte) of a whole fetch (last 0: the end), covers it."""
        if max(num_stages, self.num_stages) > 1:
            return (self.stage, self.num_stages) == (stage, num_stages)
        if self.first_byte < first_byte:
            return False
        return last_byte == 0 or (self.last_byte != 0 and self.last_byte <= last_byte)

    def repeats(self, other: "Want") -> bool:
        return bool(self.instance_id) and replace(self, cause=None) == replace(other, cause=None)


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
    """The source of complete weights has changed (checked only where no checksum pins them)."""

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
    """A person asks for weights, by a model's name or their own. Raises InvalidModelFile (bad checksum)."""

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
    """Run one fetch as a task. `urgency` orders fetches on the link. `cause`: the command, None when the controller
    noticed that a starting instance lacks its weights."""

    digest: str
    weights: WeightsRef
    model_key: str
    urgency: int
    first_byte: int
    last_byte: int
    cause: Event | None
    from_disk: bool = False  # then the source, if that fails
    stage: int = 0  # of a pipeline of `num_stages`
    num_stages: int = 1
    peers: tuple[str, ...] = ()  # other nodes' prefetchers


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
