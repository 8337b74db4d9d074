"""How a grant of KV bytes becomes slots and context, and how a system prompt enters the chat template."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import jinja2
import pytest

from glowplug.engines import rendezvous
from glowplug.engines.gguf import GgufFacts
from glowplug.engines.samples import sample_weights_path

host = pytest.importorskip("glowplug.engines.llamacpp_host", exc_type=ImportError)

FACTS = GgufFacts(architecture="llama", context_tokens=8192, kv_bytes_per_token=1000, chat_template="")


def a_spec(**changes: Any) -> dict[str, Any]:
    return {"max_concurrency": 8, "context_tokens": 2048, "kv_bytes": 0, **changes}


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (a_spec(), (8, 2048)),
        (a_spec(kv_bytes=8 * 2048 * 1000), (8, 2048)),
        (a_spec(kv_bytes=3 * 2048 * 1000), (3, 2048)),
        (a_spec(kv_bytes=1024 * 1000), (1, 1024)),
        (a_spec(kv_bytes=1), (1, 256)),
        (a_spec(context_tokens=100_000), (8, 8192)),
    ],
)
def test_fewer_slots_first_a_shorter_context_last(spec: dict[str, Any], expected: tuple[int, int]) -> None:
    assert host.plan_context(spec, FACTS) == expected


@pytest.mark.parametrize("prompt", ["Be brief.", 'You are "Ada".\n{{ not code }} {% nor %} \\this', "Fränzi 🦙"])
def test_the_system_prompt_is_text_and_comes_only_without_one(prompt: str) -> None:
    template = jinja2.Template(
        host.template_with_system("{% for m in messages %}<{{ m.content }}>{% endfor %}", prompt)
    )
    user = {"role": "user", "content": "hi"}
    assert template.render(messages=[user]) == f"<{prompt}><hi>"
    assert template.render(messages=[{"role": "system", "content": "own"}, user]) == "<own><hi>"


def failed_start(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    """What the process of a model with the sample weights says when it cannot start."""
    weights = sample_weights_path()
    spec = {
        "weights_bytes": weights.stat().st_size,
        "system_prompt": "",
        "model": "m",
        "gpu_kind": "host",
        "wait_s": 5.0,
    }
    rendezvous.write(tmp_path, rendezvous.SPEC, a_spec(**spec) | {"host": "127.0.0.1", "port": 0, **changes})
    rendezvous.write(tmp_path, rendezvous.GO, {"path": str(weights)})
    ran = subprocess.run([sys.executable, "-m", host.__name__, str(tmp_path)], check=False, timeout=60)
    assert ran.returncode == 1
    return rendezvous.read(tmp_path, rendezvous.FAILED) or {}


@pytest.mark.llamacpp
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"engine_args": {"embeddings": True, "pooling": "foo"}}, "xllamacpp refuses the engine_args: KeyError"),
        ({"engine_args": {"n_ctx": 1 << 40}}, "xllamacpp refuses the engine_args"),
        (
            {"engine_args": {"n_ctx": 50_000}, "kv_bytes": 1 << 20},
            "engine_args.n_ctx cannot be 50000: the KV cache would",
        ),
        ({"engine_args": {}, "weights_bytes": 5}, "weights_bytes: 5 is less than"),
    ],
)
def test_a_wrong_argument_that_only_the_process_sees_is_a_fault_of_the_model(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    failed = failed_start(tmp_path, **changes)
    assert failed["code"] == "engine_misconfigured" and failed["message"].startswith(reason)
