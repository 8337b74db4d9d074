"""The process in front of a command's server: `python -m glowplug.engines.command_host RUN_DIR`.

It waits for the weights, starts the command in its own process group, reports READY once the server is healthy, and
ends with it.
"""

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from glowplug.domain.address import reachable
from glowplug.engines import rendezvous

_POLL_S = 0.02
_ASK_S = 2.0


class ServerEnded(RuntimeError):
    """The command ended before its server was healthy."""


def free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def is_healthy(host: str, port: int, path: str) -> bool:
    connection = http.client.HTTPConnection(host, port, timeout=_ASK_S)
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("GET", path)
        return connection.getresponse().status == 200
    return False


def serve(run_dir: Path, spec: dict[str, Any]) -> int:
    """Return the server's exit status. Raises ServerEnded, TimeoutError and OSError."""
    began = time.time()
    weights = rendezvous.wait(run_dir, rendezvous.GO, spec["wait_s"])["path"]
    load_at, port = time.time(), spec["port"] or free_port(spec["host"])
    fields = spec["fields"] | {
        "weights": weights,
        "port": str(port),
        "api_key": os.environ.get(rendezvous.API_KEY, ""),
    }
    argv = [text.format_map(fields) for text in spec["command"]] + spec["args"]
    env = {name: text.format_map(fields) for name, text in spec["env"].items()}
    server = subprocess.Popen(argv, env=os.environ | env, cwd=run_dir)

    def end(*_: int | FrameType | None) -> None:
        server.terminate()

    signal.signal(signal.SIGTERM, end)
    host = reachable(spec["host"])
    deadline = time.monotonic() + spec["wait_s"]
    while not is_healthy(host, port, spec["health"]):
        if (status := server.poll()) is not None:
            raise ServerEnded(f"{argv[0]} ended with status {status} before it was healthy")
        if time.monotonic() > deadline:
            server.kill()
            raise TimeoutError(f"{spec['health']} did not answer 200 within {spec['wait_s']:g} s")
        time.sleep(_POLL_S)
    ready_at = time.time()
    phases = [["launch", spec["launched_at"], began], ["load", load_at, ready_at], ["warmup", ready_at, ready_at]]
    ready = {"port": port, "phases": phases, "num_slots": spec["max_concurrency"]}
    rendezvous.write(run_dir, rendezvous.READY, ready)
    return server.wait()


def main() -> int:
    run_dir, spec = rendezvous.of_this_process()
    try:
        return serve(run_dir, spec)
    except (ServerEnded, TimeoutError, OSError) as error:
        rendezvous.write(run_dir, rendezvous.FAILED, {"message": f"{type(error).__name__}: {error}"})
        return 1


if __name__ == "__main__":
    sys.exit(main())
