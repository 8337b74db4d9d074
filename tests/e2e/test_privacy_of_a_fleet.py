"""No prompt, answer or key remains in a fleet's folder (logs, NATS streams, Valkey rows, ledger, copies) or its
services' answers."""

import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.fleet_runner import EMULATED, Fleet
from tests.waiting import wait_until

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(300)]
PROMPT, SYSTEM, USER, WRONG = (f"canary-{what}-5c1d9e" for what in ("prompt", "system", "user", "wrongkey"))


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with tempfile.TemporaryDirectory(prefix="gp-p-", ignore_cleanup_errors=True) as folder:
        models = {"m": EMULATED.format(name="m", keep_alive_s=60)}
        with Fleet.start(Path(folder), models, nodes=1, GLOWPLUG_LOG_LEVEL="DEBUG") as made:
            yield made


def ask(fleet: Fleet, key: str) -> list[str]:
    auth = {"Authorization": f"Bearer {key}"}
    body = {"model": "m", "max_tokens": 24, "user": USER, "metadata": {"note": USER}}
    chat = body | {"messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": PROMPT}]}
    url, answers = fleet.url("data") + "/v1", []
    with httpx.Client(timeout=200) as client:
        for more in ({}, {"stream": True}, {"model": "none"}, {"max_tokens": -1}, {"messages": PROMPT}):
            answer = client.post(f"{url}/chat/completions", json=chat | more, headers=auth)
            if not more:
                answers.append(answer.json()["choices"][0]["message"]["content"])
        done = client.post(f"{url}/completions", json=body | {"prompt": PROMPT}, headers=auth).json()
        answers.append(done["choices"][0]["text"])
        wrong = client.post(f"{url}/chat/completions", json=chat, headers={"Authorization": f"Bearer {WRONG}"})
        assert wrong.status_code == 401
        client.post(f"{url}/chat/completions", content=b'{"model": "m", "messages": [' + PROMPT.encode(), headers=auth)
        client.post(fleet.url("console") + "/v1/chat/completions", json=chat, headers=auth)
    return answers


def said(fleet: Fleet) -> dict[str, str]:
    found = {}
    with httpx.Client(timeout=30, headers=fleet.admin) as client:
        for process in fleet.document["processes"]:
            if not process["url"]:
                continue
            paths = client.get(process["url"] + "/openapi.json").json().get("paths", {})
            for path in [p for p, ways in paths.items() if "get" in ways and "{" not in p and "stream" not in p]:
                if "events" in path or "follow" in path:
                    continue
                found[f"{process['name']} {path}"] = client.get(process["url"] + path).text
        rows = client.get(fleet.process("router")["url"] + "/v1/requests").json()["data"]
        requests = {row["request_id"] for row in rows}
    for request_id in requests:
        found[f"why {request_id}"] = fleet.cli("why", request_id).stdout
    return found


def test_no_prompt_answer_or_key_is_left(fleet: Fleet) -> None:
    fleet.cli("tenants", "put", "acme", "--requests-per-minute", "1000")
    made = fleet.cli("keys", "create", "--tenant", "acme", "--name", "bot")
    key = made.stdout.strip()
    assert re.fullmatch(r"gp-[a-z0-9]{8}-\S{43}", key), made.stderr
    url = fleet.url("data") + "/v1/models"
    auth = {"Authorization": f"Bearer {key}"}
    wait_until("the key opens", lambda: httpx.get(url, headers=auth).status_code == 200)
    answers = ask(fleet, key)
    assert all(len(answer) > 20 for answer in answers), answers
    wait_until("the ledger has the requests", lambda: "acme" in fleet.cli("usage", "--by", "tenant").stdout)
    time.sleep(2)  # for traces and reports to be sent
    found = said(fleet)
    assert any(name.startswith("why ") for name in found) and len(found) > 20, list(found)
    secrets = [PROMPT, SYSTEM, USER, WRONG, key, key[12:], *answers]
    places = {name for name, text in found.items() for secret in secrets if secret in text}
    files = [path for path in fleet.state_dir.rglob("*") if path.is_file()]
    assert any("jetstream" in str(path) or ".blk" in path.name for path in files), files
    for path in files:
        text = path.read_bytes()
        places |= {f"{path.relative_to(fleet.state_dir)}: {s}" for s in secrets if s.encode() in text}
    assert not places, places
