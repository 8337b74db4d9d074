"""One digest on its way in, and what is published about it to those who want it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from glowplug.controllers.effects import Publish
from glowplug.controllers.prefetcher.messages import Want
from glowplug.events.facts import WeightsFetched, WeightsFetchFailed, WeightsProgressed


class Stage(StrEnum):
    QUEUED = "queued"
    SIZING = "sizing"  # task runs; its size is unknown yet, or it waits for host memory
    MOVING = "moving"  # host memory is granted
    STOPPING = "stopping"


@dataclass(frozen=True, slots=True)
class MemoryAsk:
    """A running fetch waits for so many bytes of host memory (0: as many as are free)."""

    num_bytes: int
    asked_at: float


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
    asks: MemoryAsk | None = None  # its size is known (or will not be), memory not granted
    num_bytes: int = 0
    num_bytes_done: int = 0
    is_counted: bool = False  # the cache's order knows of the miss
    is_resumed: bool = False  # some bytes were here before: its seconds are no measure of a whole fetch
    is_squeezed: bool = False  # idle weights have left for it already because memory was fuller than it seemed

    @property
    def urgency(self) -> int:
        return max((w.urgency for w in self.wants), default=0)

    @property
    def instance_ids(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(w.instance_id for w in self.wants if w.instance_id))


def one_per_model(wants: Iterable[Want]) -> Iterator[Want]:
    """The first want of each model, which causes its fact; the models that asked last come first."""
    return iter({w.model_key: w for w in reversed(list(wants))}.values())


def fetched(node_id: str, digest: str, want: Want, num_bytes: int, seconds: float, source: str) -> Publish:
    fact = WeightsFetched(
        node_id=node_id, model_key=want.model_key, digest=digest, num_bytes=num_bytes, seconds=seconds, source=source
    )
    return Publish(fact, want.cause)


def failed(node_id: str, digest: str, want: Want, code: str, message: str) -> Publish:
    fact = WeightsFetchFailed(node_id=node_id, model_key=want.model_key, digest=digest, code=code, message=message)
    return Publish(fact, want.cause)


def progressed(node_id: str, job: FetchJob) -> Publish:
    want = job.wants[0]
    fact = WeightsProgressed(
        node_id=node_id,
        model_key=want.model_key,
        digest=job.digest,
        num_bytes_done=job.num_bytes_done,
        num_bytes=job.num_bytes,
    )
    return Publish(fact, want.cause)
