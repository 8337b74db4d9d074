"""The shared REST surface, and a standby's calls: forwarded once, answered locally, or refused."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from fastapi import Depends, FastAPI, Request
from fastapi.testclient import TestClient
from pydantic import BaseModel

from glowplug.bus.memory_bus import MemoryBus
from glowplug.controllers.reads import Reads
from glowplug.domain import errors
from glowplug.domain.lease import Lease
from glowplug.runtime.control import PASSED_ON, ControlService, ToLeader
from glowplug.runtime.rest import admin, make_app
from glowplug.runtime.service import World
from glowplug.runtime.shell import Shell
from glowplug.state.memory_store import MemoryStore

TYPED = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, errors.GlowplugError)]


class Body(BaseModel):
    count: int


class Stage:
    def __init__(self) -> None:
        self.why_not_ready = ""
        self.app = make_app(
            "placer", "placer-1", ready=lambda: self.why_not_ready, policies=lambda: {"placement": "first_fit"}
        )

        @self.app.post("/v1/things", dependencies=[Depends(admin("secret"))])
        async def things(body: Body) -> dict[str, int]:
            return {"count": body.count}

        @self.app.post("/v1/open", dependencies=[Depends(admin(""))])
        async def open_() -> dict[str, int]:
            return {}

        @self.app.get("/v1/fail/{name}")
        async def fail(name: str) -> None:
            raise {cls.__name__: cls for cls in TYPED}[name]("why it failed", param="model", retry_after_s=2.6)

        @self.app.get("/v1/crash")
        async def crash() -> None:
            raise ZeroDivisionError("secret detail")

        self.client = TestClient(self.app, raise_server_exceptions=False)


@pytest.fixture
def stage() -> Iterator[Stage]:
    made = Stage()
    with made.client:
        yield made


@pytest.mark.parametrize("path", ["/health", "/live"])
def test_a_living_service_says_who_it_is(stage: Stage, path: str) -> None:
    answer = stage.client.get(path)
    assert answer.status_code == 200
    assert (answer.json()["service"], answer.json()["service_id"]) == ("placer", "placer-1")


def test_readiness_says_why_not(stage: Stage) -> None:
    assert stage.client.get("/ready").json() == {"ready": True, "reason": ""}
    stage.why_not_ready = "no store"
    answer = stage.client.get("/ready")
    assert (answer.status_code, answer.json()) == (503, {"ready": False, "reason": "no store"})


def test_metrics_are_prometheus_text(stage: Stage) -> None:
    answer = stage.client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    assert "# HELP" in answer.text


def test_policies_in_force_are_named(stage: Stage) -> None:
    assert stage.client.get("/policies").json() == {"placement": "first_fit"}


def test_openapi_is_published(stage: Stage) -> None:
    paths = stage.client.get("/openapi.json").json()["paths"]
    assert {"/health", "/live", "/ready", "/metrics", "/policies", "/v1/things"} <= paths.keys()


@pytest.mark.parametrize("cls", TYPED, ids=lambda cls: cls.__name__)
def test_a_typed_error_has_its_status_shape_and_retry(stage: Stage, cls: type[errors.GlowplugError]) -> None:
    answer = stage.client.get(f"/v1/fail/{cls.__name__}")
    assert answer.status_code == cls.status
    assert answer.json() == {
        "error": {"message": "why it failed", "type": cls.type, "param": "model", "code": cls.code}
    }
    assert answer.headers["retry-after"] == "3"


AUTHORISED = {"Authorization": "Bearer secret"}


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'{"count": "many"}', b"{}", b"null", b'{"count": NaN}', b"\xff\xfe", b'{"count": 1e400}'],
)
def test_bad_input_is_400_in_openais_shape(stage: Stage, body: bytes) -> None:
    headers = AUTHORISED | {"Content-Type": "application/json"}
    answer = stage.client.post("/v1/things", content=body, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("given", [b"", b"Bearer wrong", b"Basic secret", b"Bearer \xe9", b"Bearer"])
def test_without_the_admin_token_nothing_changes(stage: Stage, given: bytes) -> None:
    answer = stage.client.post("/v1/things", json={"count": 1}, headers={b"authorization": given})
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"


def test_with_the_admin_token_it_does(stage: Stage) -> None:
    assert stage.client.post("/v1/things", json={"count": 1}, headers=AUTHORISED).json() == {"count": 1}


def test_where_no_token_is_set_none_is_asked_for(stage: Stage) -> None:
    assert stage.client.post("/v1/open").status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [("GET", "/nothing", 404, "not_found"), ("DELETE", "/health", 405, "method_not_allowed")],
)
def test_unknown_paths_and_verbs_have_its_shape(stage: Stage, method: str, path: str, status: int, code: str) -> None:
    answer = stage.client.request(method, path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


def test_a_crash_is_500_in_the_same_shape_and_tells_nothing(stage: Stage) -> None:
    answer = stage.client.get("/v1/crash")
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert "secret detail" not in answer.text
    assert answer.headers["x-request-id"]


def test_the_request_id_comes_back_or_is_given(stage: Stage) -> None:
    assert stage.client.get("/health", headers={"X-Request-Id": "abc"}).headers["x-request-id"] == "abc"
    given = {stage.client.get("/health").headers["x-request-id"] for _ in range(3)}
    assert len(given) == 3
    assert len(stage.client.get("/health", headers={"X-Request-Id": "x" * 999}).headers["x-request-id"]) == 128
    assert stage.client.get("/nothing", headers={"X-Request-Id": "abc"}).headers["x-request-id"] == "abc"


def service(bus: MemoryBus, store: MemoryStore) -> ControlService:
    made = ControlService(cast(World, SimpleNamespace(bus=bus, store=store)), Reads(service="placer"))
    made.shell = cast(Shell, SimpleNamespace(restored=True))
    return made


@pytest.mark.parametrize("what", ["bus", "store"])
def test_a_service_whose_commands_or_rows_are_not_taken_is_not_ready_and_says_why(what: str) -> None:
    bus, store = MemoryBus(), MemoryStore()
    made = service(bus, store)
    assert made.not_ready() == ""
    full: Any = bus.broker if what == "bus" else store
    full.refusal = "it takes nothing: no space left on device"
    assert made.not_ready() == "it takes nothing: no space left on device"
    full.refusal = ""
    assert made.not_ready() == ""


@dataclass
class Standing:
    """The candidate as the middleware sees it."""

    service: str = "placer"
    service_id: str = "placer-b"
    leader_id: str = "placer-a"
    lease: Lease = field(default_factory=lambda: Lease(holder="placer-a@1", url="http://127.0.0.1:9"))
    leads: bool = False

    def may_act(self) -> bool:
        return self.leads


def an_app(name: str, candidate: Standing | None) -> tuple[FastAPI, ToLeader]:
    app, forward = FastAPI(), ToLeader(lambda: candidate)  # type: ignore[arg-type, return-value]
    app.middleware("http")(forward)

    @app.api_route("/v1/{path:path}", methods=["GET", "POST"])
    async def echo(path: str, request: Request) -> dict[str, object]:
        return {
            "by": name,
            "path": request.scope["raw_path"].decode() if request.scope.get("raw_path") else path,
            "query": request.url.query,
            "token": request.headers.get("authorization", ""),
            "origin": request.headers.get("origin", ""),
            "passed_on": request.headers.get(PASSED_ON, ""),
            "body": (await request.body()).decode(),
        }

    @app.get("/health")
    async def health() -> str:
        return name

    return app, forward


def client(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://standby")


async def test_a_call_is_passed_on_whole_and_its_answer_comes_back() -> None:
    standby, forward = an_app("standby", Standing())
    leader, _ = an_app("leader", None)
    forward._client = client(leader)
    async with client(standby) as asked:
        answer = await asked.post(
            "/v1/models/a%2Fb/load?x=1&y=%20",
            content=b"body",
            headers={"authorization": "Bearer t", "origin": "http://standby"},
        )
        said = answer.json()
        assert (said["by"], said["query"], said["token"], said["body"]) == ("leader", "x=1&y=%20", "Bearer t", "body")
        assert said["origin"] == "", "the standby has judged the page; to the leader it would be of another site"
        assert said["passed_on"] == "placer-b" and "%2F" in said["path"]
        assert (await asked.get("/health")).json() == "standby", "health is each process's own"
    await forward.close()


async def test_while_the_leader_does_not_answer_reads_are_answered_here_and_changes_refused() -> None:
    standby, forward = an_app("standby", Standing())
    async with client(standby) as asked:
        assert (await asked.get("/v1/nodes")).json()["by"] == "standby"
        refused = await asked.post("/v1/nodes/n/drain")
        assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "not_leader" and "127.0.0.1:9" in refused.json()["error"]["message"]
    await forward.close()


@pytest.mark.parametrize("candidate", [None, Standing(leads=True)], ids=["no election", "leader"])
async def test_who_leads_or_is_alone_answers_itself(candidate: Standing | None) -> None:
    app, _ = an_app("self", candidate)
    async with client(app) as asked:
        assert (await asked.post("/v1/x")).json()["by"] == "self"


async def test_a_call_is_passed_on_once() -> None:
    """Two standbys that take each other for the leader must not loop."""
    standby, _ = an_app("standby", Standing())
    async with client(standby) as asked:
        passed = {PASSED_ON: "placer-c"}
        assert (await asked.get("/v1/x", headers=passed)).json()["by"] == "standby"
        assert (await asked.post("/v1/x", headers=passed)).status_code == 503


async def test_a_body_without_end_is_not_kept() -> None:
    standby, _ = an_app("standby", Standing())
    async with client(standby) as asked:
        assert (await asked.post("/v1/x", content=b"x" * (9 << 20))).status_code == 413
