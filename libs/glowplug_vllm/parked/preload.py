"""The modules a server imports on its way to the first token, imported once before the fork.

Found with `GLOWPLUG_TRACE_IMPORTS=1` (boot.py names every module that a fork still imports). A name that this vLLM
does not have is skipped and reported: a start is slower then, not broken.
"""

import importlib
from collections.abc import Iterable

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
    """What to import for servers on this platform."""
    return [*_SERVER.split(), *_ENGINE.split(), *(_CPU if is_cpu else _CUDA), *_ARCHITECTURES]


def preload(names: Iterable[str]) -> dict[str, str]:
    """Import each module. Returns the skipped ones with the reason."""
    skipped = {}
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            skipped[name] = str(error)
    return skipped
