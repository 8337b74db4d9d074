"""What a llama.cpp process is started with."""

from pathlib import Path

import pytest

from glowplug.domain.model import Model, WeightsRef
from glowplug.engines.llamacpp import LlamacppDriver
from glowplug.engines.port import LaunchRequest

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
