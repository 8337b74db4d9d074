"""One server's arguments, chat template, and errors at start."""

import json
import struct
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import pytest

from glowplug_vllm import plugin, rendezvous, server

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
USER = {"role": "user", "content": "hi"}
CALLS = ["--exclude-tools-when-tool-choice-none", "--enable-auto-tool-choice", "--tool-call-parser"]


def spec(**changes: Any) -> dict[str, Any]:
    return {"argv": ["--port", "0"], "launched_at": 1.0, "wait_s": 5.0, "system_prompt": "Be brief.", **changes}


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


@pytest.fixture
def run_dir(weights: Path, tmp_path: Path) -> Path:
    rendezvous.write(tmp_path, rendezvous.SPEC, spec())
    rendezvous.write(tmp_path, rendezvous.GO, {"path": str(weights)})
    return tmp_path


@pytest.fixture(autouse=True)
def _no_start_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "START", None)
    monkeypatch.setattr("sys.argv", ["python"])
    monkeypatch.setenv("VLLM_PLUGINS", "")


def test_the_template_is_a_file_with_the_system_prompt(weights: Path, tmp_path: Path) -> None:
    argv = server.arguments(spec(), weights, tmp_path)
    assert argv[:4] == ["serve", str(weights), "--port", "0"]
    assert argv[4:6] == ["--chat-template", str(tmp_path / "chat_template.jinja")]
    assert argv[6:] == [*CALLS, "hermes", "--chat-template-content-format", "string"]
    assert "Be brief." in (tmp_path / "chat_template.jinja").read_text()


@pytest.mark.parametrize("as_file", [False, True])
def test_a_template_of_the_owner_replaces_the_models_and_has_the_system_prompt_too(
    weights: Path, tmp_path: Path, as_file: bool
) -> None:
    given, path = "{{ messages }}{{ tools }}", tmp_path / "mine.jinja"
    path.write_text(given)
    argv = server.arguments(spec(argv=["--chat-template", str(path) if as_file else given]), weights, tmp_path)
    assert argv[4:6] == ["--chat-template", str(tmp_path / "chat_template.jinja")]
    made = (tmp_path / "chat_template.jinja").read_text()
    assert made.endswith(given) and "Be brief." in made


@pytest.mark.parametrize(("template", "is_told"), [("{{ messages }}", True), ("{{ tools }}", False)])
def test_a_template_without_tools_is_told_of_them(weights: Path, tmp_path: Path, template: str, is_told: bool) -> None:
    (weights / "chat_template.jinja").write_text(template)
    server.arguments(spec(with_tools="TOLD"), weights, tmp_path)
    assert ("TOLD" in (tmp_path / "chat_template.jinja").read_text()) is is_told


def test_a_template_of_the_owner_that_is_not_there_is_a_bad_argument(weights: Path, tmp_path: Path) -> None:
    with pytest.raises(server.BadArguments, match="gone"):
        server.arguments(spec(argv=["--chat-template", str(tmp_path / "gone")]), weights, tmp_path)


def test_a_model_without_a_template_gets_none(tmp_path: Path) -> None:
    assert server.arguments(spec(), tmp_path, tmp_path) == ["serve", str(tmp_path), "--port", "0"]


def test_naming_our_endpoint_keeps_what_the_owner_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "lora")
    server.allow_our_endpoint()
    server.allow_our_endpoint()
    assert server.os.environ["VLLM_PLUGINS"] == "lora,glowplug"


def serving(seen: list[Any], error: BaseException | None = None) -> server.Serve:
    def run(args: Any) -> None:
        seen.append(args)
        if error is not None:
            raise error

    def parse(argv: Sequence[str]) -> Namespace:
        return Namespace(argv=list(argv))

    return server.Serve(parse, run)


def test_run_serves_the_weights_of_go(weights: Path, run_dir: Path) -> None:
    seen: list[Any] = []
    assert server.run(run_dir, serving(seen)) == 0
    assert seen[0].argv[1] == str(weights)
    assert plugin.START is not None and plugin.START.launched_at == 1.0


@pytest.mark.parametrize(
    ("error", "status"), [(SystemExit(3), 3), (SystemExit("why"), 1), (SystemExit(), 0), (KeyboardInterrupt(), 130)]
)
def test_an_end_keeps_its_status(run_dir: Path, error: BaseException, status: int) -> None:
    assert server.run(run_dir, serving([], error)) == status


def test_a_failure_is_told_in_the_run_directory(run_dir: Path) -> None:
    assert server.run(run_dir, serving([], ValueError("no such dtype"))) == 1
    assert json.loads((run_dir / rendezvous.FAILED).read_text()) == {"message": "ValueError: no such dtype"}


def test_weights_that_never_come_are_a_failure(tmp_path: Path) -> None:
    rendezvous.write(tmp_path, rendezvous.SPEC, spec(wait_s=0.0))
    assert server.run(tmp_path, serving([])) == 1
    assert "TimeoutError" in rendezvous.wait(tmp_path, rendezvous.FAILED, 0.0)["message"]


def create_engine_config(error: Exception) -> None:
    """Stands in for vLLM's function."""
    raise error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("max_model_len is greater than the derived one"), "engine_misconfigured"),
        (RuntimeError("no device"), None),
    ],
)
def test_what_the_next_start_would_repeat_has_a_code(run_dir: Path, error: Exception, code: str | None) -> None:
    assert server.run(run_dir, server.Serve(lambda argv: Namespace(), lambda args: create_engine_config(error))) == 1
    assert rendezvous.wait(run_dir, rendezvous.FAILED, 0.0).get("code") == code


def test_a_refused_argument_and_broken_weights_have_their_codes(weights: Path, run_dir: Path) -> None:
    def refuse(argv: Sequence[str]) -> Namespace:
        raise server.BadArguments("unrecognized arguments: --n-thread")

    assert server.run(run_dir, server.Serve(refuse, lambda args: None)) == 1
    assert rendezvous.wait(run_dir, rendezvous.FAILED, 0.0)["code"] == "engine_misconfigured"
    (weights / "model.safetensors").write_bytes(b"x")
    assert server.run(run_dir, serving([])) == 1
    assert rendezvous.wait(run_dir, rendezvous.FAILED, 0.0)["code"] == "weights_corrupt"


def render(template: str, messages: list[dict[str, str]]) -> str:
    return jinja2.Environment().from_string(template).render(messages=messages)


@pytest.mark.parametrize(
    "prompt",
    ["You are Ada.", 'Say "{{ x }}" and %} and {% if', "two\nlines\tand \\ back", "snow ☃ and 😀", "it's"],
)
def test_the_prompt_is_rendered_as_it_was_written(prompt: str) -> None:
    assert render(server.with_system_prompt(TEMPLATE, prompt), [USER]) == f"<system>{prompt}<user>hi"


def test_a_system_message_of_the_client_wins() -> None:
    own = {"role": "system", "content": "mine"}
    assert render(server.with_system_prompt(TEMPLATE, "default"), [own, USER]) == "<system>mine<user>hi"


def test_no_prompt_leaves_the_template_untouched() -> None:
    assert server.with_system_prompt(TEMPLATE, "") == TEMPLATE


def test_a_template_file_goes_before_the_one_in_the_tokenizer_config(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "from config"}))
    assert server.read_template(tmp_path) == "from config"
    (tmp_path / "chat_template.jinja").write_text("from file")
    assert server.read_template(tmp_path) == "from file"


NAMED = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]


@pytest.mark.parametrize(
    ("text", "template"),
    [("{", ""), ("[]", ""), ('{"chat_template": 5}', ""), (json.dumps({"chat_template": NAMED}), "plain")],
)
def test_of_several_named_templates_the_default_is_taken_and_what_is_none_is_left(
    tmp_path: Path, text: str, template: str
) -> None:
    assert server.read_template(tmp_path) == ""
    (tmp_path / "tokenizer_config.json").write_text(text)
    assert server.read_template(tmp_path) == template


def test_a_model_that_sees_is_not_text_only(tmp_path: Path) -> None:
    assert server.is_text_only(tmp_path)
    (tmp_path / "config.json").write_text('{"vision_config": {}}')
    assert not server.is_text_only(tmp_path)


def image(num_bytes: int = 8) -> bytes:
    tensor = {"dtype": "F32", "shape": [2], "data_offsets": [0, num_bytes]}
    header = json.dumps({"__metadata__": {"format": "pt"}, "w": tensor}).encode()
    return struct.pack("<Q", len(header)) + header + b"\0" * num_bytes


def test_whole_files_and_other_files_pass(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(image())
    (tmp_path / "config.json").write_text("{")
    assert server.check(tmp_path) is None


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (image()[:-1], "has .* bytes, its header promises"),
        (image() + b"x", "has .* bytes, its header promises"),
        (b"", "is not a safetensors file"),
        (b"\x08" + b"\0" * 7 + b"not json", "is not a safetensors file"),
        (b"\xff" * 16, "a header of"),
        (struct.pack("<Q", 2) + b"[]", "is not a safetensors file"),
        (struct.pack("<Q", 7) + b'{"w":5}', "is not a safetensors file"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, raw: bytes, why: str) -> None:
    (tmp_path / "b.safetensors").write_bytes(raw)
    with pytest.raises(server.BrokenWeights, match=f"b.safetensors.*{why}|b.safetensors {why}"):
        server.check(tmp_path)
