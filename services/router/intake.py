"""The intake of requests: check access, read the body, find the model, start an exchange, or answer here."""

import html
import logging
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any
from urllib.parse import unquote_to_bytes

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from glowplug import __version__
from glowplug.controllers.router.messages import RequestArrived
from glowplug.domain.errors import BadRequest, GlowplugError, NotFound
from glowplug.domain.instance import InstanceState
from glowplug.domain.model import Model
from glowplug.engines import apis
from glowplug.engines.apis import EngineApi
from glowplug.engines.drivers import api_of
from glowplug.events.facts import ModelKeepAliveAsked
from glowplug.policies.limits.scope import Reservation
from glowplug.policies.routing.prefix_index import Prefix
from glowplug.services.router import (
    api_errors,
    batch_paths,
    custom_tools,
    forced_tools,
    logprobs,
    messages_as_chat,
    ollama,
    openapi,
    responses_as_chat,
    sequences,
    tracing,
)
from glowplug.services.router import request_shapes as shapes
from glowplug.services.router.api_errors import STOPPING, ApiError, refused
from glowplug.services.router.continuation import decode
from glowplug.services.router.conversation import TextReader, text_of
from glowplug.services.router.corrections import (
    AsItIs,
    Corrected,
    Renaming,
    beginning,
    with_beginning,
    with_sound_calls,
)
from glowplug.services.router.ends import ClientSink
from glowplug.services.router.exchange import Exchange
from glowplug.services.router.http_request import HttpRequest, body_too_large
from glowplug.services.router.port_context import PortContext
from glowplug.services.router.request_body import (
    CHARS_PER_TOKEN,
    OPERATIONS,
    check_model,
    drop_tools,
    fields_named,
    read_body,
    read_form,
    readers,
    sizes,
    unknown_fields,
    without_servers_tools,
)
from glowplug.services.router.request_shapes import (
    NULL,
    ChatAsked,
    CompletionAsked,
    CountAsked,
    Generating,
    MessagesAsked,
    RerankAsked,
    ResponseFormat,
)
from glowplug.services.router.request_table import PortStage, RequestTable
from glowplug.services.router.settings import Limits
from glowplug.services.router.tracing import Sampler, Way
from glowplug.services.router.translated import TranslatedClient, Translation, inner_request
from glowplug.services.router.wire import JSON_HEADERS, MESSAGES, encode_json

HTML_HEADERS = (
    b"content-type: text/html; charset=utf-8\r\ncontent-security-policy: default-src 'none'\r\nvary: accept\r\n"
)
PATHS = {
    "/v1/models": "the models, and how warm each one is",
    "/v1/chat/completions": "OpenAI's chats",
    "/v1/completions": "OpenAI's completions",
    "/v1/responses": "OpenAI's responses, also over a WebSocket (and /v1/responses/compact)",
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
    "/openapi.json": "all of these, as an OpenAPI document",
}
ANTHROPIC_VERSION = b"anthropic-version"


def root(accept: bytes, console_url: str) -> tuple[int, bytes, bytes]:
    """Return (status, body, headers) of GET /."""
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
    """Return a model in Anthropic's shape. `created`: epoch seconds."""
    at = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"type": "model", "id": name, "display_name": name, "created_at": at}


def anthropic_list(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    first, last = (rows[0]["id"], rows[-1]["id"]) if rows else (None, None)
    return {"data": list(rows), "has_more": False, "first_id": first, "last_id": last}


# Engines take plain JSON: bodies are decoded, within the size limit.
BOM = b"\xef\xbb\xbf"
ENCODING = b"content-encoding"
TAKEN = "gzip, deflate"
ACCEPTED = b"accept-encoding: gzip, deflate\r\n"  # beside a 415 (RFC 9110, 12.5.3)
_AUTO, _RAW = 47, -15  # zlib's window bits: a gzip or zlib header, no header
_MOST_MEMBERS = 32  # each costs a copy of the bytes after it
_GZIP = frozenset((b"gzip", b"x-gzip"))


def undo_coding(request: HttpRequest, limits: Limits) -> int:
    """Decode the request's body in place and drop its content-encoding header. Returns the body's growth in bytes.
    Raises ApiError."""
    before, encoding = request.body, request.headers.pop(ENCODING, b"").strip().lower()
    if encoding not in (b"", b"identity"):
        if encoding not in _GZIP and encoding != b"deflate":
            shown = encoding[:100].decode("ascii", "replace")
            message = f"The content-encoding `{shown}` is not supported; send the body plain, or as {TAKEN}."
            raise refused(415, message, "unsupported_media_type")
        request.body = _inflated(before, encoding, limits)
    request.body = request.body.removeprefix(BOM)
    return len(request.body) - len(before)


def _inflated(body: bytes, encoding: bytes, limits: Limits) -> bytes:
    is_gzip = encoding in _GZIP
    bits = _AUTO if is_gzip or _has_zlib_header(body) else _RAW
    out = bytearray()
    try:
        for _ in range(_MOST_MEMBERS):
            stream = zlib.decompressobj(bits)
            out += stream.decompress(body, limits.max_body_bytes + 1 - len(out))
            if len(out) > limits.max_body_bytes:
                raise body_too_large(limits)
            if not stream.eof:
                raise _wrong(encoding, "it ends too early")
            body = stream.unused_data if is_gzip else b""
            if not body:
                return bytes(out)
    except zlib.error as error:
        raise _wrong(encoding, str(error)) from error
    raise _wrong(encoding, f"it has more than {_MOST_MEMBERS} members")


def _has_zlib_header(body: bytes) -> bool:
    """Return whether a deflate body has zlib's header (RFC 9110, 8.4.1.2); some clients omit it."""
    return len(body) > 1 and body[0] & 0x0F == 8 and (body[0] << 8 | body[1]) % 31 == 0


def _wrong(encoding: bytes, why: str) -> ApiError:
    name = encoding.decode()
    return refused(400, f"The body is labelled `content-encoding: {name}`, and is not {name}: {why}.", "invalid_body")


# On /v1/completions llama.cpp ignores `response_format` and heeds its own `json_schema`.

_ANY_OBJECT = Raw(b'{"type":"object"}')


def translate(body: bytes, asked: CompletionAsked) -> bytes:
    """Add the engine's field; the client's stays for a stream's continuation. Raises BadRequest for a missing schema or
    a second structure."""
    form = asked.response_format
    more = _completion_format(asked, form) if form is not None and form.type != "text" else {}
    return encode_json(decode(body, type=dict[str, Raw]) | more) if more else body


def _completion_format(asked: CompletionAsked, form: ResponseFormat) -> dict[str, Any]:
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


# Blocks of prompts for routing by prefixes (policies/routing/prefix_index.py), hashed with this process's key. Tools
# precede the messages, as in engines' templates. Unread differences (images, template settings) make the estimate
# wrong; engines correct it.

MOST_BLOCKS = 4096  # of one prompt
MOST_SUMMARY_TOKENS = 1024  # of a compaction


def prefix_of(asked: Any, block_tokens: int) -> Prefix:
    """Return a prompt's blocks of `block_tokens` each; empty for several prompts."""
    if isinstance(asked, shapes.CompletionAsked):
        return _completion_prefix(asked.prompt, block_tokens)
    return blocks("\0".join(texts_of(asked)), block_tokens * CHARS_PER_TOKEN)


def _completion_prefix(prompt: Any, block_tokens: int) -> Prefix:
    if isinstance(prompt, list) and len(prompt) == 1:
        (prompt,) = prompt
    if isinstance(prompt, str):
        return blocks(prompt, block_tokens * CHARS_PER_TOKEN)
    ids = tuple(prompt[: block_tokens * MOST_BLOCKS]) if isinstance(prompt, list) else ()
    return blocks(ids, block_tokens) if all(isinstance(one, int) for one in ids) else ()


def blocks(prompt: str | tuple[Any, ...], size: int) -> Prefix:
    """Return chained hashes of whole blocks of `size` characters or token ids."""
    last, found = hash("the key of this process"), []
    for at in range(size, min(len(prompt), size * MOST_BLOCKS) + 1, size):
        last = hash((last, prompt[at - size : at]))
        found.append(last)
    return tuple(found)


def texts_of(asked: Any) -> Iterator[str]:
    yield from _tool_names(getattr(asked, "tools", None) or ())
    if isinstance(asked, shapes.ChatAsked):
        yield from _said(asked.messages)
    elif isinstance(asked, shapes.MessagesAsked):
        yield text_of(asked.system)
        yield from _said(asked.messages)


def _said(turns: Iterable[Any]) -> Iterator[str]:
    for turn in turns:
        yield turn.role or ""
        yield from _texts(turn.content)
        for call in getattr(turn, "tool_calls", None) or ():
            yield call.said


def _texts(content: Any) -> Iterator[str]:
    if isinstance(content, str):
        yield content
        return
    for piece in content or ():
        yield piece.text or ""
        yield from _texts(getattr(piece, "content", None))


def _tool_names(tools: Iterable[Any]) -> Iterator[str]:
    for tool in tools:
        yield getattr(getattr(tool, "function", tool), "name", None) or ""


log = logging.getLogger(__name__)
_LOCAL_PATHS = (b"/", b"/metrics", b"/v1/models", b"/health", b"/live", b"/ready", b"/livez", b"/readyz", openapi.PATH)
CHAT, RESPONSES, COMPACT = (path.encode() for path in (apis.CHAT, apis.RESPONSES, apis.COMPACT))
AnswerCall = Callable[[ClientSink, HttpRequest, PortContext[Any]], None]


class Intake:
    """The intake of one data port. `strict`: refuse unknown fields. `texts` estimates answer lengths, if routing uses
    them."""

    def __init__(
        self,
        context: PortContext[Exchange],
        *,
        sampler: Sampler | None = None,
        strict: bool = False,
        console_url: str = "",
        texts: TextReader | None = None,
    ) -> None:
        self._texts = texts
        self._context, self._table, self._access = context, context.table, context.access
        self._sampler = sampler or Sampler()
        self._readers, self._console_url = readers(strict=strict), console_url
        self._openapi = openapi.document(strict=strict)
        self._apis: dict[str, tuple[Model, EngineApi]] = {}  # by model_key
        self._bases: frozenset[str] = frozenset()  # model keys whose engines may hold adapters
        self.answer_batches: AnswerCall | None = None
        controller = context.table.controller
        self._tracks_tokens = controller.tracks_tokens
        self._chooses = controller.chooses
        self._block_tokens = controller.params.balancer.block_tokens if controller.reads_prefixes else 0

    def take(self, client: ClientSink, request: HttpRequest) -> bool:
        """Take a complete request while its connection answers no other. Returns True when an exchange now has it. A
        fault of ours gets a 500."""
        try:
            if (refusal := self._access.refusal(request)) is not None:
                return self._refuse(client, request, refusal)
            if request.open_socket is not None:
                return self._open_socket(client, request, request.open_socket)
            if request.path not in OPERATIONS or request.method != b"POST":
                if request.path in ollama.PATHS:
                    return self._take_ollama(client, request)
                if batch_paths.is_path(request.path):
                    return self._take_batches(client, request)
                return self._answer_here(client, request)
            request.caller = self._access.caller(request)
            if self._table.stage is PortStage.REFUSING:
                return self._refuse(client, request, STOPPING)
            return self._ask(client, request, is_translated=False)
        except ApiError as error:
            return self._refuse(client, request, error)
        except Exception:
            if client.exchange is not None:  # it holds the request, and ends with the connection
                raise
            log.exception("failed to take a request; it gets a 500")
            return self._refuse(client, request, api_errors.FAILED)

    def _open_socket(self, client: ClientSink, request: HttpRequest, opens: Callable[[HttpRequest], None]) -> bool:
        """Check a handshake as the POSTs that it stands for: a page of another site may not open a WebSocket. Raises
        ApiError."""
        if (refusal := self._access.refusal(replace(request, method=b"POST"))) is not None:
            return self._refuse(client, request, refusal)
        self._access.caller(request)
        if self._table.stage is PortStage.REFUSING:
            return self._refuse(client, request, STOPPING)
        opens(request)
        return False

    def ask(self, client: ClientSink, request: HttpRequest) -> bool:
        """Send on a POST of a known caller. Returns as `take`."""
        return self._ask(client, request, is_translated=False)

    def _ask(
        self, client: ClientSink, request: HttpRequest, *, is_translated: bool, is_corrected: bool = False
    ) -> bool:
        path = request.path
        try:
            if ENCODING in request.headers or request.body[:1] == BOM[:1]:
                self._context.buffered_bytes += undo_coding(request, self._context.limits)
            if (reader := self._readers.get(path)) is None:
                asked: Any = read_form(request.body, request.headers.get(b"content-type", b""))
            else:
                asked = read_body(path, request.body, self._readers)
                if b"json" not in request.headers.get(b"content-type", b"json"):  # an engine would read a form
                    request.headers[b"content-type"] = b"application/json"
                if type(asked) is not reader.shape and not request.notes:  # else a translated request's, named already
                    request.notes = unknown_fields(reader, request.body)
                if isinstance(asked, CountAsked):
                    asked = self._without_servers_tools(request, asked)
                elif path == CHAT and b'"tool_calls"' in request.body:
                    self._write_calls(request, asked)
            model = self._table.find(asked.model, request.caller)
            if asked.model != model.name:
                self._name_it(request, model)
            api = self._api(model)
            if path in (RESPONSES, COMPACT):
                chat = self._as_chat(client, request, asked, model, api)
                return self._ask_behind(request, *chat, is_translated=True)
            may_differ = api.prefills and path in (CHAT, MESSAGES) and not is_corrected
            if may_differ and (corrected := self._corrected(client, request, asked)) is not None:
                return self._ask_behind(request, *corrected, is_translated=is_translated, is_corrected=True)
            if path == CHAT and b'"custom"' in request.body and custom_tools.can(asked):
                return self._ask_behind(request, *self._with_functions(client, request), is_translated=False)
            if isinstance(asked, CountAsked) and api.thinks_by_template:
                self._write_thinking(request, asked)
            may_need = path in api.translated and not is_translated and (path != CHAT or _is_special(asked))
            if may_need and (translated := self._translated(client, request, asked, model, api)) is not None:
                return self._ask_behind(request, *translated, is_translated=True)
            needs = check_model(asked, model, api, path, len(request.body))
            if api.ignores_formats and isinstance(asked, CompletionAsked):
                self._write_format(request, asked)
            if isinstance(asked, RerankAsked):
                self._write_documents(request, asked)
            if reader is not None and (model.base or model.key in self._bases):
                self._name_adapter(request, model, api)
                client, request = self._renamed(client, request, asked, model, api)
            prompt_tokens, max_tokens = sizes(asked)
            limits = self._table.limits if request.caller.has_limits else None
            reserved = None
            if limits is not None:
                num_answers = sequences.num_sequences(asked) if isinstance(asked, Generating) else 1
                reserved = limits.admit(request, model, prompt_tokens, max_tokens, num_answers)
        except GlowplugError as error:
            return self._refuse(client, request, error)
        self._send_on(client, request, asked, model, api, needs, (prompt_tokens, max_tokens), reserved)
        return True

    def _send_on(
        self,
        client: ClientSink,
        request: HttpRequest,
        asked: Any,
        model: Model,
        api: EngineApi,
        needs: str,
        sizes: tuple[int, int],
        reserved: Reservation | None,
    ) -> None:
        """Make an exchange of a checked request. `sizes`: tokens of the prompt and, at most, of the answer."""
        way, traceparent = self._traced(request)
        ticket = next(self._table.tickets)
        exchange = client.exchange = Exchange(
            self._context, ticket, client, request, model, api, bool(asked.stream), needs, sizes[0], way, traceparent
        )
        if reserved is not None:
            self._table.limits.reserved[exchange.ticket] = reserved
        counted = sizes if self._tracks_tokens else (0, 0)
        texts = self._texts
        reads = (texts is not None or self._block_tokens) and self._chooses(model.key)
        said, caller = texts.before(asked) if texts is not None and reads else 0, request.caller
        expected = 0
        if reserved is not None and self._tracks_tokens and not said:  # the controller would expect the same
            expected = reserved.tokens - sizes[0]
        request.priority = caller.classes.get(getattr(asked, "service_tier", None), caller.priority)
        self._table.arrive(
            exchange,
            RequestArrived(
                exchange.ticket,
                model.name,
                request.request_id,
                traceparent,
                *counted,
                expected,
                said,
                tenant=caller.tenant,
                weight=caller.weight,
                priority=request.priority,
                key_id=caller.key_id,
                prefix=prefix_of(asked, self._block_tokens) if reads and self._block_tokens else (),
            ),
        )
        if texts is not None and not said:
            texts.later(exchange, asked, model.key)

    def _without_servers_tools(self, request: HttpRequest, asked: CountAsked) -> CountAsked:
        before = len(request.body)
        request.body, dropped = without_servers_tools(request.body, asked)
        if not dropped:
            return asked
        drop_tools(request, dropped)
        self._context.buffered_bytes += len(request.body) - before
        left: CountAsked = read_body(request.path, request.body, self._readers)
        return left

    def _as_chat(
        self, client: ClientSink, request: HttpRequest, asked: Any, model: Model, api: EngineApi
    ) -> tuple[ClientSink, HttpRequest]:
        """Translate a response or compaction. Raises BadRequest with its own fields, and NotSupported."""
        check_model(asked, model, api, RESPONSES, len(request.body), may_choose=True)
        answer: Translation
        named = request.body, request.request_id, int(request.complete_at)
        if request.path == COMPACT:
            body, answer, dropped = responses_as_chat.compact(*named, summary_tokens(model))
        else:
            forces = CHAT in api.translated
            body, answer, dropped = responses_as_chat.translate(*named, time.time, forces=forces)
        if dropped:
            drop_tools(request, dropped)
        return self._behind(client, request, CHAT, body, answer)

    def _with_functions(self, client: ClientSink, request: HttpRequest) -> tuple[ClientSink, HttpRequest]:
        body, answer, dropped = custom_tools.translate(request.body)
        if dropped:
            drop_tools(request, dropped)
        return self._behind(client, request, CHAT, body, answer)

    def _corrected(self, client: ClientSink, request: HttpRequest, asked: Any) -> tuple[ClientSink, HttpRequest] | None:
        """Ask for an answer that is corrected, else return None. The beginning of an answer becomes one text."""
        path, begun = request.path, beginning(asked)
        if begun is not None and (not begun or asked.messages[-1].content != begun):
            self._write(request, {"messages": with_beginning(asked, decode(request.body)["messages"], begun)})
        if path == CHAT:  # several answers come in a stream
            differs = begun and not asked.stream and sequences.num_sequences(asked) == 1
        else:
            differs = asked.stop_sequences or (begun and not asked.stream)
        if not differs:
            return None
        return self._behind(
            client, request, path, request.body, Corrected(path, streams=bool(asked.stream), begun=begun or "")
        )

    def _translated(
        self, client: ClientSink, request: HttpRequest, asked: Any, model: Model, api: EngineApi
    ) -> tuple[ClientSink, HttpRequest] | None:
        """Translate a request for a feature that the engine lacks, else return None. Raises BadRequest."""
        made: tuple[bytes, Translation]
        if isinstance(asked, MessagesAsked):
            if not api.has_messages:
                check_model(asked, model, api, request.path, len(request.body))
            elif not messages_as_chat.can(asked):
                return None
            made = messages_as_chat.translate(request.body, asked, request.request_id, sizes(asked)[0])
            return self._behind(client, request, CHAT, *made)
        is_several = sequences.num_sequences(asked) > 1
        if request.path == CHAT and forced_tools.can(asked):
            if is_several:
                raise BadRequest("n: one answer at a time can be made to call a tool.", param="n")
            made = forced_tools.translate(request.body, request.request_id)
        elif is_several:
            made = sequences.translate(request.body, asked)
        elif logprobs.can(asked):
            made = logprobs.translate(request.body, asked)
        else:
            return None
        return self._behind(client, request, request.path, *made)

    def _behind(
        self, client: ClientSink, request: HttpRequest, path: bytes, body: bytes, translation: Translation
    ) -> tuple[TranslatedClient, HttpRequest]:
        inner = inner_request(request, path, body)
        if path != request.path:  # errors get the inner path's shape first
            inner.headers.pop(ANTHROPIC_VERSION, None)
        return TranslatedClient(client, request, translation, self._context), inner

    def _ask_behind(
        self,
        outer: HttpRequest,
        client: ClientSink,
        inner: HttpRequest,
        *,
        is_translated: bool,
        is_corrected: bool = False,
    ) -> bool:
        """Send the translated request on; its body replaces the original's in the buffered bytes. Returns as `take`."""
        has_begun = False
        self._context.buffered_bytes += len(inner.body) - len(outer.body)
        try:
            has_begun = self._ask(client, inner, is_translated=is_translated, is_corrected=is_corrected)
        finally:
            if not has_begun:  # the inner body may have been changed
                self._context.buffered_bytes -= len(inner.body) - len(outer.body)
        return has_begun

    def _take_ollama(self, client: ClientSink, request: HttpRequest) -> bool:
        path = request.path
        if headers := self._access.preflight(request):
            client.respond(request, 200, b"", headers)
            return False
        allowed = b"GET, HEAD" if path in ollama.READS else request.method if path in ollama.OPERATORS else b"POST"
        if request.method not in allowed.split(b", "):
            self._not_allowed(client, request, allowed)
            return False
        try:
            request.caller = self._access.caller(request)
        except ApiError as error:
            return self._refuse(client, request, error)
        if self._table.stage is PortStage.REFUSING:
            return self._refuse(client, request, STOPPING)
        try:
            if path not in ollama.ASKS:
                client.respond(request, 200, *self._about_ollama(request))
                return False
            self._context.buffered_bytes += undo_coding(request, self._context.limits)
            asked = ollama.read(request.body)
            model = self._table.find(ollama.name_of(asked), request.caller)
            keep_alive_s = ollama.keep_alive_s(asked, model, self._context.limits.client_keep_alive_s)
            if keep_alive_s == 0 and ollama.says_nothing(path, asked):
                self._keep_alive(model, keep_alive_s)
                client.respond(request, 200, ollama.unloaded(path, asked, time.monotonic))
                return False
            made = ollama.translate(path, asked, model, time.monotonic, keeps=keep_alive_s is not None)
        except GlowplugError as error:
            return self._refuse(client, request, error)
        sink, inner = self._behind(client, request, made.path, made.body, made.answer)
        if keep_alive_s is not None:
            sink.at_end = partial(self._keep_alive, model, keep_alive_s)
        inner.notes = fields_named(made.ignored) if made.ignored else b""
        return self._ask_behind(request, sink, inner, is_translated=False)

    def _take_batches(self, client: ClientSink, request: HttpRequest) -> bool:
        if headers := self._access.preflight(request):
            client.respond(request, 200, b"", headers)
            return False
        try:
            request.caller = self._access.caller(request)
            if self.answer_batches is None:
                raise batch_paths.not_configured()
        except GlowplugError as error:
            return self._refuse(client, request, error)
        if self._table.stage is PortStage.REFUSING:
            return self._refuse(client, request, STOPPING)
        self.answer_batches(client, request, self._context)
        return True

    def _keep_alive(self, model: Model, keep_alive_s: float) -> None:
        self._table.publish(ModelKeepAliveAsked(model_key=model.key, keep_alive_s=keep_alive_s))

    def _about_ollama(self, request: HttpRequest) -> tuple[bytes, bytes]:
        path, table = request.path, self._table
        if path == ollama.VERSION:
            return encode_json({"version": __version__}), JSON_HEADERS
        if path in (ollama.TAGS, ollama.PS):
            models = table.models(request.caller)
            if path == ollama.PS:
                models = [model for model in models if _is_loaded(model, table)]
            return encode_json({"models": [ollama.row(model, table.started_at) for model in models]}), JSON_HEADERS
        if path in ollama.OPERATORS:
            raise ApiError(501, ollama.IS_OPERATORS, "invalid_request_error", "not_supported")
        asked = ollama.read(request.body)
        model = table.find(ollama.name_of(asked), request.caller)
        if path == ollama.SHOW:
            lacks = self._api(model).lacks
            can = [name for name, needs in ollama.CAPABILITIES if needs not in lacks]
            return encode_json(ollama.shown(model, can, table.started_at)), JSON_HEADERS
        if asked.get("stream") is False:
            return b'{"status":"success"}', JSON_HEADERS
        return b'{"status":"pulling manifest"}\n{"status":"success"}\n', ollama.LINES_HEADERS

    def _name_it(self, request: HttpRequest, model: Model) -> None:
        """Write the model's own name into the body: engines do not know the others."""
        if request.path in self._readers:
            self._write(request, {"model": model.name})

    def _name_adapter(self, request: HttpRequest, model: Model, api: EngineApi) -> None:
        """Overwrite the client's values with the model's own name and the engine's adapter fields."""
        self._write(request, {"model": model.name, **api.names_adapter})

    def _renamed(
        self, client: ClientSink, request: HttpRequest, asked: Any, model: Model, api: EngineApi
    ) -> tuple[ClientSink, HttpRequest]:
        if not (model.base and api.names_adapter):
            return client, request
        if not isinstance(client, TranslatedClient):
            as_it_is = AsItIs(request.path, streams=bool(asked.stream))
            client, request = self._behind(client, request, request.path, request.body, as_it_is)
        base = self._table.controller.fleet.models.get(model.base)
        client.renaming = Renaming(base.name if base else model.base, model.name)
        return client, request

    def _write_format(self, request: HttpRequest, asked: CompletionAsked) -> None:
        before = len(request.body)
        request.body = translate(request.body, asked)
        self._context.buffered_bytes += len(request.body) - before

    def _write_thinking(self, request: HttpRequest, asked: CountAsked) -> None:
        """The client's own settings of the template take precedence."""
        if settings := messages_as_chat.template_settings(asked):
            given = decode(request.body).get("chat_template_kwargs")
            self._write(request, {"chat_template_kwargs": settings | (given if isinstance(given, dict) else {})})

    def _write_calls(self, request: HttpRequest, asked: ChatAsked) -> None:
        if (messages := with_sound_calls(asked, request.body)) is not None:
            self._write(request, {"messages": messages})

    def _write_documents(self, request: HttpRequest, asked: RerankAsked) -> None:
        """Engines take texts."""
        texts = [one if isinstance(one, str) else one.text for one in asked.documents]
        if texts != asked.documents:
            self._write(request, {"documents": texts})

    def _write(self, request: HttpRequest, fields: dict[str, Any]) -> None:
        """Write these fields into the body."""
        before = len(request.body)
        request.body = encode_json(decode(request.body, type=dict[str, Raw]) | fields)
        self._context.buffered_bytes += len(request.body) - before

    def forget_models(self) -> None:
        fleet = self._table.controller.fleet
        models = fleet.models
        holding = {one.model_key for one in fleet.instances.values() if one.adapter_slots}
        self._bases = frozenset({model.base for model in models.values() if model.base} | holding)
        for key in [key for key in self._apis if key not in models]:
            del self._apis[key]

    def _traced(self, request: HttpRequest) -> tuple[Way, str]:
        """Return the request's way and its traceparent, for its events and its engine. An unsampled request passes on
        the client's."""
        given = request.headers.get(b"traceparent")
        parent = tracing.parent_context(given) if given is not None else None
        theirs = parent[0] if parent is not None else ""
        way = Way(OPERATIONS[request.path], theirs[36:52])
        sampled = parent[1] if parent is not None else self._sampler.root(request.complete)
        if theirs and not sampled:
            return way, theirs
        return way, tracing.new_context(theirs, sampled=sampled)

    def _api(self, model: Model) -> EngineApi:
        known = self._apis.get(model.key)
        if known is None or known[0] is not model:
            known = self._apis[model.key] = model, api_of(model)
        return known[1]

    # -- the router's own answers: each returns False, since no exchange has the request --------------------------

    def _answer_here(self, client: ClientSink, request: HttpRequest) -> bool:
        path = request.path
        if headers := self._access.preflight(request):
            client.respond(request, 200, b"", headers)
        elif path in OPERATIONS:
            self._not_allowed(client, request, b"POST")
        elif not _is_local(path):
            self._refuse(client, request, NotFound(f"There is nothing at {path[:200].decode('ascii', 'replace')}."))
        elif request.method not in (b"GET", b"HEAD"):
            self._not_allowed(client, request, b"GET, HEAD")
        else:
            try:
                if path.startswith(b"/v1/"):
                    request.caller = self._access.caller(request)
                answer = self._answer(request)
            except GlowplugError as error:
                return self._refuse(client, request, error)
            client.respond(request, *answer)
        return False

    def _answer(self, request: HttpRequest) -> tuple[int, bytes, bytes]:
        path, table = request.path, self._table
        is_anthropic = ANTHROPIC_VERSION in request.headers
        if path == b"/":
            console_url = self._console_url if self._access.admits(request) else ""
            return root(request.headers.get(b"accept", b""), console_url)
        if path == b"/metrics":
            raise NotFound("This port has no metrics: each service shows its own at /metrics of its admin port.")
        if path == openapi.PATH:
            return 200, self._openapi, JSON_HEADERS
        if path == b"/v1/models":
            rows = [_model_row(model, table) for model in table.models(request.caller)]
            if is_anthropic:
                rows = [anthropic_row(row["id"], row["created"]) for row in rows]
                return 200, encode_json(anthropic_list(rows)), JSON_HEADERS
            return 200, encode_json({"object": "list", "data": rows}), JSON_HEADERS
        if path.startswith(b"/v1/models/"):
            name = unquote_to_bytes(path.removeprefix(b"/v1/models/")).decode("utf-8", "replace")
            row = _model_row(table.find(name, request.caller), table)
            return (
                200,
                encode_json(anthropic_row(row["id"], row["created"]) if is_anthropic else row),
                JSON_HEADERS,
            )
        if path in (b"/ready", b"/readyz"):
            why = table.not_ready()
            return 503 if why else 200, encode_json({"ready": not why, "reason": why}), JSON_HEADERS
        return 200, b'{"status":"ok","service":"router"}', JSON_HEADERS

    def _not_allowed(self, client: ClientSink, request: HttpRequest, allowed: bytes) -> None:
        message = f"{request.method.decode('ascii', 'replace')} is not allowed here; use {allowed.decode()}."
        self._refuse(client, request, refused(405, message, "method_not_allowed"), b"allow: %b\r\n" % allowed)

    def _refuse(self, client: ClientSink, request: HttpRequest, error: GlowplugError, headers: bytes = b"") -> bool:
        self._context.metrics.refused(error.status)
        self._context.report_refusal(request, error)
        headers = JSON_HEADERS + headers + api_errors.no_retry(error)
        path = MESSAGES if ANTHROPIC_VERSION in request.headers else request.path
        if error.status == 415 and request.path in OPERATIONS:
            headers += ACCEPTED
        body, more = api_errors.body(path, error), api_errors.retry_after(error)
        client.respond(request, error.status, body, headers, more)
        return False


# -- models and readiness ---------------------------------------------------------------------------------------


def summary_tokens(model: Model) -> int:
    """Leave most of the context to the conversation."""
    return min(MOST_SUMMARY_TOKENS, max(1, model.context_tokens // 4))


def _is_special(chat: Any) -> bool:
    return chat.tool_choice is not None or chat.n is not None or chat.n_cmpl is not None or bool(chat.logprobs)


def _is_loaded(model: Model, table: RequestTable[Exchange]) -> bool:
    return any(i.serves and i.state is InstanceState.READY for i in table.controller.fleet.of(model.key).values())


def _is_local(path: bytes) -> bool:
    return path in _LOCAL_PATHS or path.startswith(b"/v1/models/")


def _model_row(model: Model, table: RequestTable[Exchange]) -> dict[str, Any]:
    fleet, load = table.controller.fleet, table.controller.load(model.key)
    instances = sorted(fleet.of(model.key).values(), key=lambda i: i.instance_id)
    return {
        "id": model.name,
        "object": "model",
        "created": int(table.started_at),
        "owned_by": "glowplug",
        "state": fleet.temperature(model.key).value,
        "eta_s": round(table.eta_s(model.key), 3),
        "key": model.key,
        "aliases": list(model.aliases),
        "engine": model.engine,
        "emulated": model.engine == "emulated",
        "max_model_len": model.context_tokens,
        "num_waiting": load.num_waiting,
        "num_in_flight": load.num_in_flight,
        "instances": [
            {"instance_id": i.instance_id, "state": i.state.value, "node_id": i.node_id if i.workers else ""}
            for i in instances
        ],
    }
