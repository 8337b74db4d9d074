"""Turn a fork of the zygote into a server. Never returns to the zygote's loop."""

import gc
import importlib
import multiprocessing.util
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from importlib import import_module
from multiprocessing import resource_tracker
from pathlib import Path
from typing import NoReturn

from glowplug_vllm import server
from glowplug_vllm.parked import patches, tokenizers
from glowplug_vllm.parked.protocol import Question

# Modules on a server's way to the first token, imported once before the fork. Found with `GLOWPLUG_TRACE_IMPORTS=1`,
# which reports imports after a fork. Names unknown to this vLLM are skipped and reported: a start is then slower.

_SERVER = """
setproctitle uvloop httptools uvicorn.protocols.http.auto uvicorn.protocols.websockets.auto uvicorn.lifespan.on
uvicorn.loops.auto anyio._backends._asyncio prometheus_fastapi_instrumentator
model_hosting_container_standards.sagemaker
vllm.entrypoints.cli.serve vllm.renderers.hf vllm.transformers_utils.chat_templates
vllm.entrypoints.anthropic.api_router vllm.entrypoints.cohere.api_router vllm.entrypoints.generate.api_router
vllm.entrypoints.generate.generative_scoring.api_router vllm.entrypoints.generate.structured_decisions.api_router
vllm.entrypoints.openai.chat_completion.api_router vllm.entrypoints.openai.chat_completion.batch_serving
vllm.entrypoints.openai.completion.api_router vllm.entrypoints.openai.models.api_router
vllm.entrypoints.openai.responses.api_router vllm.entrypoints.scale_out.factories
vllm.entrypoints.scale_out.derender.api_router vllm.entrypoints.scale_out.render.api_router
vllm.entrypoints.scale_out.token_in_token_out.api_router vllm.entrypoints.serve.elastic_ep.api_router
vllm.entrypoints.serve.instrumentator.metrics vllm.entrypoints.serve.instrumentator.offline_docs
vllm.entrypoints.serve.lora.api_router vllm.entrypoints.serve.profile.api_router
vllm.entrypoints.serve.tokenize.api_router vllm.entrypoints.serve.utils.fingerprint
vllm.entrypoints.serve.dev.rpc.api_router vllm.entrypoints.rl.online.api_router
glowplug_vllm.plugin glowplug_vllm.sleeping glowplug_vllm.connector safetensors.numpy
"""

_ENGINE = """
vllm.v1.engine.async_llm vllm.v1.engine.core vllm.v1.core.sched.scheduler vllm.v1.executor.multiproc_executor
vllm.v1.executor.uniproc_executor vllm.v1.worker.gpu_worker vllm.v1.pool.flash_maxsim
vllm.distributed.elastic_ep.elastic_execute vllm.model_executor.model_loader.default_loader
vllm.model_executor.layers.quantization.compressed_tensors.utils
vllm.model_executor.layers.quantization.online.fp8 vllm.model_executor.layers.quantization.online.int8
vllm.model_executor.layers.quantization.online.mxfp4 vllm.model_executor.layers.quantization.online.mxfp8
vllm.model_executor.layers.quantization.online.nvfp4
"""

_CPU = ["glowplug_vllm.worker", "vllm.v1.worker.cpu_worker", "vllm.v1.attention.backends.cpu_attn"]
_CUDA = ["vllm.v1.attention.backends.flash_attn"]

_ARCHITECTURES = ["vllm.model_executor.models.llama"]  # others: `park --preload vllm.model_executor.models.qwen3`


def modules(is_cpu: bool) -> list[str]:
    return [*_SERVER.split(), *_ENGINE.split(), *(_CPU if is_cpu else _CUDA), *_ARCHITECTURES]


def preload(names: Iterable[str]) -> dict[str, str]:
    skipped = {}
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            skipped[name] = str(error)
    return skipped


Boot = Callable[[Question], NoReturn]


def park(extra: Iterable[str] = (), kept: Iterable[Path] = ()) -> Boot:
    """Import vLLM, patch it and return the function for forks. 15-25 s on two cores.

    Raises patches.Unpatchable, ImportError, and RuntimeError if an import initialised CUDA."""
    platforms = import_module("vllm.platforms")
    is_cpu = bool(platforms.current_platform.is_cpu())
    for name, reason in preload([*modules(is_cpu), *extra]).items():
        print(f"not preloaded: {name} ({reason})", flush=True)
    patches.apply(is_cpu)
    tokenizers.install()
    for directory in kept:
        tokenizers.keep(directory)
    serve = server.load_serve()
    assert_no_cuda()
    gc.collect()
    gc.freeze()  # keeps the collector from writing to shared pages

    def boot(question: Question) -> NoReturn:
        assert_no_cuda()
        become(question, serve, is_cpu)

    return boot


def assert_no_cuda() -> None:
    """Raises RuntimeError: a fork cannot use CUDA initialised before it."""
    torch = import_module("torch")
    if torch.cuda.is_initialized():
        raise RuntimeError("CUDA was initialised before the fork: no server may be started from this process")


def become(question: Question, serve: server.Serve, is_cpu: bool) -> NoReturn:
    code = 1
    try:
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork" if not is_cpu else "spawn"  # the CPU platform insists
        # One tracker per server, owned by the API server. Started later it is the engine core's child, vLLM ends it on
        # shutdown, and two shared-memory segments of every server stay behind.
        resource_tracker.ensure_running()
        if os.environ.get("GLOWPLUG_TRACE_IMPORTS"):
            sys.meta_path.insert(0, _ImportTrace())
        code = server.run(Path(question.run_dir), serve)
        multiprocessing.util._exit_function()  # type: ignore[attr-defined]  # what an interpreter's end runs
    except BaseException:  # noqa: BLE001 (the end of this process: nothing may fall back into the zygote's loop)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class _ImportTrace:
    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        print(f"late import {os.getpid()} {time.time():.3f} {name}", file=sys.stderr, flush=True)
