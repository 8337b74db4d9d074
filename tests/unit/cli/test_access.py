"""Commands for tenants and keys."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from glowplug.cli import client
from glowplug.cli.client import Answer
from glowplug.cli.main import app_of
from glowplug.domain.access import digest_of, key_id_of

Run = Callable[..., tuple[str, str]]
SECRET = f"gp-abcdefgh-{'s' * 43}"
NONE = dict.fromkeys(
    ("requests_per_minute", "tokens_per_minute", "tokens_per_day", "tokens_per_month", "concurrent", "queued"), 0
)
LAB: dict[str, Any] = {
    "name": "lab", "limits": NONE | {"concurrent": 4}, "model_limits": {"big/*": NONE | {"queued": 1}},
    "priority": "standard", "weight": 1.0, "revision": 3, "source": "", "num_keys": 1,
}  # fmt: skip
KEY: dict[str, Any] = {
    "key_id": "abcdefgh", "prefix": "gp-abcdefgh", "tenant": "lab", "name": "ci", "models": ["chat", "org/*"],
    "surfaces": ["data"], "limits": NONE, "priority": None, "created_at": 1_800_000_000.0,
    "expires_at": 1_802_592_000.0, "revoked_at": 0.0, "state": "active", "revision": 1, "source": "",
}  # fmt: skip
OTHER = KEY | {"key_id": "zzzzzzzz", "prefix": "gp-zzzzzzzz", "tenant": "shop", "state": "revoked", "expires_at": 0.0}


class Autoscaler:
    """Answers as the REST API does. `asked`: calls except listings, with query and body."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, Any, Any]] = []

    def answer(self, method: str, url: str, **kwargs: Any) -> Answer:
        path = url.removeprefix("http://autoscaler")
        listed = {"/v1/tenants": [LAB], "/v1/keys": [KEY, OTHER]}
        if method == "GET" and path in listed:
            return said(200, {"object": "list", "data": listed[path]})
        self.asked.append((method, path, kwargs.get("params"), kwargs.get("json")))
        if path.startswith("/v1/tenants"):
            return said(200, {"name": "lab", "deleted": True} if method == "DELETE" else LAB)
        if method == "POST":
            return said(201, KEY | {"key": SECRET})
        return said(200, KEY | ({"state": "revoked"} if method == "DELETE" else {}))


def said(status: int, value: Any) -> Answer:
    return Answer(status, json.dumps(value).encode())


@pytest.fixture
def autoscaler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Autoscaler:
    made = Autoscaler()
    monkeypatch.setenv("GLOWPLUG_AUTOSCALER_URL", "http://autoscaler")
    monkeypatch.setenv("GLOWPLUG_STATE_DIR", str(tmp_path))
    monkeypatch.setattr(client, "request", made.answer)
    return made


@pytest.fixture
def run() -> Run:
    def command(line: str, code: int = 0) -> tuple[str, str]:
        """Return stdout and stderr."""
        argv = line.split()
        done = CliRunner().invoke(app_of(argv[0]), argv)
        assert done.exit_code == code, done.output
        return done.stdout, f"{done.stderr}{done.exception or ''}"

    return command


def test_a_new_key_stands_alone_on_stdout(autoscaler: Autoscaler, run: Run) -> None:
    out, err = run("keys create --tenant lab --name ci --models chat,org/* --expires 30d --concurrent 2")
    assert out == f"{SECRET}\n"
    assert err.splitlines() == [
        "gp-abcdefgh is a key of tenant lab: data at chat and org/*, until 2027-02-14",
        "the key is shown only once",
    ]
    body = {"tenant": "lab", "name": "ci", "models": ["chat", "org/*"], "surfaces": ["data"]}
    assert autoscaler.asked == [("POST", "/v1/keys", None, body | {"limits": {"concurrent": 2}, "expires": "30d"})]
    out, err = run("keys create --tenant lab --name ci --surfaces read,operate --priority batch --json")
    assert json.loads(out)["key"] == SECRET and err == ""
    assert autoscaler.asked[-1][3]["surfaces"] == ["read", "operate"]
    assert autoscaler.asked[-1][3]["priority"] == "batch"


@pytest.mark.parametrize(
    ("options", "why"),
    [("--surfaces prompts", "is not one of data, read, operate, admin"), ("--models ,", "is empty")],
)
def test_what_is_no_surface_or_model_is_not_asked_for(autoscaler: Autoscaler, run: Run, options: str, why: str) -> None:
    assert why in run(f"keys create --tenant lab --name ci {options}", code=1)[1]
    assert autoscaler.asked == []


def test_keys_are_listed_by_prefix_and_shown_with_their_end(autoscaler: Autoscaler, run: Run) -> None:
    rows = run("keys list")[0].splitlines()
    assert rows[1].split()[:4] == ["gp-abcdefgh", "ci", "lab", "chat,"] and rows[1].endswith("active   2027-02-14")
    assert rows[2].startswith("gp-zzzzzzzz") and rows[2].endswith("-")
    assert [row["tenant"] for row in json.loads(run("keys list --tenant shop --json")[0])] == ["shop"]
    shown = run("keys show gp-abcdefgh")[0]
    assert "created      2027-01-15" in shown and "limits       no limit" in shown
    assert autoscaler.asked == [("GET", "/v1/keys/abcdefgh", None, None)]


@pytest.mark.parametrize("named", ["abcdefgh", "gp-abcdefgh", SECRET])
def test_a_key_is_named_by_id_prefix_or_itself_and_its_secret_stays_here(
    autoscaler: Autoscaler, run: Run, named: str
) -> None:
    assert run(f"keys revoke {named}")[0] == "gp-abcdefgh (ci of tenant lab) is revoked\n"
    out, err = run(f"keys rotate {named} --overlap 10m")
    assert out == f"{SECRET}\n" and "replaces gp-abcdefgh, which ends in 10m" in err
    assert autoscaler.asked == [
        ("DELETE", "/v1/keys/abcdefgh", None, None),
        ("POST", "/v1/keys/abcdefgh/rotate", None, {"overlap": "10m"}),
    ]


def test_a_key_keeps_what_is_not_named(autoscaler: Autoscaler, run: Run) -> None:
    shown = run("keys set gp-abcdefgh --models chat,org/* --expires 30d --priority batch --name build")[0]
    run("keys set abcdefgh --queued 3")
    changed = {"name": "build", "models": ["chat", "org/*"], "priority": "batch", "expires": "30d"}
    assert autoscaler.asked == [
        ("PATCH", "/v1/keys/abcdefgh", None, changed),
        ("GET", "/v1/keys/abcdefgh", None, None),
        ("PATCH", "/v1/keys/abcdefgh", None, {"limits": NONE | {"queued": 3}}),
    ]
    assert shown.splitlines()[1].startswith("gp-abcdefgh")
    assert "give an option" in run("keys set abcdefgh", code=1)[1]


def test_a_key_for_a_file_is_made_without_a_fleet(run: Run) -> None:
    made = json.loads(run("keys hash --json")[0])
    assert key_id_of(made["key"]) == made["id"] and digest_of(made["key"]) == made["sha256"]
    plain = dict(line.split() for line in run("keys hash")[0].splitlines())
    assert plain.keys() == made.keys() and plain["key"] != made["key"]


def test_a_tenant_keeps_what_is_not_named(autoscaler: Autoscaler, run: Run) -> None:
    run("tenants put lab --requests-per-minute 60 --priority batch --weight 2")
    run("tenants put lab --model big/* --concurrent 1")
    run("tenants put new --queued 5")
    kept = {"limits": LAB["limits"], "model_limits": LAB["model_limits"], "priority": "standard", "weight": 1.0}
    limits = NONE | {"concurrent": 4, "requests_per_minute": 60}
    at_models = {"big/*": NONE | {"queued": 1, "concurrent": 1}}
    assert [(path, body) for _, path, _, body in autoscaler.asked] == [
        ("/v1/tenants/lab", kept | {"limits": limits, "priority": "batch", "weight": 2.0}),
        ("/v1/tenants/lab", kept | {"model_limits": at_models}),
        ("/v1/tenants/new", {"limits": {"queued": 5}}),
    ]
    assert "needs a limit" in run("tenants put lab --model x", code=1)[1]


def test_tenants_are_listed_with_their_limits_and_removed_with_their_keys(autoscaler: Autoscaler, run: Run) -> None:
    assert "4 concurrent; big/*: 1 queued" in run("tenants list")[0]
    assert run("tenants remove lab")[0] == "tenant lab is removed\n"
    assert run("tenants remove lab --with-keys")[0] == "tenant lab is removed, and its keys are revoked\n"
    assert [params for _, _, params, _ in autoscaler.asked] == [{"with_keys": "false"}, {"with_keys": "true"}]
