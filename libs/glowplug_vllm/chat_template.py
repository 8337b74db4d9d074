"""The chat template of a model directory, with a default system message in front when the owner asks for one."""

import json
from pathlib import Path
from typing import Any


def read_template(model_dir: Path) -> str:
    """The Jinja text of a HF directory: chat_template.jinja, else the field of tokenizer_config.json; '' for none."""
    try:
        return (model_dir / "chat_template.jinja").read_text(encoding="utf-8")
    except FileNotFoundError:
        template = _read_object(model_dir / "tokenizer_config.json").get("chat_template", "")
    if isinstance(template, list):  # several named templates: the one called default
        template = next((t.get("template", "") for t in template if t.get("name") == "default"), "")
    return template if isinstance(template, str) else ""


def is_text_only(model_dir: Path) -> bool:
    """False when config.json names another modality: such a model takes message content as a list of parts."""
    config = _read_object(model_dir / "config.json")
    return not any(key in config for key in ("vision_config", "audio_config", "video_config"))


def with_system_prompt(template: str, prompt: str) -> str:
    """The template that puts `prompt` first when the client sent no system message of its own."""
    if not prompt:
        return template
    message = '{"role": "system", "content": ' + json.dumps(prompt, ensure_ascii=False) + "}"
    return (
        "{%- if not messages or messages[0]['role'] != 'system' -%}"
        "{%- set messages = [" + message + "] + messages -%}"
        "{%- endif -%}" + template
    )


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
