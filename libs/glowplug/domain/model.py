"""A served model as its owner declares it."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from glowplug.domain.bounds import OutOfBounds, check_bounds

MAX_BYTES = 1 << 56  # of weights, or of a KV cache
# Bounds that no owner means to exceed: instances and GPUs are made one by one, which would never end; the others are
# multiplied, and the product must still be a number that can be written. A model file allows less; a simulated fleet
# may have as many instances as GPUs.
MOST: Mapping[str, float] = {
    "max_instances": 10_000,
    "num_gpus": 1024,
    "max_concurrency": 1 << 20,
    "max_queue": 1 << 32,
    "context_tokens": 1 << 32,
    "weights_bytes": MAX_BYTES,
    "kv_bytes": MAX_BYTES,
}


class OnCold(StrEnum):
    """The router's answer to a request when no instance of its model runs."""

    HOLD = "hold"
    REFUSE = "refuse"


class Rung(StrEnum):
    """Nearness of a copy of a model to serving, the nearest last."""

    HOST = "host"  # the weights lie in host memory of a node
    ASLEEP = "asleep"  # the engine was started, and sleeps outside the GPU
    PREWARMED = "prewarmed"  # the weights lie on a GPU
    READY = "ready"


class KeptAt(StrEnum):
    """The rung, below READY, at which an operator keeps at least one copy of a model."""

    NOWHERE = ""
    HOST = "host"
    ASLEEP = "asleep"


class Temperature(StrEnum):
    """Start temperature as users see it: hot (running), warm (prewarmed or asleep), cold."""

    HOT = "hot"
    WARM = "warm"
    COLD = "cold"


_NOT_SLUG = re.compile(r"[^a-z0-9]+")


def model_key(name: str) -> str:
    """The slug of a model name, safe as one NATS token and one file name: 'Qwen/Qwen3-8B.v1' -> 'qwen-qwen3-8b-v1'.

    Raises ValueError when the name has no letter or digit.
    """
    key = _NOT_SLUG.sub("-", name.lower()).strip("-")
    if not key:
        raise ValueError(f"model name {name!r} has no letter or digit")
    return key


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsRef:
    """The source of a model's weights. `uri` is file:, http(s):, hf:, s3: or gs:; a given `sha256` (hex) is checked."""

    uri: str
    num_bytes: int = 0  # 0: unknown until fetched
    sha256: str = ""

    def __post_init__(self) -> None:
        check_bounds(self, most={"num_bytes": MAX_BYTES})

    @property
    def digest(self) -> str:
        """The name of the weights in host memory: the given checksum, else the SHA-256 of the address. Models with the
        same weights share a copy."""
        return self.sha256.lower() or hashlib.sha256(self.uri.encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Service level objectives, seconds; 0 means none set. Raises OutOfBounds below 0."""

    ttft_s: float = 0.0
    tpot_s: float = 0.0

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model's weights and configuration. `memory_bytes` (weights + KV) is what one instance holds, over its
    `num_gpus` GPUs.

    Raises OutOfBounds for numbers that no owner can mean.
    """

    name: str
    key: str
    engine: str  # llamacpp | vllm | emulated
    weights: WeightsRef
    weights_bytes: int  # GPU bytes for weights
    kv_bytes: int  # GPU bytes for KV cache
    context_tokens: int = 2048
    max_concurrency: int = 8  # requests one instance runs at once (B in WarmServe)
    max_queue: int = 256  # held requests before 429
    max_wait_s: float = 60.0  # longest hold before 503
    keep_alive_s: float = 30.0  # idle seconds before drain; -1 never, 0 at once
    min_instances: int = 0
    max_instances: int = 1
    on_cold: OnCold = OnCold.HOLD
    pinned: bool = False  # never evicted, never scaled below one
    preload: bool = False  # loaded when deployed
    asleep: bool = False  # started once when deployed, then asleep while it has no requests
    kept_at: KeptAt = (
        KeptAt.NOWHERE
    )  # rung at which an operator keeps at least one copy: host or asleep (ready: `pinned`)
    priority: int = 0  # higher is evicted later and placed earlier
    aliases: tuple[str, ...] = ()
    system_prompt: str = ""  # default system message, rendered by the engine's chat template
    slo: Slo = Slo()
    suspended: bool = False  # drained by an operator: no start until it is loaded again
    engine_args: Mapping[str, Any] = field(default_factory=dict)  # passed to the engine driver unchanged
    source: str = ""  # file path, "api", or that of a custom resource (domain/declared.py)
    revision: int = 0
    declared_at: int = 0  # revision of the last change by its owner, not by an operator; 0: this one
    num_gpus: int = 1  # tensor parallelism: GPUs of one node over which an instance is spread evenly
    weights_shared: bool = False  # instances must read the weights where their node keeps them, or not start
    base: str = ""  # key of the model whose engines serve this one; `weights` are then a LoRA adapter's alone
    adapter_rank: int = 0  # of that adapter, as its own configuration says; 0: unknown, or no adapter

    def __post_init__(self) -> None:
        check_bounds(
            self,
            most=MOST,
            context_tokens=1,
            max_concurrency=1,
            keep_alive_s=-1,
            max_instances=1,
            priority=float("-inf"),
            num_gpus=1,
        )
        if self.min_instances > self.max_instances:
            raise OutOfBounds("min_instances", f"{self.min_instances} is above max_instances, {self.max_instances}")

    @property
    def memory_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes

    @property
    def share_key(self) -> str:
        """The key of weights that instances can share: those with the same key on one GPU read the same pages in host
        memory; "" where none can, since the weights are spread over several GPUs. Models with the same weights have the
        same key."""
        if self.num_gpus > 1:
            return ""
        which = self.weights.digest[:16] if self.weights.uri else self.key
        return f"{self.engine}:{which}:asked" if self.weights_shared else f"{self.engine}:{which}"

    def is_declared_as(self, revision: int) -> bool:
        """Return whether an instance started with that revision of the row (0: unknown) has the current declaration: an
        operator's pin or drain in between does not change it."""
        return not revision or (self.declared_at or self.revision) <= revision <= self.revision

    @property
    def pinned_at(self) -> Rung | None:
        """The rung below which the model's last copy must not fall: by its declaration or by an operator."""
        if self.pinned:
            return Rung.READY
        if self.asleep or self.kept_at is KeptAt.ASLEEP:
            return Rung.ASLEEP
        return Rung.HOST if self.kept_at is KeptAt.HOST else None

    @property
    def fetch_bytes(self) -> int:
        """Bytes of the weights as fetched into host memory: as declared, else as many as lie on the GPUs."""
        return self.weights.num_bytes or self.weights_bytes

    @property
    def names(self) -> tuple[str, ...]:
        """Every name a client may send in `model`."""
        return (self.name, *self.aliases)
