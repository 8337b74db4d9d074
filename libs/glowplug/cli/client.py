"""The way to a running fleet: its addresses and tokens, and calls that fail with one clear line."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import httpx

from glowplug.cli.terminal import CliError, NoFleet
from glowplug.runtime.supervisor.statedir import FLEET_FILE, read_fleet

TIMEOUT_S = 10.0
SERVICES = ("data", "console", "router", "predictor", "placer", "autoscaler")


@dataclass(frozen=True)
class FleetClient:
    """`urls` by service ("data" is the OpenAI API). `document` is fleet.json; empty when the environment names it."""

    urls: dict[str, str]
    admin_token: str = ""
    api_key: str = ""
    console_key: str = ""
    nats_url: str = ""
    document: dict[str, Any] = field(default_factory=dict)

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
        return {"Authorization": f"Bearer {token}"} if token else {}

    def data_headers(self) -> dict[str, str]:
        """Headers of the OpenAI API."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


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


def _of_document(document: dict[str, Any], state_dir: Path) -> FleetClient:
    """Raises CliError for what no supervisor of this version wrote."""
    texts: dict[str, Any] = {name: document.get(name) for name in ("admin_token", "api_key", "nats_url")}
    texts["console_key"] = document.get("console_key", "")
    urls = document.get("urls")
    if not isinstance(urls, dict) or not all(isinstance(text, str) for text in (*urls.values(), *texts.values())):
        raise CliError(f"{state_dir / FLEET_FILE} is not of this version: `glowplug down`, then `glowplug up`")
    return FleetClient(urls=urls, document=document, **texts)


def connect(state_dir: Path) -> FleetClient:
    """The fleet of `state_dir`, else the one named by GLOWPLUG_*_URL. Raises NoFleet, CliError."""
    document = read_fleet(state_dir)
    if document is not None:
        return _of_document(document, state_dir)
    urls = {s: os.environ[f"GLOWPLUG_{s.upper()}_URL"] for s in SERVICES if os.environ.get(f"GLOWPLUG_{s.upper()}_URL")}
    if not urls or not all(urlsplit(url).scheme for url in urls.values()):
        raise NoFleet(state_dir)
    return FleetClient(
        urls={name: url.rstrip("/") for name, url in urls.items()},
        admin_token=os.environ.get("GLOWPLUG_ADMIN_TOKEN", ""),
        api_key=os.environ.get("GLOWPLUG_API_KEY", ""),
        console_key=os.environ.get("GLOWPLUG_CONSOLE_KEY", ""),
        nats_url=os.environ.get("GLOWPLUG_NATS_URL", ""),
    )
