"""Calls that reach a standby: passed on once; while nobody leads answered from what it knows, or refused."""

from dataclasses import dataclass, field

import httpx
import pytest
from fastapi import FastAPI, Request

from glowplug.domain.lease import Lease
from glowplug.runtime.forward import PASSED_ON, ToLeader


@dataclass
class Standing:
    """What the middleware asks of a candidate."""

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
        told = answer.json()
        assert (told["by"], told["query"], told["token"], told["body"]) == ("leader", "x=1&y=%20", "Bearer t", "body")
        assert told["origin"] == "", "the standby has judged the page; to the leader it would be of another site"
        assert told["passed_on"] == "placer-b" and "%2F" in told["path"]
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
    """Two standbys that each take the other for the leader must not send a call round for ever."""
    standby, _ = an_app("standby", Standing())
    async with client(standby) as asked:
        passed = {PASSED_ON: "placer-c"}
        assert (await asked.get("/v1/x", headers=passed)).json()["by"] == "standby"
        assert (await asked.post("/v1/x", headers=passed)).status_code == 503


async def test_a_body_without_end_is_not_kept() -> None:
    standby, _ = an_app("standby", Standing())
    async with client(standby) as asked:
        assert (await asked.post("/v1/x", content=b"x" * (9 << 20))).status_code == 413
