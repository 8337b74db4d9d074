"""A router process with NATS and Valkey; its engines run in the test."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from glowplug.domain.instance import Instance
from glowplug.domain.model import Model
from glowplug.events.envelope import to_json
from glowplug.state.redis_store import RedisStore
from tests.ports import free_port
from tests.waiting import WAIT_S


@dataclass
class RouterProcess:
    nats_url: str
    redis_url: str
    state_dir: Path
    data_port: int = field(default_factory=free_port)
    admin_port: int = field(default_factory=free_port)
    process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.data_port}"

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self.admin_port}"

    async def start(self, *, wait: bool = True, **env: str) -> "RouterProcess":
        given = {
            "GLOWPLUG_NATS_URL": self.nats_url,
            "GLOWPLUG_REDIS_URL": self.redis_url,
            "GLOWPLUG_STATE_DIR": str(self.state_dir),
            "GLOWPLUG_DATA_PORT": str(self.data_port),
            "GLOWPLUG_PORT": str(self.admin_port),
            "GLOWPLUG_SERVICE_ID": "router-1",
        }
        argv = (sys.executable, "-m", "glowplug.services.router")
        with (self.state_dir / "router.log").open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *argv, stdout=log, stderr=log, env=os.environ | given | env
            )
        if wait:
            await self.until_ready()
        return self

    async def until_ready(self) -> None:
        async with asyncio.timeout(WAIT_S), httpx.AsyncClient() as client:
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if (await client.get(f"{self.url}/ready")).status_code == 200:
                        return
                assert self.process is not None and self.process.returncode is None, self.log()
                await asyncio.sleep(0.02)

    def log(self) -> str:
        return (self.state_dir / "router.log").read_text(errors="replace")[-3000:]

    def terminate(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)

    async def ended(self) -> int:
        assert self.process is not None
        return await asyncio.wait_for(self.process.wait(), WAIT_S)

    async def kill(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


@contextlib.asynccontextmanager
async def a_router(nats_url: str, redis_url: str, state_dir: Path, **env: str) -> AsyncIterator[RouterProcess]:
    router = RouterProcess(nats_url, redis_url, state_dir)
    try:
        yield await router.start(**env)
    finally:
        await router.kill()


async def write_rows(redis_url: str, *rows: Model | Instance) -> None:
    store = RedisStore(redis_url)
    for row in rows:
        table, key = ("models", row.key) if isinstance(row, Model) else ("instances", row.instance_id)
        await store.put(table, key, to_json(row))
    await store.close()


def chat_body(model: str = "m", *, stream: bool = False) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "hi"}], "stream": stream}
