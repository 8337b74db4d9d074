"""The Python API."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

import glowplug
import glowplug_lab
from glowplug_lab.simulator.scenario.errors import ScenarioError

ROOT = Path(__file__).parents[2]


class Services(HTTPServer):
    """All services of a fleet on one port; `answers` by method and path."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, str, Any, str | None]] = []
        self.answers: dict[str, tuple[int, Any]] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Services

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        said = (self.command, self.path, json.loads(body) if body else None, self.headers.get("Authorization"))
        self.server.asked.append(said)
        missing = {"error": {"message": f"no {self.path}", "type": "not_found", "code": None}}
        status, answer = self.server.answers.get(f"{self.command} {self.path}", (404, missing))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    do_GET = do_PUT = do_POST = do_DELETE = _answer

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@pytest.fixture
def services() -> Iterator[Services]:
    with Services() as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


@pytest.fixture
def client(services: Services) -> glowplug.Client:
    urls = dict.fromkeys(("data", "router", "placer", "autoscaler"), services.url)
    return glowplug.Client(urls=urls, admin_token="admin")


def test_a_model_is_deployed_moved_and_removed(client: glowplug.Client, services: Services) -> None:
    model = {"name": "team/writer", "engine": "llamacpp", "weights": "file:/models/writer.gguf"}
    path = "/v1/models/team/writer"
    services.answers |= {f"PUT {path}": (200, {"name": "team/writer", "state": "cold"}), f"DELETE {path}": (200, {})}
    services.answers |= {f"POST {path}/{verb}": (202, {"verb": verb}) for verb in ("wake", "sleep", "load", "unload")}
    assert client.deploy(model)["state"] == "cold"
    assert [move("team/writer")["verb"] for move in (client.wake, client.sleep, client.load, client.unload)] == [
        "wake", "sleep", "load", "unload",
    ]  # fmt: skip
    client.undeploy("team/writer")
    assert services.asked[0] == ("PUT", path, model, "Bearer admin")
    assert services.asked[-1] == ("DELETE", path, None, "Bearer admin")


def test_what_there_is_is_listed(client: glowplug.Client, services: Services) -> None:
    services.answers |= {
        "GET /v1/models": (200, {"data": [{"name": "a"}]}),
        "GET /v1/nodes": (200, {"data": [{"node_id": "n"}]}),
        "GET /v1/instances?model=a&gone=false": (200, {"data": [{"instance_id": "i"}]}),
        "GET /v1/requests?limit=3": (200, {"data": [{"request_id": "r"}]}),
    }
    assert client.models() == [{"name": "a"}] and client.nodes() == [{"node_id": "n"}]
    assert client.instances("a") == [{"instance_id": "i"}] and client.requests(3) == [{"request_id": "r"}]
    assert client.openai_url == f"{services.url}/v1"


def test_tenants_and_keys_are_made_listed_and_revoked(client: glowplug.Client, services: Services) -> None:
    services.answers |= {
        "GET /v1/tenants": (200, {"data": [{"name": "lab"}]}),
        "PUT /v1/tenants/lab": (200, {"name": "lab"}),
        "GET /v1/keys": (200, {"data": [{"key_id": "abcdefgh"}]}),
        "POST /v1/keys": (201, {"key_id": "abcdefgh", "key": "gp-abcdefgh-secret"}),
        "DELETE /v1/keys/abcdefgh": (200, {"state": "revoked"}),
    }
    assert client.put_tenant("lab", limits={"concurrent": 4})["name"] == "lab"
    assert client.tenants() == [{"name": "lab"}] and client.keys() == [{"key_id": "abcdefgh"}]
    assert client.create_key("lab", "ci", models=["writer"], expires="30d")["key"] == "gp-abcdefgh-secret"
    assert client.revoke_key("gp-abcdefgh")["state"] == "revoked"
    sent = [asked[2] for asked in services.asked if asked[2]]
    assert sent == [
        {"limits": {"concurrent": 4}}, {"tenant": "lab", "name": "ci", "models": ["writer"], "expires": "30d"}
    ]  # fmt: skip


def test_a_whole_key_is_revoked_by_its_id_and_its_secret_is_not_sent(
    client: glowplug.Client, services: Services
) -> None:
    services.answers["DELETE /v1/keys/abcdefgh"] = (200, {"state": "revoked"})
    assert client.revoke_key(f"gp-abcdefgh-{'s' * 43}")["state"] == "revoked"


def test_a_refusal_is_one_line(client: glowplug.Client, tmp_path: Path) -> None:
    with pytest.raises(glowplug.FleetError, match=r"^no /v1/models/ghost/wake \(not_found\)$"):
        client.wake("ghost")
    with pytest.raises(glowplug.FleetError, match="a model needs a name"):
        client.deploy({"engine": "emulated"})
    with pytest.raises(glowplug.FleetError, match="no fleet runs in"):
        glowplug.Client(tmp_path)
    with pytest.raises(glowplug.FleetError, match="no service is named 'routr'; there are: "):
        glowplug.Client(urls={"routr": "http://127.0.0.1:1"})
    with pytest.raises(glowplug.FleetError, match="this fleet has no address for data"):
        _ = glowplug.Client(urls={}).openai_url


def test_why_says_what_was_decided_about_a_request(client: glowplug.Client, services: Services) -> None:
    decisions = [{"decision_id": f"d-{n}", "made_at": n} for n in (1, 2)]
    services.answers |= {
        "GET /v1/requests?limit=10000": (200, {"data": [{"request_id": "r", "instance_id": "i"}]}),
        "GET /v1/decisions?request=r": (200, {"data": decisions[:1]}),
        "GET /v1/decisions?instance=i": (200, {"data": decisions}),
    }
    assert [one["decision_id"] for one in client.why("r")] == ["d-2", "d-1"]


def test_a_scenario_gives_its_figures_and_the_same_again() -> None:
    scenario = ROOT / "scenarios/small.yaml"
    first, again = (glowplug_lab.simulate(scenario, {"seconds": "30s"}, seed=2) for _ in range(2))
    assert first == again and first["total"]["num_arrived"] == first["total"]["num_finished"] > 0
    assert sum(row["num_arrived"] for row in first["models"]) == first["total"]["num_arrived"]
    other = glowplug_lab.simulate(scenario, {"seconds": "30s", "policies": "serverless_vllm"}, seed=2)
    assert other["total"]["ttft_s_p50"] > 0 and other != first


def test_a_wrong_scenario_says_which_field() -> None:
    with pytest.raises(ScenarioError, match="seconds: is missing"):
        glowplug_lab.simulate({"name": "nothing"})
    with pytest.raises(ScenarioError, match=r"nowhere\.yaml"):
        glowplug_lab.simulate("nowhere.yaml")


def test_the_package_has_no_other_names() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Clientt'"):
        _ = glowplug.Clientt
