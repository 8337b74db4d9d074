"""Login at a third-party provider, oidc-provider-mock of PyPI, in its own process.

Lane: long; skipped where its command is not on the path (`pip install oidc-provider-mock`, into an environment of its
own). Costs some seconds."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import ports
from tests.console_server import ADMIN_TOKEN, addresses, owning, visited
from tests.servers import until_answers

COMMAND = "oidc-provider-mock"
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which(COMMAND) is None, reason=f"{COMMAND} is not on the path (pip install it)"),
]
PEOPLE = {"ann": ["staff", "ops"], "rob": ["root"], "eve": ["guests"]}


@dataclass
class Elsewhere:
    """It makes a new key at each start."""

    folder: Path
    port: int = field(default_factory=ports.free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, *options: str) -> None:
        self.stop()
        people = [{"sub": sub, "email": f"{sub}@example.org", "groups": groups} for sub, groups in PEOPLE.items()]
        argv = [COMMAND, "-p", str(self.port), "--require-nonce", "true", *options]
        for person in people:
            argv += ["--user-claims", json.dumps(person)]
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(argv, stdout=log, stderr=log, env=env)
        until_answers(f"{self.url}/.well-known/openid-configuration", self.process, self.folder / "log")

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def settings(self, **more: Any) -> dict[str, Any]:
        client = {"oidc_issuer": self.url, "oidc_client_id": "console", "oidc_client_secret": "of-the-console"}
        return client | {"oidc_viewers": "staff", "oidc_operators": "ops", "oidc_admins": "root"} | more


@pytest.fixture
def issuer(tmp_path: Path) -> Iterator[Elsewhere]:
    made = Elsewhere(tmp_path)
    try:
        made.start()
        yield made
    finally:
        made.stop()
        ports.give_back(made.port)


async def go(client: httpx.AsyncClient, sub: str) -> str:
    there = (await client.get("/login/oidc")).headers["location"]
    chosen = await client.post(there, data={"sub": sub})
    assert chosen.status_code == 302, chosen.text
    return str((await client.get(chosen.headers["location"])).headers["location"])


async def who(client: httpx.AsyncClient) -> tuple[str, str]:
    said = (await client.get("/session")).json()
    return said["name"], said["role"]


async def test_a_group_gives_its_role_and_the_logout_ends_both_logins(issuer: Elsewhere) -> None:
    async with (
        owning() as owner,
        visited(**issuer.settings(admin_token=ADMIN_TOKEN, **addresses(owner))) as (at, client),
    ):
        assert await go(client, "ann") == "/login" and await who(client) == ("ann@example.org", "operator")
        assert (await client.post("/api/v1/models/m/load")).status_code == 202
        assert (await client.post("/api/v1/keys", json={})).status_code == 403
        said = (await client.post("/logout")).json()
        there = await client.get(said["next"])
        assert there.status_code == 200 and f"{at.url}/login" in there.text
        assert (await client.get("/api/v1/fleet")).status_code == 401
        assert await go(client, "rob") == "/login" and (await who(client))[1] == "admin"
        await client.post("/logout")
        assert await go(client, "eve") == "/login?failed=no_role" and (await who(client))[1] == "none"


async def test_new_keys_are_read_and_a_token_that_is_over_opens_nothing(issuer: Elsewhere) -> None:
    async with visited(**issuer.settings()) as (under_test, client):
        under_test.clock.stop()
        assert await go(client, "ann") == "/login"
        issuer.start()
        under_test.clock.forward(20.0)
        assert await go(client, "rob") == "/login" and (await who(client))[1] == "admin"
        issuer.start("--token-max-age", "-3600")
        under_test.clock.forward(20.0)
        assert await go(client, "ann") == "/login?failed=failed"


async def test_scopes_that_are_not_asked_for_leave_the_subject_as_the_name(issuer: Elsewhere) -> None:
    async with visited(**issuer.settings(oidc_scope="openid")) as (_, client):
        assert await go(client, "ann") == "/login" and await who(client) == ("ann", "operator")
