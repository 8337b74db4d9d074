"""vLLM's entry points `glowplug` in `vllm.general_plugins` and `vllm.endpoint_plugins`.

The endpoint has the routes of sleeping.py, and tells two facts that vLLM does not: the port of a server started with
`--port 0` (written to the run directory once it accepts), and the engine core's silence. vLLM's /health asks only
whether the core's process has ended, so a hung core looks well (vllm#39863)."""

import asyncio
import multiprocessing
import os
import time
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from glowplug_vllm import arriving, kv_limit, moving, process, rendezvous, sleeping
from glowplug_vllm.parked import patches

CORE_PATH = "/glowplug/core"
_ANSWER_WITHIN_S = 0.2
_LOOPBACK_OF = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True, slots=True)
class ServerStart:
    """Times of a server's start, epoch seconds. Set by server.py in the API server's process."""

    run_dir: Path
    launched_at: float
    imported_at: float
    load_began_at: float


START: ServerStart | None = None


def register() -> None:
    """Runs in the API server, the engine core and the workers: the latter two must not outlive their parent."""
    if multiprocessing.parent_process() is not None:
        process.die_with_parent()
    from vllm.v1.engine.core import EngineCore

    EngineCore.glowplug_kv = kv_limit.kv  # called by name from the API server
    EngineCore.glowplug_export = moving.export
    keep_meeting_file()
    if arriving.is_on():
        from glowplug_vllm import arriving_load

        arriving_load.install()


def keep_meeting_file() -> None:
    """Put the file in which workers meet into the run directory: vLLM's own stays in /tmp after each start."""
    from vllm.utils import network_utils

    if hasattr(network_utils, "get_file_store_init_method"):  # older ones meet over TCP
        patches.replace_everywhere(network_utils.__name__, "get_file_store_init_method", meeting_file)


def meeting_file() -> str:
    return f"file://{Path.cwd()}/meeting-{uuid4().hex}"


class CoreWatch:
    """Ask the engine core one cheap question at a time."""

    def __init__(self, ask: Any) -> None:
        self._ask = ask
        self._asked_at = 0.0
        self._question: asyncio.Task[Any] | None = None

    async def silent_s(self) -> float:
        """Return the seconds that the oldest question is open; 0.0 if the core answers. Raises the question's errors,
        e.g. vLLM's EngineDeadError."""
        if self._question is None:
            self._asked_at = time.monotonic()
            self._question = asyncio.create_task(self._ask())
        await asyncio.wait([self._question], timeout=_ANSWER_WITHIN_S)
        if not self._question.done():
            return time.monotonic() - self._asked_at
        question, self._question = self._question, None
        question.result()
        return 0.0


class GlowplugEndpoint:
    """vLLM's EndpointPlugin."""

    name = "glowplug"
    required_tasks = None

    def __init__(self) -> None:
        self._watch: CoreWatch | None = None
        self._announcement: asyncio.Task[None] | None = None
        self._sleeping: sleeping.Sleeping | None = None
        self._move: moving.Move | None = None

    def attach_router(self, app: Any) -> None:
        from fastapi.responses import JSONResponse

        async def core() -> JSONResponse:
            """Whether the engine core answers: {"silent_s"}; 503 with {"error"} when it is dead."""
            if self._watch is None:
                return JSONResponse({"error": "no engine in this server"}, status_code=503)
            try:
                return JSONResponse({"silent_s": round(await self._watch.silent_s(), 3)})
            except Exception as error:  # noqa: BLE001 (whatever ended the core is the answer)
                return JSONResponse({"error": f"{type(error).__name__}: {error}"}, status_code=503)

        app.add_api_route(CORE_PATH, core, methods=["GET"], include_in_schema=False)
        app.include_router(sleeping.routes(lambda: self._sleeping, lambda: self._move))

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        if engine_client is not None:
            self._watch = CoreWatch(engine_client.is_sleeping)  # a round trip through the core's busy loop
            self._move = moving.Move(engine_client)
            self._sleeping = sleeping.Sleeping(engine_client, int(os.environ.get(sleeping.FIRST_BYTES) or 0))
        arriving.check()
        if START is not None:
            port = args.port or process.bound_port()
            self._announcement = asyncio.create_task(announce(START, args.host or "", port, holds(engine_client)))


def holds(engine_client: Any) -> dict[str, int]:
    config = getattr(engine_client, "vllm_config", None)
    cache, scheduler = getattr(config, "cache_config", None), getattr(config, "scheduler_config", None)
    num_blocks, block_size = getattr(cache, "num_gpu_blocks", None), getattr(cache, "block_size", None)
    return {
        "num_slots": int(getattr(scheduler, "max_num_seqs", 0) or 0),
        "kv_tokens": int(num_blocks or 0) * int(block_size or 0),
    }


async def announce(start: ServerStart, host: str, port: int, held: Mapping[str, int]) -> None:
    loaded_at = time.time()
    host = _LOOPBACK_OF.get(host, host)
    while True:
        try:
            _, writer = await asyncio.open_connection(host, port)
        except OSError:
            await asyncio.sleep(0.005)
            continue
        writer.close()
        break
    phases = [
        ("launch", start.launched_at, start.imported_at),
        ("load", start.load_began_at, loaded_at),
        ("warmup", loaded_at, time.time()),
    ]
    rendezvous.write(start.run_dir, rendezvous.READY, {"port": port, "phases": phases, **held})
