"""The batch in time: one task that plans a step, sleeps for its cost, and gives out tokens; and vLLM's metric names for
it in Prometheus text, written by hand, since a client library would double this process's memory."""

import asyncio
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Annotated

import msgspec

from glowplug_lab.emulated.batch import BLOCK_TOKENS, Batch, Sequence, Step
from glowplug_lab.emulated.faults import Faults
from glowplug_lab.emulated.profiles import Profile
from glowplug_lab.emulated.stages import (
    DEFAULT_STAGE_TIMEOUT_S,
    Carried,
    Pipeline,
    StageLost,
    StepPart,
)

OnToken = Callable[[bool], None]  # called once per token; True with the last one
CRASH_STATUS = 139
_CRASH_DELAY_S = 0.005


@dataclass(slots=True)
class Metrics:
    """Counters of one engine; gauges are read from the batch when asked."""

    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_finished: dict[str, int] = field(default_factory=dict)  # by finish reason

    def text(self, labels: str, batch: Batch, num_carried: int = 0) -> str:
        """The whole exposition; every sample has these labels. `num_carried`: see stages.Carried."""
        blocks = f'block_size="{BLOCK_TOKENS}",num_gpu_blocks="{batch.num_blocks}",cache_dtype="auto"'
        samples = (
            ("vllm:num_requests_running", "gauge", labels, len(batch.running)),
            ("vllm:num_requests_waiting", "gauge", labels, len(batch.waiting)),
            ("vllm:kv_cache_usage_perc", "gauge", labels, batch.kv_usage_ratio),
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
    long_prefill_tokens: int = 0  # as of Batch
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
        """Bytes of one KV block, of the layers that the engine starts with."""
        return max(1, self.profile.kv_bytes_per_token * BLOCK_TOKENS // self.num_stages)

    @property
    def part_bytes(self) -> int:
        """Bytes of the weights of the layers that the engine starts with."""
        return -(-self.weights_bytes // self.num_stages)

    def blocks_of(self, num_bytes: int) -> int:
        """Blocks in that many bytes, never fewer than one whole context needs."""
        return max(num_bytes // self.block_bytes, -(-(self.context_tokens + 1) // BLOCK_TOKENS))


@dataclass(frozen=True, slots=True)
class Whole:
    """What a stage is once it runs all of the layers: KV cache of its GPU, and the requests it runs at once."""

    kv_bytes: Annotated[int, msgspec.Meta(ge=0)]
    max_running: Annotated[int, msgspec.Meta(ge=0)]


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
            long_prefill_tokens=config.long_prefill_tokens,
        )
        self.rest_bytes = config.weights_bytes - config.first_bytes if config.first_bytes >= 0 else 0
        self.num_stages = config.num_stages  # 1 once it has all of the layers
        self.pipeline: Pipeline | None = None  # of a first stage, once it is joined
        self.carried = Carried(config.profile.kv_bytes_per_token // config.num_stages)  # of a later stage
        self.whole: Whole | None = None  # what it becomes, once all of the weights are there
        self.adapters_s = 0.0  # that each step takes longer beside LoRA adapters
        self.stepping = asyncio.Lock()  # held while a step is under way
        self.sleeps = False  # its weights are in host memory
        self.frozen = False  # paused with its requests kept
        self.refuses = False  # what comes meanwhile
        self.chance = random.Random(config.seed)
        self._on_token: dict[Sequence, OnToken] = {}
        self._wake = asyncio.Event()
        self._tokens_to_crash = faults.crash_at_token
        self._grown: list[bytes] = []  # by the fault of that name
        self._next_id = 0

    @property
    def num_in_flight(self) -> int:
        return len(self._on_token)

    def submit(self, num_prompt: int, num_wanted: int, on_token: OnToken) -> Sequence:
        """Queue one request; `on_token` is called for each of its `num_wanted` tokens."""
        self._next_id += 1
        sequence = Sequence(str(self._next_id), num_prompt, num_wanted)
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

    def set_faults(self, faults: Faults) -> None:
        if faults.crash_at_token != self.faults.crash_at_token:
            self._tokens_to_crash = faults.crash_at_token
        self.faults = faults
        self._wake.set()

    async def sleep(self) -> None:
        """Stop stepping, and take the weights to host memory over the modelled link, as fast as they come back
        (SwapServeLLM section 4 charges both ways)."""
        if not self.sleeps:
            self.sleeps = True
            await self.pass_time(self.config.weights_bytes / self.config.load_bytes_per_s)

    async def wake_up(self) -> None:
        """Bring the weights back over the modelled link, then go on, with the whole KV cache. Of a replica of the first
        layers the rest comes; it goes on once the last layers come while the shortest prefill runs (WarmServe section
        4)."""
        self.batch.num_blocks = self.config.num_blocks
        rest_bytes, self.rest_bytes = self.rest_bytes, 0
        if self.sleeps:
            await self.pass_time(self.config.weights_bytes / self.config.load_bytes_per_s)
            self.sleeps = False
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
        """Bytes of KV cache that one token takes in the layers that the engine has."""
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
        """Serve as the first of these stages; `kv_tokens` is what the smallest KV cache of them holds."""
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
            stopped = self.faults.hang or self.frozen or self.sleeps
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
        set_s = self.faults.ttft_s if step.num_prefill_tokens else self.faults.itl_s
        return (set_s if set_s >= 0 else step.seconds) + self.adapters_s

    def _hand_out(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            on_token = self._on_token.get(sequence)
            if on_token is None:
                continue
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
