"""Named keys on the data port."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from glowplug.domain.access import AccessLimits, Priority, Surface, Tenant
from glowplug.events import facts
from tests.contract.data_port_rig import (
    DONE,
    TOKEN,
    Answer,
    Rig,
    a_model,
    a_rig,
    answering,
    assert_error,
    chat,
    get,
    post,
    streaming,
)
from tests.contract.keys_rig import KEY, a_key, bearer, secret_of, tell

OTHER = "bbbbbbb2"
ACME = Tenant(name="acme", weight=2.0)
MODELS = (a_model(), a_model("org/big", key="big", aliases=("large",)), a_model("m-secret", key="m-secret"))
WHOLE = answering({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 3}})


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with a_rig(models=MODELS) as made:
        await made.engine(WHOLE)
        tell(made.table.keys, ACME, a_key(models=("m", "org/*")))
        yield made


def message(model: str, extra: bytes = b"") -> bytes:
    body = {"model": model, "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]}
    return post("/v1/messages", json.dumps(body).encode(), b"anthropic-version: 2023-06-01\r\n" + extra)


def ollama_chat(model: str, extra: bytes = b"") -> bytes:
    body = {"model": model, "stream": False, "messages": [{"role": "user", "content": "hi"}]}
    return post("/api/chat", json.dumps(body).encode(), extra)


# -- who is answered ---------------------------------------------------------------------------------------------


async def test_the_port_is_open_until_the_first_named_key() -> None:
    async with a_rig() as rig:
        await rig.engine()
        assert (await rig.ask(chat())).status == 200
        tell(rig.table.keys, ACME)
        assert (await rig.ask(chat(extra=b"authorization: Bearer whatever\r\n"))).status == 200
        tell(rig.table.keys, a_key())
        assert_error(await rig.ask(chat()), 401, "invalid_api_key")
        assert (await rig.ask(chat(extra=bearer()))).status == 200
        tell(rig.table.keys, a_key(revision=1, revoked_at=1.0))
        assert_error(await rig.ask(chat()), 401, "invalid_api_key")  # a revoked key counts
        tell(rig.table.keys, facts.KeyRemoved(key_id=KEY), at=1.0)
        assert (await rig.ask(chat())).status == 200


async def test_the_one_key_goes_on_beside_named_ones() -> None:
    async with a_rig(api_key="the-one", models=MODELS) as rig:
        await rig.engine(WHOLE)
        tell(rig.table.keys, ACME, a_key(models=("m",)))
        one = b"authorization: Bearer the-one\r\n"
        assert (await rig.ask(chat(extra=one))).status == 200
        assert (await rig.ask(chat(extra=bearer()))).status == 200
        assert_error(await rig.ask(chat(extra=b"authorization: Bearer the-two\r\n")), 401, "invalid_api_key")
        assert len((await rig.ask(get("/v1/models", extra=one))).json()["data"]) == 3
        await rig.until(lambda: len(rig.finished) == 2)
        assert [(e.request.caller.tenant, e.request.caller.key_id) for e in rig.finished] == [
            ("default", ""),
            ("acme", KEY),
        ]


async def test_each_way_to_bring_a_key(rig: Rig) -> None:
    key = secret_of().encode()
    for header in (b"authorization: Bearer %b\r\n", b"Authorization: bearer %b\r\n", b"x-api-key: %b\r\n"):
        assert (await rig.ask(chat(extra=header % key))).status == 200
    for header in (b"authorization: %b\r\n", b"authorization: Basic %b\r\n", b"authorization: Bearer %b,\r\n"):
        assert (await rig.ask(chat(extra=header % key))).status == 401


@pytest.mark.parametrize("ask", [chat, message, ollama_chat])
async def test_a_key_that_opens_nothing_is_refused_in_the_words_of_each_api(rig: Rig, ask: Any) -> None:
    now = time.time()
    tell(
        rig.table.keys,
        a_key("revoked1", revoked_at=now - 1),
        a_key("expired1", expires_at=now - 1),
        a_key("reading1", surfaces=(Surface.READ,)),
        a_key("nobodys1", tenant="gone"),
    )
    wrong_secret = bearer("revoked1").replace(b"sss", b"ttt")
    expected = {
        b"": (401, "missing or wrong"),
        b"authorization: Bearer x\r\n": (401, "missing or wrong"),
        bearer("unknown1"): (401, "missing or wrong"),
        wrong_secret: (401, "missing or wrong"),  # only its owner learns that it is revoked
        bearer("revoked1"): (401, "The API key gp-revoked1 is revoked."),
        bearer("expired1"): (401, "The API key gp-expired1 is expired."),
        bearer("nobodys1"): (401, "a tenant that does not exist"),
        bearer("reading1"): (403, "`data`"),
    }
    for header, (status, words) in expected.items():
        answer = await rig.ask(ask("m", extra=header))
        assert answer.status == status, header
        error = answer.json()["error"]
        if ask is ollama_chat:
            assert words in error
            continue
        assert words in error["message"]
        if ask is message:
            kind = "authentication_error" if status == 401 else "permission_error"
            assert error["type"] == kind and answer.json()["type"] == "error"
        elif status == 401:
            assert_error(answer, 401, "invalid_api_key")
            assert error["type"] == "invalid_request_error"
        else:
            assert_error(answer, 403, "permission_denied")
            assert error["type"] == "permission_error"
    assert not rig.finished


async def test_every_path_of_models_needs_a_key_and_the_health_paths_need_none(rig: Rig) -> None:
    for path in ("/v1/models", "/v1/models/m", "/api/tags", "/api/ps", "/api/version"):
        assert (await rig.ask(get(path))).status == 401, path
        assert (await rig.ask(get(path, extra=bearer()))).status == 200, path
    for path in ("/api/show", "/api/pull"):
        body = b'{"model": "m"}'
        assert (await rig.ask(post(path, body))).status == 401, path
        assert (await rig.ask(post(path, body, bearer()))).status == 200, path
    for path in ("/health", "/ready", "/"):
        assert (await rig.ask(get(path))).status == 200, path


# -- which models ------------------------------------------------------------------------------------------------


async def test_a_model_that_a_key_may_not_use_is_nowhere(rig: Rig) -> None:
    listed = (await rig.ask(get("/v1/models", extra=bearer()))).json()["data"]
    assert [row["id"] for row in listed] == ["org/big", "m"]
    for path in ("/api/tags", "/api/ps"):
        rows = (await rig.ask(get(path, extra=bearer()))).json()["models"]
        assert "m-secret" not in str(rows) and "m" in str(rows)
    assert_error(await rig.ask(get("/v1/models/m-secret", extra=bearer())), 404, "model_not_found")
    for name in ("m-secret", "m-secrets"):
        answer = await rig.ask(chat(name, extra=bearer()))
        assert_error(answer, 404, "model_not_found")
        assert "`m-secret`?" not in answer.json()["error"]["message"]
        assert answer.json()["error"]["message"].startswith(f"The model `{name}` does not exist.")
        found = (await rig.ask(message(name, bearer()))).json()["error"]
        assert found["type"] == "not_found_error"
        ollama = await rig.ask(ollama_chat(name, bearer()))
        assert ollama.status == 404 and f"The model `{name}` does not exist." in ollama.json()["error"]
        assert (await rig.ask(post("/api/show", b'{"model": "%b"}' % name.encode(), bearer()))).status == 404
    answer = await rig.ask(chat("large-one", extra=bearer()))
    assert "Did you mean `large`?" in answer.json()["error"]["message"]


async def test_a_key_follows_the_aliases_of_a_model(rig: Rig) -> None:
    tell(rig.table.keys, a_key(OTHER, models=("large",)))
    assert [row["id"] for row in (await rig.ask(get("/v1/models", extra=bearer(OTHER)))).json()["data"]] == ["org/big"]
    assert (await rig.ask(get("/v1/models/org/big", extra=bearer(OTHER)))).status == 200
    rig.table.restore("models", {"big": a_model("org/big", key="big", aliases=("small",), revision=2)})
    assert (await rig.ask(get("/v1/models/org/big", extra=bearer(OTHER)))).status == 404


async def test_the_official_openai_client_raises_its_own_errors(rig: Rig) -> None:
    import openai

    tell(rig.table.keys, a_key(OTHER, surfaces=(Surface.OPERATE,)))
    host, port = rig.host_port

    async def raised(key: str, model: str = "m") -> openai.APIStatusError:
        async with openai.AsyncOpenAI(base_url=f"http://{host}:{port}/v1", api_key=key, max_retries=0) as client:
            with pytest.raises(openai.APIStatusError) as found:
                await client.chat.completions.create(model=model, messages=[{"role": "user", "content": "hi"}])
        return found.value

    wrong = await raised("sk-wrong")
    assert type(wrong) is openai.AuthenticationError and wrong.code == "invalid_api_key"
    assert type(await raised(secret_of(OTHER))) is openai.PermissionDeniedError
    missing = await raised(secret_of(), "m-secret")
    assert type(missing) is openai.NotFoundError and missing.code == "model_not_found"


# -- changes -----------------------------------------------------------------------------------------------------


async def test_a_revoked_key_ends_no_stream_and_opens_no_other(rig: Rig) -> None:
    go_on = asyncio.Event()
    await rig.engine(streaming(TOKEN, go_on, TOKEN, DONE))
    client = await rig.sent(chat(stream=True, extra=bearer()))
    assert (await client.head())[0] == 200
    await client.chunk()
    tell(rig.table.keys, a_key(revision=1, revoked_at=time.time() - 1))
    assert_error(await rig.ask(chat(extra=bearer())), 401, "invalid_api_key")
    go_on.set()
    assert DONE in await client.rest()
    await client.send(chat(extra=bearer()))
    assert_error(await client.answer(), 401, "invalid_api_key")


async def test_a_key_expires_by_the_clock(rig: Rig) -> None:
    tell(rig.table.keys, a_key(OTHER, expires_at=time.time() + 600.0))
    assert (await rig.ask(chat(extra=bearer(OTHER)))).status == 200
    rig.table.keys._clock = lambda: time.time() + 601.0
    assert_error(await rig.ask(chat(extra=bearer(OTHER))), 401, "invalid_api_key")


async def test_a_tenant_that_is_removed_takes_its_keys_with_it(rig: Rig) -> None:
    assert (await rig.ask(chat(extra=bearer()))).status == 200
    tell(rig.table.keys, facts.TenantRemoved(tenant_name="acme"))
    assert (await rig.ask(chat(extra=bearer()))).status == 401
    tell(rig.table.keys, ACME, at=1.0)
    assert (await rig.ask(chat(extra=bearer()))).status == 200


# -- what is known of the caller ---------------------------------------------------------------------------------


async def arrived(rig: Rig, request: bytes) -> Any:
    taken: list[Any] = []
    take = rig.table.take

    def noted(stimulus: Any) -> None:
        taken.append(stimulus)
        take(stimulus)

    rig.table.take = noted  # type: ignore[method-assign]
    try:
        assert (await rig.ask(request)).status == 200
    finally:
        rig.table.take = take  # type: ignore[method-assign]
    return taken[0]


@pytest.mark.parametrize(
    ("tenants", "keys", "tier", "expected"),
    [
        (Priority.STANDARD, None, None, Priority.STANDARD),
        (Priority.STANDARD, None, "auto", Priority.STANDARD),
        (Priority.STANDARD, None, "default", Priority.STANDARD),
        (Priority.STANDARD, None, "priority", Priority.STANDARD),
        (Priority.STANDARD, None, "flex", Priority.BATCH),
        (Priority.INTERACTIVE, None, None, Priority.INTERACTIVE),
        (Priority.INTERACTIVE, None, "flex", Priority.BATCH),
        (Priority.INTERACTIVE, Priority.STANDARD, "priority", Priority.STANDARD),
        (Priority.INTERACTIVE, Priority.BATCH, None, Priority.BATCH),
        (Priority.BATCH, Priority.INTERACTIVE, "priority", Priority.BATCH),
    ],
)
async def test_a_request_is_never_more_urgent_than_its_key_and_its_tenant(
    rig: Rig, tenants: Priority, keys: Priority | None, tier: str | None, expected: Priority
) -> None:
    tell(rig.table.keys, Tenant(name="t", priority=tenants, weight=3.0), a_key(OTHER, "t", priority=keys))
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "service_tier": tier}
    stimulus = await arrived(rig, chat(body=json.dumps(body).encode(), extra=bearer(OTHER)))
    assert (stimulus.tenant, stimulus.weight, stimulus.priority) == ("t", 3.0, expected)


async def test_a_request_is_reported_with_its_tenant_and_its_keys_prefix(rig: Rig) -> None:
    await rig.ask(chat(extra=bearer()))
    await rig.ask(ollama_chat("m", bearer()))
    await rig.ask(chat("gone", extra=bearer()))
    await rig.ask(chat("gone"))
    await rig.until(lambda: len(rig.finished) == 2)
    finished = [fact for fact in rig.reported if isinstance(fact, facts.RequestFinished)]
    assert [(fact.tenant, fact.key_id) for fact in finished] == [("acme", KEY)] * 2
    rows = rig.reports.rows(10)
    shown = sorted((row["state"], row["tenant"], row["key"]) for row in rows)
    known = ("acme", f"gp-{KEY}")
    assert shown == [("finished", *known)] * 2 + [("refused", "", ""), ("refused", *known)]
    client = await rig.held(chat("org/big", extra=bearer()))
    assert (rig.reports.rows(1)[0]["tenant"], rig.reports.rows(1)[0]["key"]) == known
    assert secret_of() not in f"{rig.reports.rows(10)} {rig.reported} {rig.published}"
    client.close()


async def test_no_engine_gets_the_key(rig: Rig) -> None:
    for extra in (bearer(), b"x-api-key: %b\r\n" % secret_of().encode()):
        await rig.ask(chat(extra=extra))
        await rig.ask(message("m", extra))
    sent = b"".join(served.head + served.body for engine in rig.engines for served in engine.served)
    assert sent and secret_of().encode() not in sent


async def test_the_limits_of_key_tenant_and_tenant_at_model_are_at_hand(rig: Rig) -> None:
    of_key, of_tenant, at_big = (AccessLimits(concurrent=n) for n in (1, 2, 3))
    tenant = Tenant(name="t", limits=of_tenant, model_limits={"org/*": at_big, "*": of_key})
    tell(rig.table.keys, tenant, a_key(OTHER, "t", limits=of_key))
    caller = rig.table.keys.find(secret_of(OTHER).encode())
    own = [("tenant/t", of_tenant), (f"key/{OTHER}", of_key)]
    for model, limits in ((MODELS[1], at_big), (MODELS[0], of_key)):
        scopes = [(scope.scope_id, scope.limits) for scope in caller.scopes_at(model)]
        assert scopes == [*own, (f"model/t/{model.key}", limits)]


# -- many keys ---------------------------------------------------------------------------------------------------


async def test_each_of_ten_thousand_keys_is_its_own(rig: Rig) -> None:
    ids = [f"k{number:07d}" for number in range(10_000)]
    rig.table.restore("keys", {key_id: a_key(key_id, models=("m",)) for key_id in ids})
    last: Answer | None = None
    for key_id in ids[::1000]:
        last = await rig.ask(chat(extra=bearer(key_id)))
        assert last.status == 200
    tell(rig.table.keys, a_key(ids[1000], revision=1, revoked_at=1.0))
    assert (await rig.ask(chat(extra=bearer(ids[1000])))).status == 401
    assert (await rig.ask(chat(extra=bearer(ids[2000])))).status == 200
    for key_id in ids:
        if key_id != ids[1000]:
            assert rig.table.keys.find(secret_of(key_id).encode()).key_id == key_id
