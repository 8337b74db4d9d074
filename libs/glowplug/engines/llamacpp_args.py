"""llama.cpp's arguments and weights, as its driver declares them and its process checks them."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from glowplug.domain.errors import EngineMisconfigured
from glowplug.domain.gguf import InvalidGguf
from glowplug.domain.model import Model
from glowplug.domain.units import show_bytes
from glowplug.engines.declaration import EngineArguments, EngineWeights, WeightsForm, choice, flag, number, text, whole
from glowplug.engines.gguf import GgufFacts, bytes_as, read_facts

MAX_THREADS = 1024
MAX_TEMPLATE_CHARS = 64 * 1024  # the longest published have 20,000; every row of its model carries it
MAX_PATH_CHARS = 4096
_MIN_CONTEXT_TOKENS = _PADDING = 256
POOLINGS = ("none", "mean", "cls", "last", "rank")
CACHE_TYPES = {"f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q5_1": 7, "q5_0": 6, "q4_1": 3, "q4_0": 2}
FLASH = ("auto", "on", "off")
ROPE_SCALINGS = ("none", "linear", "yarn")
MAX_SCALE = 128


def _template(value: str) -> str | None:
    is_one = "{%" in value or "{{" in value
    return None if is_one else "this is not the text of a Jinja template; the name of one is not enough"


def _together(engine_args: Mapping[str, Any]) -> None:
    values = str(engine_args.get("cache_type_v", ""))
    if values.startswith("q") and engine_args.get("flash_attn") == "off":
        text = f"engine_args.cache_type_v cannot be {values} with flash_attn: off; leave it out, or turn it on"
        raise EngineMisconfigured(text, param="engine_args.cache_type_v")
    if "rope_scale" in engine_args and engine_args.get("rope_scaling", "none") == "none":
        text = "engine_args.rope_scale says how far, and rope_scaling how: set rope_scaling to linear or yarn"
        raise EngineMisconfigured(text, param="engine_args.rope_scaling")


ARGUMENTS = EngineArguments(
    engine="llamacpp",
    together=_together,
    known={
        "n_threads": whole("compute threads; 0 for the cores of the node, at most 8", most=MAX_THREADS),
        "n_ctx": whole("tokens of all slots together, instead of as many as kv_bytes holds", least=1),
        "n_batch": whole("prompt tokens of one call", least=1),
        "n_ubatch": whole("prompt tokens that are computed at once", least=1),
        "n_gpu_layers": whole("layers whose weights are on the GPU; -1 for all", least=-1),
        "embeddings": flag("answers /v1/embeddings"),
        "pooling": choice("how a text's embedding is made from those of its tokens", POOLINGS),
        "chat_template": text("the text of a Jinja template, instead of the file's own", MAX_TEMPLATE_CHARS, _template),
        "cache_type_k": choice("what the keys of the KV cache are kept as", tuple(CACHE_TYPES)),
        "cache_type_v": choice("what its values are kept as; below 16 bits it takes flash_attn", tuple(CACHE_TYPES)),
        "flash_attn": choice("attention without its whole matrix in memory", FLASH),
        "rope_scaling": choice("how positions beyond the trained context are made", ROPE_SCALINGS),
        "rope_scale": number("times the trained context that rope_scaling reaches", MAX_SCALE, above_zero=True),
        "rope_freq_base": number("the base of the positions' frequencies, instead of the file's", 1e9, above_zero=True),
        "draft": text("the path of a small model's file on the node, which drafts tokens", MAX_PATH_CHARS),
        "draft_max": whole("drafted tokens before the model checks them", least=1, most=64),
        "mmproj": text("the path of a projector's file on the node, for images", MAX_PATH_CHARS),
    },
)


def unreadable(path: Path) -> str:
    try:
        read_facts(path)
    except InvalidGguf as error:
        return str(error)
    return ""


def as_asked(facts: GgufFacts, engine_args: Mapping[str, Any], draft: GgufFacts | None = None) -> GgufFacts:
    """Apply these arguments: KV bytes per token by number types, plus a drafting model's, and the context of scaled
    positions."""
    kept = [str(engine_args.get(name, "f16")) for name in ("cache_type_k", "cache_type_v")]
    per_token = facts.kv_bytes_per_token
    if kept != ["f16", "f16"] and per_token:
        per_token = sum(bytes_as(CACHE_TYPES[kind], count) for kind, count in zip(kept, facts.kv_numbers, strict=True))
    if draft is not None:
        per_token += draft.kv_bytes_per_token
    context = int(facts.context_tokens * float(engine_args.get("rope_scale", 1)))
    return replace(facts, kv_bytes_per_token=per_token, context_tokens=context)


def plan_context(max_concurrency: int, context_tokens: int, kv_bytes: int, facts: GgufFacts) -> tuple[int, int]:
    """Return the (slots, tokens per slot) that fit the granted KV bytes: fewer slots first, a shorter context last.

    Other requests wait inside llama.cpp, so a small grant costs only latency.
    """
    slots, tokens = max_concurrency, context_tokens
    if facts.context_tokens:
        tokens = min(tokens, facts.context_tokens)
    if kv_bytes and facts.kv_bytes_per_token:
        fitting = kv_bytes // facts.kv_bytes_per_token
        slots = max(1, min(slots, fitting // padded(tokens)))
        if padded(tokens) > fitting // slots:
            tokens = max(_MIN_CONTEXT_TOKENS, fitting // slots // _PADDING * _PADDING)
    return slots, tokens


def padded(tokens: int) -> int:
    """Round up to llama.cpp's allocation per slot."""
    return -(-tokens // _PADDING) * _PADDING


def num_slots(model: Model, path: Path) -> int:
    """Raises OSError, InvalidGguf."""
    facts = as_asked(read_facts(path), model.engine_args)
    return plan_context(model.max_concurrency, model.context_tokens, model.kv_bytes, facts)[0]


def check_context(engine_args: Mapping[str, Any], kv_bytes: int, facts: GgufFacts) -> None:
    """Raises EngineMisconfigured where `n_ctx` exceeds the granted bytes."""
    tokens = int(engine_args.get("n_ctx", 0))
    need_bytes = tokens * facts.kv_bytes_per_token
    if kv_bytes and need_bytes > kv_bytes:
        most = kv_bytes // facts.kv_bytes_per_token
        text = (
            f"engine_args.n_ctx cannot be {tokens}: the KV cache would take {show_bytes(need_bytes)} and kv_bytes of "
            f"the model is {show_bytes(kv_bytes)}; allowed is a whole number up to {most}"
        )
        raise EngineMisconfigured(text, param="engine_args.n_ctx")


def files_beside(engine_args: Mapping[str, Any]) -> int:
    """Sum the projector's and drafting model's bytes. Raises EngineMisconfigured."""
    named = {name: engine_args[name] for name in ("mmproj", "draft") if engine_args.get(name)}
    for name, path in named.items():
        if not Path(path).is_file():
            raise EngineMisconfigured(f"engine_args.{name}: there is no file {path} here", param=f"engine_args.{name}")
    return sum(Path(path).stat().st_size for path in named.values())


def check_bytes(engine_args: Mapping[str, Any], weights_bytes: int, num_bytes: int) -> None:
    """Raises EngineMisconfigured where the files exceed the grant, unless only some layers go to the GPU."""
    if num_bytes > weights_bytes and "n_gpu_layers" not in engine_args:
        text = f"weights_bytes: {weights_bytes} is less than the {num_bytes} bytes of the files, which are all loaded"
        raise EngineMisconfigured(text, param="weights_bytes")


def check_weights(model: Model, path: Path) -> None:
    """Raises EngineMisconfigured, OSError."""
    check_bytes(model.engine_args, model.weights_bytes, path.stat().st_size)
    if "n_ctx" in model.engine_args:
        check_context(model.engine_args, model.kv_bytes, as_asked(read_facts(path), model.engine_args))


WEIGHTS = EngineWeights(
    kind="one GGUF file",
    form=WeightsForm.FILE,
    other_suffixes=(".safetensors", ".pt", ".pth", ".onnx", ".ckpt", ".zip", ".tar"),
    unreadable=unreadable,
    check=check_weights,
    num_slots=num_slots,
)
