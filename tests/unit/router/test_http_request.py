"""Heads of requests: what is passed on, what is refused, and who may call."""

from typing import Any

import pytest

from glowplug.services.router import http_request, paths
from glowplug.services.router.api_errors import ApiError
from glowplug.services.router.http_request import Access, HttpRequest
from glowplug.services.router.settings import Limits


def a_request(target: bytes = b"/v1/models", **headers: bytes) -> HttpRequest:
    lines = {name.replace("_", "-").encode(): value for name, value in headers.items()}
    return HttpRequest(method=b"POST", target=target, headers={b"host": b"t", **lines})


def checked(target: bytes = b"/v1/models", version: str = "1.1", **headers: bytes) -> HttpRequest:
    made = a_request(target, **headers)
    made.check_head(version, Limits())
    return made


def status_of(limits: Limits, request: HttpRequest) -> int:
    try:
        request.check_head("1.1", limits)
    except ApiError as error:
        return error.status
    return 200


def test_heads_are_bounded_in_lines_and_bytes() -> None:
    request = a_request(x=b"1", y=b"2")
    request.num_repeated = 2
    assert [status_of(Limits(num_headers=num), request) for num in (5, 4)] == [200, 431]
    num_bytes = len(b"host" + b"t" + b"x1" + b"y2" + b"/v1/models")
    assert [status_of(Limits(header_bytes=num), request) for num in (num_bytes, num_bytes - 1)] == [200, 431]
    limits = Limits(num_headers=2)
    request = a_request(x=b"1")
    request.repeat(b"x", b"2", limits)
    request.repeat(b"x", b"3", limits)
    assert request.headers[b"x"] == b"1, 2, 3" and request.num_repeated == 2
    with pytest.raises(ApiError) as caught:
        request.repeat(b"x", b"4", limits)
    assert caught.value.status == 431
    with pytest.raises(ApiError) as caught:
        request.repeat(b"host", b"t", limits)
    assert caught.value.status == 400


def test_http_1_0_needs_no_host_and_has_no_coding() -> None:
    request = HttpRequest(target=b"/")
    request.check_head("1.0", Limits())
    assert not request.is_http11 and checked(version="1.1").is_http11
    for version, coding, status in (("1.0", b"chunked", 400), ("1.1", b"gzip", 501), ("1.2", b"chunked", 505)):
        with pytest.raises(ApiError) as caught:
            checked(version=version, transfer_encoding=coding)
        assert caught.value.status == status
    checked(transfer_encoding=b"Chunked")
    for headers in ({}, {b"host": b"a/b"}):
        assert status_of(Limits(), HttpRequest(target=b"/", headers=headers)) == 400


@pytest.mark.parametrize(
    ("given", "path", "target", "host"),
    [
        (b"/v1/models?a=/b", b"/v1/models", b"/v1/models?a=/b", b"t"),
        (b"/models/m?a", b"/v1/models/m", b"/v1/models/m?a", b"t"),
        (b"http://h:1/v1/models?a", b"/v1/models", b"/v1/models?a", b"h:1"),
        (b"https://h?a", b"/", b"/?a", b"h"),
        (b"*", b"*", b"*", b"t"),
        (b"/unknown//x/", b"/unknown//x/", b"/unknown//x/", b"t"),
    ],
)
def test_a_target_becomes_the_ports_path(given: bytes, path: bytes, target: bytes, host: bytes) -> None:
    request = checked(given)
    assert (request.path, request.target, request.headers[b"host"]) == (path, target, host)


@pytest.mark.parametrize("given", [b"ftp://h/", b"http://u@h/", b"/a#b", b"http://h/a#b", b"x"])
def test_a_target_of_another_kind_is_refused(given: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        checked(given)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("given", "path"),
    [
        (b"", b"/"),
        (b"/v1", b"/"),
        (b"/v1/v1/chat//completions/", b"/v1/chat/completions"),
        (b"/health/", b"/health"),
        (b"/v1/api/chat", b"/api/chat"),
        (b"files/f-1", b"/v1/files/f-1"),
        (b"/models", b"/v1/models"),
        (b"/modelsx/m", b"/modelsx/m"),
        (b"/v2/models/", b"/v2/models/"),
    ],
)
def test_variants_of_a_path_lead_to_one(given: bytes, path: bytes) -> None:
    assert paths.canonical(given) == path


@pytest.mark.parametrize(
    ("connection", "passed"),
    [(None, True), (b"Keep-Alive", True), (b"close", True), (b"close, X-Hop", False), (b"x-hop", False)],
)
def test_headers_that_the_connection_names_stay_here(connection: bytes | None, passed: bool) -> None:
    request = a_request(x_hop=b"1", x_on=b"2", cookie=b"c", **({"connection": connection} if connection else {}))
    assert request.passed_headers() == b"x-hop: 1\r\n" * passed + b"x-on: 2\r\n"


class Rules:
    """Lets in the origin `http://a`, and keeps what it is asked."""

    def __init__(self) -> None:
        self.asked = list[Any]()

    def refusal(self, *given: Any, **more: Any) -> None:
        assert not more["only_json"]
        self.asked.append((given[0], given[1], given[2]("origin"), more["reads_forms"]))

    def lets_in(self, origin: str) -> bool:
        return origin == "http://a"


def test_the_web_rules_are_asked_once_for_each_host_and_always_for_a_page() -> None:
    rules: Any = Rules()
    access = Access(rules)
    assert Access(None).refusal(a_request(origin=b"http://b")) is None
    for request in (a_request(), a_request(), a_request(origin=b"http://a"), a_request(sec_fetch_site=b"same-site")):
        request.path = b"/v1/files"
        assert access.refusal(request) is None
    assert rules.asked == [("POST", ["t"], origin, True) for origin in ("", "http://a", "")]
    for number in range(2 * http_request.MAX_KNOWN_HOSTS):
        access.refusal(a_request(host=b"h%d" % number))
    assert len(access._known) == http_request.MAX_KNOWN_HOSTS and rules.asked[-1][3] is False


def test_a_page_that_is_let_in_may_read_and_ask() -> None:
    rules: Any = Rules()
    access = Access(rules)
    ours, other = a_request(origin=b"http://a"), a_request(origin=b"http://b")
    assert b"access-control-allow-origin: http://a\r\n" in access.cors(ours)
    assert access.cors(other) == access.cors(a_request()) == Access(None).cors(ours) == b""
    for request in (ours, other):
        assert access.preflight(request) == b""
        request.method = b"OPTIONS"
        assert access.preflight(request) == b""
        request.headers[b"access-control-request-method"] = b"POST"
    assert b"allow-headers: authorization, content-type\r\n" in access.preflight(ours)
    assert access.preflight(other) == b""
    ours.headers[b"access-control-request-headers"] = b"x-mine"
    assert b"allow-headers: x-mine\r\n" in access.preflight(ours)
    ours.method = b"GET"
    assert access.preflight(ours) == b""


@pytest.mark.parametrize(
    ("headers", "admitted"),
    [
        ({}, False),
        ({"authorization": b"Bearer k"}, True),
        ({"authorization": b"bearer k"}, True),
        ({"authorization": b"Bearer x"}, False),
        ({"authorization": b"Basic k", "x_api_key": b"k"}, True),
        ({"authorization": b"Bearer x", "x_api_key": b"k"}, False),
        ({"authorization": b"Basic k"}, False),
    ],
)
def test_the_key_comes_as_openais_or_as_anthropics(headers: dict[str, bytes], admitted: bool) -> None:
    assert Access(None, "k").admits(a_request(**headers)) is admitted
    assert Access(None).admits(a_request(**headers))
