"""The Python API: calls to a fleet. `glowplug_lab` has one that simulates it.

    import glowplug

    fleet = glowplug.Client()  # the fleet that `glowplug up` started here
    fleet.deploy({"name": "writer", "engine": "llamacpp", "weights": "file:/models/writer.gguf"})
    fleet.wake("writer")

Requests to models go to the OpenAI API at `Client().openai_url`, with any client of that API.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from glowplug.cli.access import id_of
from glowplug.cli.client import SERVICES, FleetClient, Row, connect, segment
from glowplug.cli.terminal import CliError
from glowplug.cli.why import decisions_about, request_of

P = ParamSpec("P")
R = TypeVar("R")


class FleetError(Exception):
    """A fleet or a scenario refused a call, or a fleet does not answer; one line for a person."""


class Client:
    """A client of one fleet. Every method raises FleetError.

    Without arguments it finds its fleet as the command line does: GLOWPLUG_STATE_DIR, `.glowplug` in this folder,
    GLOWPLUG_AUTOSCALER_URL and its like, the current context (`glowplug context`). `state_dir` is the folder of a fleet
    that `glowplug up` started. `urls` names the services of another fleet ("router", "placer", "autoscaler",
    "predictor", "console", "data"); its `admin_token` and `api_key` are GLOWPLUG_ADMIN_TOKEN and GLOWPLUG_API_KEY where
    they are not given.
    """

    def __init__(
        self,
        state_dir: str | Path | None = None,
        *,
        urls: Mapping[str, str] | None = None,
        admin_token: str = "",
        api_key: str = "",
    ) -> None:
        if urls is None:
            self._fleet = _asked(connect, Path(state_dir) if state_dir else None)
            return
        if unknown := sorted(set(urls) - set(SERVICES)):
            raise FleetError(f"no service is named {unknown[0]!r}; there are: {', '.join(SERVICES)}")
        self._fleet = FleetClient.elsewhere(urls, admin_token=admin_token, api_key=api_key)

    @property
    def openai_url(self) -> str:
        """The base URL for clients of the OpenAI API."""
        return f"{_asked(self._fleet.url, 'data')}/v1"

    def deploy(self, model: Mapping[str, Any]) -> Row:
        """Create or change a model from the fields of a model file, and return its row."""
        if not isinstance(model.get("name"), str) or not model["name"]:
            raise FleetError("a model needs a name")
        path = f"/v1/models/{segment(model['name'])}"
        return self._call("PUT", "autoscaler", path, json=dict(model))

    def undeploy(self, model: str) -> None:
        """Remove a model; its instances finish their requests and stop."""
        self._call("DELETE", "autoscaler", f"/v1/models/{segment(model)}")

    def models(self) -> list[Row]:
        """Every deployed model with its state."""
        return _asked(self._fleet.models)

    def nodes(self) -> list[Row]:
        """Every node with its GPUs."""
        return _asked(self._fleet.nodes)

    def instances(self, model: str = "") -> list[Row]:
        """Live instances of all models or of one, the newest first."""
        return _asked(self._fleet.instances, model=model)

    def requests(self, limit: int = 100) -> list[Row]:
        """Live requests, and those that ended last."""
        return _asked(self._fleet.rows, "router", "/v1/requests", limit=limit)

    def usage(self, by: Sequence[str] = ("tenant", "model"), since: str = "7d") -> list[Row]:
        """Requests, tokens and costs of whole hours since then (`90m`, `24h`, `7d`, a date), summed by these of
        tenant, model, key and hour."""
        return _asked(self._fleet.rows, "console", "/v1/usage", by=",".join(by), since=since)

    def load(self, model: str) -> Row:
        """Start an instance of a model now."""
        return self._move(model, "load")

    def unload(self, model: str) -> Row:
        """Drain a model's instances now; the next request starts one again."""
        return self._move(model, "unload")

    def wake(self, model: str) -> Row:
        """Wake a sleeping instance of a model, or start one if none sleeps."""
        return self._move(model, "wake")

    def sleep(self, model: str) -> Row:
        """Put a model's engines to sleep once they have finished their requests."""
        return self._move(model, "sleep")

    def tenants(self) -> list[Row]:
        """Every tenant with its limits and the number of its keys."""
        return _asked(self._fleet.rows, "autoscaler", "/v1/tenants")

    def put_tenant(self, name: str, **fields: Any) -> Row:
        """Create or change a tenant and return its row. `fields`: `limits` (requests_per_minute, tokens_per_minute,
        tokens_per_day, tokens_per_month, concurrent, queued; 0 sets no limit), `model_limits` (limits by model name or
        pattern), `priority` ("interactive", "standard" or "batch") and `weight`. What is left out has its default."""
        return self._call("PUT", "autoscaler", f"/v1/tenants/{segment(name)}", json=fields)

    def keys(self) -> list[Row]:
        """Every key by its prefix, revoked and expired ones too."""
        return _asked(self._fleet.rows, "autoscaler", "/v1/keys")

    def create_key(self, tenant: str, name: str, **fields: Any) -> Row:
        """Create a key and return its row, whose `key` is the key itself, shown only once. `fields`: `models`
        and `surfaces` (lists of names), `limits`, `priority`, and `expires` ("30d", "12h" or seconds)."""
        return self._call("POST", "autoscaler", "/v1/keys", json={"tenant": tenant, "name": name, **fields})

    def revoke_key(self, key_id: str) -> Row:
        """End a key, by its id or prefix, and return its row."""
        return self._call("DELETE", "autoscaler", f"/v1/keys/{segment(id_of(key_id))}")

    def why(self, subject: str, limit: int = 5) -> list[Row]:
        """The newest decisions about a request, model, GPU, node or instance, with inputs, rule and rivals."""
        request = _asked(request_of, self._fleet, subject)
        return _asked(decisions_about, self._fleet, subject, request, limit)

    def _move(self, model: str, verb: str) -> Row:
        return self._call("POST", "autoscaler", f"/v1/models/{segment(model)}/{verb}", json={})

    def _call(self, method: str, service: str, path: str, **given: Any) -> Row:
        answer: Row = _asked(self._fleet.call, method, service, path, **given)
        return answer


def _asked(call: Callable[P, R], *given: P.args, **named: P.kwargs) -> R:
    try:
        return call(*given, **named)
    except CliError as error:
        raise FleetError(str(error)) from error
