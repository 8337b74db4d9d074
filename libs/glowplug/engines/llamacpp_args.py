"""What llama.cpp takes and reads, as the driver declares it. The engine process checks by the same functions."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glowplug.domain.errors import EngineMisconfigured
from glowplug.domain.model import Model
from glowplug.domain.units import show_bytes
from glowplug.engines.declaration import EngineArguments, EngineWeights, WeightsForm, choice, flag, text, whole
from glowplug.engines.gguf import GgufFacts, InvalidGguf, read_facts

MAX_THREADS = 1024  # more than any machine has cores: a typing error, and each thread takes a stack
MAX_TEMPLATE_CHARS = 64 * 1024  # the longest templates published have 20,000; it travels in every row of its model
MAX_PATH_CHARS = 4096  # of Linux
POOLINGS = ("none", "mean", "cls", "last", "rank")


def _template(value: str) -> str | None:
    is_one = "{%" in value or "{{" in value
    return None if is_one else "this is not the text of a Jinja template; the name of one is not enough"


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
        "chat_template": text("the text of a Jinja template, instead of the file's own", MAX_TEMPLATE_CHARS, _template),
        "mmproj": text("the path of a projector's file on the node, for images", MAX_PATH_CHARS),
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


def projector_bytes(engine_args: Mapping[str, Any]) -> int:
    """Of the projector's file on this node; 0 without one. Raises EngineMisconfigured."""
    projector = engine_args.get("mmproj", "")
    if not projector:
        return 0
    if not Path(projector).is_file():
        raise EngineMisconfigured(f"engine_args.mmproj: there is no file {projector} here", param="engine_args.mmproj")
    return Path(projector).stat().st_size


def check_bytes(engine_args: Mapping[str, Any], weights_bytes: int, num_bytes: int) -> None:
    """The grant holds all of the files, unless only some layers go to the GPU. Raises EngineMisconfigured."""
    if num_bytes > weights_bytes and "n_gpu_layers" not in engine_args:
        text = f"weights_bytes: {weights_bytes} is less than the {num_bytes} bytes of the files, which are all loaded"
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
