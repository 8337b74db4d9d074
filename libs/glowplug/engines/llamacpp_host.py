"""The llama.cpp engine process: import, wait for the weights, load them, warm up, serve until SIGTERM.

    python -m glowplug.engines.llamacpp_host RUN_DIR

Weights may still arrive: llama.cpp maps their file and reads no tensor before the first token, so its server is built
once the header has landed, and warmed up after the last byte. Where it would repack them for this CPU or copy them to a
GPU, it first waits for all.
"""

import json
import os
import platform
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xllamacpp

from glowplug.domain.errors import ChecksumMismatch, EngineMisconfigured
from glowplug.domain.gguf import InvalidGguf
from glowplug.engines import control, openmp, rendezvous
from glowplug.engines.apis import TOOL_CHOICE
from glowplug.engines.gguf import GgufFacts, read_facts
from glowplug.engines.landing import Landing
from glowplug.engines.llamacpp_args import (
    CACHE_TYPES,
    as_asked,
    check_bytes,
    check_context,
    files_beside,
    padded,
    plan_context,
)
from glowplug.engines.llamacpp_lora import PLACEHOLDER, Adapters
from glowplug.engines.llamacpp_sleep import SLOTS, EngineServer
from glowplug.engines.template_tools import with_tools

_BATCH_TOKENS = 512
_CPU_BATCH_TOKENS = 64  # a batch delays every other request
_HEADER_STEP_BYTES = 1 << 20
_X86 = ("x86_64", "AMD64", "i686")
_PLAIN = frozenset({0, 1, 30})  # GGML's F32, F16, BF16
_UNPACKED_ON_X86 = frozenset({3, 6, 7, 8})  # Q4_1, Q5_0, Q5_1, Q8_0


def template_with_system(template: str, system_prompt: str) -> str:
    """Return the chat template with a default system message. Request bodies stay untouched."""
    prompt = json.dumps(system_prompt, ensure_ascii=False)
    head = (
        "{%- if messages and messages[0]['role'] != 'system' -%}"
        f"{{%- set messages = [{{'role': 'system', 'content': {prompt}}}] + messages -%}}"
        "{%- endif -%}"
    )
    return head + (template or _CHATML)


_CHATML = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)


def parameters(spec: dict[str, Any], weights: Path, facts: GgufFacts) -> Any:
    args = spec["engine_args"]
    drafting = read_facts(Path(args["draft"])) if args.get("draft") else None
    asked = as_asked(facts, args, drafting)
    check_context(args, spec["kv_bytes"], asked)
    slots, tokens = plan_context(spec["max_concurrency"], spec["context_tokens"], spec["kv_bytes"], asked)
    p = xllamacpp.CommonParams()
    p.model.path = str(weights)
    p.model_alias = {spec["model"]}
    p.hostnames, p.port = [spec["host"]], spec["port"]
    if api_key := os.environ.get(rendezvous.API_KEY, ""):
        p.api_keys = [api_key]
    p.cors_origins = ""
    p.ui, p.endpoint_slots, p.endpoint_metrics = False, False, True  # /slots would show prompts
    p.load_mode = xllamacpp.llama_load_mode.LLAMA_LOAD_MODE_MMAP  # share the region in host memory, do not copy it
    p.n_parallel, p.n_ctx = slots, int(args.get("n_ctx", slots * tokens))
    p.n_gpu_layers = int(args.get("n_gpu_layers", -1 if spec["gpu_kind"] == "cuda" else 0))
    batch = _BATCH_TOKENS if p.n_gpu_layers else _CPU_BATCH_TOKENS
    if args.get("embeddings"):  # a text is one batch, up to the context
        batch = max(_BATCH_TOKENS, p.n_ctx // slots)
    p.n_batch, p.n_ubatch = int(args.get("n_batch", batch)), int(args.get("n_ubatch", batch))
    if args.get("embeddings"):  # else llama.cpp aborts: it pools over batches divided among its slots
        p.n_batch, p.n_ubatch = (-(-size // slots) * slots for size in (p.n_batch, p.n_ubatch))
    p.fit_params = False  # the ledger decides, not the memory free at the moment
    p.cache_ram_mib = 0  # no prompt cache outside the grant
    p.warmup = False  # EngineServer.warm_up does it, over HTTP
    p.cpuparams.n_threads = int(args.get("n_threads", 0)) or min(os.cpu_count() or 1, 8)
    p.cpuparams.poll = 0  # idle threads sleep: engines share these cores
    if args.get("embeddings"):
        pooling = str(args.get("pooling", "mean")).upper()
        p.embedding = True
        p.pooling_type = xllamacpp.llama_pooling_type[f"LLAMA_POOLING_TYPE_{pooling}"]
    template = with_tools(str(args.get("chat_template", "")) or facts.chat_template)
    if spec["system_prompt"]:
        template = template_with_system(template, spec["system_prompt"])
    if template:
        p.chat_template = template
    _attention(p, args, facts)
    if drafting is not None:
        p.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        p.speculative.draft.mparams.path = str(args["draft"])
        p.speculative.draft.n_gpu_layers = p.n_gpu_layers
        p.speculative.draft.n_max = int(args.get("draft_max", p.speculative.draft.n_max))
    if projector := args.get("mmproj"):
        p.mmproj.path = str(projector)
        p.mmproj_use_gpu = p.n_gpu_layers != 0
    print(f"context: {slots} slots of {p.n_ctx // slots} tokens, {p.cpuparams.n_threads} threads", flush=True)
    return p


def _attention(p: Any, args: Mapping[str, Any], facts: GgufFacts) -> None:
    p.cache_type_k, p.cache_type_v = (
        xllamacpp.ggml_type(CACHE_TYPES[args.get(name, "f16")]) for name in ("cache_type_k", "cache_type_v")
    )
    flash = {"auto": "AUTO", "on": "ENABLED", "off": "DISABLED"}[args.get("flash_attn", "auto")]
    p.flash_attn_type = xllamacpp.llama_flash_attn_type[f"LLAMA_FLASH_ATTN_TYPE_{flash}"]
    if scaling := args.get("rope_scaling"):
        p.rope_scaling_type = xllamacpp.llama_rope_scaling_type[f"LLAMA_ROPE_SCALING_TYPE_{scaling.upper()}"]
        p.rope_freq_scale = 1 / float(args.get("rope_scale", 1))
        p.yarn_orig_ctx = facts.context_tokens
    if "rope_freq_base" in args:
        p.rope_freq_base = float(args["rope_freq_base"])


def holds(props: dict[str, Any]) -> dict[str, Any]:
    """Actual slots, KV cache and lacking features, from llama.cpp's /props."""
    num_slots = int(props["total_slots"])
    caps = props.get("chat_template_caps", {})
    lacks = [] if caps.get("supports_tools") or caps.get("supports_tool_calls") else [TOOL_CHOICE]
    kv_tokens = num_slots * int(props["default_generation_settings"]["n_ctx"])
    return {"num_slots": num_slots, "kv_tokens": kv_tokens, "lacks": lacks}


def bring_up(run_dir: Path, spec: dict[str, Any]) -> EngineServer:
    """Load and report READY. The caller must keep the returned server alive."""
    imported_at = time.time()
    weights = Path(rendezvous.wait(run_dir, rendezvous.GO, spec["wait_s"])["path"])
    args, landing = spec["engine_args"], Landing.of(weights)
    check_bytes(args, int(spec["weights_bytes"]), weights.stat().st_size + files_beside(args))
    load_at = time.time()
    wanted, facts = _wanted(spec, facts_of(weights, landing, spec["wait_s"]), weights)
    if landing is not None:
        if wanted.n_gpu_layers == 0 and stay_mapped(facts.tensor_types):
            wanted.no_extra_bufts = True  # no repacking, even if this build could
        else:
            landing.wait_beginning(landing.num_bytes, spec["wait_s"])
            landing = None
    slots_dir = run_dir / SLOTS
    slots_dir.mkdir(mode=0o500, exist_ok=True)
    # Enables POST /slots, to erase a slot's cache, and to save and restore one.
    wanted.slot_save_path = f"{slots_dir}/"

    adapters = None
    if slots := int(spec["adapter_slots"]):
        adapters = Adapters(Path(xllamacpp.xllamacpp.__file__), slots, run_dir / PLACEHOLDER, facts)
        wanted.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(str(run_dir / PLACEHOLDER), 0.0)]
        wanted.lora_init_without_apply = True
        wanted.endpoint_slots = True

    openmp.share_cores(wanted.cpuparams.n_threads)

    def build(port: int) -> Any:
        wanted.port = port or spec["port"]
        return xllamacpp.Server(wanted)

    kv_bytes = wanted.n_parallel * padded(wanted.n_ctx // wanted.n_parallel) * as_asked(facts, args).kv_bytes_per_token
    server = EngineServer(build, kv_bytes, weights, wanted.n_gpu_layers == 0, run_dir, facts.tensors, adapters)
    if landing is not None:
        landing.wait_beginning(landing.num_bytes, spec["wait_s"])
    warmup_at = time.time()
    held = {**holds(server.warm_up()), "shared_bytes": server.shared_bytes(), "step_s": server.step_s}
    phases = [
        ["launch", spec["launched_at"], imported_at],
        ["load", load_at, warmup_at],
        ["warmup", warmup_at, time.time()],
    ]
    control.serve(run_dir, server.answer)
    rendezvous.write(run_dir, rendezvous.READY, {"port": server.port, "phases": phases, **held})
    return server


def facts_of(weights: Path, landing: Landing | None, timeout_s: float) -> GgufFacts:
    """Read the header as soon as it has landed. Raises InvalidGguf, WeightsDropped, TimeoutError."""
    if landing is None:
        return read_facts(weights)
    wanted = min(_HEADER_STEP_BYTES, landing.num_bytes)
    while True:
        landing.wait_beginning(wanted, timeout_s)
        try:
            facts = read_facts(weights)
            if facts.header_bytes <= wanted:
                return facts
            wanted = min(facts.header_bytes, landing.num_bytes)
        except InvalidGguf:
            if wanted >= landing.num_bytes:
                raise
            wanted = min(wanted + _HEADER_STEP_BYTES, landing.num_bytes)


def stay_mapped(tensor_types: frozenset[int]) -> bool:
    """Return whether llama.cpp keeps these types' layout on this CPU, and so computes on the mapped file."""
    is_arm, has_amx = platform.machine() not in _X86, "AMX_INT8 = 1" in xllamacpp.get_system_info()
    return tensor_types <= (_PLAIN if is_arm or has_amx else _PLAIN | _UNPACKED_ON_X86)


def _wanted(spec: dict[str, Any], facts: GgufFacts, weights: Path) -> tuple[Any, GgufFacts]:
    """Attribute any refusal by xllamacpp to the arguments."""
    try:
        return parameters(spec, weights, facts), facts
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        raise EngineMisconfigured(f"xllamacpp refuses the engine_args: {type(error).__name__}: {error}") from error


def main() -> int:
    run_dir, spec = rendezvous.of_this_process()
    try:
        server = bring_up(run_dir, spec)
    except InvalidGguf as error:  # another start would read the same bytes
        failed = {"message": f"the weights cannot be served: {error}", "code": ChecksumMismatch.code}
        rendezvous.write(run_dir, rendezvous.FAILED, failed)
        return 1
    except EngineMisconfigured as error:
        rendezvous.write(run_dir, rendezvous.FAILED, {"message": error.message, "code": error.code})
        return 1
    except Exception as error:  # noqa: BLE001 - whatever it is, the driver reads the reason and the process ends
        rendezvous.write(run_dir, rendezvous.FAILED, {"message": f"{type(error).__name__}: {error}"})
        return 1
    threading.Event().wait()
    del server
    return 0


if __name__ == "__main__":
    sys.exit(main())
