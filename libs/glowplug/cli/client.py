"""The way to a running fleet: its addresses and tokens, and calls that fail with one clear line."""

import json
import json as json_text
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from shutil import copyfileobj
from typing import IO, Any
from urllib.parse import quote, urlencode, urlsplit

from glowplug.cli import contexts
from glowplug.cli.terminal import CliError, NoFleet
from glowplug.runtime.supervisor.statedir import FLEET_FILE, read_fleet

# One call to a service: the standard library's client, since others take longer to import than the call takes.


class NoAnswer(Exception):
    """There is no whole answer; the text says why."""


@dataclass(frozen=True, slots=True)
class Answer:
    """`retry_after` as the service sent it, in seconds; "" without."""

    status: int
    body: bytes
    retry_after: str = ""

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", errors="replace")


def request(
    method: str,
    url: str,
    *,
    headers: Mapping[str, str],
    timeout_s: float,
    params: Mapping[str, object] | None = None,
    json: Any = None,
    content: Iterable[bytes] | None = None,
    into: IO[bytes] | None = None,
) -> Answer:
    """Whatever the service answers, errors too. `params` go into the query, but for None; `json` is the body, or else
    `content`, whose length and type `headers` say. The body of an answer that is no error goes `into` a file, if one is
    given. Raises NoAnswer, also where no answer goes on within `timeout_s`."""
    query = urlencode({name: value for name, value in (params or {}).items() if value is not None})
    body = content if json is None else json_text.dumps(json).encode()
    sent = dict(headers) | ({} if json is None else {"Content-Type": "application/json"})
    try:
        parts = urlsplit(url)
        kind = {"http": HTTPConnection, "https": HTTPSConnection}.get(parts.scheme)
        if kind is None or not parts.hostname:
            raise NoAnswer(f"{url} is not an http or https address")
        connection = kind(parts.hostname, parts.port, timeout=timeout_s)
        try:
            connection.request(method, f"{parts.path or '/'}{'?' if query else ''}{query}", body=body, headers=sent)
            answer = connection.getresponse()
            if into is not None and answer.status < HTTPStatus.BAD_REQUEST:
                copyfileobj(answer, into)
            return Answer(answer.status, answer.read(), answer.getheader("Retry-After", ""))
        finally:
            connection.close()
    except (OSError, HTTPException, ValueError) as error:
        raise NoAnswer(str(error) or type(error).__name__) from error


TIMEOUT_S = 10.0
SERVICES = ("data", "console", "router", "predictor", "placer", "autoscaler")
SECRETS = ("admin_token", "api_key", "console_key", "nats_url", "redis_url")
Row = dict[str, Any]


@dataclass(frozen=True)
class FleetClient:
    """`urls` by service ("data" is the OpenAI API). `document` is fleet.json; empty when the environment names it."""

    urls: dict[str, str]
    admin_token: str = ""
    api_key: str = ""
    console_key: str = ""
    nats_url: str = ""
    redis_url: str = ""
    timeout_s: float = TIMEOUT_S
    document: Row = field(default_factory=dict)

    @classmethod
    def elsewhere(cls, urls: Mapping[str, str], **given: str) -> "FleetClient":
        """A fleet that was not started here. Each token and the addresses of bus and store are as `given`, by the name
        of the field; what is not given or empty comes from the environment."""
        values: Row = {name: given.get(name) or os.environ.get(f"GLOWPLUG_{name.upper()}", "") for name in SECRETS}
        return cls({name: url.rstrip("/") for name, url in urls.items()}, **values)

    def also(self, service: str, url: str) -> "FleetClient":
        """This fleet, with the address of one more service."""
        return replace(self, urls={**self.urls, service: url.rstrip("/")})

    def models(self) -> list[Row]:
        return self.rows("autoscaler", "/v1/models")

    def nodes(self) -> list[Row]:
        return self.rows("placer", "/v1/nodes")

    def instances(self, *, model: str = "", gone: bool = False) -> list[Row]:
        """Newest first; with `gone` those too that have stopped or failed."""
        return self.rows("placer", "/v1/instances", model=model, gone=str(gone).lower())

    def key_of(self, model: str) -> str:
        """The key of a model that is named by name, alias or key; the text itself where there is no such model."""
        try:
            return str(self.get("autoscaler", f"/v1/models/{segment(model)}")["key"])
        except CliError:
            return model

    def rows(self, service: str, path: str, **params: Any) -> list[Row]:
        """The rows of a list. Raises CliError."""
        data: list[Row] = self.get(service, path, **params)["data"]
        return data

    def get(self, service: str, path: str, **params: Any) -> Any:
        """Decoded JSON of a GET. Raises CliError."""
        return self.call("GET", service, path, params={k: v for k, v in params.items() if v not in ("", None)})

    def get_text(self, service: str, path: str, **params: Any) -> str:
        """A GET whose answer is plain text. Raises CliError."""
        return self._ask("GET", service, path, params=params).text

    def save(self, service: str, path: str, into: IO[bytes]) -> None:
        """Write what a GET answers to a file. Raises CliError."""
        self._ask("GET", service, path, into=into)

    def call(self, method: str, service: str, path: str, **kwargs: Any) -> Any:
        """Decoded JSON of any call. Raises CliError with the message the service gave."""
        try:
            return json.loads(self._ask(method, service, path, **kwargs).body)
        except ValueError as error:
            raise CliError(f"{service} did not answer {path} with JSON") from error

    def through_console(self, method: str, path: str, **kwargs: Any) -> Any:
        """Decoded JSON of a call that the console passes on with the admin token. Raises CliError."""
        key = self.console_key or self.api_key
        headers = bearer(self.admin_token) | ({"X-Glowplug-Console-Key": key} if key else {})
        return self.call(method, "console", path, headers=headers, **kwargs)

    def _ask(
        self, method: str, service: str, path: str, headers: Mapping[str, str] | None = None, **kwargs: Any
    ) -> Answer:
        url = f"{self.url(service)}{path}"
        given = self.headers(service) if headers is None else headers
        try:
            answer = request(method, url, headers=given, timeout_s=self.timeout_s, **kwargs)
        except NoAnswer as error:
            raise CliError(f"{service} at {self.url(service)} does not answer: {error}") from error
        if answer.status >= HTTPStatus.BAD_REQUEST:
            raise CliError(error_message(url, answer.status, answer.body, answer.retry_after))
        return answer

    def url(self, service: str) -> str:
        if service not in self.urls:
            raise CliError(f"this fleet has no address for {service}: set GLOWPLUG_{service.upper()}_URL")
        return self.urls[service]

    def headers(self, service: str) -> dict[str, str]:
        """What a service asks for: the data port and the console their keys, the others the admin token."""
        if service == "data":
            return self.data_headers()
        token = (self.console_key or self.api_key) if service == "console" else self.admin_token
        return bearer(token)

    def data_headers(self) -> dict[str, str]:
        """Headers of the OpenAI API."""
        return bearer(self.api_key)


def bearer(token: str) -> dict[str, str]:
    """The header that carries a token or key; none for ""."""
    return {"Authorization": f"Bearer {token}"} if token else {}


def segment(text: str) -> str:
    """A model name or id as part of a path (slashes stay: names may have them)."""
    return quote(text, safe="/")


def error_message(url: str, status: int, body: bytes, retry_after: str) -> str:
    """What went wrong, in the service's own message when its answer has our error shape."""
    try:
        error = json.loads(body)["error"]
        message = f"{error['message']} ({error['code'] or error['type']})"
    except (ValueError, KeyError, TypeError):
        message = f"{url} answered {status}"
    return f"{message}; try again in {retry_after} s" if retry_after else message


def connect(state_dir: Path | None = None) -> FleetClient:
    """The fleet of `state_dir` or of the place that `contexts.chosen` finds; where none runs in a folder that was given
    or is here, the one that GLOWPLUG_*_URL name, which also goes before the current context. Raises NoFleet; CliError
    for a fleet.json that no supervisor of this version wrote."""
    named = {service: url for service in SERVICES if (url := os.environ.get(f"GLOWPLUG_{service.upper()}_URL"))}
    is_named = bool(named) and all(urlsplit(url).scheme for url in named.values())
    where = contexts.chosen(state_dir, by_context=not is_named)
    if where.urls:
        return FleetClient.elsewhere(where.urls, **where.values())
    folder = Path(where.state_dir)
    document = read_fleet(folder)
    if document is not None:
        return _started_here(folder, document)
    if is_named:
        return FleetClient.elsewhere(named)
    raise NoFleet(folder, where.name)


def _started_here(folder: Path, document: Row) -> FleetClient:
    texts: dict[str, Any] = {name: document.get(name) for name in ("admin_token", "api_key", "nats_url")}
    texts |= {name: document.get(name, "") for name in ("console_key", "redis_url")}
    given = {name: os.environ.get(f"GLOWPLUG_{name.upper()}", "") for name in ("admin_token", "api_key", "console_key")}
    texts |= {name: text for name, text in given.items() if text}  # a key of one's own in place of the fleet's
    urls = document.get("urls")
    if not isinstance(urls, dict) or not all(isinstance(text, str) for text in (*urls.values(), *texts.values())):
        raise CliError(f"{folder / FLEET_FILE} was written by another version: `glowplug down`, then `glowplug up`")
    return FleetClient(urls, document=document, **texts)
