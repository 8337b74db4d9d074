"""The way to a running fleet: its addresses and tokens, and calls that fail with one clear line."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import httpx

from glowplug.cli.terminal import CliError, NoFleet
from glowplug.runtime.supervisor.statedir import FLEET_FILE, read_fleet

TIMEOUT_S = 10.0
SERVICES = ("data", "console", "router", "predictor", "placer", "autoscaler")
Row = dict[str, Any]


@dataclass(frozen=True)
class FleetClient:
    """`urls` by service ("data" is the OpenAI API). `document` is fleet.json; empty when the environment names it."""

    urls: dict[str, str]
    admin_token: str = ""
    api_key: str = ""
    console_key: str = ""
    nats_url: str = ""
    document: Row = field(default_factory=dict)

    @classmethod
    def elsewhere(cls, urls: Mapping[str, str]) -> "FleetClient":
        """A fleet that was not started here, with the tokens and the bus that the environment names."""
        return cls(
            urls={name: url.rstrip("/") for name, url in urls.items()},
            admin_token=os.environ.get("GLOWPLUG_ADMIN_TOKEN", ""),
            api_key=os.environ.get("GLOWPLUG_API_KEY", ""),
            console_key=os.environ.get("GLOWPLUG_CONSOLE_KEY", ""),
            nats_url=os.environ.get("GLOWPLUG_NATS_URL", ""),
        )

    def also(self, service: str, url: str) -> "FleetClient":
        """This fleet, with the address of one more service."""
        return replace(self, urls={**self.urls, service: url.rstrip("/")})

    @property
    def redis_url(self) -> str:
        """The store's address, "" where none is known."""
        return self.document.get("redis_url") or os.environ.get("GLOWPLUG_REDIS_URL", "")

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

    def call(self, method: str, service: str, path: str, **kwargs: Any) -> Any:
        """Decoded JSON of any call. Raises CliError with the message the service gave."""
        try:
            return self._ask(method, service, path, **kwargs).json()
        except ValueError as error:
            raise CliError(f"{service} answered {path} with something that is no JSON") from error

    def _ask(self, method: str, service: str, path: str, **kwargs: Any) -> httpx.Response:
        headers = self.headers(service)
        url = f"{self.url(service)}{path}"
        try:
            response = httpx.request(method, url, headers=headers, timeout=TIMEOUT_S, trust_env=False, **kwargs)
        except httpx.HTTPError as error:
            raise CliError(f"{service} at {self.url(service)} does not answer: {error}") from error
        if response.is_error:
            raise CliError(error_message(response))
        return response

    def url(self, service: str) -> str:
        if service not in self.urls:
            raise CliError(f"this fleet has no address for {service}: set GLOWPLUG_{service.upper()}_URL")
        return self.urls[service]

    def headers(self, service: str) -> dict[str, str]:
        """What a service asks for: the console its key, the others the admin token."""
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


def error_message(response: httpx.Response) -> str:
    """What went wrong, in the service's own message when its answer has our error shape."""
    try:
        error = response.json()["error"]
        message = f"{error['message']} ({error['code'] or error['type']})"
    except (ValueError, KeyError, TypeError):
        message = f"{response.request.url} answered {response.status_code}"
    retry = response.headers.get("retry-after")
    return f"{message}; try again in {retry} s" if retry else message


def connect(state_dir: Path) -> FleetClient:
    """The fleet of `state_dir`, else the one named by GLOWPLUG_*_URL. Raises NoFleet; CliError for a fleet.json that no
    supervisor of this version wrote."""
    document = read_fleet(state_dir)
    if document is None:
        named = {service: url for service in SERVICES if (url := os.environ.get(f"GLOWPLUG_{service.upper()}_URL"))}
        if not named or not all(urlsplit(url).scheme for url in named.values()):
            raise NoFleet(state_dir)
        return FleetClient.elsewhere(named)
    texts: dict[str, Any] = {name: document.get(name) for name in ("admin_token", "api_key", "nats_url")}
    texts["console_key"] = document.get("console_key", "")
    urls = document.get("urls")
    if not isinstance(urls, dict) or not all(isinstance(text, str) for text in (*urls.values(), *texts.values())):
        raise CliError(f"{state_dir / FLEET_FILE} is not of this version: `glowplug down`, then `glowplug up`")
    return FleetClient(urls, document=document, **texts)
