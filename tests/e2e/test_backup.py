"""A backup of one fleet restores into an empty one; a wrong one changes nothing.

Lane: long. In the system lane docs/howto/backup.md is run; in the fast one tests/unit/cli/test_backup.py says what is
restored and what is refused.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from glowplug.cli.backup import body
from tests.fleet_runner import EMULATED, Fleet
from tests.waiting import wait_until

pytestmark = [pytest.mark.fleet, pytest.mark.long, pytest.mark.timeout(500)]
MODELS = {name: EMULATED.format(name=name, keep_alive_s=60) for name in ("one", "two")}
OVER_REST = """
name: over/rest
engine: emulated
weights_bytes: 2GiB
aliases: [rest]
slo: {ttft_s: 2s}
"""


@pytest.fixture
def roots() -> Iterator[tuple[Path, Path]]:
    with (
        tempfile.TemporaryDirectory(prefix="gp-a-", ignore_cleanup_errors=True) as one,
        tempfile.TemporaryDirectory(prefix="gp-b-", ignore_cleanup_errors=True) as two,
    ):
        yield Path(one), Path(two)


def rows(fleet: Fleet) -> dict[str, Any]:
    data = httpx.get(fleet.url("autoscaler") + "/v1/models").json()["data"]
    return {row["key"]: body(row) | {"suspended": row["suspended"]} for row in data}


def draining(fleet: Fleet) -> set[str]:
    nodes = httpx.get(fleet.url("placer") + "/v1/nodes").json()["data"]
    return {node["node_id"] for node in nodes if node["draining"]}


def test_a_backup_brings_an_empty_fleet_to_the_same_models(roots: tuple[Path, Path], tmp_path: Path) -> None:
    archive, extra = tmp_path / "fleet.tar.gz", tmp_path / "rest.yaml"
    extra.write_text(OVER_REST)
    with Fleet.start(roots[0], MODELS) as first:
        for argv in (("deploy", str(extra)), ("pin", "one"), ("drain", "two")):
            assert first.cli(*argv).returncode == 0
        httpx.post(first.url("placer") + "/v1/nodes/node-2/drain", headers=first.admin).raise_for_status()
        wait_until("node-2 drains", lambda: draining(first) == {"node-2"})
        assert first.cli("tenants", "put", "lab", "--concurrent", "8").returncode == 0
        key = first.cli("keys", "create", "--tenant", "lab", "--name", "notebook", "--models", "one").stdout.strip()
        done = first.cli("backup", str(archive))
        assert "3 model(s), 2 model file(s), 1 drained node(s)" in done.stdout, done.stderr
        again = first.cli("backup", str(archive))
        assert again.returncode == 1 and "--force" in again.stderr
        as_it_is = first.cli("restore", str(archive))
        assert as_it_is.returncode == 0 and "nothing to do" in as_it_is.stdout
        before = rows(first)
        secrets = first.secrets
    assert secrets and not [secret for secret in secrets if secret.encode() in archive.read_bytes()]
    assert key and key.encode() not in archive.read_bytes()

    with Fleet.start(roots[1], {}) as second:
        dry = second.cli("restore", "--dry-run", str(archive))
        assert dry.returncode == 0 and "deploy over/rest" in dry.stdout and "drain node node-2" in dry.stdout
        assert rows(second) == {}
        done = second.cli("restore", str(archive))
        assert done.returncode == 0, done.stdout + done.stderr
        wait_until("the same models", lambda: rows(second) == before)
        wait_until("the same drained node", lambda: draining(second) == {"node-2"})
        wait_until("the key of the backup opens its model", lambda: asked(second, key, "one") == 200)
        assert (
            asked(second, key, "two") == 404
            and asked(second, key[:-1] + ("B" if key[-1] == "A" else "A"), "one") == 401
        )
        assert {path.name for path in second.models_dir.iterdir()} == {"one.yaml", "two.yaml"}

        refuses_to_overwrite(second, archive)
        archive.write_bytes(archive.read_bytes()[:-100])
        broken = second.cli("restore", str(archive))
        assert broken.returncode == 1 and "cut short" in broken.stderr
        assert len(broken.stderr.strip().splitlines()) == 1


def asked(fleet: Fleet, key: str, model: str) -> int:
    body = {"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]}
    url, headers = fleet.url("data") + "/v1/chat/completions", {"Authorization": f"Bearer {key}"}
    return httpx.post(url, json=body, headers=headers, timeout=200).status_code


def refuses_to_overwrite(fleet: Fleet, archive: Path) -> None:
    file = fleet.models_dir / "one.yaml"
    kept = file.read_text()
    file.write_text(kept.replace("kv_bytes: 1GiB", "kv_bytes: 2GiB"))
    wait_until("the change is in force", lambda: rows(fleet)["one"]["kv_bytes"] == 2 << 30)
    refused = fleet.cli("restore", str(archive))
    assert refused.returncode == 1
    assert "model one exists with a different declaration" in refused.stderr and "--replace" in refused.stderr
    assert rows(fleet)["one"]["kv_bytes"] == 2 << 30
    done = fleet.cli("restore", "--replace", str(archive))
    assert done.returncode == 0, done.stderr
    wait_until("it is as it was", lambda: rows(fleet)["one"]["kv_bytes"] == 1 << 30)
    assert file.read_text() == kept
