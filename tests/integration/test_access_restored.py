"""Tenants and keys restored from a backup over REST; revoked keys stay revoked."""

from glowplug.cli.backup import AccessShown, Backup, plan
from glowplug.domain.access import ApiKey, Tenant, digest_of
from tests.integration.test_control_rest import TOKEN, Fleet, fleet  # noqa: F401 - the fixture

LAB = Tenant(name="lab")
CI = ApiKey(
    key_id="abcdefgh", tenant="lab", name="ci", sha256=digest_of("gp-abcdefgh-x"), models=("m",), created_at=5.0
)
KEPT = Backup(made_at=1.0, tenants={"lab": LAB}, keys={"abcdefgh": CI})


async def test_a_key_comes_back_by_its_digest_and_stays_revoked(fleet: Fleet) -> None:  # noqa: F811
    todo = plan(KEPT, {}, {}, frozenset(), AccessShown())
    async with fleet.client("autoscaler", headers=TOKEN) as client:
        body = dict(todo.keys["abcdefgh"])
        assert (await client.put("/v1/keys/abcdefgh", json=body)).status_code == 404
        await client.put("/v1/tenants/lab", json=todo.tenants["lab"])
        row = (await client.put("/v1/keys/abcdefgh", json=body)).json()
        assert (row["state"], row["created_at"], row["models"]) == ("active", 5.0, ["m"]) and "sha256" not in row
        tenants, keys = [(await client.get(f"/v1/{table}")).json()["data"] for table in ("tenants", "keys")]
        shown = AccessShown(tenants={row["name"]: row for row in tenants}, keys={row["key_id"]: row for row in keys})
        assert plan(KEPT, {}, {}, frozenset(), shown).is_nothing
        other = await client.put("/v1/keys/abcdefgh", json=body | {"sha256": "0" * 64})
        assert other.status_code == 409 and other.json()["error"]["param"] == "key_id"
        await client.delete("/v1/keys/abcdefgh")
        assert (await client.put("/v1/keys/abcdefgh", json=body)).json()["state"] == "revoked"
        wrong = [body | {"sha256": "x"}, body | {"name": "a b"}, body | {"models": []}]
        assert [(await client.put("/v1/keys/abcdefgh", json=one)).status_code for one in wrong] == [400] * 3
