"""Every OpenAPI we publish, spoken to in every way it allows and many it does not: no 500, no crash (schemathesis)."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.ha_fleet import ADMIN, HaFleet, Process
from tests.servers import Infra
from tests.waiting import wait_until

EXAMPLES = "8"  # per operation and phase
SERVICES = ("router", "predictor", "placer", "autoscaler", "prefetcher", "agent", "console")
ENDLESS = "(/stream|/events)$"  # paths whose answers never end
PASSED_ON = "/{verb}$|/playground/v1/"  # what the console passes on to its owner: none is here, so it is a 503


@pytest.fixture(params=SERVICES)
def service(request: pytest.FixtureRequest, infra: Infra, tmp_path: Path) -> Iterator[Process]:
    fleet = HaFleet(tmp_path, infra, lease_s=0)
    process = fleet.add(f"{request.param}-openapi", GLOWPLUG_NODE_ID="openapi").start()
    try:
        wait_until(f"{process.name} is ready", process.ready)
        yield process
    finally:
        fleet.stop()


def test_no_input_breaks_a_service(service: Process) -> None:
    argv = [str(Path(sys.executable).with_name("st")), "run", f"{service.url}/openapi.json", "--no-color"]
    argv += ["--checks", "not_a_server_error", "--max-examples", EXAMPLES, "--phases", "examples,coverage,fuzzing"]
    argv += ["--header", f"Authorization: {ADMIN['Authorization']}", "--exclude-path-regex", f"{ENDLESS}|{PASSED_ON}"]
    argv += ["--request-timeout", "60", "--seed", "1", "--generation-database", "none", "--workers", "1"]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=service.log_path.parent, timeout=270, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    generated = re.search(r"(\d+) generated", done.stdout)
    assert generated is not None
    assert int(generated[1]) > 20, done.stdout
    assert service.process is not None and service.process.poll() is None
    assert service.ready() and "Traceback" not in service.log()


def test_changing_calls_want_the_admin_token(service: Process) -> None:
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
