"""Check recorded usage against the engine's own counts, over kills of router, console and database.

    python bench/usage/run.py [--engine counting|emulated|llamacpp] [--requests 10000] [--kills 9] [--postgres FOLDER]

A router, a console, NATS and Valkey as processes, and an engine: by default one in this process that reports another
usage in each answer, and knows which requests it was given; else an emulated or a real one as a process. A client
repeats each request until it has a whole answer; meanwhile router and console are killed and the database is taken
away, in turns: SQLite is locked for three seconds; with `--postgres` (the folder of initdb and pg_ctl; Debian's package
postgresql, and psycopg for Python) the server is stopped at once and started again.

Compares each record with the engine's own count, which is the usage in the client's answer. Among requests broken off
by the kill of a router it counts those with a record (`router_lost`), and those that reached the engine and have none.
Prints the sums; `--out` keeps them, and the counts of each request whose record is missing or differs, as JSON. Exits
with 1 if a record is missing, differs or comes twice.
"""

import argparse
import asyncio
import contextlib
import json
import os
import pwd
import secrets
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy import create_engine, text
from sqlalchemy.exc import SQLAlchemyError

from tests.contract.data_port_rig import DONE, TOKEN, FakeEngine, Served, a_model, an_instance, streaming
from tests.contract.engine_rig import engine_case
from tests.integration.router_process import RouterProcess, chat_body, write_rows
from tests.ports import free_port
from tests.servers import NatsProcess, ValkeyProcess

NUM_CLIENTS = 8
WITHIN_S = 120.0  # until the ledger has everything, after the last request
SETTLE_S = 3.0
Counts = tuple[int, int, int]  # prompt, cached and response tokens


class Engine:
    """Answers each request with a usage of its own, every other one as a stream."""

    def __init__(self) -> None:
        self.given: set[str] = set()  # ids of all requests that came
        self._num = 0

    async def reply(self, served: Served) -> None:
        self.given.add(served.header("x-request-id") or "")
        self._num = number = self._num + 1
        counts = 100 + number % 977, number % 89, 7 + number % 499
        usage = {
            "prompt_tokens": counts[0],
            "completion_tokens": counts[2],
            "prompt_tokens_details": {"cached_tokens": counts[1]},
        }
        if json.loads(served.body)["stream"]:
            end = b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"
            await streaming(TOKEN, end, DONE, every_s=0.0)(served)
        else:
            await served.json({"choices": [], "usage": usage})


class Postgres:
    """A PostgreSQL server of this run's own, as the user `postgres` where this is root."""

    def __init__(self, programs: Path, folder: Path) -> None:
        self._programs, self._folder, self.port = programs, folder, free_port()
        if os.geteuid() == 0:
            user = pwd.getpwnam("postgres")
            os.chown(folder, user.pw_uid, user.pw_gid)
        self._run("initdb", "-D", f"{folder}/data", "-A", "trust", "-U", "gp")
        self.start()

    @property
    def url(self) -> str:
        return f"postgresql+psycopg://gp@127.0.0.1:{self.port}/postgres"

    def start(self) -> None:
        options = f"-p {self.port} -k {self._folder} -h 127.0.0.1"
        self._run("pg_ctl", "-D", f"{self._folder}/data", "-l", f"{self._folder}/log", "-o", options, "-w", "start")

    def stop(self) -> None:
        self._run("pg_ctl", "-D", f"{self._folder}/data", "-m", "immediate", "stop")

    def _run(self, program: str, *argv: str) -> None:
        command = [str(self._programs / program), *argv]
        as_user = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
        subprocess.run([*as_user, *command], check=True, stdout=subprocess.DEVNULL, cwd="/", timeout=60)


class Console:
    """A console process, to be killed."""

    def __init__(self, nats_url: str, redis_url: str, state_dir: Path, database_url: str) -> None:
        self._log = state_dir / "console.log"
        self._env = os.environ | {
            "GLOWPLUG_NATS_URL": nats_url,
            "GLOWPLUG_REDIS_URL": redis_url,
            "GLOWPLUG_STATE_DIR": str(state_dir),
            "GLOWPLUG_PORT": str(free_port()),
            "GLOWPLUG_SERVICE_ID": "console-1",
            "GLOWPLUG_USAGE_DATABASE_URL": database_url,
        }
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            argv = [sys.executable, "-m", "glowplug.services.console"]
            self._process = subprocess.Popen(argv, env=self._env, stdout=log, stderr=log)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


class Clients:
    """Clients that ask until `num` requests were answered whole."""

    def __init__(self, url: str, num: int) -> None:
        self._url, self._num = f"{url}/v1/chat/completions", num
        self.whole: dict[str, Counts] = {}  # by request id: the usage in the answer
        self.broken: list[str] = []  # ids of requests without a whole answer
        self._num_asked = 0

    async def run(self) -> None:
        async with httpx.AsyncClient(timeout=30) as client, asyncio.TaskGroup() as tasks:
            for _ in range(NUM_CLIENTS):
                tasks.create_task(self._ask(client))

    async def _ask(self, client: httpx.AsyncClient) -> None:
        while self._num_asked < self._num:
            self._num_asked += 1
            body, deadline = self._body(self._num_asked), time.monotonic() + 90
            while not await self._asked(client, body):
                if time.monotonic() > deadline:
                    raise TimeoutError("a request found no answer for 90 s")
                await asyncio.sleep(0.05)

    def _body(self, number: int) -> dict[str, Any]:
        body = chat_body(stream=bool(number % 2)) | {"max_tokens": 2 + number % 7}
        body["messages"] = [{"role": "user", "content": " ".join(["hello"] * (1 + number % 23)) + f" {number}"}]
        return body | ({"stream_options": {"include_usage": True}} if number % 2 else {})

    async def _asked(self, client: httpx.AsyncClient, body: dict[str, Any]) -> bool:
        request_id = secrets.token_hex(8)
        try:
            answer = await client.post(self._url, json=body, headers={"x-request-id": request_id})
        except httpx.ConnectError:
            return False
        except httpx.HTTPError:
            self.broken.append(request_id)
            return False
        if answer.status_code == 200 and (usage := usage_in(answer.text)) is not None:
            self.whole[request_id] = usage
            return True
        self.broken.append(request_id)
        return False


def usage_in(text: str) -> Counts | None:
    """The engine's counts in an answer; None in one that broke off."""
    if text.startswith("data: "):
        if not text.rstrip().endswith("data: [DONE]"):
            return None
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        found = [event["usage"] for event in events if event.get("usage")]
    else:
        found = [json.loads(text)["usage"]]
    cached = (found[-1].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return found[-1]["prompt_tokens"], cached, found[-1]["completion_tokens"]


@contextlib.contextmanager
def locked(database: Path) -> Iterator[None]:
    with contextlib.closing(sqlite3.connect(database, timeout=20)) as lock:
        lock.execute("BEGIN IMMEDIATE")
        yield
        lock.rollback()


async def harm(kind: int, router: RouterProcess, console: Console, postgres: Postgres | None, database: Path) -> str:
    """Take one process or the database away for a while. Returns what it did."""
    if kind == 0:
        await router.kill()
        await router.start()
        return "router killed"
    if kind == 1:
        console.kill()
        await asyncio.sleep(1)
        console.start()
        return "console killed"
    if postgres is not None:
        await asyncio.to_thread(postgres.stop)
        await asyncio.sleep(3)
        await asyncio.to_thread(postgres.start)
        return "PostgreSQL stopped at once"
    if not database.exists():
        return "no ledger yet"
    with locked(database):
        await asyncio.sleep(3)
    return "SQLite locked"


def records(url: str) -> list[tuple[str, str, Counts]]:
    """(request id, error code, counts) of each record in the ledger."""
    engine = create_engine(url)
    columns = "request_id, error_code, prompt_tokens, cached_tokens, response_tokens"
    with engine.connect() as connection:
        rows = connection.execute(text(f"SELECT {columns} FROM usage_records"))
        return [(row[0], row[1], (row[2], row[3], row[4])) for row in rows]


def totals(url: str) -> Counts:
    engine = create_engine(url)
    statement = text("SELECT sum(prompt_tokens), sum(cached_tokens), sum(response_tokens) FROM usage_hours")
    with engine.connect() as connection:
        return tuple(int(n) for n in connection.execute(statement).one())  # type: ignore[return-value]


async def measure(args: argparse.Namespace, folder: Path, nats: NatsProcess, valkey: ValkeyProcess) -> int:
    database = folder / "console" / "usage.db"
    place = Path(tempfile.mkdtemp(prefix="gp-pg-"))
    postgres = Postgres(args.postgres, place) if args.postgres else None
    url = postgres.url if postgres else f"sqlite:///{database}"
    counting = Engine()
    router = RouterProcess(nats.url, valkey.url, folder)
    console = Console(nats.url, valkey.url, folder, postgres.url if postgres else "")
    async with contextlib.AsyncExitStack() as stack:
        if args.engine == "counting":
            engine = await FakeEngine(counting.reply).start()
            stack.push_async_callback(engine.stop)
            address = engine.url
        else:
            case = await stack.enter_async_context(engine_case(args.engine))
            fast: dict[str, Any] = (
                {"engine_args": {"time_scale": 10.0, "launch_s": 0.0}} if args.engine == "emulated" else {}
            )
            address = (await case.start(name="m", key="m", **fast)).handle.url
        await write_rows(valkey.url, a_model(engine=args.engine), an_instance("i-1", address))
        stack.push_async_callback(router.kill)
        stack.callback(console.kill)
        if postgres is not None:
            stack.callback(shutil.rmtree, place, ignore_errors=True)
            stack.callback(postgres.stop)
        await router.start()
        console.start()
        clients, began, done = Clients(router.url, args.requests), time.monotonic(), list[str]()
        asking = asyncio.create_task(clients.run())
        for number in range(1, args.kills + 1):
            while len(clients.whole) < args.requests * number // (args.kills + 1) and not asking.done():
                await asyncio.sleep(0.1)
            done.append(await harm((number - 1) % 3, router, console, postgres, database))
            print(f"{len(clients.whole)} requests, {time.monotonic() - began:.0f} s: {done[-1]}", flush=True)
        await asking
        found = await compare(clients, counting.given, url)
        found = {"engine": args.engine, "kills": dict(Counter(done))} | found
        print(json.dumps({key: value for key, value in found.items() if key != "requests"}, indent=1))
        if args.out is not None:
            args.out.write_text(json.dumps(found, indent=1) + "\n")
        return sum(found[name] for name in ("missing", "differ", "twice", "given_without_record"))


async def compare(clients: Clients, given: set[str], url: str) -> dict[str, Any]:
    """The ledger beside the engine's counts, once it has everything and changes no more, or WITHIN_S are over."""
    deadline, rows, whole = time.monotonic() + WITHIN_S, list[tuple[str, str, Counts]](), clients.whole
    num_before = -1
    while time.monotonic() < deadline and not (
        len(rows) == num_before and {row[0] for row in rows} >= (whole.keys() | given)
    ):
        num_before = len(rows)
        await asyncio.sleep(SETTLE_S)
        with contextlib.suppress(SQLAlchemyError):
            rows = await asyncio.to_thread(records, url)
    kept = {request_id: counts for request_id, _, counts in rows}
    lost = {request_id for request_id, code, _ in rows if code == "router_lost"}
    differ = [request_id for request_id in whole if request_id in kept and kept[request_id] != whole[request_id]]
    return {
        "whole_answers": len(whole),
        "records": len(rows),
        "missing": len(whole.keys() - kept.keys()),
        "differ": len(differ),
        "twice": len(rows) - len(kept),
        "router_lost": len(lost),
        "of_these_whole_for_the_client": len(lost & whole.keys()),
        "broken_for_the_client": len(clients.broken),
        "given_to_the_engine": len(given),
        "given_without_record": len(given - kept.keys()),
        "engine_tokens": [sum(counts[part] for counts in whole.values()) for part in range(3)],
        "ledger_tokens": [sum(kept.get(one, (0, 0, 0))[part] for one in whole) for part in range(3)],
        "lost_tokens": [sum(kept[one][part] for one in lost - whole.keys()) for part in range(3)],
        "hourly_totals": list(totals(url)),
        "requests": {one: [counts, kept.get(one)] for one, counts in whole.items() if kept.get(one) != counts},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("counting", "emulated", "llamacpp"), default="counting")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=9)
    parser.add_argument("--postgres", type=Path, help="the folder of initdb and pg_ctl")
    parser.add_argument("--out", type=Path, help="a file for the comparison")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gp-usage-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with NatsProcess(folder / "nats") as nats, ValkeyProcess(folder / "valkey") as valkey:
            sys.exit(min(asyncio.run(measure(args, folder, nats, valkey)), 1))


if __name__ == "__main__":
    main()
