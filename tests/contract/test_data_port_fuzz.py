"""Random clients: every complete request gets one complete answer, in order.

`FUZZ_S=300 FUZZ_SEED=7 python -m pytest --timeout=0 tests/contract/test_data_port_fuzz.py -k uvloop-1` runs new seeds
for that long.
"""

import asyncio
import os
import random
import re
import time
from dataclasses import dataclass, field

import pytest

from glowplug.services.router.settings import Limits
from tests.contract.data_port_rig import CHUNKED, DONE, TOKEN, Answer, Client, Rig, Served, a_rig, chat, chunk, get
from tests.waiting import WAIT_S

NUM_CLIENTS = 12  # at once, for each seed
LIMITS = Limits(header_bytes=2000, max_body_bytes=4000, num_pipelined=4, write_buffer_bytes=4096)
MOST_HELD = 300_000
COMMENT = re.compile(rb"(?m)^:.*\n\n")  # to a client that is held or half-closed


@dataclass
class Script:
    sent: bytes = b""
    statuses: list[int] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    last: bool = False
    may_cut: bool = False  # `sent` may end in a partial request


def chunked(chance: random.Random, body: bytes, trailers: bytes = b"") -> bytes:
    out, at = CHUNKED % b"", 0
    while at < len(body):
        size = chance.randint(1, 60)
        part = body[at : at + size]
        out += chunk(part, chance.choice((b"", b"", b";a=b")))
        at += size
    return out + b"0\r\n" + trailers + b"\r\n"


def add_good(chance: random.Random, script: Script, name: int) -> None:
    stream = chance.random() < 0.5
    whole = chat(stream=stream, extra=b"x-name: %d\r\n" % name)
    body = whole.partition(b"\r\n\r\n")[2]
    answer = TOKEN * 3 + DONE if stream else b'{"name":"%d"}' % name
    kind = chance.randrange(7)
    if kind < 3:
        script.sent += whole
    elif kind == 3:
        script.sent += whole.replace(b"POST /", b"POST http://h/")
    elif kind == 4:
        answer = TOKEN * 3 + DONE if stream else b'{"name":"None"}'
        script.sent += chunked(chance, body, chance.choice((b"", b"x-name: 9\r\n", b"a: b\r\n" * 5)))
    else:
        script.sent += get("/health")
        answer = b'{"status":"ok","service":"router"}'
    script.statuses.append(200)
    script.bodies.append(answer)


REFUSED = (
    (404, chat("nobody")),
    (404, get("/nowhere")),
    (405, get("/v1/models", method="DELETE")),
    (400, chat(body=b"{")),
)
LAST = (
    (400, b"\x00garbage\r\n\r\n"),
    (400, b"GET /health HTTP/1.1\r\n\r\n"),
    (400, chat(extra=b"host: u\r\n")),
    (400, CHUNKED % b"content-length: 1\r\n"),
    (400, CHUNKED % b"" + b"zz\r\n"),
    (413, chat(body=b"x" * 5000)),
    (413, CHUNKED % b"" + b"1000\r\n" + b"x" * 4096 + b"\r\n"),
    (417, chat(extra=b"expect: miracles\r\n")),
    (431, b"GET /health HTTP/1.1\r\nhost: t\r\nx: " + b"a" * 40_000),
    (431, CHUNKED % b"" + b"0\r\n" + b"a: b\r\n" * 10_000),
    (431, CHUNKED % b"" + b"1;" + b"a" * 40_000),
    (501, CHUNKED.replace(b"chunked", b"gzip, chunked") % b""),
)


def a_script(chance: random.Random) -> Script:
    script = Script()
    for i in range(chance.randint(0, 12)):
        if chance.random() < 0.75:
            add_good(chance, script, i)
        else:
            status, sent = chance.choice(REFUSED)
            script.sent += sent
            script.statuses.append(status)
            script.bodies.append(b"")
    if chance.random() < 0.4:
        status, sent = chance.choice(LAST)
        script.sent += sent + chance.choice((b"", chat(), b"\xff" * 3000))
        script.statuses.append(status)
        script.bodies.append(b"")
        script.last = True
    elif chance.random() < 0.3:
        script.sent += chat()[: chance.randint(1, 100)]
        script.may_cut = True
    return script


async def engine(served: Served) -> None:
    seed = len(served.head) + len(served.body)
    if seed % 3 == 0:
        await asyncio.sleep(0.002)
    if b'"stream": true' in served.body:
        await served.sse_head()
        for part in (TOKEN, TOKEN[:9], TOKEN[9:] + TOKEN, DONE):
            await served.chunk(part)
        await served.end()
    else:
        await served.json(b'{"name":"%b"}' % str(served.header("x-name")).encode())


async def send(chance: random.Random, client: Client, data: bytes) -> None:
    """A port that has refused may have closed."""
    most = (
        chance.choice((1, 7, 100, 5000, len(data) + 1)) if len(data) < 3000 else chance.choice((500, 5000, len(data)))
    )
    at = 0
    try:
        while at < len(data):
            size = chance.randint(1, most)
            client.writer.write(data[at : at + size])
            at += size
            if chance.random() < 0.2:
                await asyncio.sleep(0)
            await client.writer.drain()
    except ConnectionError:
        return


async def run(rig: Rig, chance: random.Random) -> None:
    script, how = a_script(chance), chance.random()
    client = await rig.client()
    sending = asyncio.create_task(send(chance, client, script.sent))
    if how < 0.15 and not script.last:
        await asyncio.sleep(chance.random() * 0.01)
        client.close()
        await sending
        return
    statuses, bodies = list(script.statuses), list(script.bodies)
    half_closes = how < 0.5
    if half_closes:
        await sending
        if client.writer.can_write_eof() and not client.writer.is_closing():
            client.half_close()
        if script.may_cut:
            statuses.append(400)
            bodies.append(b"")
    answers: list[Answer] = []
    for _ in statuses:
        if chance.random() < 0.1:
            await asyncio.sleep(0.001)
        answers.append(await asyncio.wait_for(client.answer(), WAIT_S))
    assert [a.status for a in answers] == statuses, (answers[-1].body, script.sent)
    assert all(a.complete for a in answers)
    told = [COMMENT.sub(b"", a.body) for a in answers]
    assert [t for t, body in zip(told, bodies, strict=True) if body] == [body for body in bodies if body]
    if half_closes or script.last:
        assert await asyncio.wait_for(client.at_end(), WAIT_S), script.sent
    await sending


async def watch(rig: Rig) -> None:
    while True:
        for connection in rig.port.connections:
            held = len(connection._unread) + sum(len(p.body) + len(p.target) for p in connection._waiting)
            assert held + len(connection._body) + connection.transport.get_write_buffer_size() < MOST_HELD
        await asyncio.sleep(0.002)


async def tick(rig: Rig) -> None:
    """An unreachable engine is tried again."""
    while True:
        await asyncio.sleep(0.25)
        rig.tick()


async def check_seed(seed: int) -> None:
    chance = random.Random(seed)
    raised: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context))
    async with a_rig(LIMITS) as rig:
        await rig.engine(engine, max_concurrency=4)
        watching, ticking = asyncio.create_task(watch(rig)), asyncio.create_task(tick(rig))
        for _ in range(3):
            await asyncio.gather(*(run(rig, random.Random(chance.random())) for _ in range(NUM_CLIENTS)))
        assert not watching.done()
        watching.cancel()
        ticking.cancel()
        for client in rig.clients:
            client.close()
        await rig.until(lambda: not rig.port.connections and not rig.table.exchanges)
        assert rig.port.context.buffered_bytes == 0
    of_port = [c for c in raised if "data_port_rig" not in str(c)]
    assert not of_port, f"seed {seed}: {of_port}"


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_every_complete_request_gets_one_answer_in_order(seed: int) -> None:
    await check_seed(seed)
    end = time.monotonic() + float(os.environ.get("FUZZ_S", "0"))
    more = int(os.environ.get("FUZZ_SEED", "1000"))
    while time.monotonic() < end:
        more += 1
        print("seed", more)
        await check_seed(more)
