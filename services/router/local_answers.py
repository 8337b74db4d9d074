"""What the data port answers itself: the models, and whether the router is alive and ready."""

from typing import Any
from urllib.parse import unquote_to_bytes

from glowplug.domain.errors import ModelNotFound
from glowplug.domain.model import Model
from services.router import api_errors
from services.router.request_table import RequestTable
from services.router.wire import encode_json

Answer = tuple[int, bytes]
_PATHS = (b"/v1/models", b"/health", b"/live", b"/ready", b"/livez", b"/readyz")


def is_local(path: bytes) -> bool:
    return path in _PATHS or path.startswith(b"/v1/models/")


def answer(path: bytes, table: RequestTable[Any]) -> Answer:
    """(status, JSON) of a GET on a local path."""
    if path == b"/v1/models":
        models = sorted(table.controller.fleet.models.values(), key=lambda m: m.key)
        return 200, encode_json({"object": "list", "data": [model_row(m, table) for m in models]})
    if path.startswith(b"/v1/models/"):
        name = _unquote(path.removeprefix(b"/v1/models/"))
        model = table.lookup(name)
        if model is None:
            return 404, api_errors.body(path, ModelNotFound(f"The model `{name}` does not exist.", param="model"))
        return 200, encode_json(model_row(model, table))
    if path in (b"/ready", b"/readyz"):
        why = table.not_ready()
        return 503 if why else 200, encode_json({"ready": not why, "reason": why})
    return 200, b'{"status":"ok","service":"router"}'


def model_row(model: Model, table: RequestTable[Any]) -> dict[str, Any]:
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


def _unquote(text: bytes) -> str:
    return unquote_to_bytes(text).decode("utf-8", "replace")
