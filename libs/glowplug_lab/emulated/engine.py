"""Run the simulator's model of an engine by the wall clock: each token goes out when the model says. Metrics use vLLM's
names; their Prometheus text is handwritten, since a client library would cost each process 2 MB."""

import asyncio
import math
import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Annotated, Final

import msgspec

from glowplug_lab.emulated.faults import Faults
from glowplug_lab.emulated.profiles import Profile
from glowplug_lab.emulated.stages import (
    DEFAULT_STAGE_TIMEOUT_S,
    Carried,
    Pipeline,
    StageLost,
    StepPart,
)
from glowplug_lab.simulator.costs import StepCosts
from glowplug_lab.simulator.hardware.batching import BatchEngine, EngineLimits, Sequence, What

OnToken = Callable[[bool], None]  # True: the last token
CRASH_STATUS = 139
BLOCK_TOKENS: Final = 16  # a KV cache has whole blocks
_CRASH_DELAY_S = 0.005
_LEAST_STEP_S = 1e-6  # emulated: a step ends after it began


@dataclass(slots=True)
class Metrics:
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    num_finished: Counter[str] = field(default_factory=Counter)  # by finish reason


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
    long_prefill_tokens: int = 0  # see EngineLimits
    time_scale: float = 1.0
    seed: int = 0
    stage: int = 0
    num_stages: int = 1  # 1 once it has all layers
    hop_s: float = 0.0  # added per hop
    stage_timeout_s: float = DEFAULT_STAGE_TIMEOUT_S

    @property
    def kv_tokens(self) -> int:
        every_context = self.max_running * -(-self.context_tokens // BLOCK_TOKENS) * self.block_bytes
        return self.kv_tokens_in(self.kv_bytes or every_context)

    @property
    def kv_bytes_per_token(self) -> int:
        """In the layers that the engine has."""
        return self.profile.kv_bytes_per_token // self.num_stages

    @property
    def block_bytes(self) -> int:
        return max(1, self.profile.kv_bytes_per_token * BLOCK_TOKENS // self.num_stages)

    @property
    def part_bytes(self) -> int:
        """Weights of its layers."""
        return -(-self.weights_bytes // self.num_stages)

    def kv_tokens_in(self, num_bytes: int) -> int:
        """In whole blocks, at least one full context."""
        return BLOCK_TOKENS * max(num_bytes // self.block_bytes, -(-(self.context_tokens + 1) // BLOCK_TOKENS))


@dataclass(frozen=True, slots=True)
class Whole:
    kv_bytes: Annotated[int, msgspec.Meta(ge=0)]
    max_running: Annotated[int, msgspec.Meta(ge=0)]


@dataclass(slots=True, eq=False)
class Stream:
    """`num_sent` tokens of the sequence have gone to its client."""

    sequence: Sequence
    on_token: OnToken
    num_sent: int = 0


class Engine:
    """Runs on one event loop. For the model it is always the beginning of the present step: time passes at its ends."""

    def __init__(self, config: EngineConfig, faults: Faults) -> None:
        self.config = config
        self.faults = faults
        self.metrics = Metrics()
        self.rest_bytes = config.weights_bytes - config.first_bytes if config.first_bytes >= 0 else 0
        self.pipeline: Pipeline | None = None  # of a joined first stage
        self.carried = Carried(config.kv_bytes_per_token)
        self.whole: Whole | None = None  # once all weights are there
        self.stepping = asyncio.Lock()
        self.sleeps = False  # weights in host memory
        self.frozen = False  # requests are kept
        self.refuses = False  # new requests
        self.chance = random.Random(config.seed)
        self._longer_s = 0.0  # each step
        self.batch = BatchEngine(
            self._costs(),
            EngineLimits(
                kv_tokens=config.kv_tokens,
                max_sequences=config.max_running,
                chunk_tokens=config.max_step_tokens,
                long_prefill_tokens=config.long_prefill_tokens,
            ),
            stepping=True,
        )
        self._now_s = 0.0  # of the batch
        self._streams: dict[int, Stream] = {}
        self._wake = asyncio.Event()
        self._tokens_to_crash = faults.crash_at_token
        self._grown: list[bytes] = []
        self._next_id = 0

    @property
    def num_in_flight(self) -> int:
        return len(self._streams)

    @property
    def num_running(self) -> int:
        return len(self._streams) - len(self.batch.waiting)

    def submit(self, num_prompt: int, num_wanted: int, on_token: OnToken) -> Stream:
        self._next_id += 1
        stream = Stream(Sequence(self._next_id, num_prompt, num_wanted), on_token)
        self._streams[self._next_id] = stream
        self.batch.submit(stream.sequence, self._now_s)
        self.metrics.num_prompt_tokens += num_prompt
        self._wake.set()
        return stream

    def finish(self, stream: Stream, reason: str) -> None:
        """Forget a finished or aborted request. Idempotent."""
        if self._streams.pop(stream.sequence.key, None) is None:
            return
        self.batch.abort(stream.sequence, self._now_s)
        self.metrics.num_finished[reason] += 1
        self._wake.set()

    def set_faults(self, faults: Faults) -> None:
        if faults.crash_at_token != self.faults.crash_at_token:
            self._tokens_to_crash = faults.crash_at_token
        self.faults = faults
        self._reshape(self.batch.limits)

    def lengthen_steps(self, by_s: float) -> None:
        self._longer_s = by_s
        self._reshape(self.batch.limits)

    async def sleep(self) -> None:
        """Move the weights to host memory at loading speed (SwapServeLLM section 4 charges both ways)."""
        if not self.sleeps:
            self.sleeps = True
            await self.pass_time(self.config.weights_bytes / self.config.load_bytes_per_s)

    async def wake_up(self) -> None:
        """Load the weights back and resume with the whole KV cache; a replica of the first layers, once the rest of the
        load fits into the shortest prefill (WarmServe section 4)."""
        self.batch.limit_kv(self.config.kv_tokens, self._now_s)
        rest_bytes, self.rest_bytes = self.rest_bytes, 0
        if self.sleeps:
            await self.pass_time(self.config.weights_bytes / self.config.load_bytes_per_s)
            self.sleeps = False
            self._wake.set()
        elif rest_bytes:
            prefill_s = self.config.profile.costs.prefill_s(1, 1)
            await self.pass_time(max(0.0, rest_bytes / self.config.load_bytes_per_s - prefill_s))

    def freeze(self, frozen: bool) -> None:
        self.frozen = frozen
        self._wake.set()

    @property
    def serves(self) -> bool:
        return self.config.num_stages == 1 or self.pipeline is not None

    @property
    def kv_bytes_used(self) -> int:
        own = self.batch.kv_tokens_used(self._now_s) * self.config.kv_bytes_per_token
        return own + self.carried.kv_bytes(asyncio.get_running_loop().time())

    def be_whole(self, *, recompute: bool) -> None:
        """Run all layers from the next step. `recompute`: the other stages' KV cache is lost."""
        whole = self.whole
        assert whole is not None, "all of the weights are there first"
        self.rest_bytes = 0
        if self.pipeline is not None:
            self.pipeline.close()
            self.pipeline = None
        self.config = replace(self.config, kv_bytes=whole.kv_bytes, max_running=whole.max_running, num_stages=1)
        limits = replace(self.batch.limits, kv_tokens=self.config.kv_tokens, max_sequences=whole.max_running)
        self._reshape(limits)
        if recompute:
            self.batch.recompute(self._now_s)

    def join(self, pipeline: Pipeline, kv_tokens: int) -> None:
        self.pipeline = pipeline
        self.batch.limit_kv(min(self.batch.limits.kv_tokens, kv_tokens), self._now_s)

    def limit_kv(self, num_bytes: int) -> None:
        """Never below present use or one full context."""
        self.batch.limit_kv(self.config.kv_tokens_in(num_bytes), self._now_s)

    async def pass_time(self, seconds: float) -> None:
        await asyncio.sleep(seconds / self.config.time_scale)

    def metrics_text(self, labels: str) -> str:
        batch, metrics = self.batch, self.metrics
        kv_tokens = batch.limits.kv_tokens
        blocks = f'block_size="{BLOCK_TOKENS}",num_gpu_blocks="{kv_tokens // BLOCK_TOKENS}",cache_dtype="auto"'
        num_carried = self.carried.requests(asyncio.get_running_loop().time())
        samples = (
            ("vllm:num_requests_running", "gauge", labels, self.num_running),
            ("vllm:num_requests_waiting", "gauge", labels, len(batch.waiting)),
            ("vllm:kv_cache_usage_perc", "gauge", labels, batch.kv_tokens_used(self._now_s) / kv_tokens),
            ("emulated:num_requests_carried", "gauge", labels, num_carried),
            ("vllm:num_preemptions_total", "counter", labels, metrics.num_preemptions),
            ("vllm:prompt_tokens_total", "counter", labels, metrics.num_prompt_tokens),
            ("vllm:generation_tokens_total", "counter", labels, metrics.num_generation_tokens),
            ("vllm:cache_config_info", "gauge", f"{labels},{blocks}", 1),
        )
        lines: list[str] = []
        for name, kind, labels_here, value in samples:
            lines += [f"# TYPE {name} {kind}", f"{name}{{{labels_here}}} {float(value)}"]
        lines.append("# TYPE vllm:request_success_total counter")
        for reason, count in sorted(metrics.num_finished.items()):
            lines.append(f'vllm:request_success_total{{{labels},finished_reason="{reason}"}} {count}')
        return "\n".join(lines) + "\n"

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            self._wake.clear()
            async with self.stepping:
                is_running = self._is_running
                if is_running:
                    due = await self._step(due)
            if not is_running:
                await self._wake.wait()
                due = loop.time()

    async def carry(self, part: StepPart) -> None:
        while self.faults.hang:
            self._wake.clear()
            await self._wake.wait()
        await self.pass_time(self.faults.itl_s if self.faults.itl_s >= 0 else part.seconds)
        self.carried.stepped(part, asyncio.get_running_loop().time())
        for _ in range(part.num_running):
            self._count_to_crash()

    @property
    def _is_running(self) -> bool:
        """Sequences whose clients have all left are dropped even in a hang."""
        stopped = self.faults.hang or self.frozen or self.sleeps
        return self.batch.next_at_s < math.inf and not (stopped and self._streams)

    async def _step(self, due: float) -> float:
        """Wait for the step's end. Returns that moment, planned, so that this process's own costs do not accumulate."""
        loop, end_s = asyncio.get_running_loop(), self.batch.next_at_s
        due = max(due, loop.time() - 0.05) + (end_s - self._now_s) / self.config.time_scale
        await asyncio.sleep(max(0.0, due - loop.time()))
        if self.pipeline is not None:
            is_done = await self._pass_on(self.pipeline, end_s - self._now_s)
            due = loop.time()
            if not is_done:
                return due
        self._now_s = end_s
        outcomes = self.batch.advance(end_s)
        self.metrics.num_preemptions += sum(what is What.PREEMPTED for what, _, _ in outcomes)
        self._hand_out()
        return due

    async def _pass_on(self, pipeline: Pipeline, seconds: float) -> bool:
        """When a later stage is lost, end (StageLost) as vLLM does, or go on alone, without this step, if all weights
        are there."""
        num_decoding = len(self.batch.running)
        kv_tokens = self.batch.kv_tokens_used(self._now_s) + num_decoding
        part = StepPart(seconds, self.batch.num_reading + num_decoding, kv_tokens, self.num_running)
        try:
            await pipeline.step(part)
        except StageLost:
            if self.whole is None:
                raise
            self.be_whole(recompute=True)
            return False
        return True

    def _reshape(self, limits: EngineLimits) -> None:
        self.batch.reshape(self._costs(), limits, self._now_s)
        self._wake.set()

    def _costs(self) -> StepCosts:
        """Of one stage's part of a step."""
        costs, faults = self.config.profile.costs, self.faults
        if faults.ttft_s >= 0:
            base_s = max(_LEAST_STEP_S, faults.ttft_s)
            costs = replace(costs, prefill_base_s=base_s, prefill_s_per_token=0.0, prefill_s_per_token2=0.0)
        if faults.itl_s >= 0:
            base_s = max(_LEAST_STEP_S, faults.itl_s)
            costs = replace(costs, decode_base_s=base_s, decode_s_per_sequence=0.0, decode_s_per_context=0.0)
        prefill_s, decode_s = costs.prefill_base_s + self._longer_s, costs.decode_base_s + self._longer_s
        return replace(costs, prefill_base_s=prefill_s, decode_base_s=decode_s).scaled(1 / self.config.num_stages)

    def _hand_out(self) -> None:
        for stream in list(self._streams.values()):
            sequence = stream.sequence
            while stream.num_sent < self.batch.num_emitted(sequence, self._now_s):
                stream.num_sent += 1
                self.metrics.num_generation_tokens += 1
                stream.on_token(stream.num_sent == sequence.output_tokens)
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
