"""What llama.cpp takes and reads, as the driver declares it. The engine process checks by the same functions."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glowplug.domain.errors import EngineMisconfigured
from glowplug.domain.model import Model
from glowplug.domain.units import show_bytes
from glowplug.engines.declaration import EngineArguments, EngineWeights, WeightsForm, choice, flag, whole
from glowplug.engines.gguf import GgufFacts, InvalidGguf, read_facts

MAX_THREADS = 1024  # more than any machine has cores: a typing error, and each thread takes a stack
POOLINGS = ("none", "mean", "cls", "last", "rank")

ARGUMENTS = EngineArguments(
    engine="llamacpp",
    known={
        "n_threads": whole("compute threads; 0 for the cores of the node, at most 8", most=MAX_THREADS),
        "n_ctx": whole("tokens of all slots together, instead of as many as kv_bytes holds", least=1),
        "n_batch": whole("prompt tokens of one call", least=1),
        "n_ubatch": whole("prompt tokens that are computed at once", least=1),
        "n_gpu_layers": whole("layers whose weights lie on the GPU; -1 for all", least=-1),
        "embeddings": flag("answers /v1/embeddings"),
        "pooling": choice("how the embedding of a text is made from those of its tokens", POOLINGS),
    },
)


def unreadable(path: Path) -> str:
    """'' for one whole GGUF file, else why llama.cpp cannot read it. Raises OSError."""
    try:
        read_facts(path)
    except InvalidGguf as error:
        return str(error)
    return ""


def check_context(engine_args: Mapping[str, Any], kv_bytes: int, facts: GgufFacts) -> None:
    """The KV cache that `n_ctx` asks for fits the granted bytes. Raises EngineMisconfigured."""
    tokens = int(engine_args.get("n_ctx", 0))
    need_bytes = tokens * facts.kv_bytes_per_token
    if kv_bytes and need_bytes > kv_bytes:
        most = kv_bytes // facts.kv_bytes_per_token
        text = (
            f"engine_args.n_ctx cannot be {tokens}: the KV cache would take {show_bytes(need_bytes)} and kv_bytes of "
            f"the model is {show_bytes(kv_bytes)}; allowed is a whole number up to {most}"
        )
        raise EngineMisconfigured(text, param="engine_args.n_ctx")


def check_bytes(engine_args: Mapping[str, Any], weights_bytes: int, num_bytes: int) -> None:
    """The grant holds all of the file, unless only some layers go to the GPU. Raises EngineMisconfigured."""
    if num_bytes > weights_bytes and "n_gpu_layers" not in engine_args:
        text = f"weights_bytes: {weights_bytes} is less than the {num_bytes} bytes of the file, which are all loaded"
        raise EngineMisconfigured(text, param="weights_bytes")


def check_weights(model: Model, path: Path) -> None:
    """The model's bytes hold this file and its KV cache. Raises EngineMisconfigured, or OSError."""
    check_bytes(model.engine_args, model.weights_bytes, path.stat().st_size)
    if "n_ctx" in model.engine_args:
        check_context(model.engine_args, model.kv_bytes, read_facts(path))


WEIGHTS = EngineWeights(
    kind="one GGUF file",
    form=WeightsForm.FILE,
    other_suffixes=(".safetensors", ".pt", ".pth", ".onnx", ".ckpt", ".zip", ".tar"),
    unreadable=unreadable,
    check=check_weights,
)
