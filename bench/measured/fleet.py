"""The common parts of benchmarks of whole fleets: a live fleet, its recording, and requests at given times.

`with fleet(...) as live, recorded(live, path, seconds): asyncio.run(drive(...))` starts a fleet with a state directory
of its own, records its events, and ends both even after an error.
"""

import asyncio
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx

from glowplug.engines.samples import sample_weights_path

GLOWPLUG: Final = (sys.executable, "-m", "glowplug.cli.main")
READY_S: Final = 2.0  # a recorder has subscribed this long after it opened its file
SAMPLE_S: Final = 2.0
WAIT_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Live:
    """A running fleet. `env` is the environment for `glowplug` commands about it."""

    env: Mapping[str, str]
    urls: Mapping[str, str]
    admin: Mapping[str, str]  # headers of an operator


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a load."""

    at_s: float
    model: str
    prompt: str
    max_tokens: int


@contextmanager
def fleet(*up: str, settings: Mapping[str, str]) -> Iterator[Live]:
    """Run `glowplug up` with these arguments and only these settings, until the block ends."""
    state = Path(tempfile.mkdtemp(prefix="glowplug-bench-fleet-"))
    env = {key: value for key, value in os.environ.items() if not key.startswith("GLOWPLUG_")}
    env |= {"GLOWPLUG_STATE_DIR": str(state), **settings}
    try:
        subprocess.run([*GLOWPLUG, "up", "-d", "-q", *up], env=env, check=True, stdout=subprocess.DEVNULL)
        document = json.loads((state / "fleet.json").read_text())
        yield Live(env, document["urls"], {"Authorization": f"Bearer {document['admin_token']}"})
    finally:
        subprocess.run([*GLOWPLUG, "down"], env=env, check=False, stdout=subprocess.DEVNULL)
        shutil.rmtree(state, ignore_errors=True)


@contextmanager
def recorded(live: Live, out: Path, seconds: float) -> Iterator[None]:
    """Record the fleet to `out` for `seconds`. The block begins once the recording has begun, and its end waits for the
    recording to end."""
    out.unlink(missing_ok=True)
    recorder = subprocess.Popen([*GLOWPLUG, "record", str(out), "--seconds", str(seconds)], env=live.env)
    try:
        while recorder.poll() is None and not list(out.parent.glob(f".{out.name}.*.partial")):
            time.sleep(0.1)
        time.sleep(READY_S)
        yield
    finally:
        recorder.wait(timeout=seconds + WAIT_S)


def write_weights(path: Path, number: int) -> str:
    """Write the sample model as distinct weights, by trailing bytes that llama.cpp never reads. Returns their
    digest."""
    content = sample_weights_path().read_bytes() + number.to_bytes(8, "little")
    path.write_bytes(content)
    return hashlib.sha256(content).hexdigest()


async def ask(http: httpx.AsyncClient, one: Ask, began: float) -> int:
    """Stream one answer to its end. Returns its HTTP status."""
    await asyncio.sleep(max(0.0, began + one.at_s - time.monotonic()))
    body = {
        "model": one.model,
        "messages": [{"role": "user", "content": one.prompt}],
        "max_tokens": one.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        async for _ in answer.aiter_bytes():
            pass
        return answer.status_code


async def held_bytes(http: httpx.AsyncClient, placer: str, held: list[int]) -> None:
    """Sample the bytes granted on all GPUs into `held`, until cancelled."""
    while True:
        rows = (await http.get(placer + "/v1/nodes")).json()["data"]
        held.append(sum(grant["num_bytes"] for row in rows for gpu in row["gpus"] for grant in gpu["grants"]))
        await asyncio.sleep(SAMPLE_S)


async def drive(asks: Sequence[Ask], live: Live) -> tuple[Counter[str], list[int]]:
    """Send the whole load. Returns (count of requests by status or error, samples of the bytes held)."""
    held: list[int] = []
    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(base_url=live.urls["data"], timeout=WAIT_S, limits=limits) as http,
        httpx.AsyncClient(headers=dict(live.admin), timeout=5.0) as admin,
    ):
        sampling = asyncio.create_task(held_bytes(admin, live.urls["placer"], held))
        began = time.monotonic()
        answers = await asyncio.gather(*(ask(http, one, began) for one in asks), return_exceptions=True)
        if sampling.done():
            sampling.result()
        sampling.cancel()
    return Counter(type(a).__name__ if isinstance(a, BaseException) else str(a) for a in answers), held


def rows_of(recording: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(type, data) of each event of a recording, in the order they came."""
    for line in recording.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        yield row["type"], row["data"]


def at(values: Sequence[float], share: float) -> float:
    """A percentile, by nearest rank; nan without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")
