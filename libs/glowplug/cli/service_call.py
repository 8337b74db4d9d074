"""One call to a service: the standard library's client, since others take longer to import than the call takes."""

import json as json_text
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from shutil import copyfileobj
from typing import IO, Any
from urllib.parse import urlencode, urlsplit


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
