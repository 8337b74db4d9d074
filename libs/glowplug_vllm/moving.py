"""Move running requests with their KV cache to another engine (HydraServe section 6).

A request becomes two kinds of files in a directory of shared memory, the JSON one written last:

    N.json        {"request_id", "token_ids", "num_prompt", "num_computed", "block_size", "num_tp"}
    N.tpR.kv      safetensors, of tensor-parallel rank R: layer name -> [blocks, ...] as in the cache; none for a
                  request too short to be worth moving

`token_ids` are prompt and generated tokens; the files hold the KV cache of the first `num_computed`. Stages of a
pipeline send their layers to the first one by vLLM's own queues, so that the files are on its node alone. The owner
of a stream continues it with these token ids (or fewer) as a prompt; the pulling engine (connector.py) finds the
file with the longest common beginning."""

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any


def index(directory: Path, number: int) -> Path:
    return directory / f"{number}.json"


def kv_file(index_path: Path, tp_rank: int) -> Path:
    return index_path.with_name(f"{index_path.stem}.tp{tp_rank}.kv")


def export(core: Any, directory: str, recompute_below: int) -> list[dict[str, Any]]:
    """Write every request of a paused engine core, without its cache below `recompute_below` tokens.

    Return, for each, {"request_id", "num_tokens", "num_computed", "num_bytes"}. Raises errors of workers and the
    file system."""
    config, scheduler = core.vllm_config, core.scheduler
    block_size = config.cache_config.block_size
    requests, blocks = list(scheduler.requests.values()), []
    for request in requests:
        groups = scheduler.kv_cache_manager.get_block_ids(request.request_id)
        is_worth_it = len(groups) == 1 and request.num_computed_tokens >= max(1, recompute_below)
        num_blocks = -(-request.num_computed_tokens // block_size) if is_worth_it else 0
        blocks.append([int(block) for block in groups[0][:num_blocks]] if num_blocks else [])
    ranks = core.collective_rpc("read_blocks", args=(blocks,)) if any(blocks) else []
    Path(directory).mkdir(parents=True, exist_ok=True, mode=0o700)
    num_tp = config.parallel_config.tensor_parallel_size
    return [
        _write(index(Path(directory), number), request, [rank[number] for rank in ranks], num_tp, block_size)
        for number, request in enumerate(requests)
    ]


def _write(path: Path, request: Any, ranks: list[dict[str, Any]], num_tp: int, block_size: int) -> dict[str, Any]:
    num_bytes = 0
    for tp_rank in range(num_tp):
        layers = {name: cache for rank in ranks[tp_rank::num_tp] for name, cache in rank.items()}
        if layers:
            from safetensors.numpy import save_file

            save_file(layers, kv_file(path, tp_rank))
            num_bytes += sum(cache.nbytes for cache in layers.values())
    tokens = [int(token) for token in request.all_token_ids]
    facts = {
        "request_id": request.request_id,
        "token_ids": tokens,
        "num_prompt": request.num_prompt_tokens,
        "num_computed": request.num_computed_tokens if num_bytes else 0,
        "block_size": block_size,
        "num_tp": num_tp,
    }
    part = path.with_suffix(".part")
    part.write_text(json.dumps(facts))
    part.replace(path)
    return {
        "request_id": request.request_id,
        "num_tokens": len(tokens),
        "num_computed": facts["num_computed"],
        "num_bytes": num_bytes,
    }


def longest(directory: Path, token_ids: list[int], block_size: int, num_tp: int) -> tuple[int, Path | None]:
    """Return the most tokens at the beginning of `token_ids` computed in a file, and its index. The last token is
    always computed."""
    best: tuple[int, Path | None] = (0, None)
    for path in directory.glob("*.json"):
        try:
            facts = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        if (facts["block_size"], facts["num_tp"]) != (block_size, num_tp):
            continue
        known = facts["token_ids"][: facts["num_computed"]]
        most = min(len(known), len(token_ids) - 1)
        same = next((n for n in range(most) if known[n] != token_ids[n]), most)
        best = max(best, (same, path), key=lambda found: found[0])
    return best


class Move:
    def __init__(self, client: Any) -> None:
        self._client = client

    def num_requests(self) -> int:
        return int(self._client.output_processor.get_num_unfinished_requests())

    def by_adapter(self) -> dict[str, int]:
        names = (state.lora_name for state in self._client.output_processor.request_states.values())
        return Counter(name for name in names if name is not None)

    async def export(self, directory: str, recompute_below: int) -> dict[str, Any]:
        """Pause, write every request (see `export`), and resume: requests not continued elsewhere end here. Return
        {"pause_s", "export_s", "requests"}."""
        began = time.monotonic()
        await self._client.pause_generation(mode="keep", clear_cache=False)
        paused_at = time.monotonic()
        try:
            ask = self._client.engine_core.call_utility_async
            requests = await ask("glowplug_export", directory, recompute_below)
        finally:
            await self._client.resume_generation()
        seconds = {"pause_s": paused_at - began, "export_s": time.monotonic() - paused_at}
        return {**{name: round(value, 4) for name, value in seconds.items()}, "requests": requests}
