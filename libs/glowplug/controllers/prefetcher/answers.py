"""What the prefetcher says of a fetch to those who wanted it: one fact per model, caused by its first command."""

from collections.abc import Iterable, Iterator

from glowplug.controllers.effects import Publish
from glowplug.controllers.prefetcher.messages import FetchJob, Want
from glowplug.events.facts import WeightsFetched, WeightsFetchFailed, WeightsProgressed


def one_per_model(wants: Iterable[Want]) -> Iterator[Want]:
    """The first want of each model; the models that asked last come first."""
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
