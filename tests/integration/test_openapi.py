"""Schemathesis on every published OpenAPI: no 500, no crash."""

import re
from collections.abc import Iterator

import httpx
import pytest
from click.testing import CliRunner

from tests.ha_fleet import ADMIN, HaFleet, Process
from tests.servers import Infra
from tests.waiting import wait_until

SERVICES = ("router", "predictor", "placer", "autoscaler", "prefetcher", "agent", "console")
ENDLESS = "(/stream|/events)$"
# 503: its owner is absent.
PASSED_ON = "/{verb}$|/playground/v1/|^/api/v1/(tenants|keys|models|model_files)"


@pytest.fixture(scope="module", params=SERVICES)
def service(
    request: pytest.FixtureRequest, infra: Infra, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Process]:
    fleet = HaFleet(tmp_path_factory.mktemp(request.param), infra, lease_s=0)
    process = fleet.add(f"{request.param}-openapi", GLOWPLUG_NODE_ID="openapi").start()
    try:
        wait_until(f"{process.name} is ready", process.ready)
        yield process
    finally:
        fleet.stop()


@pytest.mark.parametrize(
    ("phases", "num_examples"),
    [("fuzzing", "1"), pytest.param("examples,coverage,fuzzing", "3", marks=pytest.mark.long)],
)
def test_no_input_breaks_a_service(
    service: Process, phases: str, num_examples: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One or two requests per operation; the long lane adds the bounds of every field. The command runs in this
    process: importing it takes longer than testing one service."""
    from schemathesis.cli import schemathesis  # here: every process of a lane imports every file of tests

    argv = ["run", f"{service.url}/openapi.json", "--no-color"]
    argv += ["--checks", "not_a_server_error", "--max-examples", num_examples, "--phases", phases]
    argv += ["--header", f"Authorization: {ADMIN['Authorization']}", "--exclude-path-regex", f"{ENDLESS}|{PASSED_ON}"]
    argv += ["--request-timeout", "60", "--seed", "1", "--generation-database", "none", "--workers", "1"]
    monkeypatch.chdir(service.log_path.parent)  # it leaves a folder where it runs
    done = CliRunner().invoke(schemathesis, argv)
    assert done.exit_code == 0, done.stdout[-4000:] + done.stderr[-1000:]
    generated = re.search(r"(\d+) generated", done.stdout)
    assert generated is not None
    assert int(generated[1]) > (2 if phases == "fuzzing" else 20), done.stdout
    assert service.process is not None and service.process.poll() is None
    assert service.ready() and "Traceback" not in service.log()


def test_changing_calls_want_the_admin_token(service: Process) -> None:
    paths = httpx.get(f"{service.url}/openapi.json").json()["paths"]
    changing = [(verb, path) for path, verbs in paths.items() for verb in verbs if verb not in ("get", "head")]
    for verb, path in changing:
        if path in ("/login", "/logout"):
            continue  # console readers change nothing in the fleet
        answer = httpx.request(verb.upper(), service.url + path.replace("{", "").replace("}", ""), json={})
        if re.search(PASSED_ON, path):
            assert answer.is_error, (verb, path)  # the owner decides on access
            continue
        assert answer.status_code == 401, (verb, path)
        assert answer.json()["error"]["code"] == "invalid_api_key"
