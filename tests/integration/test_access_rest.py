"""Tenants and keys over REST and from files."""

import asyncio
import logging
from pathlib import Path

import pytest

from glowplug.domain.access import KEYS, TENANTS, digest_of
from glowplug.services.autoscaler.access_watch import AccessWatch, load
from tests.integration.test_control_rest import MODEL, TOKEN, Fleet, fleet  # noqa: F401 - the fixture

LIMITS = {"requests_per_minute": 60, "tokens_per_day": 10_000}
FILE = """
tenant: acme
limits: {requests_per_minute: 60}
keys:
  - {id: abcd1234, name: bot, sha256: "%s", models: ["org/*"], expires_at: 2099-01-01T00:00:00Z}
"""


async def test_a_key_is_shown_once_and_kept_as_a_digest(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:  # noqa: F811
    caplog.set_level(logging.DEBUG)
    async with fleet.client("autoscaler", headers=TOKEN) as client:
        put = await client.put("/v1/tenants/acme", json={"limits": LIMITS, "priority": "batch"})
        assert (put.status_code, put.json()["limits"]["tokens_per_day"], put.json()["num_keys"]) == (200, 10_000, 0)
        body = {"tenant": "acme", "name": "bot", "models": ["org/*"], "expires": "30d"}
        made = await client.post("/v1/keys", json=body)
        row = made.json()
        assert made.status_code == 201 and made.headers["cache-control"] == "no-store"
        assert row["key"].startswith(f"{row['prefix']}-") and row["state"] == "active"
        assert row["expires_at"] - row["created_at"] == pytest.approx(30 * 86_400, abs=60)
        shown = (await client.get("/v1/keys")).text + (await client.get(f"/v1/keys/{row['key_id']}")).text
        assert row["key"] not in shown and digest_of(row["key"]) not in shown
        stored = b"".join([*(await fleet.store.load(KEYS)).values(), *(await fleet.store.load(TENANTS)).values()])
        assert digest_of(row["key"]).encode() in stored and row["key"].encode() not in stored
        assert row["key"] not in caplog.text
        assert (await client.get("/v1/tenants")).json()["data"][0]["num_keys"] == 1
        revoked = await client.delete(f"/v1/keys/{row['key_id']}")
        assert revoked.json()["state"] == "revoked"


async def test_a_rotated_key_ends_after_the_overlap(fleet: Fleet) -> None:  # noqa: F811
    async with fleet.client("autoscaler", headers=TOKEN) as client:
        await client.put("/v1/tenants/acme", json={})
        old = (await client.post("/v1/keys", json={"tenant": "acme", "name": "bot", "models": ["a"]})).json()
        new = (await client.post(f"/v1/keys/{old['key_id']}/rotate", json={"overlap": "1h"})).json()
        assert (new["models"], new["name"], new["expires_at"]) == (["a"], "bot", 0) and new["key"] != old["key"]
        left = (await client.get(f"/v1/keys/{old['key_id']}")).json()
        assert left["state"] == "active" and left["expires_at"] - new["created_at"] == pytest.approx(3600, abs=60)
        await client.post(f"/v1/keys/{new['key_id']}/rotate", json={"overlap": 0})
        assert (await client.get(f"/v1/keys/{new['key_id']}")).json()["state"] == "revoked"
        assert (await client.post(f"/v1/keys/{new['key_id']}/rotate")).status_code == 409


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"tenant": "nobody", "name": "bot"}, 404, "tenant"),
        ({"tenant": "acme", "name": "a b"}, 400, "name"),
        ({"tenant": "acme", "name": "bot", "models": []}, 400, "body.models"),
        ({"tenant": "acme", "name": "bot", "surfaces": ["all"]}, 400, "body.surfaces.0"),
        ({"tenant": "acme", "name": "bot", "expires": "soon"}, 400, "body.expires"),
        (
            {"tenant": "acme", "name": "bot", "limits": {"requests_per_minute": -1}},
            400,
            "body.limits.requests_per_minute",
        ),
    ],
)
async def test_wrong_bodies_name_the_field(fleet: Fleet, body: dict, status: int, param: str) -> None:  # noqa: F811
    async with fleet.client("autoscaler", headers=TOKEN) as client:
        await client.put("/v1/tenants/acme", json={})
        answer = await client.post("/v1/keys", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


async def test_each_role_does_what_its_keys_open(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:  # noqa: F811
    caplog.set_level(logging.INFO)
    async with fleet.client("autoscaler", headers=TOKEN) as client:
        assert (await fleet.client("autoscaler").get("/v1/keys")).status_code == 401
        await client.put("/v1/tenants/acme", json={}, headers={"X-Glowplug-Actor": "ann@example.org"})
        assert "ann@example.org asked for PUT /v1/tenants/acme" in caplog.text
        made = {}
        for surface in ("data", "read", "operate", "admin"):
            body = {"tenant": "acme", "name": surface, "surfaces": [surface]}
            made[surface] = (await client.post("/v1/keys", json=body)).json()
        calls = [("GET", "/v1/keys", None), ("PUT", f"/v1/models/{MODEL['name']}", MODEL), ("PUT", "/v1/tenants/b", {})]
        for surface, statuses in {
            "data": (401, 401, 401),
            "read": (200, 403, 403),
            "operate": (200, 200, 403),
            "admin": (200, 200, 200),
        }.items():
            bearer = {"Authorization": f"Bearer {made[surface]['key']}", "X-Glowplug-Actor": "somebody else"}
            for (method, path, body), status in zip(calls, statuses, strict=True):
                answer = await client.request(method, path, json=body, headers=bearer)
                assert answer.status_code == status, (surface, path, answer.text)
                if status == 403:
                    assert answer.json()["error"]["code"] == "role_required"
        assert f"key {made['operate']['prefix']} asked for PUT /v1/models/" in caplog.text
        assert "somebody else" not in caplog.text, "only the admin token speaks for others"
        await client.delete(f"/v1/keys/{made['operate']['key_id']}")
        bearer = {"Authorization": f"Bearer {made['operate']['key']}"}
        assert (await client.get("/v1/keys", headers=bearer)).status_code == 401


async def test_the_placer_reads_the_key_that_is_presented(fleet: Fleet) -> None:  # noqa: F811
    async with fleet.client("autoscaler", headers=TOKEN) as client, fleet.client("placer") as placer:
        await client.put("/v1/tenants/acme", json={})
        for surface, status in (("data", 401), ("read", 403), ("operate", 404), ("admin", 404)):  # no such node
            body = {"tenant": "acme", "name": surface, "surfaces": [surface]}
            made = (await client.post("/v1/keys", json=body)).json()
            bearer = {"Authorization": f"Bearer {made['key']}"}
            answer = await placer.post("/v1/nodes/node-1/drain", headers=bearer)
            assert answer.status_code == status, (surface, answer.text)
        wrong = {"Authorization": f"Bearer {made['prefix']}-{'A' * 43}"}
        assert (await placer.post("/v1/nodes/node-1/drain", headers=wrong)).status_code == 401


async def test_a_tenant_with_keys_goes_only_with_them(fleet: Fleet) -> None:  # noqa: F811
    async with fleet.client("autoscaler", headers=TOKEN) as client:
        await client.put("/v1/tenants/acme", json={})
        await client.post("/v1/keys", json={"tenant": "acme", "name": "bot"})
        assert (await client.delete("/v1/tenants/acme")).status_code == 409
        assert (await client.delete("/v1/tenants/acme?with_keys=true")).json() == {"name": "acme", "deleted": True}
        assert (await client.get("/v1/keys")).json()["data"][0]["state"] == "revoked"


async def test_files_declare_tenants_and_keys_live(fleet: Fleet, tmp_path: Path) -> None:  # noqa: F811
    shell, path, key = fleet.shells[0], tmp_path / "acme.yaml", "gp-abcd1234-" + "x" * 43
    watch, rows = AccessWatch(tmp_path), shell.controller.access
    path.write_text(FILE % digest_of(key))
    await watch.poll(shell)
    assert not watch.errors and rows.keys["abcd1234"].models == ("org/*",) and rows.tenants["acme"].source == str(path)
    async with fleet.client("autoscaler", headers=TOKEN) as client:
        answer = await client.patch("/v1/keys/abcd1234", json={"models": ["*"]})
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "conflict")
    path.write_text((FILE % digest_of(key)).replace("id: abcd1234", "id: short"))
    await asyncio.sleep(0.01)
    await watch.poll(shell)
    assert "short" in watch.errors[str(path)] and not rows.keys["abcd1234"].revoked_at, "what was there stays"
    path.write_text("tenant: acme\nweight: 2\n")
    await watch.poll(shell)
    assert not watch.errors and rows.tenants["acme"].weight == 2 and rows.keys["abcd1234"].revoked_at
    path.unlink()
    await watch.poll(shell)
    assert not rows.tenants


async def test_an_error_nobody_thought_of_keeps_one_file_of_a_tenant_out(
    fleet: Fleet,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shell, watch = fleet.shells[0], AccessWatch(tmp_path)
    real = watch.load
    monkeypatch.setattr(watch, "load", lambda path: real(path) if path.stem == "good" else 1 / 0)
    (tmp_path / "bad.yaml").write_text("tenant: bad\n")
    (tmp_path / "good.yaml").write_text("tenant: good\n")
    await watch.poll(shell)
    assert set(shell.controller.access.tenants) == {"good"}
    assert watch.errors == {str(tmp_path / "bad.yaml"): "cannot be read: ZeroDivisionError: division by zero"}


def a_file(tenant: str, *key_ids: str) -> str:
    digest = digest_of(f"gp-abcd1234-{'x' * 43}")
    keys = "".join(f'  - {{id: {key_id}, name: bot, sha256: "{digest}"}}\n' for key_id in key_ids)
    return f"tenant: {tenant}\nkeys:\n{keys}" if keys else f"tenant: {tenant}\n"


MOVED = {"a": a_file("acme", "aaaa1111"), "b": a_file("brick", "aaaa2222", "bbbb1111")}
BEGIN = {"a": a_file("acme", "aaaa1111", "aaaa2222"), "b": a_file("brick", "bbbb1111")}


@pytest.mark.parametrize(
    ("files", "revoked"),
    [
        pytest.param({"c": BEGIN["a"], "b": BEGIN["b"]}, set(), id="a file is renamed"),
        pytest.param({"a": BEGIN["b"], "b": BEGIN["a"]}, set(), id="two exchange all"),
        pytest.param(
            {"a": a_file("brick", "aaaa1111", "aaaa2222"), "b": a_file("acme", "bbbb1111")}, set(), id="and their names"
        ),
        pytest.param({"a": a_file("apex", "aaaa1111", "aaaa2222"), "b": BEGIN["b"]}, set(), id="a tenant is renamed"),
        pytest.param(MOVED, set(), id="a key moves"),
        pytest.param({"b": a_file("acme", "aaaa2222", "bbbb1111")}, {"aaaa1111"}, id="one takes over"),
    ],
)  # fmt: skip
async def test_tenants_and_keys_change_their_files_in_one_look(
    fleet: Fleet,  # noqa: F811
    tmp_path: Path,
    files: dict[str, str],
    revoked: set[str],
) -> None:
    shell, watch = fleet.shells[0], AccessWatch(tmp_path)
    rows = shell.controller.access

    async def look(declared: dict[str, str]) -> None:
        for path in tmp_path.iterdir():
            path.unlink()
        for name, text in declared.items():
            (tmp_path / f"{name}.yaml").write_text(text)
        watch._seen.clear()
        await watch.poll(shell)

    await look(BEGIN)
    await look(files)
    assert not watch.errors
    declared = {name: load(tmp_path / f"{name}.yaml") for name in files}
    assert {t.name: t.source for t in rows.tenants.values()} == {t.name: t.source for t, _ in declared.values()}
    living = {key.key_id: (key.tenant, key.source) for key in rows.keys.values() if not key.revoked_at}
    assert living == {key.key_id: (key.tenant, key.source) for _, keys in declared.values() for key in keys}
    assert rows.keys.keys() - living.keys() == revoked


async def test_a_tenant_and_a_key_of_another_file_stay_its_own(fleet: Fleet, tmp_path: Path) -> None:  # noqa: F811
    shell, watch = fleet.shells[0], AccessWatch(tmp_path)
    for name, text in {**BEGIN, "c": a_file("acme"), "d": a_file("dune", "bbbb1111")}.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    await watch.poll(shell)
    (tmp_path / "b.yaml").write_text("tenant: [")  # what it declared before stays in force, and its own
    for _ in range(2):
        await watch.poll(shell)
        assert watch.errors.keys() - {str(tmp_path / "b.yaml")} == {str(tmp_path / f"{name}.yaml") for name in "cd"}
    rows = shell.controller.access
    assert rows.tenants["acme"].source == str(tmp_path / "a.yaml")
    assert (rows.keys["bbbb1111"].tenant, rows.keys["bbbb1111"].revoked_at) == ("brick", 0.0)
