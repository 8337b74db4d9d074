"""The template of a model directory, with a default system message that survives Jinja as it was written."""

import json
from pathlib import Path

import jinja2
import pytest

from glowplug_vllm import chat_template

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
USER = {"role": "user", "content": "hi"}


def render(template: str, messages: list[dict[str, str]]) -> str:
    return jinja2.Environment().from_string(template).render(messages=messages)


@pytest.mark.parametrize(
    "prompt",
    ["You are Ada.", 'Say "{{ x }}" and %} and {% if', "two\nlines\tand \\ back", "snow ☃ and 😀", "it's"],
)
def test_the_prompt_is_rendered_as_it_was_written(prompt: str) -> None:
    assert render(chat_template.with_system_prompt(TEMPLATE, prompt), [USER]) == f"<system>{prompt}<user>hi"


def test_a_system_message_of_the_client_wins() -> None:
    own = {"role": "system", "content": "mine"}
    assert render(chat_template.with_system_prompt(TEMPLATE, "default"), [own, USER]) == "<system>mine<user>hi"


def test_no_prompt_leaves_the_template_untouched() -> None:
    assert chat_template.with_system_prompt(TEMPLATE, "") == TEMPLATE


def test_a_template_file_goes_before_the_one_in_the_tokenizer_config(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "from config"}))
    assert chat_template.read_template(tmp_path) == "from config"
    (tmp_path / "chat_template.jinja").write_text("from file")
    assert chat_template.read_template(tmp_path) == "from file"


def test_of_several_named_templates_the_default_is_taken(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert chat_template.read_template(tmp_path) == "plain"


@pytest.mark.parametrize("text", [None, "{", "[]", '{"chat_template": 5}'])
def test_a_model_without_a_readable_template_has_none(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "tokenizer_config.json").write_text(text)
    assert chat_template.read_template(tmp_path) == ""


def test_a_model_that_sees_is_not_text_only(tmp_path: Path) -> None:
    assert chat_template.is_text_only(tmp_path)
    (tmp_path / "config.json").write_text('{"vision_config": {}}')
    assert not chat_template.is_text_only(tmp_path)
