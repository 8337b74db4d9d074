"""How a grant of KV bytes becomes slots and context, and how a system prompt enters the chat template."""

from typing import Any

import jinja2
import pytest

from glowplug.engines.gguf import GgufFacts

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
