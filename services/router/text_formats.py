"""The structure of an answer, moved to the field where the engine reads it: llama.cpp ignores `text.format` on
/v1/responses and heeds `response_format` there; it ignores `response_format` on /v1/completions and heeds its own field
`json_schema` there.

Pure: bytes in, bytes out.
"""

from typing import Any

import msgspec
from msgspec import Raw

from glowplug.domain.errors import BadRequest
from glowplug.services.router.continuation import decode
from glowplug.services.router.request_shapes import NULL, CompletionAsked, ResponseAsked, ResponseFormat, TextFormat
from glowplug.services.router.wire import encode_json

_ANY_OBJECT = Raw(b'{"type":"object"}')


def translate(body: bytes, asked: ResponseAsked | CompletionAsked) -> bytes:
    """The body for the engine. It keeps the client's field, which the continuation of a stream reads. Raises BadRequest
    where the schema is missing, or where the request asks for another structure besides."""
    if isinstance(asked, ResponseAsked):
        wanted = asked.text.format if asked.text is not None else None
        more = _of_response(wanted) if wanted is not None and wanted.type != "text" else {}
    else:
        form = asked.response_format
        more = _of_completion(asked, form) if form is not None and form.type != "text" else {}
    return encode_json(decode(body, type=dict[str, Raw]) | more) if more else body


def _of_response(wanted: TextFormat) -> dict[str, Any]:
    form: dict[str, Any] = {"type": wanted.type}
    if wanted.type == "json_schema":
        if wanted.schema == NULL:
            raise BadRequest("text.format.schema is missing.", param="text.format.schema")
        form["json_schema"] = {"name": "response", "schema": wanted.schema}
    return {"response_format": form}


def _of_completion(asked: CompletionAsked, form: ResponseFormat) -> dict[str, Any]:
    for name in ("json_schema", "grammar"):
        if getattr(asked, name) not in (NULL, None, ""):
            text = f"response_format: `{name}` asks for a structure already; leave one of them out."
            raise BadRequest(text, param="response_format")
    schema = form.schema
    if schema == NULL and form.json_schema != NULL:
        schema = msgspec.json.decode(form.json_schema, type=dict[str, Raw]).get("schema", NULL)
    if schema == NULL and form.type == "json_schema":
        param = "response_format.json_schema.schema"
        raise BadRequest(f"{param} is missing.", param=param)
    return {"json_schema": _ANY_OBJECT if schema == NULL else schema}
