"""Files and batches over a real router, NATS and Valkey, with OpenAI's own client."""

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from glowplug.domain.access import ApiKey, Tenant
from glowplug.events.envelope import to_json
from glowplug.state.redis_store import RedisStore
from tests.contract.data_port_rig import FakeEngine, Served, a_model, an_instance
from tests.contract.keys_rig import a_key, secret_of
from tests.integration.router_process import RouterProcess, a_router, write_rows
from tests.servers import NatsProcess, S3Process, ValkeyProcess
from tests.waiting import WAIT_S, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

ACME, OTHER, NARROW = "aaaaaa", "bbbbbbb1", "cccccc"  # of its tenant's number, too
TENANTS = range(10, 30)
NEXT_TENANT = iter(TENANTS)
OVER = ("completed", "failed", "expired", "cancelled")


def a_line(num: int, model: str = "m", **over: Any) -> dict[str, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": f"question {num}"}]}
    return {"custom_id": f"c-{num}", "method": "POST", "url": "/v1/chat/completions", "body": body} | over


def as_file(lines: Iterable[Any]) -> tuple[str, bytes]:
    return "input.jsonl", "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines).encode()


async def echo(served: Served) -> None:
    said = json.loads(served.body)["messages"][0]["content"]
    usage = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
    await served.json({"choices": [{"message": {"content": f"re: {said}"}}], "usage": usage})


@dataclass(frozen=True)
class Store:
    folder: Path
    s3: S3Process | None = None

    @property
    def env(self) -> dict[str, str]:
        if self.s3 is None:
            return {"GLOWPLUG_FILES_URL": self.folder.as_uri()}
        return {"GLOWPLUG_FILES_URL": "s3://files/fleet", **self.s3.variables}


@dataclass
class At:
    router: RouterProcess
    engine: FakeEngine
    num: int
    client: AsyncOpenAI = field(init=False)

    def __post_init__(self) -> None:
        self.client = self.as_key(self.key)

    @property
    def tenant(self) -> str:
        return f"acme-{self.num}"

    @property
    def key(self) -> str:
        return f"{ACME}{self.num}"

    def as_key(self, key_id: str) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.router.url}/v1", api_key=secret_of(key_id), max_retries=0)

    async def batch(self, lines: Iterable[Any], client: AsyncOpenAI | None = None) -> Any:
        client = client or self.client
        file = await client.files.create(file=as_file(lines), purpose="batch")
        return await client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"job": "night"}
        )

    async def over(self, batch_id: str, client: AsyncOpenAI | None = None) -> Any:
        async with asyncio.timeout(WAIT_S):
            while (batch := await (client or self.client).batches.retrieve(batch_id)).status not in OVER:
                await asyncio.sleep(0.05)
        return batch

    async def lines(self, file_id: str | None) -> dict[str, Any]:
        assert file_id
        rows = [json.loads(row) for row in (await self.client.files.content(file_id)).text.splitlines()]
        assert len({row["custom_id"] for row in rows}) == len(rows)
        return {row["custom_id"]: row for row in rows}


async def write_access(redis_url: str, *rows: ApiKey | Tenant) -> None:
    store = RedisStore(redis_url)
    for row in rows:
        table, key = ("keys", row.key_id) if isinstance(row, ApiKey) else ("tenants", row.name)
        await store.put(table, key, to_json(row))
    await store.close()


@pytest.fixture(scope="module")
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    folder = tmp_path_factory.mktemp("store")
    if getattr(request, "param", "file") == "file":
        yield Store(folder / "files")
        return
    with S3Process(folder / "s3") as server:
        yield Store(folder, server)


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[NatsProcess, ValkeyProcess]]:
    """Not shared: once a record holds a key, every router on these servers asks for one."""
    with (
        tempfile.TemporaryDirectory(prefix="gp-") as folder,
        NatsProcess(Path(folder) / "nats") as bus,
        ValkeyProcess(Path(folder) / "valkey") as record,
    ):
        yield bus, record


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(
    servers: tuple[NatsProcess, ValkeyProcess], store: Store, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[RouterProcess, FakeEngine]]:
    bus, record = servers
    engine = await FakeEngine(echo).start()
    await write_rows(record.url, a_model(), a_model("n"), an_instance("i-1", engine.url))
    await write_access(record.url, Tenant(name="other"), a_key(OTHER, "other"))
    for num in TENANTS:
        await write_access(record.url, Tenant(name=f"acme-{num}"))
        await write_access(record.url, a_key(f"{ACME}{num}", f"acme-{num}"))
        await write_access(record.url, a_key(f"{NARROW}{num}", f"acme-{num}", models=("n",)))
    env = store.env | {"GLOWPLUG_FILES_MAX_BYTES": str(4 << 20)}
    async with a_router(bus.url, record.url, tmp_path_factory.mktemp("router"), **env) as router:
        yield router, engine
    await engine.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def at(running: tuple[RouterProcess, FakeEngine]) -> At:
    router, engine = running
    engine.reply = echo
    engine.served.clear()
    return At(router, engine, next(NEXT_TENANT))


async def test_a_batch_from_file_to_output(at: At) -> None:
    wrong = a_line(0, "no-such-model")
    batch = await at.batch([wrong, *(a_line(num) for num in range(1, 41))])
    assert batch.status == "validating" and batch.metadata == {"job": "night"}
    done = await at.over(batch.id)
    assert done.status == "completed" and done.completed_at >= done.created_at and done.errors is None
    assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (41, 40, 1)
    output = await at.lines(done.output_file_id)
    assert set(output) == {f"c-{num}" for num in range(1, 41)}
    row = output["c-7"]
    assert row["error"] is None and row["response"]["status_code"] == 200 and row["response"]["request_id"]
    assert row["response"]["body"]["choices"][0]["message"]["content"] == "re: question 7"
    (failed,) = (await at.lines(done.error_file_id)).values()
    assert failed["custom_id"] == "c-0" and failed["response"]["status_code"] == 404
    assert failed["response"]["body"]["error"]["code"] == "model_not_found"
    listed = [b async for b in at.client.batches.list(limit=1)]
    assert [b.id for b in listed] == [batch.id]
    assert len(at.engine.served) == 40
    async with httpx.AsyncClient(base_url=at.router.admin_url) as admin:
        requests = (await admin.get("/v1/requests")).json()["data"]
        text = (await admin.get("/metrics")).text
    ours = [row for row in requests if row["state"] != "refused" and row["tenant"] == at.tenant]
    assert len(ours) == 40
    assert 'glowplug_batch_lines_total{outcome="completed"}' in text
    assert f'glowplug_tenant_requests_total{{tenant="{at.tenant}"}} 40.0' in text  # usage records
    assert "question 7" not in at.router.log() and secret_of(at.key) not in at.router.log()


async def test_files_are_listed_by_page_read_and_deleted(at: At) -> None:
    files = [await at.client.files.create(file=as_file([a_line(num)]), purpose="batch") for num in range(3)]
    assert files[0].filename == "input.jsonl" and files[0].purpose == "batch" and files[0].status == "processed"
    assert [f.id async for f in at.client.files.list(limit=2)] == [f.id for f in reversed(files)]
    assert [f.id async for f in at.client.files.list(limit=1, order="asc")] == [f.id for f in files]
    assert (await at.client.files.retrieve(files[1].id)).bytes == files[1].bytes
    assert (await at.client.files.content(files[1].id)).content == as_file([a_line(1)])[1]
    assert (await at.client.files.delete(files[1].id)).deleted
    with pytest.raises(openai.NotFoundError):
        await at.client.files.retrieve(files[1].id)
    kept = await at.client.files.create(
        file=as_file([a_line(0)]), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert kept.expires_at is not None and kept.expires_at == kept.created_at + 3600
    large = b"x" * (3 << 20)
    file = await at.client.files.create(file=("large", large), purpose="batch")
    assert (await at.client.files.content(file.id)).content == large
    with pytest.raises(openai.APIStatusError) as error:
        await at.client.files.create(file=("larger", large + large), purpose="batch")
    assert error.value.status_code == 413
    with pytest.raises(openai.BadRequestError):
        await at.client.files.create(file=as_file([a_line(0)]), purpose="assistants")


async def test_an_input_that_cannot_be_used_names_its_lines(at: At) -> None:
    lines = [a_line(1), "no json", a_line(1), a_line(4, url="/v1/embeddings"), a_line(5, method="GET")]
    batch = await at.over((await at.batch(lines)).id)
    assert batch.status == "failed" and batch.errors is not None and batch.errors.data is not None
    found = [(error.line, error.code) for error in batch.errors.data]
    assert found == [
        (2, "invalid_json_line"),
        (3, "duplicate_custom_id"),
        (4, "mismatched_url"),
        (5, "invalid_method"),
    ]
    assert not at.engine.served
    with pytest.raises(openai.BadRequestError):
        await at.client.batches.create(
            input_file_id=batch.input_file_id, endpoint="/v1/moderations", completion_window="24h"
        )
    with pytest.raises(openai.NotFoundError):
        await at.client.batches.create(
            input_file_id="file-none", endpoint="/v1/chat/completions", completion_window="24h"
        )


async def test_what_is_no_number_and_no_body_is_refused(at: At) -> None:
    headers = {"Authorization": f"Bearer {secret_of(at.key)}"}
    deep = b'{"output_expires_after":{"a":' + b"[" * 30_000 + b"]" * 30_000 + b"}}"
    async with httpx.AsyncClient(base_url=at.router.url, headers=headers) as client:
        answers = [await client.get(f"/v1/{what}?limit={'9' * 5000}") for what in ("batches", "files")]
        answers.append(await client.post("/v1/batches", content=deep))
        fields = {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "9" * 5000}
        answers.append(await client.post("/v1/files", data=fields, files={"file": as_file([a_line(1)])}))
    assert [answer.status_code for answer in answers] == [400] * 4, [answer.text for answer in answers]


async def test_cancel_keeps_what_is_done(at: At) -> None:
    async def reply(served: Served) -> None:
        if len(at.engine.served) <= 5:
            await echo(served)
        else:
            await served.left.wait()

    at.engine.reply = reply
    batch = await at.batch(a_line(num) for num in range(200))
    await until(lambda: len(at.engine.served) > 5, "lines that are not answered")
    assert (await at.client.batches.cancel(batch.id)).status == "cancelling"
    done = await at.over(batch.id)
    assert done.status == "cancelled" and done.cancelled_at
    output, errors = await at.lines(done.output_file_id), await at.lines(done.error_file_id)
    assert len(output) == done.request_counts.completed == 5 and len(errors) == 195
    assert {row["error"]["code"] for row in errors.values()} == {"batch_cancelled"}
    assert all(served.left.is_set() for served in at.engine.served[5:])


async def test_another_tenant_sees_nothing(at: At) -> None:
    batch = await at.over((await at.batch([a_line(1)])).id)
    other = at.as_key(OTHER)
    assert [b async for b in other.batches.list()] == [] and [f async for f in other.files.list()] == []
    for call in (
        other.batches.retrieve(batch.id),
        other.batches.cancel(batch.id),
        other.files.retrieve(batch.output_file_id),
        other.files.content(batch.output_file_id),
        other.files.delete(batch.input_file_id),
        other.batches.create(
            input_file_id=batch.input_file_id, endpoint="/v1/chat/completions", completion_window="24h"
        ),
    ):
        with pytest.raises(openai.NotFoundError):
            await call
    with pytest.raises(openai.AuthenticationError):
        await AsyncOpenAI(base_url=f"{at.router.url}/v1", api_key="wrong", max_retries=0).files.create(
            file=as_file([a_line(1)]), purpose="batch"
        )
    narrow = at.as_key(f"{NARROW}{at.num}")
    done = await at.over((await at.batch([a_line(1)], narrow)).id, narrow)
    (row,) = (await at.lines(done.error_file_id)).values()
    assert row["response"]["body"]["error"]["code"] == "model_not_found"


async def test_lines_that_are_refused_for_the_moment_are_sent_again(at: At) -> None:
    refused: set[bytes] = set()

    async def reply(served: Served) -> None:
        if served.body in refused:
            await echo(served)
        else:
            refused.add(served.body)
            await served.json({"error": {"message": "full"}}, "429 Too Many Requests", b"retry-after: 1\r\n")

    at.engine.reply = reply
    done = await at.over((await at.batch(a_line(num) for num in range(3))).id)
    assert done.status == "completed" and done.request_counts.completed == 3


@pytest.mark.system
@pytest.mark.parametrize("store", ["file", "s3"], indirect=True)
async def test_another_router_goes_on_where_one_was_killed(
    at: At, servers: tuple[NatsProcess, ValkeyProcess], store: Store, tmp_path: Path
) -> None:
    begun = 0
    answered: list[str] = []

    async def slow(served: Served) -> None:
        nonlocal begun
        begun += 1
        await asyncio.sleep(0.05)
        await echo(served)
        answered.append(json.loads(served.body)["messages"][0]["content"])

    at.engine.reply = slow
    env = store.env | {"GLOWPLUG_SERVICE_ID": "router-2"}
    second = RouterProcess(*(server.url for server in servers), tmp_path)
    try:
        await second.start(wait=True, **env)
        num = 2500
        batch = await at.batch(a_line(k) for k in range(num))
        await until(lambda: len(answered) > 600, "results of the first router")
        await at.router.kill()
        at.client = AsyncOpenAI(base_url=f"{second.url}/v1", api_key=secret_of(at.key), max_retries=0)
        done = await at.over(batch.id)
        assert done.status == "completed" and done.request_counts.completed == num
        assert len(await at.lines(done.output_file_id)) == num
    finally:
        await second.kill()
    assert num <= len(answered) <= num + 400 + 64  # twice: the rest was in no part yet


async def test_without_an_object_store_the_error_names_the_setting(
    servers: tuple[NatsProcess, ValkeyProcess], tmp_path: Path
) -> None:
    env = {"GLOWPLUG_FILES_URL": "", "GLOWPLUG_SERVICE_ID": "router-3"}
    async with a_router(*(server.url for server in servers), tmp_path, **env) as router:
        client = AsyncOpenAI(base_url=f"{router.url}/v1", api_key=secret_of(OTHER), max_retries=0)
        for call in (client.files.list(), client.files.create(file=as_file([a_line(1)]), purpose="batch")):
            with pytest.raises(openai.APIStatusError) as error:
                await call
            assert error.value.status_code == 501 and "GLOWPLUG_FILES_URL" in error.value.message
