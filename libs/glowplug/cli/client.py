"""Client of a running fleet: addresses, tokens, and calls that fail with one clear line."""

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

# The standard library's HTTP client: others take longer to import than the call takes.


class NoAnswer(Exception):
    """No complete answer; the text says why."""


@dataclass(frozen=True, slots=True)
class Answer:
    """`retry_after`: seconds as sent; "" without."""

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
    """Return any answer, errors too.

    `params` of None are left out; the body is `json`, or `content` with length and type in `headers`. A successful
    body goes `into` a file, if given. Raises NoAnswer, also after a silence of `timeout_s`."""
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
    """`urls` by service ("data": the OpenAI API). `document`: fleet.json, or empty for a fleet elsewhere."""

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
        """Return a fleet not started here. Tokens and addresses of bus and store default to the environment."""
        values: Row = {name: given.get(name) or os.environ.get(f"GLOWPLUG_{name.upper()}", "") for name in SECRETS}
        return cls({name: url.rstrip("/") for name, url in urls.items()}, **values)

    def also(self, service: str, url: str) -> "FleetClient":
        return replace(self, urls={**self.urls, service: url.rstrip("/")})

    def models(self) -> list[Row]:
        return self.rows("autoscaler", "/v1/models")

    def nodes(self) -> list[Row]:
        return self.rows("placer", "/v1/nodes")

    def instances(self, *, model: str = "", gone: bool = False) -> list[Row]:
        return self.rows("placer", "/v1/instances", model=model, gone=str(gone).lower())

    def key_of(self, model: str) -> str:
        """Accept a name, alias or key; return unknown ones unchanged."""
        try:
            return str(self.get("autoscaler", f"/v1/models/{segment(model)}")["key"])
        except CliError:
            return model

    def rows(self, service: str, path: str, **params: Any) -> list[Row]:
        """Raises CliError."""
        data: list[Row] = self.get(service, path, **params)["data"]
        return data

    def get(self, service: str, path: str, **params: Any) -> Any:
        """Raises CliError."""
        return self.call("GET", service, path, params={k: v for k, v in params.items() if v not in ("", None)})

    def get_text(self, service: str, path: str, **params: Any) -> str:
        """Raises CliError."""
        return self._ask("GET", service, path, params=params).text

    def save(self, service: str, path: str, into: IO[bytes]) -> None:
        """Raises CliError."""
        self._ask("GET", service, path, into=into)

    def call(self, method: str, service: str, path: str, **kwargs: Any) -> Any:
        """Return decoded JSON. Raises CliError with the service's message."""
        try:
            return json.loads(self._ask(method, service, path, **kwargs).body)
        except ValueError as error:
            raise CliError(f"{service} did not answer {path} with JSON") from error

    def through_console(self, method: str, path: str, **kwargs: Any) -> Any:
        """Call through the console, which passes it on with the admin token. Raises CliError."""
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
        if service == "data":
            return self.data_headers()
        token = (self.console_key or self.api_key) if service == "console" else self.admin_token
        return bearer(token)

    def data_headers(self) -> dict[str, str]:
        return bearer(self.api_key)


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"} if token else {}


def segment(text: str) -> str:
    """Slashes stay: names may have them."""
    return quote(text, safe="/")


def error_message(url: str, status: int, body: bytes, retry_after: str) -> str:
    try:
        error = json.loads(body)["error"]
        message = f"{error['message']} ({error['code'] or error['type']})"
    except (ValueError, KeyError, TypeError):
        message = f"{url} answered {status}"
    return f"{message}; try again in {retry_after} s" if retry_after else message


def connect(state_dir: Path | None = None) -> FleetClient:
    """Return the fleet of `state_dir` or of `contexts.chosen`; if none runs there, that of GLOWPLUG_*_URL, which also
    precede the current context.

    Raises NoFleet; CliError for a fleet.json of another version."""
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
    texts |= {name: text for name, text in given.items() if text}
    urls = document.get("urls")
    if not isinstance(urls, dict) or not all(isinstance(text, str) for text in (*urls.values(), *texts.values())):
        raise CliError(f"{folder / FLEET_FILE} was written by another version: `glowplug down`, then `glowplug up`")
    return FleetClient(urls, document=document, **texts)
