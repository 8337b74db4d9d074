"""One engine process of a simulated node, and its slowdown by neighbours."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from typing import Any, Final

from glowplug.controllers.agent.messages import EngineReady
from glowplug.domain.instance import SLOT_ENGINES, EngineFigures, Phase
from glowplug.fleet.start_times import StartKind
from glowplug_lab.simulator.hardware.batching import BatchEngine, EngineLimits
from glowplug_lab.simulator.kernel import Timer
from glowplug_lab.simulator.links import Transfer
from glowplug_lab.simulator.run import Run
from glowplug_lab.simulator.setup import ModelSetup, Params, StartSeconds


class Origin(StrEnum):
    """Where a start found the model, warmest first."""

    PREWARMED = "prewarmed"
    PREWARMING = "prewarming"  # replica still loading
    SWAPPED = "swapped"  # engine asleep outside the GPU
    HOST = "host"
    DISK = "disk"
    REMOTE = "remote"


ORIGINS: Final = {StartKind.CACHED: Origin.HOST, StartKind.DISK: Origin.DISK, StartKind.COLD: Origin.REMOTE}
"""Of a start from nothing."""


@dataclass(slots=True, eq=False)
class SimEngine:
    """`stage_gpus`: GPUs of all pipeline stages it answers for."""

    instance_id: str
    node_id: str
    model: ModelSetup
    gpu_ids: tuple[str, ...]
    num_bytes: int  # granted, over all its GPUs
    launched_at: float
    is_replica: bool = False
    shares: bool = False  # reads shared weight pages
    stage: int = 0
    num_stages: int = 1
    up_at: float = -1.0  # -1: not yet launched
    fetched_at: float = -1.0
    found: StartKind = StartKind.COLD
    load_began_at: float = -1.0
    loaded_at: float = -1.0
    is_activating: bool = False  # dormant, becoming an engine
    is_swapped: bool = False
    is_background: bool = False
    rest_bytes: int = 0  # per lane, not granted to a replica
    num_migrations: int = 0
    transfer: Transfer | None = None
    serving: BatchEngine | None = None
    wake: Timer | None = None
    tickets: dict[int, Any] = field(default_factory=dict)
    stage_gpus: tuple[tuple[str, ...], ...] = ()
    start: StartSeconds = field(default_factory=StartSeconds)
    pace: float = 1.0  # factor on step costs
    first: "SimEngine | None" = None  # of the pipeline it was a later stage of
    adapters: dict[str, str] = field(default_factory=dict)  # model_key by instance_id
    slot_bytes: int = 0  # kept for adapters, out of its KV cache
    shares_compute: tuple[bool, ...] = ()  # by stage, (): all; others have a reserved part of their GPU

    def __post_init__(self) -> None:
        self.stage_gpus = self.stage_gpus or (self.gpu_ids,)

    @property
    def carries(self) -> "SimEngine | None":
        """The serving first stage, seen from a later one."""
        first = self.first
        return first if first is not None and first.num_stages > 1 and first.serving is not None else None

    @property
    def num_in_flight(self) -> int:
        carried = self.carries
        return len(self.tickets) + (len(carried.tickets) if carried is not None else 0)

    @property
    def kv_tokens(self) -> int:
        """0 if not serving."""
        return self.serving.limits.kv_tokens if self.serving is not None else 0

    @property
    def num_slots(self) -> int:
        """0 if not serving."""
        return self.serving.limits.max_sequences if self.serving is not None else 0

    def ready(self, *phases: Phase) -> EngineReady:
        return EngineReady(
            self.instance_id,
            f"sim://{self.instance_id}",
            phases,
            figures=EngineFigures(
                num_slots=self.num_slots,
                kv_tokens=self.kv_tokens,
                shared_bytes=self.shared_bytes,
                step_s=self.serving.costs.decode_s(1, 0) if self.serving is not None else 0.0,
            ),
        )

    @property
    def shared_bytes(self) -> int:
        return self.weights_bytes if self.shares else 0

    @property
    def weights_bytes(self) -> int:
        """The engine's part of the model, over all its GPUs."""
        return -(-self.model.model.weights_bytes // self.num_stages)

    @property
    def load_bytes(self) -> int:
        """Per GPU lane."""
        return -(-self.weights_bytes // len(self.gpu_ids))

    def kv_bytes_used(self, now_s: float) -> int:
        if self.serving is None:
            return 0
        return self.serving.kv_tokens_used(now_s) * self.model.kv_bytes_per_token

    def serve(self, gpu_kind: str, params: Params, stages: "tuple[SimEngine, ...]" = ()) -> None:
        if stages:
            self.stage_gpus = tuple(one.gpu_ids for one in stages)
            for one in stages[1:]:
                one.first = self
        costs = self._costs(gpu_kind)
        if stages and params.reserve_compute:
            whole, num = self.model.model.memory_bytes, self.num_stages
            self.shares_compute = tuple(one.num_bytes >= whole for one in stages)
            num_full = sum(self.shares_compute)
            costs = self.model.costs[gpu_kind].scaled(num - num_full + num_full / num)
            costs = costs.pipelined(num, self.model.start.hop_s)
        self.serving = BatchEngine(
            costs, self._limits(stages, params), stepping=params.stepping, first_s=self.start.first_s
        )

    def become_whole(self, gpu_kind: str, params: Params, now_s: float) -> None:
        """Become a single worker (HydraServe section 6) without losing a request."""
        self.num_stages, self.stage = 1, 0
        self.num_bytes = max(self.num_bytes, self.model.model.memory_bytes)
        self.stage_gpus, self.shares_compute = (self.gpu_ids,), ()
        if self.serving is None:
            self.serve(gpu_kind, params)
        else:
            self.serving.reshape(self._costs(gpu_kind), self._limits((), params), now_s)

    def _costs(self, gpu_kind: str) -> Any:
        return self.model.costs[gpu_kind].pipelined(self.num_stages, self.model.start.hop_s)

    def _limits(self, stages: "tuple[SimEngine, ...]", params: Params) -> EngineLimits:
        """A stage keeps its own layers' KV, so the one with the least memory bounds all."""
        model, per_token = self.model.model, self.model.kv_bytes_per_token
        kv_tokens = (model.kv_bytes - self.slot_bytes) // per_token
        if self.num_bytes > self.weights_bytes:
            kv_tokens = min(kv_tokens, (self.num_bytes - self.weights_bytes - self.slot_bytes) // per_token)
        if self.num_stages > 1:
            kv_tokens = min((one.num_bytes - one.weights_bytes) * self.num_stages // per_token for one in stages)
        num_sequences = model.max_concurrency * self.num_stages
        return EngineLimits(
            kv_tokens=max(1, kv_tokens),
            max_sequences=num_sequences,
            chunk_tokens=params.chunk_tokens,
            block_tokens=params.block_tokens,
            slots=model.engine in SLOT_ENGINES,
            long_prefill_tokens=params.long_prefill_tokens,
        )


class Sharing:
    """Busy engines on one GPU share time evenly (as in MuxServe, without its reordering); a background load slows a
    little. A pipeline is as slow as its stages on average, a tensor group as its slowest GPU. `watch(engine)` follows a
    moved boundary."""

    def __init__(self, run: Run, watch: Callable[[SimEngine], None]) -> None:
        self._run, self._watch = run, watch
        self._busy: dict[str, dict[SimEngine, None]] = {}
        self._loads: dict[str, int] = {}

    def busy(self, engine: SimEngine) -> None:
        for gpu_id in chain(*engine.stage_gpus):
            self._busy.setdefault(gpu_id, {})[engine] = None
        self._settle(engine)

    def idle(self, engine: SimEngine) -> None:
        for gpu_id in chain(*engine.stage_gpus):
            self._busy.get(gpu_id, {}).pop(engine, None)
        self._settle(engine)

    def pace(self, engine: SimEngine, pace: float) -> None:
        """`pace`: factor on step costs."""
        if pace != engine.pace:
            engine.pace = pace
            self._slow(engine)

    def load(self, engine: SimEngine, background: bool) -> None:
        if engine.is_background is background:
            return
        engine.is_background = background
        for gpu_id in engine.gpu_ids:
            self._loads[gpu_id] = self._loads.get(gpu_id, 0) + (1 if background else -1)
            for one in self._busy.get(gpu_id, ()):
                self._slow(one)

    def _settle(self, changed: SimEngine) -> None:
        self._slow(changed)
        for gpu_id in chain(*changed.stage_gpus):
            for one in self._busy.get(gpu_id, ()):
                if one is not changed:
                    self._slow(one)

    def _slow(self, engine: SimEngine) -> None:
        if engine.serving is None:
            return
        shares = engine.shares_compute or (True,) * len(engine.stage_gpus)
        ratios = (
            max(self._ratio(gpu_id, shares_compute) for gpu_id in gpus)
            for gpus, shares_compute in zip(engine.stage_gpus, shares, strict=True)
        )
        ratio = sum(ratios) / len(engine.stage_gpus)
        engine.serving.slow_down(ratio * engine.pace, self._run.kernel.now_s)
        self._watch(engine)

    def _ratio(self, gpu_id: str, shares_compute: bool) -> float:
        params = self._run.setup.params
        num = max(1, len(self._busy.get(gpu_id, ()))) if params.share_compute and shares_compute else 1
        return num * (params.load_slowdown if self._loads.get(gpu_id) else 1.0)
