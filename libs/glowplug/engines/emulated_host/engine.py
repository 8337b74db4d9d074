"""The batch in time: one task that plans a step, sleeps for its cost, and gives out tokens; and vLLM's metric names for
it in Prometheus text, written by hand, since a client library would double this process's memory."""

import asyncio
import os
import random
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from glowplug.engines.emulated_host.batch import BLOCK_TOKENS, Batch, Sequence, Step
from glowplug.engines.emulated_host.faults import Faults
from glowplug.engines.emulated_host.profiles import Profile
from glowplug.engines.emulated_host.stages import (
    DEFAULT_STAGE_TIMEOUT_S,
    Carried,
    Pipeline,
    StageLost,
    StepPart,
)

TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0)
ITL_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
E2E_BUCKETS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)
OnToken = Callable[[bool], None]  # called once per token; True with the last one
CRASH_STATUS = 139
_CRASH_DELAY_S = 0.005


@dataclass(slots=True)
class Histogram:
    """Cumulative buckets are made when read; observing is one bisection."""

    name: str
    buckets: tuple[float, ...]
    counts: list[int] = field(init=False)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.buckets) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.buckets, value)] += 1
        self.total += value

    def lines(self, labels: str) -> list[str]:
        lines, seen = [f"# TYPE {self.name} histogram"], 0
        for bound, count in zip((*map(str, self.buckets), "+Inf"), self.counts, strict=True):
            seen += count
            lines.append(f'{self.name}_bucket{{{labels},le="{bound}"}} {seen}')
        return [*lines, f"{self.name}_sum{{{labels}}} {self.total}", f"{self.name}_count{{{labels}}} {seen}"]


@dataclass(slots=True)
class Metrics:
    """Counters and histograms of one engine; gauges are read from the batch when asked."""

    ttft: Histogram = field(default_factory=lambda: Histogram("vllm:time_to_first_token_seconds", TTFT_BUCKETS))
    itl: Histogram = field(default_factory=lambda: Histogram("vllm:inter_token_latency_seconds", ITL_BUCKETS))
    e2e: Histogram = field(default_factory=lambda: Histogram("vllm:e2e_request_latency_seconds", E2E_BUCKETS))
    queue: Histogram = field(default_factory=lambda: Histogram("vllm:request_queue_time_seconds", E2E_BUCKETS))
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_finished: dict[str, int] = field(default_factory=dict)  # by finish reason

    def text(self, labels: str, batch: Batch, sleep_level: int, num_carried: int = 0) -> str:
        """The whole exposition; every sample has these labels. `num_carried`: see stages.Carried."""
        blocks = f'block_size="{BLOCK_TOKENS}",num_gpu_blocks="{batch.num_blocks}",cache_dtype="auto"'
        samples = (
            ("vllm:num_requests_running", "gauge", labels, len(batch.running)),
            ("vllm:num_requests_waiting", "gauge", labels, len(batch.waiting)),
            ("vllm:kv_cache_usage_perc", "gauge", labels, batch.kv_usage_ratio),
            ("vllm:engine_sleep_state", "gauge", labels, sleep_level),
            ("emulated:num_requests_carried", "gauge", labels, num_carried),
            ("vllm:num_preemptions_total", "counter", labels, batch.num_preemptions),
            ("vllm:prompt_tokens_total", "counter", labels, self.num_prompt_tokens),
            ("vllm:generation_tokens_total", "counter", labels, self.num_generation_tokens),
            ("vllm:cache_config_info", "gauge", f"{labels},{blocks}", 1),
        )
        lines: list[str] = []
        for name, kind, labels_here, value in samples:
            lines += [f"# TYPE {name} {kind}", f"{name}{{{labels_here}}} {float(value)}"]
        lines.append("# TYPE vllm:request_success_total counter")
        for reason, count in sorted(self.num_finished.items()):
            lines.append(f'vllm:request_success_total{{{labels},finished_reason="{reason}"}} {count}')
        for histogram in (self.ttft, self.itl, self.e2e, self.queue):
            lines += histogram.lines(labels)
        return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What this engine emulates. Times are emulated seconds; `time_scale` of them pass per real second."""

    profile: Profile
    context_tokens: int
    max_running: int
    kv_bytes: int  # of its GPU: a stage's own, of its part of the layers
    weights_bytes: int  # of the whole model
    load_bytes_per_s: float
    first_bytes: int = -1  # of the weights, loaded at the start; the rest when it is woken; -1: all
    max_step_tokens: int = 2048
    time_scale: float = 1.0
    seed: int = 0
    stage: int = 0
    num_stages: int = 1  # that the layers are shared out to at the start
    hop_s: float = 0.0  # added to each way between two stages
    stage_timeout_s: float = DEFAULT_STAGE_TIMEOUT_S

    @property
    def num_blocks(self) -> int:
        """KV blocks of the grant, never fewer than one whole context needs."""
        every_context = self.max_running * -(-self.context_tokens // BLOCK_TOKENS) * self.block_bytes
        return self.blocks_of(self.kv_bytes or every_context)

    @property
    def block_bytes(self) -> int:
        """Of the layers that it starts with."""
        return max(1, self.profile.kv_bytes_per_token * BLOCK_TOKENS // self.num_stages)

    @property
    def part_bytes(self) -> int:
        """Of the weights, those of the layers that it starts with."""
        return -(-self.weights_bytes // self.num_stages)

    def blocks_of(self, num_bytes: int) -> int:
        """Blocks in that many bytes, never fewer than one whole context needs."""
        return max(num_bytes // self.block_bytes, -(-(self.context_tokens + 1) // BLOCK_TOKENS))


@dataclass(frozen=True, slots=True)
class Whole:
    """What a stage is once it runs all of the layers: KV cache of its GPU, and the requests it runs at once."""

    kv_bytes: int
    max_running: int


class Engine:
    """Sequences in, tokens out by callback. Everything runs on one event loop."""

    def __init__(self, config: EngineConfig, faults: Faults) -> None:
        self.config = config
        self.faults = faults
        self.metrics = Metrics()
        self.batch = Batch(
            profile=config.profile,
            num_blocks=config.num_blocks,
            max_running=config.max_running,
            max_step_tokens=config.max_step_tokens,
        )
        self.rest_bytes = config.weights_bytes - config.first_bytes if config.first_bytes >= 0 else 0
        self.num_stages = config.num_stages  # 1 once it has all of the layers
        self.pipeline: Pipeline | None = None  # of a first stage, once it is joined
        self.carried = Carried(config.profile.kv_bytes_per_token // config.num_stages)  # of a later stage
        self.whole: Whole | None = None  # what it becomes, once all of the weights are there
        self.stepping = asyncio.Lock()  # held while a step is under way
        self.sleep_level = 0
        self.frozen = False  # paused with its requests kept
        self.refuses = False  # what comes meanwhile
        self.chance = random.Random(config.seed)
        self._on_token: dict[Sequence, OnToken] = {}
        self._wake = asyncio.Event()
        self._tokens_to_crash = faults.crash_at_token
        self._grown: list[bytes] = []  # by the fault of that name
        self._next_id = 0

    def now_s(self) -> float:
        """Emulated seconds on a clock that only goes forward."""
        return asyncio.get_running_loop().time() * self.config.time_scale

    @property
    def num_in_flight(self) -> int:
        return len(self._on_token)

    def submit(self, num_prompt: int, num_wanted: int, on_token: OnToken) -> Sequence:
        """Queue one request; `on_token` is called for each of its `num_wanted` tokens."""
        self._next_id += 1
        sequence = Sequence(str(self._next_id), num_prompt, num_wanted, arrived_at=self.now_s())
        self._on_token[sequence] = on_token
        self.batch.add(sequence)
        self.metrics.num_prompt_tokens += num_prompt
        self._wake.set()
        return sequence

    def finish(self, sequence: Sequence, reason: str) -> None:
        """Forget a request: it has all it wants, or its client left (reason "abort"). Idempotent."""
        if self._on_token.pop(sequence, None) is None:
            return
        self.batch.remove(sequence)
        self.metrics.num_finished[reason] = self.metrics.num_finished.get(reason, 0) + 1
        if reason != "abort":
            self.metrics.e2e.observe(self.now_s() - sequence.arrived_at)

    def set_faults(self, faults: Faults) -> None:
        if faults.crash_at_token != self.faults.crash_at_token:
            self._tokens_to_crash = faults.crash_at_token
        self.faults = faults
        self._wake.set()

    async def sleep(self, level: int) -> None:
        """Stop stepping, and at level 1 take the weights to host memory over the modelled link, as fast as they come
        back (SwapServeLLM section 4 charges both ways); level 2 drops them, which takes no time."""
        is_out = self.sleep_level > 0
        self.sleep_level = level
        if level == 1 and not is_out:
            await self.pass_time(self.config.weights_bytes / self.config.load_bytes_per_s)

    async def wake_up(self) -> None:
        """Bring the weights back over the modelled link, then go on, with the whole KV cache. Of a replica of the first
        layers the rest comes; it goes on once the last layers come while the shortest prefill runs (WarmServe section
        4)."""
        self.batch.num_blocks = self.config.num_blocks
        rest_bytes, self.rest_bytes = self.rest_bytes, 0
        if self.sleep_level:
            await self.pass_time(self.config.weights_bytes / self.config.load_bytes_per_s)
            self.sleep_level = 0
            self._wake.set()
        elif rest_bytes:
            prefill_s = self.config.profile.step_s(tok=1, sq=1, num_decoding=0, ctx=0)
            await self.pass_time(max(0.0, rest_bytes / self.config.load_bytes_per_s - prefill_s))

    def freeze(self, frozen: bool) -> None:
        self.frozen = frozen
        self._wake.set()

    def admit(self, admitting: bool) -> None:
        self.batch.admitting = admitting
        self._wake.set()

    @property
    def serves(self) -> bool:
        """Whether it answers clients: alone, or as the first of stages that are joined."""
        return self.num_stages == 1 or self.pipeline is not None

    @property
    def kv_bytes_per_token(self) -> int:
        """Of the layers that it has."""
        return self.config.profile.kv_bytes_per_token // self.num_stages

    @property
    def kv_tokens_kept(self) -> int:
        """Tokens whose keys and values it holds for the requests that it runs."""
        return sum(sequence.num_computed for sequence in self.batch.running)

    @property
    def kv_bytes_used(self) -> int:
        """By its own requests, in blocks, and by those of a pipeline that passes through it."""
        own = self.batch.num_used_blocks * BLOCK_TOKENS * self.kv_bytes_per_token
        return own + self.carried.kv_bytes(asyncio.get_running_loop().time())

    def be_whole(self, *, recompute: bool) -> None:
        """From the next step on it runs all of the layers. `recompute`: the other stages' part of the KV cache is lost,
        and what its requests had computed is computed again."""
        whole = self.whole
        assert whole is not None, "all of the weights are there first"
        self.num_stages, self.rest_bytes = 1, 0
        if self.pipeline is not None:
            self.pipeline.close()
            self.pipeline = None
        self.config = replace(self.config, kv_bytes=whole.kv_bytes, max_running=whole.max_running, num_stages=1)
        self.batch.max_running, self.batch.num_blocks = whole.max_running, self.config.num_blocks
        if recompute:
            for sequence in self.batch.running:
                sequence.num_computed = 0
        self._wake.set()

    def join(self, pipeline: Pipeline, kv_tokens: int) -> None:
        """It is the first of these stages, the smallest of whose KV caches holds so many tokens."""
        self.pipeline = pipeline
        self.batch.num_blocks = min(self.batch.num_blocks, kv_tokens // BLOCK_TOKENS)

    def limit_kv(self, num_bytes: int) -> None:
        """Shrink or grow the KV cache, never below what is used or what one whole context needs."""
        self.batch.num_blocks = max(self.config.blocks_of(num_bytes), self.batch.num_used_blocks)
        self._wake.set()

    async def pass_time(self, seconds: float) -> None:
        await asyncio.sleep(seconds / self.config.time_scale)

    async def run(self) -> None:
        """Step for ever. Idle, it waits for an event and costs nothing."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            self._wake.clear()
            stopped = self.faults.hang or self.frozen or self.sleep_level > 0
            step = None if stopped else self.batch.plan()
            if step is None:
                await self._wake.wait()
                due = loop.time()
                continue
            async with self.stepping:
                # Sleep until a planned moment, so that the costs of this process do not add up over many steps.
                seconds = self._seconds(step) / self.num_stages
                due = max(due, loop.time() - 0.05) + seconds / self.config.time_scale
                await asyncio.sleep(max(0.0, due - loop.time()))
                if self.pipeline is not None:
                    is_done = await self._pass_on(step, self.pipeline)
                    due = loop.time()
                    if not is_done:
                        continue
                self._hand_out(self.batch.commit(step))

    async def _pass_on(self, step: Step, pipeline: Pipeline) -> bool:
        """The later stages' part of a step. Without one of them its requests have lost a part of their KV cache: it
        ends (StageLost), as vLLM does; or goes on alone where it has all of the weights by then, without this step."""
        num_tokens = sum(step.pieces.values())
        kept = self.kv_tokens_kept + num_tokens
        part = StepPart(step.seconds / self.num_stages, num_tokens, kept, len(self.batch.running))
        try:
            await pipeline.step(part)
        except StageLost:
            if self.whole is None:
                raise
            self.be_whole(recompute=True)
            return False
        return True

    async def carry(self, part: StepPart) -> None:
        """Do a later stage's part of a pipeline's step. One that hangs never does."""
        while self.faults.hang:
            self._wake.clear()
            await self._wake.wait()
        await self.pass_time(self.faults.itl_s if self.faults.itl_s >= 0 else part.seconds)
        self.carried.stepped(part, asyncio.get_running_loop().time())
        for _ in range(part.num_running):
            self._count_to_crash()

    def _seconds(self, step: Step) -> float:
        faults = self.faults
        seconds = step.seconds
        if step.num_prefill_tokens and faults.ttft_s >= 0:
            seconds = faults.ttft_s
        elif not step.num_prefill_tokens and faults.itl_s >= 0:
            seconds = faults.itl_s
        load = len(self.batch.running) / self.config.max_running
        seconds *= 1.0 + (faults.time_factor_under_load - 1.0) * load
        return seconds * max(0.0, self.chance.gauss(1.0, faults.jitter)) if faults.jitter else seconds

    def _hand_out(self, sequences: list[Sequence]) -> None:
        now_s = self.now_s()
        for sequence in sequences:
            on_token = self._on_token.get(sequence)
            if on_token is None:
                continue
            if sequence.num_generated == 1:
                self.metrics.ttft.observe(now_s - sequence.arrived_at)
            else:
                self.metrics.itl.observe(now_s - sequence.last_token_at)
            sequence.last_token_at = now_s
            self.metrics.num_generation_tokens += 1
            on_token(sequence.num_generated >= sequence.num_wanted)
            self._count_to_crash()
            if self.faults.grow_bytes_per_token > 0:
                self._grown.append(b"x" * self.faults.grow_bytes_per_token)

    def _count_to_crash(self) -> None:
        if self._tokens_to_crash > 0:
            self._tokens_to_crash -= 1
            if self._tokens_to_crash == 0:
                print("fault injection: crash_at_token", flush=True)
                # The token itself still reaches its client: writing it is the next thing this loop does.
                asyncio.get_running_loop().call_later(_CRASH_DELAY_S, os._exit, CRASH_STATUS)
