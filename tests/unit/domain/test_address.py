"""Addresses as text."""

import pytest

from glowplug.domain.address import PortRange, advertised, http_url, reachable


def test_urls() -> None:
    assert http_url("10.0.0.3", 8080) == "http://10.0.0.3:8080"
    assert http_url("fd00::1", 8080) == "http://[fd00::1]:8080"
    assert (reachable("0.0.0.0"), reachable("::"), reachable("10.0.0.3")) == ("127.0.0.1", "::1", "10.0.0.3")
    assert advertised("http://127.0.0.1:20001", "node-1") == "http://node-1:20001"
    assert advertised("http://[::1]:20001", "") == "http://[::1]:20001"


def test_port_ranges() -> None:
    assert PortRange.parse("") is None
    assert PortRange.parse("20000-20199") == PortRange(20000, 20199) and len(PortRange(20000, 20199)) == 200
    assert str(PortRange.parse("7-7")) == "7-7"


@pytest.mark.parametrize("text", ["20000", "20199-20000", "0-5", "1-65536", "a-b", "-", "1-2-3", "+1-5", "1--5"])
def test_what_is_no_range(text: str) -> None:
    with pytest.raises(ValueError, match="expected first-last"):
        PortRange.parse(text)
