"""Names by which a port answers, and origins of pages."""

import pytest

from glowplug.domain.errors import GlowplugError
from glowplug.runtime.settings import ServiceSettings
from glowplug.runtime.web import AllowedHosts, WebRules, host_name, parse_origins

ALWAYS = [
    *("127.0.0.1", "127.0.0.1:8000", "10.244.1.7:8080", "[::1]", "[::1]:8001", "[fe80::1%eth0]:80", "8.8.8.8"),
    *("localhost", "localhost:8000", "LocalHost.", "demo.localhost:8000", ""),
]
NEVER = [
    *("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "notlocalhost"),
    *("127.0.0.1@evil.example", "evil.example/", "http://localhost", "2130706433", "0x7f.0.0.1", "127.1", "::1"),
    *("local host", "localhost:8000:8000", "localhost:x", "[evil.example]", "[::1].evil.example", "."),
    *("lo\u212aalhost", "\x00localhost"),
]


@pytest.mark.parametrize("host", ALWAYS)
def test_addresses_and_localhost_are_always_allowed(host: str) -> None:
    assert AllowedHosts().allows(host)


@pytest.mark.parametrize("host", NEVER)
def test_any_other_name_is_not(host: str) -> None:
    assert not AllowedHosts.parse("router,*.example.org", ["127.0.0.1", "box"]).allows(host)


@pytest.mark.parametrize(
    ("setting", "host", "may"),
    [
        ("api.example.org", "API.example.org:443", True),
        ("api.example.org", "www.example.org", False),
        ("api.example.org", "api.example.org.evil.example", False),
        ("*.example.org", "a.b.example.org", True),
        ("*.example.org", "example.org", False),
        ("*.example.org", "evilexample.org", False),
        ("*.example.org, example.org", "example.org.", True),
        ("router,console", "console:8080", True),
        ("node_1", "node_1:8080", True),
        ("*", "evil.example", True),
    ],
)
def test_the_setting_adds_names(setting: str, host: str, may: bool) -> None:
    assert AllowedHosts.parse(setting).allows(host) is may


def test_a_process_answers_to_the_names_it_has() -> None:
    rules = ServiceSettings(host="0.0.0.0", advertise_host="node-1").web_rules()
    assert rules.hosts.allows("node-1:8080") and not rules.hosts.allows("node-2:8080")


@pytest.mark.parametrize(
    "wrong", ["http://a.example", "a.example:80", "a.*.example", "**", "a b", "*.", "a..b", "é.example"]
)
def test_what_is_no_name_is_refused_with_it(wrong: str) -> None:
    with pytest.raises(ValueError, match="expected names"):
        ServiceSettings(allowed_hosts=f"good.example,{wrong}")


@pytest.mark.parametrize("wrong", ["a.example", "https://", "https://a.example/path", "https://u@a.example", "null"])
def test_what_is_no_origin_is_refused_with_it(wrong: str) -> None:
    with pytest.raises(ValueError, match="expected scheme"):
        ServiceSettings(allowed_origins=wrong)


def test_the_name_in_a_host_header() -> None:
    assert [host_name(h) for h in ("A.b:1", "[::1]:8", "a.", "a b", "a:b")] == ["a.b", "::1", "a", "", ""]


def refusal(method: str = "POST", hosts: tuple[str, ...] = ("localhost:8001",), **headers: str) -> GlowplugError | None:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    rules = WebRules(origins=parse_origins("https://app.example"))
    return rules.refusal(method, hosts, given.get)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"origin": "http://localhost:8001"},
        {"origin": "http://localhost:8001", "sec_fetch_site": "same-origin"},
        {"sec_fetch_site": "none"},
        {"origin": "https://behind.example", "sec_fetch_site": "same-origin"},  # a proxy changed Host
        {"origin": "https://behind.example", "x_forwarded_host": "behind.example"},
        {"origin": "https://app.example", "sec_fetch_site": "cross-site"},
        {"content_type": "application/json; charset=utf-8"},
    ],
)
def test_programs_the_own_page_and_pages_let_in_may_change(headers: dict[str, str]) -> None:
    assert refusal(**headers) is None


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "http://localhost:3000"},
        {"origin": "http://localhost"},
        {"origin": "null"},
        {"origin": "http://localhost:8001.evil.example"},
        {"origin": "http://["},
        {"origin": "http://localhost:8001", "sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
        {"sec_fetch_site": "anything"},
        {"origin": "https://app.example.evil.example"},
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "OPTIONS"])
def test_pages_of_other_sites_may_not(method: str, headers: dict[str, str]) -> None:
    error = refusal(method, **headers)
    assert error is not None and (error.status, error.code) == (403, "foreign_origin")
    assert "GLOWPLUG_ALLOWED_ORIGINS" in error.message


def test_a_link_on_another_site_may_be_followed_but_not_framed() -> None:
    link = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate", "sec_fetch_dest": "document"}
    assert refusal("GET", **link) is None
    assert refusal("POST", **link) is not None, "a form is no link"
    assert refusal("GET", **link | {"sec_fetch_dest": "iframe"}) is not None
    assert refusal("GET", **link | {"sec_fetch_mode": "no-cors", "sec_fetch_dest": "image"}) is not None


@pytest.mark.parametrize(
    "kind",
    ["text/plain", "Text/Plain;charset=UTF-8", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"],
)
def test_what_a_form_can_send_changes_nothing(kind: str) -> None:
    error = refusal(content_type=kind)
    assert error is not None and (error.status, error.code) == (415, "unsupported_media_type")
    assert refusal("GET", content_type=kind) is None


def test_a_form_with_a_file_is_read_where_it_belongs_and_from_pages_that_are_let_in() -> None:
    def answer(kind: str, origin: str) -> GlowplugError | None:
        given = {"content-type": kind, "origin": origin}
        rules = WebRules(origins=parse_origins("https://app.example"))
        return rules.refusal("POST", ["localhost"], given.get, only_json=False, reads_forms=True)

    form = "multipart/form-data; boundary=x"
    assert answer(form, "https://app.example") is None
    assert answer("text/plain", "https://app.example") and answer(form, "http://localhost:3000")


def test_every_host_header_counts() -> None:
    error = refusal(hosts=("localhost", "evil.example"))
    assert error is not None and (error.status, error.code) == (421, "host_not_allowed")
    assert "GLOWPLUG_ALLOWED_HOSTS" in error.message and "evil.example" in error.message
