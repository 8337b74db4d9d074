"""What an engine would have to compile is counted before a model is woken for it."""

import json
from typing import Any

import pytest

from glowplug.domain.errors import BadRequest
from glowplug.services.router import schemas
from glowplug.services.router.request_body import read_body

TWO_THOUSAND = {"type": "string", "maxLength": 2000}
MANY = {"anyOf": [TWO_THOUSAND] * 11}
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def check(schema: Any) -> int:
    return schemas.check_schema("s", json.dumps(schema).encode())


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "object"}, 0),
        ({"maxLength": 7}, 7),
        ({"minLength": 3, "maxLength": 7.0}, 10),
        ({"items": {"maxItems": 5, "items": [{"minItems": 2}]}}, 7),
        ({"maxLength": True, "maxItems": "9", "minItems": -4, "pattern": 3}, 1),
        ({"pattern": r"^[a-z]{3}(b{2,40}|c{5,})\d{,6}$"}, 3 + 40 + 5 + 6),
        ({"properties": {"maxLength": {"maxLength": 4}}}, 4),
        ({"regex": "a{8}", "json": json.dumps({"maxItems": 6})}, 14),
        (json.dumps({"maxItems": 6}), 6),
        ("{", 0),
        (["a", "b"], 0),
        ({"minLength": 20_000}, 20_000),
        ({"maxLength": 2000, "maxItems": 2000}, 4000),
        ({"maxLength": 2001, "maxItems": 524_288}, 0),
    ],
)
def test_repetitions_are_added_up(schema: Any, expected: int) -> None:
    assert check(schema) == expected


TEXT = {"type": "string"}
EIGHT = {"anyOf": [TEXT, {"oneOf": [TEXT] * 3}, {"properties": {"a": {"anyOf": [TEXT] * 4}}}]}
LOOP = {"anyOf": [{"$ref": "#/$defs/a~1b"}] * 16, "$defs": {"a/b": {**EIGHT, "items": {"$ref": "#/$defs/a~1b"}}}}


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"minItems": 20_001}, "add up to 20001"),
        ({"maxLength": 10**40}, "add up to 20001"),
        ({"anyOf": [EIGHT] * 17}, "136 alternatives"),
        ({**LOOP, "anyOf": [*LOOP["anyOf"], TEXT]}, "129 alternatives"),
        ({"json": json.dumps({"oneOf": [TEXT] * 129})}, "129 alternatives"),
        ({"a": "a" * schemas.SCHEMA_BYTES}, "16393 bytes are more"),
    ],
)
def test_what_an_engine_would_compile_for_long_or_try_at_each_token_is_refused(schema: Any, why: str) -> None:
    with pytest.raises(BadRequest, match=why) as refused:
        check(schema)
    assert refused.value.param == "s"


@pytest.mark.parametrize("schema", [{"anyOf": [EIGHT] * 16}, LOOP, {"$ref": "#/no/such"}, {"$ref": "#"}, {"$ref": 3}])
def test_alternatives_at_the_bound_and_references_to_nowhere_pass(schema: Any) -> None:
    assert check(schema) == 0


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    with pytest.raises(BadRequest, match="nested too deeply"):
        schemas.check_schema("s", b'{"a":' * 2500 + b"1" + b"}" * 2500)


TOOLS = [{"type": "function", "function": {"name": f"f{n}", "parameters": TWO_THOUSAND}} for n in range(11)]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (b"/v1/chat/completions", {**CHAT, "tools": TOOLS}, "tools"),
        (
            b"/v1/chat/completions",
            {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": MANY}}},
            "response_format.json_schema",
        ),
        (b"/v1/chat/completions", {**CHAT, "guided_regex": "a{2000}" * 11}, "guided_regex"),
        (b"/v1/completions", {"model": "m", "prompt": "hi", "json_schema": MANY}, "json_schema"),
        (b"/v1/completions", {"model": "m", "prompt": "hi", "grammar": "root ::= " + "[a]{2000} " * 11}, "grammar"),
        (
            b"/v1/responses",
            {"model": "m", "input": "hi", "text": {"format": {"type": "json_schema", "name": "a", "schema": MANY}}},
            "text.format.schema",
        ),
        (
            b"/v1/messages",
            {**CHAT, "max_tokens": 5, "tools": [{"name": "f", "input_schema": MANY}]},
            "tools[0].input_schema",
        ),
    ],
)
def test_what_would_keep_an_engine_from_all_its_requests_is_refused_by_name(
    path: bytes, body: dict[str, Any], param: str
) -> None:
    with pytest.raises(BadRequest, match="more than 20000") as refused:
        read_body(path, json.dumps(body).encode())
    assert refused.value.param == param
