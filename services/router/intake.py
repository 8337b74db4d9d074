"""From a complete HTTP request to an exchange: whether its client may ask, what it asks for, and of which model.

What is no request for an engine is answered here: refusals, and the paths that the router answers itself.
"""

from collections.abc import Iterable
from typing import Any
from urllib.parse import unquote_to_bytes

from glowplug.controllers.router.messages import RequestArrived
from glowplug.domain.errors import GlowplugError, NotFound, Unauthorized
from glowplug.domain.model import Model
from glowplug.engines.apis import EngineApi
from glowplug.engines.drivers import api_of
from glowplug.telemetry import semconv
from glowplug.telemetry.tracing import Tracing
from services.router import api_errors, tracing
from services.router.api_errors import STOPPING, refused
from services.router.conversation import Lengths, text_tokens
from services.router.ends import ClientSink
from services.router.exchange import Exchange
from services.router.http_request import HttpRequest
from services.router.port_context import PortContext
from services.router.request_body import OPERATIONS, READERS, check_model, read_body, readers, sizes
from services.router.request_table import RequestTable, Stage
from services.router.tracing import RequestTrace, Sampler
from services.router.wire import JSON_HEADERS, encode_json

_LOCAL_PATHS = (b"/v1/models", b"/health", b"/live", b"/ready", b"/livez", b"/readyz")
WRONG_KEY = Unauthorized("The API key is missing or wrong (`Authorization: Bearer ...`, or `x-api-key`).")


class Intake:
    """Takes the complete requests of one data port. `passed_fields` of a body go to engines unchecked. `lengths` say
    how long an answer will be, where a policy asks."""

    def __init__(
        self,
        context: PortContext[Exchange],
        *,
        tracing: Tracing | None = None,
        sampler: Sampler | None = None,
        passed_fields: Iterable[str] = (),
        lengths: Lengths | None = None,
    ) -> None:
        self._lengths = lengths if context.table.controller.tracks_tokens else None
        self._context, self._table, self._access = context, context.table, context.access
        self._tracing, self._sampler = tracing, sampler or Sampler()
        self._readers = readers(passed_fields)
        self._apis: dict[str, tuple[Model, EngineApi]] = {}  # by model_key: what its engine answers, as its driver says
        self._tracks_tokens = context.table.controller.tracks_tokens  # else they are not counted

    def take(self, client: ClientSink, request: HttpRequest) -> bool:
        """One complete request, none other being answered on its connection. True when an exchange now has it."""
        if (refusal := self._access.refusal(request)) is not None:
            return self._refuse(client, request, refusal)
        path = request.path
        if path not in READERS or request.method != b"POST":
            return self._answer_here(client, request)
        if not self._access.has_key(request):
            return self._refuse(client, request, WRONG_KEY)
        if self._table.stage is Stage.REFUSING:
            return self._refuse(client, request, STOPPING)
        try:
            asked = read_body(path, request.body, self._readers)
            model = self._table.find(asked.model)
            api = self._api(model)
            needs = check_model(asked, model, api, path, len(request.body))
        except GlowplugError as error:
            return self._refuse(client, request, error)
        prompt_tokens, max_tokens = sizes(asked)
        trace, traceparent = self._trace(request, model)
        exchange = client.exchange = Exchange(
            self._context,
            client,
            request,
            model,
            api,
            bool(asked.stream),
            needs,
            prompt_tokens,
            trace,
            traceparent,
        )
        traced = traceparent if trace is not None else ""
        counted = (prompt_tokens, max_tokens) if self._tracks_tokens else (0, 0)
        said = text_tokens(asked, self._lengths) if self._lengths is not None else 0
        self._table.arrive(
            exchange,
            RequestArrived(exchange.ticket, model.name, request.request_id, traced, *counted, text_tokens=said),
        )
        return True

    def forget_models(self) -> None:
        """Drop what is kept of models that are no more."""
        models = self._table.controller.fleet.models
        for key in [key for key in self._apis if key not in models]:
            del self._apis[key]

    def _trace(self, request: HttpRequest, model: Model) -> tuple[RequestTrace | None, str]:
        """Join the client's trace or begin one; unsampled requests only carry a context on."""
        parent = tracing.parent_context(request.headers.get(b"traceparent"))
        sampled = parent[1] if parent is not None else self._sampler.root(request.complete)
        if not sampled or self._tracing is None:
            return None, parent[0] if parent is not None else tracing.new_context()
        attributes: tracing.Attributes = {
            semconv.ATTR_REQUEST_ID: request.request_id,
            semconv.ATTR_MODEL: model.key,
            semconv.GEN_AI_REQUEST_MODEL: model.name,
            semconv.GEN_AI_OPERATION: OPERATIONS[request.path],
        }
        made = RequestTrace(self._tracing, parent[0] if parent is not None else "", request.complete_at, attributes)
        return made, made.traceparent

    def _api(self, model: Model) -> EngineApi:
        known = self._apis.get(model.key)
        if known is None or known[0] is not model:
            known = self._apis[model.key] = model, api_of(model)
        return known[1]

    # -- answers of the router's own: each returns False, for no exchange has the request -------------------------

    def _answer_here(self, client: ClientSink, request: HttpRequest) -> bool:
        """Everything that is not a POST to an engine."""
        path = request.path
        if headers := self._access.preflight(request):
            client.respond(request, 200, b"", headers)
        elif path in READERS:
            self._not_allowed(client, request, b"POST")
        elif not _is_local(path):
            self._refuse(client, request, NotFound(f"There is nothing at {path[:200].decode('ascii', 'replace')}."))
        elif request.method not in (b"GET", b"HEAD"):
            self._not_allowed(client, request, b"GET, HEAD")
        elif path.startswith(b"/v1/") and not self._access.has_key(request):
            self._refuse(client, request, WRONG_KEY)
        else:
            try:
                answer = _answer(path, self._table)
            except GlowplugError as error:
                return self._refuse(client, request, error)
            client.respond(request, *answer)
        return False

    def _not_allowed(self, client: ClientSink, request: HttpRequest, allowed: bytes) -> None:
        message = f"{request.method.decode('ascii', 'replace')} is not allowed here; use {allowed.decode()}."
        self._refuse(client, request, refused(405, message, "method_not_allowed"), b"allow: %b\r\n" % allowed)

    def _refuse(self, client: ClientSink, request: HttpRequest, error: GlowplugError, headers: bytes = b"") -> bool:
        self._context.metrics.refused(error.status)
        headers = JSON_HEADERS + headers + api_errors.no_retry(error)
        body, more = api_errors.body(request.path, error), api_errors.retry_after(error)
        client.respond(request, error.status, body, headers, more)
        return False


# -- the models, and whether the router is alive and ready ------------------------------------------------------


def _is_local(path: bytes) -> bool:
    return path in _LOCAL_PATHS or path.startswith(b"/v1/models/")


def _answer(path: bytes, table: RequestTable[Exchange]) -> tuple[int, bytes]:
    """(status, JSON) of a GET on a local path. Raises ModelNotFound or NoCapacity."""
    if path == b"/v1/models":
        return 200, encode_json({"object": "list", "data": [_model_row(model, table) for model in table.models()]})
    if path.startswith(b"/v1/models/"):
        name = unquote_to_bytes(path.removeprefix(b"/v1/models/")).decode("utf-8", "replace")
        return 200, encode_json(_model_row(table.find(name), table))
    if path in (b"/ready", b"/readyz"):
        why = table.not_ready()
        return 503 if why else 200, encode_json({"ready": not why, "reason": why})
    return 200, b'{"status":"ok","service":"router"}'


def _model_row(model: Model, table: RequestTable[Exchange]) -> dict[str, Any]:
    """One entry of /v1/models: OpenAI's fields, then how warm the model is and when it could answer."""
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
