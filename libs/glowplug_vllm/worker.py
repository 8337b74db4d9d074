"""vLLM's CPU worker with a sleep that frees memory: `--worker-cls glowplug_vllm.worker.SleepingCpuWorker`.

vLLM's engine calls `sleep`, `wake_up` and `discard`, which do nothing in its CPU worker. The KV cache is an
anonymous mapping: free until written to, and released page by page."""

import ctypes
import mmap
import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.distributed.distributed_c10d import _get_default_store
from torch.overrides import TorchFunctionMode
from vllm.distributed.parallel_state import get_pp_group
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.network_utils import get_ip
from vllm.v1.worker.cpu_worker import CPUWorker

from glowplug_vllm import base_rows, groups, hops, shared_load, stage
from glowplug_vllm.cpu_weights import CpuWeights

SHARED = "_GLOWPLUG_WEIGHTS_SHARED"  # environment, "1": weights are the files' pages, see cpu_weights.py
_log = init_logger("vllm.glowplug")  # vLLM shows loggers below its own name
_LEAST_KV_BYTES = 1 << 20


class UntouchedZeros(TorchFunctionMode):  # type: ignore[misc]
    """Make a large `torch.zeros` of int8 (vLLM's one KV buffer) untouched memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_kv = func is torch.zeros and kwargs.get("dtype") is torch.int8 and bool(args) and isinstance(args[0], int)
        if not is_kv or args[0] < _LEAST_KV_BYTES:
            return func(*args, **kwargs)
        num_bytes = -(-args[0] // mmap.PAGESIZE) * mmap.PAGESIZE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), dtype=torch.int8, count=args[0])


class SleepingCpuWorker(CPUWorker):  # type: ignore[misc]
    def init_device(self) -> None:
        """Make vLLM count each CPU worker as a device, by which it finds the workers of one node."""
        if self.parallel_config.nnodes > 1:
            num_workers = self.parallel_config.local_world_size
            type(current_platform).device_count = classmethod(lambda _: num_workers)
            groups.install(self.parallel_config.world_size, num_workers)
        super().init_device()
        if self.lora_config is not None:
            base_rows.install()
        if stage.START in os.environ:
            stage.agree(_get_default_store(), self.rank)
            hops.install(get_pp_group(), _get_default_store(), get_ip())

    def determine_available_memory(self) -> int:
        """Return the granted bytes of KV cache; still untouched, they need not be free now."""
        granted = self.cache_config.kv_cache_memory_bytes
        return int(granted) if granted is not None else int(super().determine_available_memory())

    def load_model(self, **options: Any) -> None:
        """Raises SharingError if the weights cannot be the files' pages as requested."""
        directory = Path(self.model_config.model)
        is_stage = stage.START in os.environ
        loading: AbstractContextManager[Any] = stage.own_tensors(directory) if is_stage else nullcontext()
        if os.environ.get(SHARED) == "1":
            loading = shared_load.in_place(directory)
        with loading as shared, stage.without_head(get_pp_group().is_last_rank):
            super().load_model(**options)
        if is_stage:
            sign = stage.report_loaded(self.local_rank)
            if not self.local_rank:
                stage.end_with_the_others(self.parallel_config.node_rank, self.parallel_config.nnodes, sign)
        self._weights = CpuWeights(self.model_runner.model, directory)
        if shared is not None:
            region, in_place = shared
            self._weights.share(region, in_place)
            _log.info("Weights are shared with host memory; %d parameters were loaded in place.", len(in_place))

    def compile_or_warm_up_model(self) -> Any:
        if not get_pp_group().is_first_rank:
            stage.make_buffers(self.model_runner)
        return super().compile_or_warm_up_model()

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[Any]:
        if tag == "kv_cache":
            return UntouchedZeros()
        context: AbstractContextManager[Any] = super()._maybe_get_memory_pool_context(tag)
        return context

    def sleep(self, level: int = 1) -> None:
        """Drop weights and KV cache at any `level`: the files hold the weights. Raises CannotSleep."""
        self._weights.drop()
        self._give_back_kv()

    def discard(self, tags: tuple[str, ...]) -> None:
        if "kv_cache" in tags:
            self._give_back_kv()

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Restore the weights whatever the `tags`: no engine serves with its KV cache alone."""
        self._weights.restore()

    def keep_first(self, num_bytes: int) -> None:
        """Raises CannotSleep before any change."""
        self._weights.keep_first(num_bytes)

    def give_back_blocks(self, runs: list[tuple[int, int]]) -> int:
        freed = 0
        for layer in self.model_runner.compilation_config.static_forward_context.values():
            cache = layer.kv_cache
            step, size = cache.stride(0) * cache.element_size(), cache[0].numel() * cache.element_size()
            for first, end in runs:
                if step == size:
                    freed += _give_back(cache.data_ptr() + first * step, cache.data_ptr() + end * step)
                else:
                    starts = (cache.data_ptr() + block * step for block in range(first, end))
                    freed += sum(_give_back(start, start + size) for start in starts)
        return freed

    def read_blocks(self, of_requests: list[list[int]]) -> list[dict[str, Any]]:
        """Return each request's KV blocks: layer -> [blocks, ...], as bytes of the cache's type."""
        layers = self.model_runner.compilation_config.static_forward_context.items()
        caches = {name: layer.kv_cache for name, layer in layers if getattr(layer, "kv_cache", None) is not None}
        return [
            {name: cache[blocks].contiguous().view(torch.uint8).numpy() for name, cache in caches.items()}
            if blocks
            else {}
            for blocks in of_requests
        ]

    def _give_back_kv(self) -> None:
        for start, num_bytes in {(s.data_ptr(), s.nbytes()) for s in map(_storage, self.model_runner.kv_caches)}:
            _give_back(start, start + num_bytes)


def _storage(cache: torch.Tensor) -> torch.UntypedStorage:
    return cache.untyped_storage()


def _give_back(start: int, end: int) -> int:
    """Free whole pages, which then read as zeros. Return bytes; raises OSError."""
    start, end = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if end <= start:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED):
        number = ctypes.get_errno()
        raise OSError(number, f"madvise: {os.strerror(number)}")
    return end - start
