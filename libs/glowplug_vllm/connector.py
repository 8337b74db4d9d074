"""vLLM's KV connector of an engine that continues another one's requests: it pulls their KV cache from files of
moving.py.

`--kv-transfer-config` names it by module path; `kv_connector_extra_config` has the "directory". vLLM recomputes the
tokens of unreadable files (`kv_load_failure_policy: recompute`)."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.logger import init_logger

from glowplug_vllm import moving

_log = init_logger("vllm.glowplug")


@dataclass
class Pull:
    """Blocks of a request's file from `first` on, for `block_ids`."""

    index: Path
    first: int
    block_ids: list[int]


@dataclass
class Pulls(KVConnectorMetadata):  # type: ignore[misc]
    pulls: list[Pull] = field(default_factory=list)


class MovingConnector(KVConnectorBase_V1):  # type: ignore[misc]
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._directory = Path(vllm_config.kv_transfer_config.get_from_extra_config("directory", ""))
        self._block_size = vllm_config.cache_config.block_size
        self._num_tp = vllm_config.parallel_config.tensor_parallel_size
        self._found: dict[str, tuple[Path, int]] = {}  # request -> index of its file, tokens in its own cache
        self._planned: dict[str, tuple[Path, int, int]] = {}  # ... and tokens after the pull
        self._failed: set[int] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Return the number of tokens in a file beyond this engine's own cache, which has whole blocks."""
        if request.num_preemptions:  # rescheduled as a known request, for which a worker pulls nothing
            return 0, False
        num, path = moving.longest(
            self._directory, list(request.prompt_token_ids or ()), self._block_size, self._num_tp
        )
        if path is None or num <= num_computed_tokens:
            return 0, False
        self._found[request.request_id] = (path, num_computed_tokens)
        return num - num_computed_tokens, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        found = self._found.pop(request.request_id, None)
        if found is not None and num_external_tokens > 0:
            self._planned[request.request_id] = (*found, found[1] + num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Pulls:
        metadata = Pulls()
        for request in scheduler_output.scheduled_new_reqs:
            planned = self._planned.pop(request.req_id, None)
            if planned is not None:
                path, num_own, num_after = planned
                first, end = num_own // self._block_size, -(-num_after // self._block_size)
                metadata.pulls.append(Pull(path, first, list(request.block_ids[0][first:end])))
        return metadata

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        num, path = moving.longest(
            self._directory, list(request.prompt_token_ids or ()), self._block_size, self._num_tp
        )
        if path is not None and num >= min(len(request.prompt_token_ids) - 1, self._block_size):
            for file in (path, *(moving.kv_file(path, rank) for rank in range(self._num_tp))):
                file.unlink(missing_ok=True)
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        for pull in metadata.pulls if isinstance(metadata, Pulls) else ():
            try:
                caches = load_file(moving.kv_file(pull.index, get_tensor_model_parallel_rank()))
                end = pull.first + len(pull.block_ids)
                for name, layer in forward_context.no_compile_layers.items():
                    if (cache := getattr(layer, "kv_cache", None)) is not None:
                        cache[pull.block_ids] = caches[name][pull.first : end].view(cache.dtype).to(cache.device)
            except (OSError, KeyError, RuntimeError, ValueError) as error:
                _log.warning("failed to read KV blocks, which are computed again: %s", error)
                self._failed |= set(pull.block_ids)

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def wait_for_layer_load(self, layer_name: str) -> None:
        """All is read before the first layer."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Write nothing: a request's KV cache is exported when it leaves."""

    def wait_for_save(self) -> None:
        """See save_kv_layer."""
