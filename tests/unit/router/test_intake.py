"""What a data port's intake makes of a request: its decoded body, its exchange, or an answer of the router's own."""

import gzip
import json
import zlib
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from glowplug.domain.access import AccessLimits, Tenant
from glowplug.domain.errors import BadRequest
from glowplug.domain.instance import InstanceState
from glowplug.runtime.settings import ServiceSettings
from glowplug.services.router import intake
from glowplug.services.router.api_errors import ApiError
from glowplug.services.router.http_request import HttpRequest
from glowplug.services.router.intake import AsItIs, texts_of, undo_coding
from glowplug.services.router.request_body import read_body
from glowplug.services.router.request_table import PortStage
from glowplug.services.router.settings import Limits
from glowplug.services.router.tracing import Sampler
from tests.contract.data_port_rig import Rig, a_model, a_rig, an_instance, answering, chat, get, hang, post
from tests.contract.keys_rig import a_key, bearer, tell

WHOLE = answering({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 3}})
BODY = b'{"model":"m"}'
gzipped = partial(gzip.compress, mtime=0)
LIMITS = Limits(max_body_bytes=2000)


def undone(body: bytes, encoding: bytes = b"gzip") -> bytes:
    request = HttpRequest(body=body, headers={b"content-encoding": encoding})
    grown = undo_coding(request, LIMITS)
    assert grown == len(request.body) - len(body) and not request.headers
    return request.body


@pytest.mark.parametrize(
    ("body", "encoding"),
    [
        (BODY, b""),
        (b"\xef\xbb\xbf" + BODY, b" Identity "),
        (zlib.compress(BODY), b"gzip"),
        (b"".join(gzipped(bytes([byte])) for byte in BODY) + gzipped(b"") * (32 - len(BODY)), b"x-gzip"),
        (zlib.compress(BODY, 0), b"deflate"),
        (zlib.compress(BODY, 9, -15), b"deflate"),
        (zlib.compress(BODY) + b"rest", b"deflate"),
    ],
)
def test_a_body_is_decoded_in_place(body: bytes, encoding: bytes) -> None:
    assert undone(body, encoding) == BODY


def test_a_decoded_body_may_have_all_the_bytes_of_a_plain_one() -> None:
    for whole in (gzipped(b"x" * 2000), gzipped(b"x" * 1999) + gzipped(b"x")):
        assert undone(whole) == b"x" * 2000
    for more in (gzipped(b"x" * 2001), gzipped(b"x" * 2000) + gzipped(b"x")):
        with pytest.raises(ApiError) as refused:
            undone(more)
        assert refused.value.status == 413


@pytest.mark.parametrize(
    ("body", "encoding", "status"),
    [
        (gzipped(b"") * 33, b"gzip", 400),
        (gzipped(BODY)[:-1], b"gzip", 400),
        (gzipped(BODY) + b"rest", b"gzip", 400),
        (gzipped(BODY), b"deflate", 400),
        (b"", b"gzip", 400),
        (b"\x78", b"deflate", 400),
        (b"\x78\x9d" + zlib.compress(BODY)[2:], b"deflate", 400),
        (BODY, b"br", 415),
    ],
)
def test_a_body_under_a_wrong_label_is_refused(body: bytes, encoding: bytes, status: int) -> None:
    with pytest.raises(ApiError) as refused:
        undone(body, encoding)
    assert refused.value.status == status


@pytest.mark.parametrize(
    ("path", "fields", "texts"),
    [
        ("/v1/chat/completions",
         {"tools": [{"type": "function", "function": {"name": "f"}}], "messages": [
             {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]},
             {"role": "assistant", "content": None, "tool_calls": [
                 {"type": "function", "function": {"name": "f", "arguments": "{}"}}]}]},
         ["f", "user", "a", "", "assistant", "{}"]),
        ("/v1/messages",
         {"max_tokens": 1, "system": [{"type": "text", "text": "s"}, {"type": "text", "text": "t"}],
          "tools": [{"name": "g"}], "messages": [{"role": "user", "content": [
              {"type": "tool_result", "content": [{"type": "text", "text": "b"}]}]}]},
         ["g", "s\nt", "user", "", "b"]),
        ("/v1/embeddings", {"input": "a"}, []),
    ],
)  # fmt: skip
def test_a_prompts_texts_come_in_the_order_of_a_template(path: str, fields: dict[str, Any], texts: list[str]) -> None:
    assert list(texts_of(read_body(path.encode(), json.dumps({"model": "m", **fields}).encode()))) == texts


def test_blocks_are_whole_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [len(intake.blocks("x" * num, 4)) for num in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]
    monkeypatch.setattr(intake, "MOST_BLOCKS", 2)
    assert [len(intake.blocks("x" * num, 4)) for num in (8, 11, 12)] == [2, 2, 2]
    asked = read_body(b"/v1/completions", json.dumps({"model": "m", "prompt": list(range(99))}).encode())
    assert intake.prefix_of(asked, 4) == intake.blocks(tuple(range(8)), 4)
    mixed = read_body(b"/v1/completions", json.dumps({"model": "m", "prompt": [1, "a", 2]}).encode())
    assert intake.prefix_of(mixed, 1) == ()


def test_anthropics_list_names_its_ends() -> None:
    rows = [intake.anthropic_row(name, 0) for name in "abc"]
    assert rows[0] == {"type": "model", "id": "a", "display_name": "a", "created_at": "1970-01-01T00:00:00Z"}
    assert intake.anthropic_list(rows) == {"data": rows, "has_more": False, "first_id": "a", "last_id": "c"}
    assert intake.anthropic_list([]) == {"data": [], "has_more": False, "first_id": None, "last_id": None}


def test_an_error_behind_a_renamed_answer_has_the_shape_of_its_path_once() -> None:
    error, theirs = b'{"error":{"message":"no","type":"server_error"}}', b'{"type":"error","error":{"message":"no"}}'
    message, other = (AsItIs(path, streams=True) for path in (b"/v1/messages", b"/v1/completions"))
    assert json.loads(message.error(error))["type"] == "error"
    assert message.error(theirs) == theirs and other.error(error) == error
    assert message.error_event(error).startswith(b"event: error\n") and other.error_event(error).startswith(b"data: ")
    message.events(b"event: error\ndata: {}\n\n")
    message.events(b"event: message_stop\ndata: {}\n\n")
    assert message.error_event(error) == b""


@pytest.mark.parametrize(
    ("over", "added"),
    [
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": {"type": "json_object"}, "grammar": "", "json_schema": None},
         {"json_schema": {"type": "object"}}),
        ({"response_format": {"type": "json_object", "json_schema": {"name": "n"}}},
         {"json_schema": {"type": "object"}}),
        ({"response_format": {"type": "json_schema", "schema": {"a": 1}, "json_schema": {"schema": 5}}},
         {"json_schema": {"a": 1}}),
    ],
)  # fmt: skip
def test_a_structure_moves_to_the_engines_field(over: dict[str, Any], added: dict[str, Any]) -> None:
    fields = {"model": "m", "prompt": "x"} | over
    body = json.dumps(fields).encode()
    made = intake.translate(body, read_body(b"/v1/completions", body))
    assert (made is body) if not added else json.loads(made) == fields | added


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "n"}},
        {"type": "json_schema", "schema": None},
    ],
)
def test_a_schema_that_is_missing_is_named(form: dict[str, Any]) -> None:
    body = json.dumps({"model": "m", "prompt": "x", "response_format": form}).encode()
    with pytest.raises(BadRequest) as refused:
        intake.translate(body, read_body(b"/v1/completions", body))
    assert refused.value.param == "response_format.json_schema.schema"


# -- requests ----------------------------------------------------------------------------------------------------------


async def arrival(rig: Rig, request: bytes) -> Any:
    """Return the stimulus of a request that is taken back."""
    taken: list[Any] = []
    take = rig.table.take

    def noted(stimulus: Any) -> None:
        taken.append(stimulus)
        take(stimulus)

    rig.table.take = noted  # type: ignore[method-assign]
    client = await rig.sent(request)
    await rig.until(lambda: bool(taken))
    client.close()
    await rig.until(lambda: not rig.table.exchanges)
    rig.table.take = take  # type: ignore[method-assign]
    return taken[0]


LONG = json.dumps({"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": "x" * 400}]}).encode()


class Texts:
    """A reader of texts that expects 70 tokens of all, or none."""

    def __init__(self, tokens: int) -> None:
        self.tokens, self.read_later = tokens, list[str]()

    def before(self, asked: Any) -> int:
        return self.tokens

    def later(self, exchange: Any, asked: Any, model_key: str) -> None:
        self.read_later.append(model_key)

    def late(self, running: Any) -> None: ...


@pytest.mark.parametrize(
    ("policy", "texts", "has_limits", "is_warm", "expected"),
    [
        ("preserve_load_aware", None, False, False, (100, 50, 0, 0)),
        ("preserve_load_aware", None, True, False, (100, 50, 50, 0)),
        ("preserve_load_aware", 70, True, False, (100, 50, 0, 70)),
        ("preserve_load_aware", 0, True, False, (100, 50, 50, 0)),
        ("preserve_load_aware", 70, True, True, (100, 50, 50, 0)),
        ("least_loaded", None, True, False, (0, 0, 0, 0)),
        ("least_loaded", 70, True, False, (0, 0, 0, 70)),
    ],
)
async def test_the_controller_is_told_the_tokens_that_its_policy_reads(
    policy: str, texts: int | None, has_limits: bool, is_warm: bool, expected: tuple[int, ...]
) -> None:
    """The only instance of a model leaves no choice that a text may decide."""
    reader: Any = None if texts is None else Texts(texts)
    async with a_rig(params={"policy": policy}, texts=reader) as rig:
        limits = AccessLimits(tokens_per_minute=1000) if has_limits else AccessLimits()
        tell(rig.table.keys, Tenant(name="acme", limits=limits), a_key())
        if is_warm:
            await rig.engine(hang)
        seen = await arrival(rig, chat(body=LONG, extra=bearer()))
        assert (seen.prompt_tokens, seen.max_tokens, seen.expected_tokens, seen.text_tokens) == expected
        assert not seen.prefix and not rig.table.limits.reserved
        if reader is not None:
            assert reader.read_later == ([] if expected[3] else ["m"])


async def test_a_prefix_is_told_where_a_choice_may_depend_on_it() -> None:
    async with a_rig(params={"policy": "union"}) as rig:
        assert (await arrival(rig, chat(body=LONG))).prefix
        await rig.engine(hang)
        assert not (await arrival(rig, chat(body=LONG))).prefix


async def test_a_request_is_reserved_for_each_of_its_answers_and_settled_with_them() -> None:
    async with a_rig() as rig:
        engine = await rig.engine(hang)
        tell(rig.table.keys, Tenant(name="acme", limits=AccessLimits(tokens_per_minute=1000)), a_key())
        body = json.loads(LONG) | {"n": 3}
        await rig.sent(chat(body=json.dumps(body).encode(), extra=bearer()))
        await rig.until(lambda: bool(engine.served))
        (reserved,) = rig.table.limits.reserved.values()
        assert reserved.tokens == 250 and list(rig.table.limits.reserved) == list(rig.table.exchanges)


async def test_bytes_of_a_body_that_grows_are_held_until_its_answer_and_not_of_a_refused_one() -> None:
    lines = json.dumps({"model": "m:latest", "messages": [{"role": "user", "content": "x" * 900}]}).encode()
    zipped = post("/v1/chat/completions", gzipped(lines), b"content-encoding: gzip\r\n")
    async with a_rig(Limits(max_body_bytes=4000)) as rig:
        engine = await rig.engine(hang)
        client = await rig.sent(zipped)
        await rig.until(lambda: bool(engine.served))
        assert rig.port.context.buffered_bytes == len(engine.served[0].body) > 900
        client.close()
        await rig.until(lambda: not rig.port.context.buffered_bytes)
        asked = post("/api/chat", gzipped(lines), b"content-encoding: gzip\r\n")
        client = await rig.sent(asked)
        await rig.until(lambda: len(engine.served) == 2)
        assert rig.port.context.buffered_bytes == len(engine.served[1].body)
        client.close()
        await rig.until(lambda: not rig.port.context.buffered_bytes)
        wrong = lines.replace(b'"user"', b"5")
        for path in ("/v1/chat/completions", "/api/chat"):
            assert (await rig.ask(post(path, gzipped(wrong), b"content-encoding: gzip\r\n"))).status == 400
        assert rig.port.context.buffered_bytes == 0


async def test_another_name_is_written_as_the_models_own_since_an_older_engine_may_not_know_it() -> None:
    async with a_rig(models=(a_model(aliases=("new",)), a_model("x:latest", key="x"))) as rig:
        engine = await rig.engine(WHOLE)
        await rig.engine(WHOLE, instance_id="i-2", model_key="x")
        for name in ("m:latest", "m", "new", "x:latest", "x"):
            assert (await rig.ask(chat(name))).status == 200
    assert [json.loads(one.body)["model"] for one in engine.served] == ["m", "m", "m"]
    assert [json.loads(one.body)["model"] for one in rig.engines[1].served] == ["x:latest", "x:latest"]


@pytest.mark.parametrize(
    ("sampler_ratio", "parent", "sampled"),
    [(1.0, b"", "01"), (0.0, b"", "00"), (0.0, b"-01", "01"), (1.0, b"-00", "00")],
)
async def test_a_trace_goes_on_as_its_client_or_the_sampler_says(
    sampler_ratio: float, parent: bytes, sampled: str
) -> None:
    head = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331"
    extra = b"traceparent: %b%b\r\n" % (head, parent) if parent else b""
    async with a_rig(sampler=Sampler(ratio=sampler_ratio)) as rig:
        engine = await rig.engine(WHOLE)
        await rig.ask(chat(extra=extra))
        said = engine.served[0].header("traceparent")
    assert said is not None and said[-2:] == sampled
    assert (said == (head + parent).decode()) is (parent == b"-00")


async def test_a_model_that_changes_has_the_api_of_its_engine() -> None:
    async with a_rig(models=(a_model(engine="vllm"),)) as rig:
        await rig.engine(WHOLE)
        image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}
        asked = chat(body=json.dumps({"model": "m", "messages": [image]}).encode())
        assert (await rig.ask(asked)).status == 200
        rig.table.restore("models", {"m": a_model(engine="llamacpp", revision=2)})
        assert (await rig.ask(asked)).status == 400
        made = rig.port.intake
        assert set(made._apis) == {"m"}
        made.forget_models()
        assert set(made._apis) == {"m"}
        del rig.table.controller.fleet.models["m"]  # type: ignore[attr-defined]
        made.forget_models()
        assert not made._apis


# -- answers of the router's own ---------------------------------------------------------------------------------------


async def test_a_row_of_a_model_shows_its_load_and_its_instances() -> None:
    async with a_rig(models=(a_model(engine="emulated", aliases=("n",), context_tokens=99),)) as rig:
        await rig.engine(hang, instance_id="i-2", max_concurrency=1)
        rig.tell(an_instance("i-1", "http://x", InstanceState.LOADING, workers=()))
        await rig.sent(chat())
        await rig.until(lambda: rig.num_in_flight == 1)
        await rig.held(chat())
        row = (await rig.ask(get("/v1/models/m"))).json()
        assert row.pop("created") == int(rig.table.started_at) and row.pop("eta_s") == round(rig.table.eta_s("m"), 3)
    assert row == {
        "id": "m", "object": "model", "owned_by": "glowplug", "state": "hot", "key": "m", "aliases": ["n"],
        "engine": "emulated", "emulated": True, "max_model_len": 99, "num_waiting": 1, "num_in_flight": 1,
        "instances": [
            {"instance_id": "i-1", "state": "loading", "node_id": ""},
            {"instance_id": "i-2", "state": "ready", "node_id": "node-1"},
        ],
    }  # fmt: skip


async def test_health_and_readiness_are_told() -> None:
    async with a_rig() as rig:
        for path in ("/health", "/live", "/livez"):
            assert (await rig.ask(get(path))).json() == {"status": "ok", "service": "router"}
        for path in ("/ready", "/readyz"):
            assert (await rig.ask(get(path))).json() == {"ready": True, "reason": ""}
        rig.table.stage = PortStage.LEAVING
        late = await rig.ask(get("/ready"))
        assert (late.status, late.json()) == (503, {"ready": False, "reason": "stopping"})


async def test_a_name_in_a_path_is_decoded_and_an_unknown_path_named() -> None:
    async with a_rig(models=(a_model("org/m", key="m"),)) as rig:
        assert (await rig.ask(get("/v1/models/org%2Fm"))).json()["id"] == "org/m"
        missing = await rig.ask(get("/v1/" + "x" * 300))
        assert missing.status == 404 and missing.json()["error"]["message"].endswith(f"/v1/{'x' * 196}.")
        assert (await rig.ask(get("/v1/modelsx"))).status == 404
        plain = await rig.ask(get("/", extra=b"accept: */*\r\n"))
        assert plain.headers["vary"] == "accept" and "console" not in plain.json()
        page = await rig.ask(get("/", extra=b"accept: Text/HTML\r\n"))
        assert page.headers["vary"] == "accept" and b"console" not in page.body and b"/v1/models" in page.body


def test_the_consoles_address_is_text_in_the_page() -> None:
    _, page, _ = intake.root(b"text/html", 'http://c/?"a"<b>')
    assert b'<a href="http://c/?&quot;a&quot;&lt;b&gt;">' in page


async def test_a_preflight_is_answered_on_every_kind_of_path() -> None:
    rules = ServiceSettings(allowed_hosts="t", allowed_origins="https://app.example").web_rules()
    asks = b"origin: https://app.example\r\naccess-control-request-method: POST\r\n"
    async with a_rig(rules=rules, api_key="k") as rig:
        for path in ("/v1/models", "/v1/chat/completions", "/api/chat", "/v1/files", "/nowhere"):
            asked = await rig.ask(get(path, method="OPTIONS", extra=asks))
            assert (asked.status, asked.body) == (200, b"") and "access-control-allow-methods" in asked.headers, path


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("HEAD", "/api/tags", 200, None),
        ("POST", "/api/tags", 405, "GET, HEAD"),
        ("DELETE", "/api/chat", 405, "POST"),
        ("GET", "/api/show", 405, "POST"),
        ("DELETE", "/api/delete", 501, None),
        ("POST", "/api/copy", 501, None),
        ("PUT", "/v1/chat/completions", 405, "POST"),
        ("POST", "/v1/models", 405, "GET, HEAD"),
        ("GET", "/v1/files", 501, None),
    ],
)
async def test_a_method_that_a_path_has_not_is_named(method: str, path: str, status: int, allow: str | None) -> None:
    async with a_rig() as rig:
        answer = await rig.ask(get(path, method=method), method)
        assert (answer.status, answer.headers.get("allow")) == (status, allow)
        assert len(rig.reports.rows(10)) == (status != 200)
        assert ("x-should-retry" in answer.headers) == (status == 501)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat", "/v1/batches"])
async def test_a_router_that_stops_refuses_every_api(path: str) -> None:
    async with a_rig() as rig:
        rig.port.intake.answer_batches = lambda *_: None
        rig.table.stage = PortStage.REFUSING
        answer = await rig.ask(post(path, chat().partition(b"\r\n\r\n")[2]))
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")


async def test_what_ollamas_clients_are_told_of_models() -> None:
    models = (a_model(engine="llamacpp"), a_model("v", engine="llamacpp", engine_args={"embeddings": True}))
    async with a_rig(models=models) as rig:
        rig.tell(an_instance("i-1", "http://x", InstanceState.LOADING))
        assert (await rig.ask(get("/api/ps"))).json() == {"models": []}
        shown = [(await rig.ask(post("/api/show", b'{"model":"%b"}' % name))).json() for name in (b"m", b"v")]
        assert [one["capabilities"] for one in shown] == [["completion", "tools"], ["completion", "tools", "embedding"]]
        whole = await rig.ask(post("/api/pull", b'{"model":"m","stream":false}'))
        assert whole.json() == {"status": "success"} and whole.headers["content-type"] == "application/json"
        lines = await rig.ask(post("/api/pull", b'{"model":"m"}'))
        assert lines.headers["content-type"] == "application/x-ndjson" and lines.body.count(b"\n") == 2


async def test_a_refusal_beside_an_encoding_says_what_is_taken_on_engines_paths_alone() -> None:
    async with a_rig() as rig:
        for path, told in (("/v1/chat/completions", "gzip, deflate"), ("/api/chat", None)):
            refused = await rig.ask(post(path, b"x", b"content-encoding: br\r\n"))
            assert (refused.status, refused.headers.get("accept-encoding")) == (415, told)


async def test_a_clients_word_for_its_body_stays_where_it_is_json() -> None:
    async with a_rig() as rig:
        engine = await rig.engine(WHOLE)
        said = b"application/vnd.x+json"
        assert (await rig.ask(chat().replace(b"application/json", said))).status == 200
        bare = chat().replace(b"content-type: application/json\r\n", b"")
        assert (await rig.ask(bare)).status == 200
    assert [one.header("content-type") for one in engine.served] == [said.decode(), None]


async def test_an_adapters_requests_name_it_to_the_engine_and_its_bases_too_while_any_is_known() -> None:
    base, tuned = a_model(engine="llamacpp"), a_model("tuned", engine="llamacpp", base="m")
    async with a_rig(models=(base, tuned)) as rig:
        engine = await rig.engine(WHOLE)
        await rig.ask(chat())
        assert "lora" not in json.loads(engine.served[0].body), "not swept yet"
        rig.port.intake.forget_models()
        await rig.ask(chat())
        assert json.loads(engine.served[1].body)["lora"] == [{"id": 0, "scale": 0}]
    async with a_rig(models=(replace(base, key="m"),)) as rig:
        engine = await rig.engine(WHOLE, adapter_slots=1)
        rig.port.intake.forget_models()
        await rig.ask(chat())
        assert "lora" in json.loads(engine.served[0].body)
