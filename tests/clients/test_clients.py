"""Third-party clients, unmodified, on a fleet of llama.cpp: one script each.

In the long lane; about three minutes. `make clients-env` makes their environment; CLIENTS_PYTHON names another one.
docs/howto/clients.md lists passing versions.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from glowplug.engines.samples import sample_weights_path
from tests.fleet_runner import Fleet

HERE = Path(__file__).parent
PYTHON = Path(os.environ.get("CLIENTS_PYTHON", HERE.parent.parent / ".venv-clients" / "bin" / "python"))
pytestmark = [
    pytest.mark.fleet,
    pytest.mark.llamacpp,
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON.exists(), reason="the clients are not installed: make clients-env"),
]
TALKS = (HERE.parents[1] / "deploy/models/llamacpp/01-smol-chat.yaml").read_text().replace("smol-chat", "talks")
EMBEDS = """
name: embeds
engine: llamacpp
weights: sample:smollm2
kv_bytes: 140MiB
context_tokens: 2048
keep_alive_s: 60s
engine_args: {embeddings: true}
"""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    models = {"talks": TALKS, "embeds": EMBEDS}
    with Fleet.start(tmp_path_factory.mktemp("clients"), models, engine="llamacpp", nodes=2) as made:
        yield made


@pytest.mark.parametrize("script", sorted(HERE.glob("check_*.*")), ids=lambda path: path.stem.removeprefix("check_"))
def test_a_client_does_all_of_its_script(fleet: Fleet, script: Path, tmp_path: Path) -> None:
    program: str | Path = PYTHON
    if script.suffix == ".mjs":
        if shutil.which("node") is None or not (HERE / "node_modules").exists():
            pytest.skip("the clients for JavaScript are not installed: make clients-env, where npm is")
        program = "node"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HOME": f"{tmp_path}"}
    done = subprocess.run(
        [program, script, fleet.url("data"), "talks", "embeds", sample_weights_path().parent],
        env=env,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
