"""The data port's answer at `/` (a page for browsers, JSON for programs), and the list of models in the shape of
Anthropic's API."""

import html
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from glowplug.services.router.wire import JSON_HEADERS, encode_json

HTML_HEADERS = (
    b"content-type: text/html; charset=utf-8\r\ncontent-security-policy: default-src 'none'\r\nvary: accept\r\n"
)
PATHS = {
    "/v1/models": "the models, and how warm each one is",
    "/v1/chat/completions": "OpenAI's chats",
    "/v1/completions": "OpenAI's completions",
    "/v1/responses": "OpenAI's responses",
    "/v1/embeddings": "OpenAI's embeddings",
    "/v1/files": "OpenAI's files of batches, where the fleet keeps files",
    "/v1/batches": "OpenAI's batches: many requests, answered later",
    "/v1/messages": "Anthropic's messages",
    "/v1/messages/count_tokens": "Anthropic's count of a message's tokens",
    "/v1/rerank": "documents in the order of their relevance",
    "/api/*": "Ollama's API: chat, generate, embed, tags, ps, show, version, pull",
    "/v1/audio/*": "speech and transcriptions, of models whose engine has them",
    "/tokenize": "the tokens of a text, of models whose engine has it (and /detokenize)",
    "/ready": "whether this router takes requests (and /health)",
}
ANTHROPIC_VERSION = b"anthropic-version"


def root(accept: bytes, console_url: str) -> tuple[int, bytes, bytes]:
    """(status, body, headers) of GET /."""
    if b"text/html" not in accept.lower():
        said: dict[str, Any] = {
            "service": "glowplug",
            "what": "Models served over the APIs of OpenAI, Anthropic and Ollama.",
        }
        said |= {"base_url": "/v1", "paths": PATHS}
        if console_url:
            said["console"] = console_url
        return 200, encode_json(said), JSON_HEADERS + b"vary: accept\r\n"
    rows = "".join(
        f"<dt><code>{html.escape(path)}</code></dt><dd>{html.escape(what)}</dd>" for path, what in PATHS.items()
    )
    address = html.escape(console_url, quote=True)
    console = f'<p>The console is at <a href="{address}">{address}</a>.</p>' if console_url else ""
    page = (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Glowplug</title><h1>Glowplug</h1>'
        "<p>This port serves models over the APIs of OpenAI, Anthropic and Ollama. Give a client its address with "
        f"<code>/v1</code> behind it as the base URL.</p>{console}<dl>{rows}</dl></html>\n"
    )
    return 200, page.encode(), HTML_HEADERS


def anthropic_row(name: str, created: int) -> dict[str, Any]:
    """One model in the shape of Anthropic's API. `created`: epoch seconds."""
    at = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"type": "model", "id": name, "display_name": name, "created_at": at}


def anthropic_list(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The list of all models in Anthropic's shape, as a single page."""
    first, last = (rows[0]["id"], rows[-1]["id"]) if rows else (None, None)
    return {"data": list(rows), "has_more": False, "first_id": first, "last_id": last}
