"""Client habits outside any specification."""

import gzip
import json
import zlib
from functools import partial

import pytest

from glowplug.services.router.settings import Limits
from tests.contract.data_port_rig import a_model, a_rig, answering, chat, get, post, streaming

BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
CHAT = "/v1/chat/completions"
zipped = partial(gzip.compress, mtime=0)
REPLY = answering({"ok": 1})


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions/", "//v1//chat/completions", "/chat/completions", "/v1/v1/chat/completions"]
)
async def test_every_base_url_leads_to_the_same_path_of_the_engine(path: str) -> None:
    async with a_rig() as rig:
        engine = await rig.engine(REPLY)
        assert (await rig.ask(post(f"{path}?a=/b//", BODY))).status == 200
        assert engine.served[0].head.startswith(b"POST /v1/chat/completions?a=/b// HTTP/1.1\r\n")


@pytest.mark.parametrize("path", ["/models", "/v1/models/", "//v1/models", "/v1/models/m", "/models/m/"])
async def test_models_are_listed_under_every_base_url(path: str) -> None:
    async with a_rig() as rig:
        found = (await rig.ask(get(path))).json()
        assert found.get("id", found.get("data", [{}])[0].get("id")) == "m"


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", zipped(BODY)),
        ("GZIP", zipped(BODY[:9]) + zipped(BODY[9:])),
        ("x-gzip", zipped(BODY)),
        ("deflate", zlib.compress(BODY)),
        ("deflate", zlib.compress(BODY, wbits=-15)),
        ("identity", BODY),
        ("gzip", zipped(b"\xef\xbb\xbf" + BODY)),
    ],
)
async def test_an_engine_gets_the_decoded_body(encoding: str, body: bytes) -> None:
    async with a_rig() as rig:
        engine = await rig.engine(REPLY)
        answer = await rig.ask(post(CHAT, body, f"content-encoding: {encoding}\r\n".encode()))
        assert answer.status == 200 and engine.served[0].body == BODY
        assert engine.served[0].header("content-encoding") is None
        assert engine.served[0].header("content-length") == str(len(BODY))


async def test_a_byte_order_mark_is_taken() -> None:
    async with a_rig() as rig:
        engine = await rig.engine(REPLY)
        assert (await rig.ask(post(CHAT, b"\xef\xbb\xbf" + BODY))).status == 200
        assert engine.served[0].body == BODY


@pytest.mark.parametrize(
    ("encoding", "body", "status", "said"),
    [
        ("gzip", BODY, 400, "is not gzip"),
        ("gzip", zipped(BODY)[:-4], 400, "it ends too early"),
        ("gzip", zipped(b"") * 40, 400, "more than 32 members"),
        ("deflate", BODY, 400, "is not deflate"),
        ("gzip", zipped(bytes(5000)), 413, "larger than 4096 bytes"),
        ("gzip", zipped(bytes(3000)) * 2, 413, "larger than 4096 bytes"),
        ("deflate", zlib.compress(bytes(5000)), 413, "larger than 4096 bytes"),
        ("br", BODY, 415, "gzip, deflate"),
        ("gzip, gzip", BODY, 415, "gzip, deflate"),
    ],
)
async def test_another_encoding_a_wrong_label_and_a_bomb_are_refused(
    encoding: str, body: bytes, status: int, said: str
) -> None:
    async with a_rig(Limits(max_body_bytes=4096)) as rig:
        answer = await rig.ask(post(CHAT, body, f"content-encoding: {encoding}\r\n".encode()))
        assert answer.status == status and said in answer.json()["error"]["message"]
        assert (answer.headers.get("accept-encoding") == "gzip, deflate") == (status == 415)


async def test_what_was_not_understood_is_said_beside_every_answer_and_refused_where_a_setting_says_so() -> None:
    odd = json.dumps(json.loads(BODY) | {"keep_alive": "5m", "options": {}}).encode()
    async with a_rig() as rig:
        engine = await rig.engine(REPLY)
        answer = await rig.ask(chat(body=odd))
        assert engine.served[0].body == odd and answer.headers["x-glowplug-unknown-fields"] == "keep_alive, options"
        refused = await rig.ask(chat(body=odd.replace(b'"m"', b'"x"')))
        assert refused.status == 404 and refused.headers["x-glowplug-unknown-fields"] == "keep_alive, options"
        assert "x-glowplug-unknown-fields" not in (await rig.ask(chat())).headers
    async with a_rig(strict_fields=True) as rig:
        error = (await rig.ask(chat(body=odd))).json()["error"]
        assert error["param"] == "keep_alive" and "no such field" in error["message"]


@pytest.mark.parametrize(
    ("name", "near"),
    [("org/Qwen3-8B", "qwen3-8b"), (" QWEN3-8b", "qwen3-8b"), ("qwen-8b", "qwen3-8b"), ("chatty:8b", "chatty")],
)
async def test_a_wrong_name_is_answered_with_the_nearest(name: str, near: str) -> None:
    models = (a_model("m"), a_model("qwen3-8b", aliases=("chatty",)))
    async with a_rig(models=models) as rig:
        error = (await rig.ask(chat(name))).json()["error"]
        assert error["code"] == "model_not_found" and f"Did you mean `{near}`?" in error["message"]
        assert "Did you mean" not in (await rig.ask(chat("zzzzzz"))).json()["error"]["message"]


async def test_latest_is_the_model_itself_and_its_engine_gets_the_name_it_knows() -> None:
    async with a_rig() as rig:
        engine = await rig.engine(REPLY)
        assert (await rig.ask(chat("m:latest"))).status == 200
        assert json.loads(engine.served[0].body) == json.loads(BODY) | {"stream": False}


async def test_the_root_says_what_this_is_and_where_the_console_is() -> None:
    async with a_rig(api_key="k", console_url="http://c.example/?a&b") as rig:
        key = b"authorization: Bearer k\r\n"
        said = (await rig.ask(get("/", extra=key))).json()
        assert said["console"] == "http://c.example/?a&b" and CHAT in said["paths"]
        assert "console" not in (await rig.ask(get("/v1/"))).json()
        page = await rig.ask(get("/", extra=key + b"accept: text/html,*/*\r\n"))
        assert page.headers["content-type"].startswith("text/html") and b"http://c.example/?a&amp;b" in page.body
        metrics = await rig.ask(get("/metrics"))
        assert metrics.status == 404 and "admin port" in metrics.json()["error"]["message"]


async def test_models_have_anthropics_shape_for_its_clients() -> None:
    header = b"anthropic-version: 2023-06-01\r\n"
    async with a_rig() as rig:
        found = (await rig.ask(get("/v1/models", extra=header))).json()
        (row,) = found["data"]
        assert (row["type"], row["id"], row["display_name"]) == ("model", "m", "m") and row["created_at"].endswith("Z")
        assert (found["first_id"], found["last_id"], found["has_more"]) == ("m", "m", False)
        assert (await rig.ask(get("/v1/models/m", extra=header))).json() == row
        assert (await rig.ask(get("/v1/models/x", extra=header))).json()["error"]["type"] == "not_found_error"


async def test_what_only_some_engines_have_is_passed_or_refused_by_model() -> None:
    form = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\n%b\r\n--b\r\nContent-Disposition: form-data; '
    form += b'name="file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\nRIFF\r\n--b--\r\n'
    multipart = (
        b"POST /v1/audio/transcriptions HTTP/1.1\r\nhost: t\r\ncontent-type: multipart/form-data; boundary=b\r\n"
    )
    models = (a_model(), a_model("small", engine="llamacpp"))
    async with a_rig(models=models) as rig:
        engine = await rig.engine(REPLY)
        for path in ("/tokenize", "/v1/audio/speech"):
            assert (await rig.ask(post(path, b'{"model":"m","input":"x","odd":1}'))).status == 200
        sent = multipart + b"content-length: %d\r\n\r\n%b"
        body, other = form % b"m", form % b"small"
        assert (await rig.ask(sent % (len(body), body))).status == 200 and engine.served[-1].body == body
        refused = await rig.ask(sent % (len(other), other))
        assert "has no /v1/audio/transcriptions" in refused.json()["error"]["message"]
        assert (await rig.ask(post("/v1/audio/transcriptions", b"{}"))).status == 400


@pytest.mark.parametrize("stream", [False, True])
async def test_a_message_has_an_id_in_anthropics_form(stream: bool) -> None:
    message = b'{"id":"chatcmpl-1a","type":"message","content":[{"type":"text","text":"\\"id\\":\\"chatcmpl-"}]}'
    start = b'event: message_start\ndata: {"type":"message_start","message":' + message + b"}\n\n"
    body = json.dumps(json.loads(BODY) | {"max_tokens": 2, "stream": stream}).encode()
    async with a_rig() as rig:
        await rig.engine(streaming(start, b"event: message_stop\ndata: {}\n\n") if stream else answering(message))
        answer = await rig.ask(post("/v1/messages", body))
        assert answer.status == 200 and answer.complete
        assert b'"id":"msg_1a"' in answer.body and b'\\"id\\":\\"chatcmpl-' in answer.body
        if not stream:
            assert answer.json()["id"] == "msg_1a" and answer.headers["content-length"] == str(len(answer.body))
