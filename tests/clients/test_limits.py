"""Third-party clients read a fleet's refusals as their own provider's, and wait as told. Scripts as in test_clients.py,
on llama.cpp, since the emulated engine has no Messages API.

In the long lane; about two minutes.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.clients.test_clients import HERE, PYTHON, TALKS
from tests.fleet_runner import Fleet
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.fleet,
    pytest.mark.llamacpp,
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON.exists(), reason="the clients are not installed: make clients-env"),
]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    models = {"talks": TALKS}
    with Fleet.start(tmp_path_factory.mktemp("limits"), models, engine="llamacpp", nodes=1) as made:
        yield made


def a_key(fleet: Fleet, tenant: str, *options: str) -> str:
    assert fleet.cli("tenants", "put", tenant).returncode == 0
    made = fleet.cli("keys", "create", "--tenant", tenant, "--name", "k", *options)
    assert made.returncode == 0, made.stderr
    return made.stdout.strip()


def chats(fleet: Fleet, key: str) -> bool:
    body = {"model": "talks", "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]}
    url = fleet.url("data") + "/v1/chat/completions"
    return httpx.post(url, json=body, headers={"Authorization": f"Bearer {key}"}, timeout=200).status_code == 200


@pytest.mark.parametrize("script", sorted(HERE.glob("limits_*.py")), ids=lambda path: path.stem.removeprefix("limits_"))
def test_a_client_reads_refusals_as_its_providers(fleet: Fleet, script: Path, tmp_path: Path) -> None:
    name = script.stem.removeprefix("limits_")
    keys = {
        "quick": a_key(fleet, f"{name}-quick", "--requests-per-minute", "20"),
        "daily": a_key(fleet, f"{name}-daily", "--tokens-per-day", "40"),
        "reads": a_key(fleet, f"{name}-reads", "--surfaces", "read"),
        "other": a_key(fleet, f"{name}-other", "--models", "other"),
        "any": a_key(fleet, f"{name}-any"),
    }
    wait_until("the key is known", lambda: chats(fleet, keys["any"]))
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HOME": f"{tmp_path}"}
    command = [f"{PYTHON}", f"{script}", fleet.url("data"), "talks", json.dumps(keys)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
