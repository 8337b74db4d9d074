"""A served model as its owner declares it."""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

from glowplug.domain.bounds import Bounded, Bounds, OutOfBounds, check_bounds

MAX_BYTES = 1 << 56
# Sanity bounds: instances and GPUs are made one by one, the others are multiplied. A model file allows less; a
# simulated fleet may have as many instances as GPUs.
MAX_INSTANCES, MAX_GPUS, MAX_CONCURRENCY, MAX_QUEUE, MAX_TOKENS = 10_000, 1024, 1 << 20, 1 << 32, 1 << 32
Bytes = Annotated[int, Bounds(most=MAX_BYTES)]
_OF_ADAPTER = ("base", "adapter_rank")  # beside its weights; all else is its base's
_OF_ENGINE = (
    "name", "engine", "weights_bytes", "kv_bytes", "context_tokens", "max_concurrency", "num_gpus", "weights_shared",
    "system_prompt", "engine_args",
)  # fmt: skip


class OnCold(StrEnum):
    """The router's answer to a request when no instance of its model runs."""

    HOLD = "hold"
    REFUSE = "refuse"


class Rung(StrEnum):
    """Nearness of a copy to serving, nearest last."""

    HOST = "host"  # weights in host memory
    ASLEEP = "asleep"  # engine started, asleep outside the GPU
    PREWARMED = "prewarmed"  # weights on a GPU
    READY = "ready"


class KeptAt(StrEnum):
    """The rung, below READY, at which an operator keeps at least one copy of a model."""

    NOWHERE = ""
    HOST = "host"
    ASLEEP = "asleep"


class Temperature(StrEnum):
    """Start temperature for users: hot (running), warm (prewarmed or asleep), cold."""

    HOT = "hot"
    WARM = "warm"
    COLD = "cold"


_NOT_SLUG = re.compile(r"[^a-z0-9]+")


def model_key(name: str) -> str:
    """Return the slug of a name, safe as a NATS token and a file name: 'Qwen/Qwen3-8B.v1' -> 'qwen-qwen3-8b-v1'.

    Raises ValueError if the name has no letter or digit.
    """
    key = _NOT_SLUG.sub("-", name.lower()).strip("-")
    if not key:
        raise ValueError(f"model name {name!r} has no letter or digit")
    return key


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsRef(Bounded):
    """Source of weights. `uri` is file:, http(s):, hf:, s3: or gs:; `sha256` (hex), if given, is checked."""

    uri: str
    num_bytes: Bytes = 0  # 0: unknown until fetched
    sha256: str = ""

    @property
    def digest(self) -> str:
        """Name of the weights in host memory: their checksum, else the SHA-256 of the address. Equal weights share a
        copy."""
        return self.sha256.lower() or hashlib.sha256(self.uri.encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo(Bounded):
    """Service level objectives in seconds; 0: none. Raises OutOfBounds below 0."""

    ttft_s: float = 0.0
    tpot_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """`memory_bytes` (weights + KV) is for one instance over all its GPUs. Raises OutOfBounds."""

    name: str
    key: str
    engine: str  # llamacpp | vllm | emulated
    weights: WeightsRef
    weights_bytes: Bytes  # on GPUs
    kv_bytes: Bytes  # on GPUs
    context_tokens: Annotated[int, Bounds(least=1, most=MAX_TOKENS)] = 2048
    # requests per instance (B in WarmServe)
    max_concurrency: Annotated[int, Bounds(least=1, most=MAX_CONCURRENCY)] = 8
    max_queue: Annotated[int, Bounds(most=MAX_QUEUE)] = 256  # held requests before 429
    max_wait_s: float = 60.0  # longest hold before 503
    keep_alive_s: Annotated[float, Bounds(least=-1)] = 30.0  # idle, before drain; -1 never, 0 at once
    min_instances: int = 0
    max_instances: Annotated[int, Bounds(least=1, most=MAX_INSTANCES)] = 1
    on_cold: OnCold = OnCold.HOLD
    pinned: bool = False  # never evicted or scaled below one
    preload: bool = False  # load when deployed
    asleep: bool = False  # start when deployed, sleep without requests
    kept_at: KeptAt = KeptAt.NOWHERE  # set by an operator; `pinned` means ready
    priority: Annotated[int, Bounds(least=-math.inf)] = 0  # higher: evicted later, placed earlier
    aliases: tuple[str, ...] = ()
    system_prompt: str = ""  # rendered by the engine's chat template
    slo: Slo = Slo()
    suspended: bool = False  # drained by an operator until loaded again
    engine_args: Mapping[str, Any] = field(default_factory=dict)  # unchanged, for the driver
    source: str = ""  # file path, "api", or a custom resource (domain/declared.py)
    revision: int = 0
    declared_at: int = 0  # revision since which its engines are declared so; 0: this one
    num_gpus: Annotated[int, Bounds(least=1, most=MAX_GPUS)] = 1  # tensor parallelism over GPUs of one node
    weights_shared: bool = False  # read weights in place on the node, or do not start
    base: str = ""  # key of the model whose engines serve this LoRA adapter
    adapter_rank: int = 0  # 0: unknown, or no adapter

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.min_instances > self.max_instances:
            raise OutOfBounds("min_instances", f"{self.min_instances} is above max_instances, {self.max_instances}")

    @property
    def memory_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes

    @property
    def share_key(self) -> str:
        """Key under which instances on one GPU share weights in host memory, "" if spread over several GPUs. Equal
        weights have equal keys."""
        if self.num_gpus > 1:
            return ""
        which = self.weights.digest[:16] if self.weights.uri else self.key
        return f"{self.engine}:{which}:asked" if self.weights_shared else f"{self.engine}:{which}"

    @property
    def engine_digest(self) -> str:
        """Digest of the fields that an engine, or an adapter in it, has from its start."""
        names = _OF_ADAPTER if self.base else _OF_ENGINE
        weights = self.weights.uri, self.weights.num_bytes, self.weights.sha256
        fields = [weights, *(getattr(self, name) for name in names)]
        return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()[:16]

    @property
    def pinned_at(self) -> Rung | None:
        if self.pinned:
            return Rung.READY
        if self.asleep or self.kept_at is KeptAt.ASLEEP:
            return Rung.ASLEEP
        return Rung.HOST if self.kept_at is KeptAt.HOST else None

    @property
    def fetch_bytes(self) -> int:
        """Bytes fetched into host memory: as declared, else as on the GPUs."""
        return self.weights.num_bytes or self.weights_bytes

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)
