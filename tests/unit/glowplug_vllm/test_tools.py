"""How vLLM is told to read a model's calls."""

import pytest

from glowplug_vllm import tools


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        ("{{ messages }}", "hermes"),
        ('<tool_call>\n{"name": <function-name>}', "hermes"),
        ("<tool_call>\n<function=f>", "qwen3_coder"),
        ("[TOOL_CALLS]", "mistral"),
        ("Environment: ipython", "llama3_json"),
    ],
)
def test_a_models_calls_are_read_in_its_templates_form(template: str, parser: str) -> None:
    assert tools.argv_of(template, ["--port", "0"])[-2:] == ["--tool-call-parser", parser]


@pytest.mark.parametrize("flag", ["--tool-call-parser", "--no-enable-auto-tool-choice"])
def test_the_owner_may_choose(flag: str) -> None:
    assert tools.argv_of("{{ messages }}", [flag]) == []
