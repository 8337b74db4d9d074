"""Every OpenAPI we publish, spoken to in every way it allows and many it does not: no 500, no crash (schemathesis)."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.ports import free_port
from tests.servers import Infra, until_answers

TOKEN = "an-admin-token"
EXAMPLES = "8"  # per operation and phase
SERVICES = ("router", "predictor", "placer", "autoscaler", "prefetcher", "agent", "console")
ENDLESS = "(/stream|/events)$"  # paths whose answers never end
PASSED_ON = "/{verb}$|/playground/v1/"  # what the console passes on to its owner: none is here, so it is a 503


@dataclass
class Running:
    """One service process."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path


@pytest.fixture(params=SERVICES)
def service(request: pytest.FixtureRequest, infra: Infra, tmp_path: Path) -> Iterator[Running]:
    port, log = free_port(), tmp_path / "log"
    env = (
        os.environ
        | infra.env
        | {
            "GLOWPLUG_PORT": str(port),
            "GLOWPLUG_SERVICE_ID": f"{request.param}-openapi",
            "GLOWPLUG_NODE_ID": "openapi",
            "GLOWPLUG_STATE_DIR": str(tmp_path / "state"),
            "GLOWPLUG_SHM_DIR": str(tmp_path / "shm"),
            "GLOWPLUG_ADMIN_TOKEN": TOKEN,
            "GLOWPLUG_ENGINES": "emulated",
        }
    )
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, "-m", f"services.{request.param}"], env=env, stdout=out, stderr=out)
    running = Running(f"http://127.0.0.1:{port}", process, log)
    try:
        until_answers(f"{running.url}/ready", process, log)
        yield running
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def test_no_input_breaks_a_service(service: Running) -> None:
    argv = [str(Path(sys.executable).with_name("st")), "run", f"{service.url}/openapi.json", "--no-color"]
    argv += ["--checks", "not_a_server_error", "--max-examples", EXAMPLES, "--phases", "examples,coverage,fuzzing"]
    argv += ["--header", f"Authorization: Bearer {TOKEN}", "--exclude-path-regex", f"{ENDLESS}|{PASSED_ON}"]
    argv += ["--request-timeout", "10", "--seed", "1", "--generation-database", "none", "--workers", "1"]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=service.log.parent, timeout=110, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    generated = re.search(r"(\d+) generated", done.stdout)
    assert generated is not None
    assert int(generated[1]) > 20, done.stdout
    assert service.process.poll() is None
    assert httpx.get(f"{service.url}/ready").status_code == 200
    assert "Traceback" not in service.log.read_text(errors="replace")


def test_changing_calls_want_the_admin_token(service: Running) -> None:
    paths = httpx.get(f"{service.url}/openapi.json").json()["paths"]
    changing = [(verb, path) for path, verbs in paths.items() for verb in verbs if verb not in ("get", "head")]
    for verb, path in changing:
        if path in ("/v1/traces", "/login", "/logout"):
            continue  # services export spans, readers of the console come and go: nothing of the fleet changes
        answer = httpx.request(verb.upper(), service.url + path.replace("{", "").replace("}", ""), json={})
        if re.search(PASSED_ON, path):
            assert answer.is_error, (verb, path)  # who may is for the owner to say
            continue
        assert answer.status_code == 401, (verb, path)
        assert answer.json()["error"]["code"] == "invalid_api_key"
