"""Replace names of vLLM in memory, before the first fork. No file of vLLM is changed.

    get_mp_context        always 'fork': vLLM's CPU platform asks for 'spawn', so that the engine core and each worker
                          would import everything again. On CUDA it stays, set to 'fork' by the environment
    _maybe_force_spawn    does nothing on CPU. On CUDA it stays: it goes back to 'spawn' once CUDA is initialised
    run_engine_core       in the forked core: die with the parent, drop the API server's port, apply OpenMP settings
    worker_main           in the forked worker: die with the parent, apply OpenMP settings
    _run_in_subprocess    a model class is inspected in this process instead of a new interpreter
    register_triton_kernel_overrides   runs now, once, instead of 0.7 s in each worker
    configure_logging     does nothing where a fork has that configuration already: 0.05 s and more in each process
    SpinCondition.wait    on a CPU, waits in the kernel (queues.py)
    AsyncLLM, StructuredOutputManager   the tokenizer is read while the engine core starts (tokenizer_aside.py)

Checked against vLLM 0.32.0. A missing name raises `Unpatchable`; the driver then starts servers the plain way."""

import multiprocessing
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from glowplug_vllm import process, queues, tokenizer_aside

NEEDED = (
    ("vllm.utils.system_utils", "get_mp_context"),
    ("vllm.utils.system_utils", "_maybe_force_spawn"),
    ("vllm.v1.engine.core", "EngineCoreProc.run_engine_core"),
    ("vllm.v1.executor.multiproc_executor", "WorkerProc.worker_main"),
    ("vllm.model_executor.models.registry", "_run_in_subprocess"),
    ("vllm.distributed.device_communicators.shm_broadcast", "SpinCondition.wait"),
    ("vllm.logger", "configure_logging"),
    ("vllm.config.logging", "LoggingConfig"),
    ("vllm.v1.engine.async_llm", "renderer_from_config"),
    ("vllm.v1.engine.async_llm", "EngineCoreClient.make_async_mp_client"),
    ("vllm.v1.engine.async_llm", "maybe_register_config_serialize_by_value"),
    ("vllm.v1.engine.utils", "EngineHandshakeMetadata"),
    ("vllm.v1.structured_output", "cached_tokenizer_from_config"),
    ("vllm.renderers.hf", "maybe_make_thread_pool"),
    # not replaced here: used by stage.py, moving.py and connector.py
    ("vllm.model_executor.model_loader.default_loader", "DefaultModelLoader.get_all_weights"),
    ("vllm.model_executor.models.utils", "is_pp_missing_parameter"),
    (
        "vllm.model_executor.layers.vocab_parallel_embedding",
        "UnquantizedEmbeddingMethod.process_weights_after_loading",
    ),
    ("vllm.distributed.kv_transfer.kv_connector.v1.base", "KVConnectorBase_V1.get_num_new_matched_tokens"),
    ("vllm.v1.core.kv_cache_manager", "KVCacheManager.get_block_ids"),
    ("torch.distributed.distributed_c10d", "_get_default_store"),
    # ... hops.py
    ("vllm.distributed.parallel_state", "GroupCoordinator.isend_tensor_dict"),
    ("vllm.distributed.parallel_state", "GroupCoordinator.irecv_tensor_dict"),
    # ... groups.py
    ("torch.distributed.distributed_c10d", "_world.pg_map"),
    ("vllm.distributed.parallel_state", "in_the_same_node_as"),
    (
        "vllm.distributed.device_communicators.cpu_communicator",
        "CpuCommunicator._all_group_ranks_share_shm_group_name",
    ),
)


class Unpatchable(RuntimeError):
    """This vLLM lacks names that parking replaces or stages use."""


def apply(is_cpu: bool) -> None:
    """Raises Unpatchable, before any change, if a name is missing."""
    if missing := [f"{module}.{name}" for module, name in NEEDED if _find(module, name) is None]:
        raise Unpatchable(f"this vLLM has no {', '.join(missing)}")
    if is_cpu:
        fork = multiprocessing.get_context("fork")
        replace_everywhere("vllm.utils.system_utils", "get_mp_context", lambda: fork)
        replace_everywhere("vllm.utils.system_utils", "_maybe_force_spawn", lambda: None)
        _scan_triton_once()
        queues.wait_in_kernel()
    _configure_logging_once()
    tokenizer_aside.install()
    replace_everywhere("vllm.model_executor.models.registry", "_run_in_subprocess", lambda fn: fn())
    _wrap("vllm.v1.engine.core", "EngineCoreProc", "run_engine_core", _enter_core)
    _wrap("vllm.v1.executor.multiproc_executor", "WorkerProc", "worker_main", _enter_worker)


def replace_everywhere(module: str, name: str, new: Any) -> int:
    """Set `name` in its module and in every module that imported it by name. Return the number."""
    old = getattr(import_module(module), name)
    holders = [m for m in list(sys.modules.values()) if getattr(m, "__dict__", {}).get(name) is old]
    for holder in holders:
        setattr(holder, name, new)
    return len(holders)


def _wrap(module: str, owner: str, name: str, before: Callable[[], None]) -> None:
    cls = getattr(import_module(module), owner)
    inner = getattr(cls, name)

    def entered(*args: Any, **kwargs: Any) -> Any:
        before()
        return inner(*args, **kwargs)

    setattr(cls, name, staticmethod(entered))


def _enter_core() -> None:
    process.die_with_parent()
    process.drop_server_sockets()
    process.apply_openmp_settings()


def _enter_worker() -> None:
    process.die_with_parent()
    process.apply_openmp_settings()


def _scan_triton_once() -> None:
    platforms = import_module("vllm.platforms")
    platform = type(platforms.current_platform)
    if scan := getattr(platform, "register_triton_kernel_overrides", None):
        scan()
        platform.register_triton_kernel_overrides = classmethod(lambda cls: None)


def _configure_logging_once() -> None:
    configure = import_module("vllm.logger").configure_logging
    has = import_module("vllm.config.logging").LoggingConfig()

    def configure_if_changed(config: Any) -> None:
        nonlocal has
        if config != has:
            configure(config)
            has = config

    configure(has)
    replace_everywhere("vllm.logger", "configure_logging", configure_if_changed)


def _find(module: str, dotted: str) -> Any:
    found: Any = import_module(module)
    for part in dotted.split("."):
        found = getattr(found, part, None)
    return found
