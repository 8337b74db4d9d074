"""What a llama.cpp process is started with."""

from pathlib import Path

import pytest

from glowplug.controllers.router.failures import HOPELESS_CODES
from glowplug.domain.errors import EngineFailed
from glowplug.domain.model import Model, WeightsRef
from glowplug.engines import rendezvous
from glowplug.engines.llamacpp import LlamacppDriver
from glowplug.engines.port import EngineHandle, LaunchRequest

REQUEST = LaunchRequest(
    instance_id="i-1",
    model=Model(key="m", name="m", engine="llamacpp", weights=WeightsRef(uri="/m.gguf"), weights_bytes=1, kv_bytes=1),
    num_bytes=1,
    run_dir=Path("run"),
    log_path=Path("log"),
)


def test_waiting_threads_give_their_core_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert LlamacppDriver().environment(REQUEST)["OMP_WAIT_POLICY"] == "PASSIVE"


def test_what_the_operator_set_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert LlamacppDriver().environment(REQUEST)["OMP_WAIT_POLICY"] == "ACTIVE"


async def load_that_fails(tmp_path: Path, log: str) -> EngineFailed:
    """What the driver raises when its process has ended and left this log."""
    log_path = tmp_path / "log"
    log_path.write_text(log)
    rendezvous.write(tmp_path, rendezvous.FAILED, {"message": "RuntimeError: Failed to init server"})
    handle = EngineHandle(
        engine="llamacpp", instance_id="i", pid=0, pid_started_at=0.0, run_dir=str(tmp_path), log_path=str(log_path)
    )
    with pytest.raises(EngineFailed) as found:
        await LlamacppDriver().load(handle, tmp_path / "w.gguf")
    return found.value


async def test_weights_that_llamacpp_does_not_know_are_hopeless_with_its_reason(tmp_path: Path) -> None:
    log = "I loading\nE llama_model_load: error loading model: unknown model architecture: 'foonet'\nE failed to load"
    error = await load_that_fails(tmp_path, log)
    assert error.message == "llama.cpp does not load these weights: unknown model architecture: 'foonet'"
    assert error.code in HOPELESS_CODES


@pytest.mark.parametrize("log", ["", "E llama_model_load: error loading model: unable to allocate CPU buffer"])
async def test_what_may_pass_is_tried_again(tmp_path: Path, log: str) -> None:
    error = await load_that_fails(tmp_path, log)
    assert error.code not in HOPELESS_CODES and "Failed to init server" in error.message
