"""Every command with a table or stream takes --json."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
import typer
from typer.testing import CliRunner

from glowplug.cli.main import app_of, without_output

SCENARIO = Path(__file__).parents[3] / "scenarios/small.yaml"
SHORT = ("--set", "seconds=20s")
NO_TABLE = {
    "backup", "batches output", "chat", "cordon", "down", "env", "node", "record", "restore", "uncordon", "undeploy",
    "up", "version",
}  # fmt: skip
MODEL = {
    "name": "m", "key": "m", "engine": "emulated", "state": "cold", "num_waiting": 0, "num_in_flight": 0,
    "memory_bytes": 1, "instances": [], "config_error": "", "last_failure": "", "pinned": False, "suspended": False,
    "weights": {"uri": "file:/w", "num_bytes": 1, "sha256": ""},
}  # fmt: skip
COST = {
    "is_possible_now": True, "seconds": 0.0, "leaving": [], "freed_host_bytes": 0, "reason": "it is there", "kind": "",
}  # fmt: skip
NODE = {
    "node_id": "n", "gpus": [], "cached": [], "engines": ["emulated"], "draining": False, "heartbeat_at": 0.0,
}  # fmt: skip
INSTANCE = {
    "instance_id": "i", "model_key": "m", "engine": "emulated", "emulated": True, "state": "ready", "url": "",
    "workers": [{"gpu_id": "n/0", "node_id": "n", "num_bytes": 1}], "max_concurrency": 1, "created_at": 1.0,
    "ready_at": 2.0,
}  # fmt: skip
REQUEST = {
    "request_id": "r", "model_key": "m", "state": "finished", "status": 200, "arrived_at": 1.0, "queue_s": 0.1,
    "ttft_s": 0.2, "e2e_s": 0.3, "tokens_exact": True, "response_tokens": 3, "instance_id": "i", "code": "",
    "num_unlisted": 0,
}  # fmt: skip
DECISION = {
    "decision_id": "d-1", "made_at": 1.0, "service": "placer", "kind": "place", "policy": "lru", "reason": "room",
}  # fmt: skip
FETCH = {"digest": "d", "stage": "complete", "num_bytes": 1, "num_bytes_done": 1, "source": "file"}
LIMITS = {"requests_per_minute": 60}
TENANT: dict[str, Any] = {
    "name": "lab", "limits": LIMITS, "model_limits": {}, "priority": "standard", "weight": 1.0, "revision": 1,
    "source": "", "num_keys": 1,
}  # fmt: skip
KEY: dict[str, Any] = {
    "key_id": "abcdefgh", "prefix": "gp-abcdefgh", "tenant": "lab", "name": "ci", "models": ["*"], "surfaces": ["data"],
    "limits": {}, "priority": None, "created_at": 1.0, "expires_at": 0.0, "revoked_at": 0.0, "state": "active",
    "revision": 1, "source": "",
}  # fmt: skip
BATCH: dict[str, Any] = {
    "id": "batch_1", "status": "completed", "endpoint": "/v1/chat/completions", "created_at": 1, "errors": None,
    "request_counts": {"total": 2, "completed": 1, "failed": 1}, "input_file_id": "file-1", "output_file_id": "file-2",
    "error_file_id": "file-3", "completed_at": 3, "expires_at": 9, "metadata": {"job": "nightly"},
}  # fmt: skip
ANSWER = b'data: {"choices": [{"delta": {"content": "hi"}}]}\n\ndata: [DONE]\n\n'
ANSWERS: dict[str, Any] = {
    "/v1/models": {"data": [MODEL], "files_read": True},
    "/v1/models/m": MODEL,
    "/v1/models/m/cost": COST,
    "/v1/model_files": {"errors": [], "change": "No instance is replaced", "replaced": [], "start_s": 0.0},
    "/v1/instances": {"data": [INSTANCE]},
    "/v1/instances/i/logs": "first\nsecond",
    "/v1/requests": {"data": [REQUEST]},
    "/api/v1/requests": {"requests": [REQUEST], "now": 5.0, "num_matching": 1},
    "/v1/decisions": {"data": [DECISION]},
    "/v1/forecasts": {"data": [], "policy": "naive"},
    "/v1/windows": {"data": {}, "window_s": 300.0},
    "/v1/capacities": {"data": []},
    "/v1/fetches": FETCH,
    "/v1/fetches/d": FETCH,
    "/v1/tenants": {"data": [TENANT]},
    "/v1/tenants/lab": TENANT,
    "/v1/keys": {"data": [KEY]},
    "/v1/keys/abcdefgh": KEY,
    "/v1/files": {"id": "file-1"},
    "/v1/batches": {"data": [BATCH], **BATCH},
    "/v1/batches/batch_1": BATCH,
    "/v1/batches/batch_1/cancel": BATCH,
    "/v1/chat/completions": ANSWER.decode(),
}


class Services(BaseHTTPRequestHandler):
    """All services of a fleet on one port; sends strings verbatim."""

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = f"http://{self.headers['Host']}"
        node = NODE | {"agent_url": url, "prefetcher_url": url}
        answer = {"data": [node]} if self.path == "/v1/nodes" else ANSWERS.get(self.path.partition("?")[0])
        body = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
        self.send_response(404 if answer is None and self.command == "GET" else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_PUT = do_DELETE = do_GET

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def state_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """State of a fleet served by this process, beside a simulated run."""
    folder, own = tmp_path_factory.mktemp("state"), psutil.Process()
    with ThreadingHTTPServer(("127.0.0.1", 0), Services) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        names = ("data", "console", "router", "predictor", "placer", "autoscaler")
        urls = dict.fromkeys(names, f"http://127.0.0.1:{server.server_port}")
        document: dict[str, Any] = {"pid": own.pid, "pid_started_at": own.create_time(), "urls": urls, "phase": "ready"}
        document |= {"engine": "emulated", "started_at": 1.0, "log_dir": str(folder), "state_dir": str(folder)}
        document |= {"admin_token": "", "api_key": "", "nats_url": "", "nodes": []}
        process = {"name": "placer-1", "service": "placer", "state": "ready", "pid": own.pid, "restarts": 0, "url": ""}
        (folder / "fleet.json").write_text(json.dumps(document | {"processes": [process]}))
        (folder / "placer-1.log").write_text("one\ntwo\nthree")
        (folder / "m.yaml").write_text("name: m\nengine: emulated\nweights_bytes: 1MiB\n")
        (folder / "requests.jsonl").write_text("{}")
        (folder / "weights.gguf").write_bytes(b"GGUF")
        typed(folder, "simulate", str(SCENARIO), *SHORT, "--out", str(folder / "run"))
        yield folder
        server.shutdown()
        thread.join()


def typed(state_dir: Path, verb: str, *argv: str) -> str:
    words = [word.replace("STATE", str(state_dir)) for word in argv]
    at = {"GLOWPLUG_STATE_DIR": str(state_dir / "none" if verb == "doctor" else state_dir)}
    done = CliRunner().invoke(app_of(verb), [verb, *words, "--json"], env=at, catch_exceptions=False)
    assert done.exit_code in ((0, 1) if verb == "doctor" else (0,)), done.output
    return done.stdout


@pytest.mark.parametrize(
    ("line", "fields"),
    [
        ("status", {"phase", "urls", "processes", "memory_bytes"}),
        ("deploy STATE/m.yaml", {"name", "engine", "state"}),
        ("deploy STATE/m.yaml --dry-run", {"errors", "change", "replaced", "start_s"}),
        ("pull STATE/weights.gguf", {"weights", "where", "num_bytes", "seconds", "source"}),
        ("pull STATE/weights.gguf --no-wait", {"weights", "where", "stage"}),
        *((f"{verb} m", {"model", "cost", "actual_s"}) for verb in ("load", "unload", "wake", "sleep", "drain", "pin")),
        ("unpin m --dry-run", {"is_possible_now", "seconds"}),
        ("models", {"data"}),
        ("ps", {"instance_id", "state"}),
        ("nodes", {"node_id", "gpus"}),
        ("top --once", {"at", "models", "instances", "nodes"}),
        ("requests", {"requests", "num_matching"}),
        ("logs placer -n 2", {"source", "line"}),
        ("logs m", {"source", "line"}),
        ("tap --run STATE/run -n 3", {"subject", "type", "data"}),
        ("why r", {"request", "decisions"}),
        ("forecast m", {"forecasts", "windows", "capacity"}),
        ("doctor", {"healthy", "counts", "findings"}),
        (f"simulate {SCENARIO} --set seconds=20s --out STATE/again --no-record", {"runs", "folder"}),
        (f"plan {SCENARIO} --slo ttft_p99=9 --gpus 8..8 --set seconds=20s --out STATE/plan", {"answer", "points"}),
        ("replay STATE/run --out STATE/replay", {"runs", "folder"}),
        ("run m hello", {"text", "ttft_s", "request_id"}),
        ("tenants list", {"name", "limits", "num_keys"}),
        ("tenants put lab --weight 2", {"name", "limits", "num_keys"}),
        ("keys list --tenant lab", {"key_id", "prefix", "tenant", "state"}),
        ("keys show gp-abcdefgh", {"key_id", "prefix", "tenant", "state"}),
        ("keys revoke abcdefgh", {"key_id", "state"}),
        ("batches create STATE/requests.jsonl", {"id", "status", "request_counts"}),
        ("batches create STATE/requests.jsonl --wait", {"id", "status", "request_counts"}),
        ("batches list", {"id", "status", "request_counts"}),
        ("batches show batch_1", {"id", "status", "request_counts"}),
        ("batches cancel batch_1", {"id", "status"}),
        ("keys hash", {"id", "sha256", "key"}),
        ("context", set()),
    ],
)
def test_a_command_prints_documents_with_fields_that_stay(state_dir: Path, line: str, fields: set[str]) -> None:
    verb, *argv = line.split()
    said = typed(state_dir, verb, *argv)
    rows = [json.loads(row) for row in said.splitlines()] if verb in ("top", "tap", "logs") else json.loads(said)
    for row in rows if isinstance(rows, list) else [rows]:
        assert row.keys() >= fields, row
    assert rows or verb == "context"


def test_each_command_takes_json_or_is_one_that_prints_no_table() -> None:
    commands: dict[str, Any] = getattr(typer.main.get_command(app_of()), "commands")  # noqa: B009
    for group in ("tenants", "keys", "batches"):
        commands |= {f"{group} {name}": one for name, one in commands.pop(group).commands.items()}
    without = {name for name, one in commands.items() if not any("--json" in option.opts for option in one.params)}
    assert without == NO_TABLE


def test_logs_are_the_last_lines_of_a_file_or_of_an_instance(state_dir: Path) -> None:
    said = [json.loads(line) for line in typed(state_dir, "logs", "placer-1", "-n", "2").splitlines()]
    assert said == [{"source": "placer-1", "line": line} for line in ("two", "three")]
    said = [json.loads(line) for line in typed(state_dir, "logs", "i").splitlines()]
    assert said == [{"source": "i", "line": line} for line in ("first", "second")]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("-o json x", "--json x"),
        ("x -ojson", "x --json"),
        ("x --output=json y", "x --json y"),
        ("--output table x", "x"),
        ("x -- -o json", "x -- -o json"),
        ("-o yaml", "-o yaml"),
    ],
)
def test_the_option_of_earlier_versions_means_the_same(typed: str, meant: str) -> None:
    assert without_output(typed.split()) == meant.split()
