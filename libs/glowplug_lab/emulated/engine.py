"""Run the batch in time. Metrics use vLLM's names; their Prometheus text is handwritten, since a client library would
double this process's memory."""

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

OnToken = Callable[[bool], None]  # True: the last token
CRASH_STATUS = 139
_CRASH_DELAY_S = 0.005


@dataclass(slots=True)
class Metrics:
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_finished: dict[str, int] = field(default_factory=dict)  # by finish reason

    def text(self, labels: str, batch: Batch, num_carried: int = 0) -> str:
        """`num_carried`: see stages.Carried."""
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
    """Times are emulated seconds; `time_scale` of them pass per real second."""

    profile: Profile
    context_tokens: int
    max_running: int
    kv_bytes: int  # a stage's own
    weights_bytes: int  # whole model
    load_bytes_per_s: float
    first_bytes: int = -1  # loaded at the start; -1: all
    max_step_tokens: int = 2048
    long_prefill_tokens: int = 0  # see Batch
    time_scale: float = 1.0
    seed: int = 0
    stage: int = 0
    num_stages: int = 1
    hop_s: float = 0.0  # added per hop
    stage_timeout_s: float = DEFAULT_STAGE_TIMEOUT_S

    @property
    def num_blocks(self) -> int:
        every_context = self.max_running * -(-self.context_tokens // BLOCK_TOKENS) * self.block_bytes
        return self.blocks_of(self.kv_bytes or every_context)

    @property
    def block_bytes(self) -> int:
        """Of the layers held at the start."""
        return max(1, self.profile.kv_bytes_per_token * BLOCK_TOKENS // self.num_stages)

    @property
    def part_bytes(self) -> int:
        """Weights of the layers held at the start."""
        return -(-self.weights_bytes // self.num_stages)

    def blocks_of(self, num_bytes: int) -> int:
        """At least those of one full context."""
        return max(num_bytes // self.block_bytes, -(-(self.context_tokens + 1) // BLOCK_TOKENS))


@dataclass(frozen=True, slots=True)
class Whole:
    kv_bytes: Annotated[int, msgspec.Meta(ge=0)]
    max_running: Annotated[int, msgspec.Meta(ge=0)]


class Engine:
    """Runs on one event loop."""

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
        self.num_stages = config.num_stages  # 1 once it has all layers
        self.pipeline: Pipeline | None = None  # of a joined first stage
        self.carried = Carried(config.profile.kv_bytes_per_token // config.num_stages)
        self.whole: Whole | None = None  # once all weights are there
        self.adapters_s = 0.0  # per step, for LoRA adapters
        self.stepping = asyncio.Lock()
        self.sleeps = False  # weights in host memory
        self.frozen = False  # requests are kept
        self.refuses = False  # new requests
        self.chance = random.Random(config.seed)
        self._on_token: dict[Sequence, OnToken] = {}
        self._wake = asyncio.Event()
        self._tokens_to_crash = faults.crash_at_token
        self._grown: list[bytes] = []
        self._next_id = 0

    @property
    def num_in_flight(self) -> int:
        return len(self._on_token)

    def submit(self, num_prompt: int, num_wanted: int, on_token: OnToken) -> Sequence:
        self._next_id += 1
        sequence = Sequence(str(self._next_id), num_prompt, num_wanted)
        self._on_token[sequence] = on_token
        self.batch.add(sequence)
        self.metrics.num_prompt_tokens += num_prompt
        self._wake.set()
        return sequence

    def finish(self, sequence: Sequence, reason: str) -> None:
        """Forget a finished or aborted request. Idempotent."""
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
        """Move the weights to host memory at loading speed (SwapServeLLM section 4 charges both ways)."""
        if not self.sleeps:
            self.sleeps = True
            await self.pass_time(self.config.weights_bytes / self.config.load_bytes_per_s)

    async def wake_up(self) -> None:
        """Load the weights back and resume with the whole KV cache; a replica of the first layers, once the rest of the
        load fits into the shortest prefill (WarmServe section 4)."""
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
        return self.num_stages == 1 or self.pipeline is not None

    @property
    def kv_bytes_per_token(self) -> int:
        """In the layers that the engine has."""
        return self.config.profile.kv_bytes_per_token // self.num_stages

    @property
    def kv_tokens_kept(self) -> int:
        return sum(sequence.num_computed for sequence in self.batch.running)

    @property
    def kv_bytes_used(self) -> int:
        own = self.batch.num_used_blocks * BLOCK_TOKENS * self.kv_bytes_per_token
        return own + self.carried.kv_bytes(asyncio.get_running_loop().time())

    def be_whole(self, *, recompute: bool) -> None:
        """Run all layers from the next step. `recompute`: the other stages' KV cache is lost."""
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
        self.pipeline = pipeline
        self.batch.num_blocks = min(self.batch.num_blocks, kv_tokens // BLOCK_TOKENS)

    def limit_kv(self, num_bytes: int) -> None:
        """Never below present use or one full context."""
        self.batch.num_blocks = max(self.config.blocks_of(num_bytes), self.batch.num_used_blocks)
        self._wake.set()

    async def pass_time(self, seconds: float) -> None:
        await asyncio.sleep(seconds / self.config.time_scale)

    async def run(self) -> None:
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
                # Sleep until a planned moment, so that this process's own costs do not accumulate.
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
        """When a later stage is lost, end (StageLost) as vLLM does, or go on alone, without this step, if all weights
        are there."""
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
                # Delayed, so that the token still reaches its client.
                asyncio.get_running_loop().call_later(_CRASH_DELAY_S, os._exit, CRASH_STATUS)
