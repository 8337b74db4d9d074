"""vLLM's command line and environment for one instance."""

import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from glowplug.domain.address import reachable, split_host_and_port
from glowplug.domain.errors import EngineFailed, EngineMisconfigured
from glowplug.domain.model import Model
from glowplug.engines.declaration import EngineArguments, EngineWeights, WeightsForm, flag, plain, whole
from glowplug.engines.port import Place
from glowplug.events.commands import StartInstance

RELOADING_WORKER = "glowplug_vllm.reloading.ReloadingWorker"
SLEEPING_WORKER = "glowplug_vllm.worker.SleepingCpuWorker"
UNIPROC = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
WEIGHTS_SHARED = "_GLOWPLUG_WEIGHTS_SHARED"
FIRST_BYTES = "_GLOWPLUG_FIRST_BYTES"
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_MAX_DEFAULT_THREADS = 4
_MAX_THREADS = 1024  # beyond any machine's cores: a typing error; each thread takes a stack

# Set by other fields of the model file, or part of how the fleet reaches the engine.
_OWNED = {
    "model": "weights.uri",
    "served_model_name": "name and aliases",
    "max_model_len": "context_tokens",
    "max_num_seqs": "max_concurrency",
    "kv_cache_memory_bytes": "kv_bytes",
    "tensor_parallel_size": "num_gpus",
    "pipeline_parallel_size": "the placer",
    "nnodes": "the placer",
    "node_rank": "the placer",
    "master_addr": "the placer",
    "master_port": "the placer",
    "host": "the agent",
    "port": "the agent",
    "uds": "the agent",
    "root_path": "the agent",
    "api_key": "the router",
    "ssl_certfile": "the router",
    "ssl_keyfile": "the router",
    "api_server_count": "the agent",
    "headless": "the agent",
}

ARGUMENTS = EngineArguments(
    engine="vllm",
    known={
        "parked": flag("start from the parked process"),
        "num_threads": whole("compute threads on a CPU", least=1, most=_MAX_THREADS),
    },
    reserved=_OWNED,
    passed_on=plain("a flag of `vllm serve`"),
)


def unreadable(path: Path) -> str:
    """'' for plausible weights, else the reason."""
    if not path.is_dir():
        return f"{path.name} is not a directory"
    return "" if (path / "config.json").is_file() else f"{path.name} has no config.json"


def check_shared(model: Model, gpu_kind: str = "host", num_stages: int = 1) -> None:
    """Raises EngineMisconfigured where weights_shared meets an engine that needs its own weights."""
    others = any(_own(model, name, None) is not None for name in ("worker_cls", "quantization"))
    is_parallel = num_stages > 1 or model.num_gpus > 1 or _is_parallel(model.engine_args)
    if model.weights_shared and (gpu_kind == "cuda" or is_parallel or others):
        why = "vLLM shares weights only in host memory: unquantised, in one process, with the worker of Glowplug"
        raise EngineMisconfigured(f"weights_shared: {why}", param="weights_shared")


WEIGHTS = EngineWeights(
    kind="a directory with config.json and safetensors",
    form=WeightsForm.DIRECTORY,
    unreadable=unreadable,
    check=lambda model, _: check_shared(model),
)


def server_argv(command: StartInstance, place: Place) -> list[str]:
    """Return the flags of `vllm serve`, without the model. Raises EngineMisconfigured.

    vLLM itself rejects unknown flags at its start.
    """
    model, num_gpus = command.model, len(place.devices.ordinals)
    ARGUMENTS.check(model.engine_args)
    check_shared(model, place.devices.kind, command.num_stages)
    flags: dict[str, Any] = {
        "host": place.host,
        "port": place.port,  # 0: the kernel chooses; the plug-in reports it
        "served_model_name": list(model.names),
        "max_model_len": model.context_tokens,
        "max_num_seqs": model.max_concurrency,
        "disable_uvicorn_access_log": True,
        "enable_prompt_tokens_details": True,  # bills and routing by prefixes rely on usage's cached tokens
    }
    if model.kv_bytes:  # vLLM counts per worker
        flags["kv_cache_memory_bytes"] = -(-model.kv_bytes // (num_gpus * command.num_stages))
    if command.adapter_slots:
        flags |= {
            "enable_lora": True,
            "max_loras": command.adapter_slots,
            "max_cpu_loras": command.adapter_slots,
            "max_lora_rank": next((rank for rank in LORA_RANKS if rank >= command.adapter_rank), LORA_RANKS[-1]),
        }
    if num_gpus > 1:
        flags["tensor_parallel_size"] = num_gpus
    if command.num_stages > 1:
        flags |= _of_stage(command)
    if place.devices.kind == "cuda":
        # vLLM starts only if this share of the GPU is free, whatever the KV cache takes; here the ledger decides.
        flags["gpu_memory_utilization"] = 0.05
        flags["enable_sleep_mode"] = True
        flags["worker_extension_cls"] = RELOADING_WORKER
    else:
        flags["enforce_eager"] = True  # compiling takes minutes on a CPU and saves nothing
        if not _is_parallel(model.engine_args):
            flags["worker_cls"] = SLEEPING_WORKER
            # one process less to start; a group needs one per worker
            flags["distributed_executor_backend"] = UNIPROC if num_gpus == command.num_stages == 1 else "mp"
    for name, value in model.engine_args.items():
        key = name.replace("-", "_")
        if key not in ARGUMENTS.known:
            flags[key] = value
    return [word for name, value in flags.items() for word in _words(name, value)]


def pulling_argv(model: Model, directory: Path) -> list[str]:
    """Flags to continue requests of another engine, with their KV cache in `directory`; none where the owner
    configured a connector."""
    if _own(model, "kv_transfer_config", None) is not None:
        return []
    config = {
        "kv_connector": "MovingConnector",
        "kv_connector_module_path": "glowplug_vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"directory": str(directory)},
    }
    return ["--kv-transfer-config", json.dumps(config)]


def _of_stage(command: StartInstance) -> dict[str, Any]:
    """Raises EngineMisconfigured for a missing rendezvous port."""
    host, port = split_host_and_port(command.rendezvous)
    if not port.isdecimal():
        why = f"a stage of a pipeline needs an address where the stages meet, not {command.rendezvous!r}"
        raise EngineMisconfigured(f"{why}; see GLOWPLUG_STAGE_PORTS of the first stage's node")
    return {
        "pipeline_parallel_size": command.num_stages,
        "nnodes": command.num_stages,
        "node_rank": command.stage,
        "master_addr": host,
        "master_port": int(port),
        "headless": True if command.stage else None,
    }


def _network(address: str) -> dict[str, str]:
    """Address and interface for the other stages. gloo chooses the interface of a name that is not local."""
    try:
        ip = str(socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise EngineFailed(f"the other stages cannot reach {address}: {error}") from error
    names = (name for name, held in psutil.net_if_addrs().items() if any(one.address == ip for one in held))
    interface = next(names, "")
    return {"VLLM_HOST_IP": ip} | ({"GLOO_SOCKET_IFNAME": interface} if interface else {})


def server_environment(command: StartInstance, place: Place) -> dict[str, str]:
    model, ordinals = command.model, place.devices.ordinals
    env = {
        "TRACEPARENT": place.traceparent,
        "VLLM_API_KEY": place.api_key,
        "VLLM_RPC_BASE_PATH": ".",  # sockets end with the run directory, and have short names
        "VLLM_SERVER_DEV_MODE": "0",  # its /sleep and /collective_rpc need no key
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1" if command.adapter_slots else "0",  # its routes need the key
        WEIGHTS_SHARED: "1" if model.weights_shared else "0",
        FIRST_BYTES: str(place.devices.num_bytes if _holds_layers(command, place) else 0),
    }
    if command.num_stages > 1:
        # torch resolves each peer's name: for 10 s, where no name server answers
        env |= _network(place.address or reachable(place.host)) | {"RES_OPTIONS": "timeout:1 attempts:1"}
    if place.devices.kind == "cuda":
        return {**env, "CUDA_VISIBLE_DEVICES": ",".join(map(str, ordinals))}
    threads = max(1, num_threads(model) // len(ordinals))
    bind = _cpus_by_worker(len(ordinals), threads) if len(ordinals) > 1 else "nobind"
    return {**env, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": bind}


def _holds_layers(command: StartInstance, place: Place) -> bool:
    """Return whether a replica keeps only the first layers until its wake."""
    devices = place.devices
    return command.replica and devices.num_bytes < command.model.weights_bytes and len(devices.ordinals) == 1


def _cpus_by_worker(num_workers: int, threads: int) -> str:
    """CPU numbers per worker in vLLM's form ("0,1|2,3"). Workers wait for one another in every layer, so none may
    share a CPU."""
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cpus) < num_workers * threads:
        return "nobind"
    parts = (cpus[n * threads : (n + 1) * threads] for n in range(num_workers))
    return "|".join(",".join(map(str, part)) for part in parts)


def num_threads(model: Model) -> int:
    """Return the threads of all local workers together: engine_args.num_threads, else this node's cores, four at
    most."""
    default = min(_MAX_DEFAULT_THREADS, os.cpu_count() or 1)
    return int(_own(model, "num_threads", default))


def zygote_environment() -> dict[str, str]:
    """Variables read on import, hence common to all servers of a zygote."""
    return {
        "HF_HUB_OFFLINE": "1",  # weights come from the region; no fetch may bypass the prefetcher
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # A waiting thread yields its core. Spinning, two engines on two cores slow each other down tenfold.
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
        "PYTHONUNBUFFERED": "1",
    }


def wants_parked(model: Model, default: bool) -> bool:
    """engine_args.parked, else the node's default. Raises EngineMisconfigured for wrong engine_args."""
    ARGUMENTS.check(model.engine_args)
    return bool(_own(model, "parked", default))


def _own(model: Model, key: str, default: Any) -> Any:
    given = {name.replace("-", "_"): value for name, value in model.engine_args.items()}
    return given.get(key, default)


def _is_parallel(engine_args: Mapping[str, Any]) -> bool:
    return any(str(engine_args.get(spelt, 1)) != "1" for spelt in ("data_parallel_size", "data-parallel-size"))


def _words(name: str, value: Any) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if value is None:
        return []
    if isinstance(value, bool):
        return [flag] if value else ["--no-" + name.replace("_", "-")]
    if isinstance(value, Mapping):
        return [flag, json.dumps(value)]
    if isinstance(value, list | tuple):
        return [flag, *(str(item) for item in value)]
    return [flag, str(value)]
