"""How one server gets its arguments, and what it says when it cannot serve."""

import json
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from glowplug_vllm import plugin, rundir, server


def spec(**changes: Any) -> dict[str, Any]:
    return {"argv": ["--port", "0"], "launched_at": 1.0, "wait_s": 5.0, "system_prompt": "Be brief.", **changes}


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


@pytest.fixture(autouse=True)
def _no_start_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "START", None)
    monkeypatch.setattr("sys.argv", ["python"])
    monkeypatch.setenv("VLLM_PLUGINS", "")


def test_the_template_is_a_file_with_the_system_prompt(weights: Path, tmp_path: Path) -> None:
    argv = server.arguments(spec(), weights, tmp_path)
    assert argv[:4] == ["serve", str(weights), "--port", "0"]
    assert argv[4:6] == ["--chat-template", str(tmp_path / "chat_template.jinja")]
    assert argv[6:] == ["--chat-template-content-format", "string"]
    assert "Be brief." in (tmp_path / "chat_template.jinja").read_text()


def test_a_template_of_the_owner_is_left_alone(weights: Path, tmp_path: Path) -> None:
    argv = server.arguments(spec(argv=["--chat-template", "mine"]), weights, tmp_path)
    assert argv == ["serve", str(weights), "--chat-template", "mine"]


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


def test_run_serves_the_weights_of_go(weights: Path, tmp_path: Path) -> None:
    rundir.write(tmp_path, rundir.SPEC, spec())
    rundir.write(tmp_path, rundir.GO, {"path": str(weights)})
    seen: list[Any] = []
    assert server.run(tmp_path, serving(seen)) == 0
    assert seen[0].argv[1] == str(weights)
    assert plugin.START is not None and plugin.START.launched_at == 1.0


@pytest.mark.parametrize(
    ("error", "status"), [(SystemExit(3), 3), (SystemExit("why"), 1), (SystemExit(), 0), (KeyboardInterrupt(), 130)]
)
def test_an_end_keeps_its_status(weights: Path, tmp_path: Path, error: BaseException, status: int) -> None:
    rundir.write(tmp_path, rundir.SPEC, spec())
    rundir.write(tmp_path, rundir.GO, {"path": str(weights)})
    assert server.run(tmp_path, serving([], error)) == status


def test_a_failure_is_told_in_the_run_directory(weights: Path, tmp_path: Path) -> None:
    rundir.write(tmp_path, rundir.SPEC, spec())
    rundir.write(tmp_path, rundir.GO, {"path": str(weights)})
    assert server.run(tmp_path, serving([], ValueError("no such dtype"))) == 1
    assert json.loads((tmp_path / rundir.FAILED).read_text()) == {"message": "ValueError: no such dtype"}


def test_weights_that_never_come_are_a_failure(tmp_path: Path) -> None:
    rundir.write(tmp_path, rundir.SPEC, spec(wait_s=0.0))
    assert server.run(tmp_path, serving([])) == 1
    assert "TimeoutError" in rundir.read(tmp_path, rundir.FAILED)["message"]


def create_engine_config(error: Exception) -> None:
    """Fails where vLLM's function of this name fails."""
    raise error


@pytest.mark.parametrize(
    ("fail", "code"),
    [
        (
            lambda: create_engine_config(ValueError("max_model_len is greater than the derived one")),
            "engine_misconfigured",
        ),
        (lambda: create_engine_config(RuntimeError("no device")), None),
    ],
)
def test_what_the_next_start_would_repeat_has_a_code(
    weights: Path, tmp_path: Path, fail: Callable[[], None], code: str | None
) -> None:
    rundir.write(tmp_path, rundir.SPEC, spec())
    rundir.write(tmp_path, rundir.GO, {"path": str(weights)})
    assert server.run(tmp_path, server.Serve(lambda argv: Namespace(), lambda args: fail())) == 1
    assert rundir.read(tmp_path, rundir.FAILED).get("code") == code


def test_a_refused_argument_and_broken_weights_have_their_codes(weights: Path, tmp_path: Path) -> None:
    rundir.write(tmp_path, rundir.SPEC, spec())
    rundir.write(tmp_path, rundir.GO, {"path": str(weights)})

    def refuse(argv: Sequence[str]) -> Namespace:
        raise server.BadArguments("unrecognized arguments: --n-thread")

    assert server.run(tmp_path, server.Serve(refuse, lambda args: None)) == 1
    assert rundir.read(tmp_path, rundir.FAILED)["code"] == "engine_misconfigured"
    (weights / "model.safetensors").write_bytes(b"x")
    assert server.run(tmp_path, serving([])) == 1
    assert rundir.read(tmp_path, rundir.FAILED)["code"] == "weights_corrupt"
