"""How one stage gets all of the model while the pipeline serves on (HydraServe section 6): the rest of the weights
first, then the other stages' part of the KV cache, then it runs all of the layers from one step to the next.

KV cache moves while tokens are made, in rounds: what came meanwhile is the next round, and the last, small one holds up
a single step. Where a stage is lost before its part has come, that is computed again from the tokens.
"""

import asyncio

from glowplug_lab.emulated.batch import BLOCK_TOKENS, Sequence
from glowplug_lab.emulated.engine import Engine, Whole
from glowplug_lab.emulated.stages import Pipeline, StageLost, ended

MAX_ROUNDS = 4
FEW_TOKENS = 32  # what is left for the last round


class Consolidation:
    """One at a time, by whoever asks; a second one waits for the first."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._task: asyncio.Task[None] | None = None

    @property
    def kv_tokens(self) -> int:
        return self._engine.config.num_blocks * BLOCK_TOKENS

    async def run(self, whole: Whole) -> None:
        """Returns once it runs all of the model; at once where it does already."""
        if self._engine.num_stages == 1:
            return
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._become(whole))
        await asyncio.shield(self._task)

    async def abandon(self) -> bool:
        """Give it up. Whether it was whole sooner."""
        if self._task is not None and not self._task.done():
            await ended(self._task)
        if self._engine.num_stages > 1:
            self._engine.whole = None
        return self._engine.num_stages == 1

    async def _become(self, whole: Whole) -> None:
        engine = self._engine
        rest_bytes = engine.config.weights_bytes - engine.config.part_bytes
        await engine.pass_time(rest_bytes / engine.config.load_bytes_per_s)
        engine.whole = whole
        print("the rest of the weights is loaded", flush=True)
        try:
            await self._take_kv()
        except StageLost as error:
            print(f"a part of the KV cache is computed again: {error}", flush=True)
            async with engine.stepping:
                if engine.num_stages > 1:  # else a step found the same, and went on alone
                    engine.be_whole(recompute=True)

    async def _take_kv(self) -> None:
        """The other stages' part of what the requests under way have computed; the last of it between two steps, at the
        end of which it has become whole. Raises StageLost."""
        engine, taken = self._engine, dict[Sequence, int]()
        for _ in range(MAX_ROUNDS):
            if (pipeline := engine.pipeline) is None or _missing(engine, taken) <= FEW_TOKENS:
                break
            await self._round(pipeline, taken)
        async with engine.stepping:
            if engine.pipeline is not None:
                await self._round(engine.pipeline, taken)
            if engine.num_stages > 1:
                engine.be_whole(recompute=False)

    async def _round(self, pipeline: Pipeline, taken: dict[Sequence, int]) -> None:
        engine = self._engine
        now = {sequence: sequence.num_computed for sequence in engine.batch.running}
        await pipeline.take_kv(_missing(engine, taken), engine.kv_bytes_per_token)
        taken.clear()
        taken.update(now)


def _missing(engine: Engine, taken: dict[Sequence, int]) -> int:
    """Tokens of requests under way that have not been taken."""
    return sum(max(0, one.num_computed - taken.get(one, 0)) for one in engine.batch.running)
