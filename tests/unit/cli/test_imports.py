"""Imports of each command; help and listings must start fast."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import typer

from glowplug import __version__
from glowplug.cli.client import FleetClient, NoAnswer, request
from glowplug.cli.main import app_of, listing
from glowplug.cli.terminal import CliError

HEAVY = {
    "fastapi", "httpx", "msgspec", "nats", "numpy", "opentelemetry", "prometheus_client", "redis",
    "rich", "uvicorn", "yaml",
}  # fmt: skip
OF_CALLS = {
    "http.client",
    "psutil",
    "pydantic",
}  # typer checks options with pydantic
CODE = """
import json, sys
from glowplug.cli.main import main
try:
    main()
finally:
    print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""


class Service(BaseHTTPRequestHandler):
    """Echoes the request; /refused gives one of our errors, /broken no JSON."""

    def do_GET(self) -> None:
        self.answer({"path": self.path, "token": self.headers["Authorization"], "data": []})

    def do_POST(self) -> None:
        sent = self.rfile.read(int(self.headers["Content-Length"] or 0))
        self.answer({"path": self.path, "type": self.headers["Content-Type"], "body": json.loads(sent or b"null")})

    def answer(self, value: dict[str, Any]) -> None:
        is_refused = self.path == "/refused"
        error = {"error": {"message": "not now", "type": "busy", "code": None}}
        body = b"<html>" if self.path == "/broken" else json.dumps(error if is_refused else value).encode()
        self.send_response(503 if is_refused else 200)
        self.send_header("Content-Length", str(len(body)))
        if is_refused:
            self.send_header("retry-after", "7")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def service() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def run(tmp_path: Path, *argv: str, **environment: str) -> tuple[str, set[str]]:
    """Return output and imported modules of a successful command."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, *argv],
        cwd=tmp_path, env={**os.environ, **environment}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout, set(json.loads(done.stderr.splitlines()[-1]))


@pytest.mark.parametrize("argv", [["--help"], ["--version"]])
def test_help_and_version_import_no_more_than_the_command_line(tmp_path: Path, argv: list[str]) -> None:
    said, modules = run(tmp_path, *argv)
    assert not modules & (HEAVY | OF_CALLS)
    assert said.strip() == __version__ or "Commands:" in said


@pytest.mark.parametrize("verb", ["ps", "models"])
def test_a_listing_imports_what_a_call_needs_and_no_service(tmp_path: Path, service: str, verb: str) -> None:
    urls = {f"GLOWPLUG_{name}_URL": service for name in ("PLACER", "AUTOSCALER")}
    _, modules = run(tmp_path, verb, **urls)
    assert "http.client" in modules and not modules & HEAVY


def test_the_help_names_every_command_with_a_whole_line_and_nothing_else() -> None:
    shown, real = (getattr(typer.main.get_command(app), "commands") for app in (listing(), app_of()))  # noqa: B009
    assert {name: one.short_help for name, one in shown.items()} == {n: one.short_help for n, one in real.items()}
    assert all(len(one.get_short_help_str(limit=66)) < 66 for one in shown.values())
    assert not [name for name, one in shown.items() if one.get_short_help_str(limit=66).endswith("...")]


def test_a_call_sends_and_gets_what_it_should(service: str) -> None:
    fleet = FleetClient({"placer": service}, admin_token="t")
    assert fleet.get("placer", "/a", x="1 &", y="", z=None) == {"path": "/a?x=1+%26", "token": "Bearer t", "data": []}
    assert fleet.call("POST", "placer", "/b", json={"n": 1})["body"] == {"n": 1}
    assert fleet.call("POST", "placer", "/b")["type"] is None
    assert json.loads(fleet.get_text("placer", "/c", limit=3))["path"] == "/c?limit=3"
    with pytest.raises(CliError, match=r"^not now \(busy\); try again in 7 s$"):
        fleet.get("placer", "/refused")
    with pytest.raises(CliError, match="placer did not answer /broken with JSON"):
        fleet.get("placer", "/broken")


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "ftp://x", "x:1", "http://", "http://h:port", "http://[x"])
def test_what_does_not_answer_is_one_error(url: str) -> None:
    with pytest.raises(NoAnswer):
        request("GET", url, headers={}, timeout_s=5)
    with pytest.raises(CliError, match=r"placer at .* does not answer"):
        FleetClient({"placer": url}).get("placer", "/")
