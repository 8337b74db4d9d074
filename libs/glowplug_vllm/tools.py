"""How a model writes its calls, by its chat template: vLLM refuses tools unless told."""

from collections.abc import Sequence

# By marks in the template, the first found; hermes' calls are JSON between <tool_call> tags.
_PARSERS = (
    ("[TOOL_CALLS]", "mistral"),
    ("<｜tool▁calls▁begin｜>", "deepseek_v3"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<minimax:tool_call>", "minimax_m2"),
    ("<|tool_call_start|>", "lfm2"),
    ("<|tool_call>", "gemma4"),
    ("<arg_key>", "glm45"),
    ("<function=", "qwen3_coder"),
    ("<|channel|>", "openai"),
    ("Environment: ipython", "llama3_json"),
)
_HERMES = "hermes"
_READ_CALLS = ("--exclude-tools-when-tool-choice-none", "--enable-auto-tool-choice", "--tool-call-parser")


def argv_of(template: str, argv: Sequence[str]) -> list[str]:
    """Return the flags by which vLLM reads such a template's calls; none if the owner chose."""
    if any(word.startswith(("--tool-call-parser", "--enable-auto", "--no-enable-auto")) for word in argv):
        return []
    parser = next((name for mark, name in _PARSERS if mark in template), _HERMES)
    return [*_READ_CALLS, parser]
