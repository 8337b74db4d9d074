"""Sentinel addresses of a store."""

import pytest

from glowplug.state.address import Sentinels, connect


def test_an_address_names_sentinels_the_master_and_who_one_is_there() -> None:
    found = Sentinels.of("redis+sentinel://placer:p%40ss@a:1,b,[::1]:3/main/2")
    assert found == Sentinels(
        hosts=(("a", 1), ("b", 26379), ("::1", 3)), master="main", db=2, user="placer", password="p@ss"
    )
    assert found.options({"socket_timeout": 1.0}) == {
        "socket_timeout": 1.0, "username": "placer", "password": "p@ss", "db": 2
    }  # fmt: skip
    secure = Sentinels.of("rediss+sentinel://a/main")
    assert secure is not None and secure.tls and secure.db == 0
    assert secure.options({})["username"] is None, "a server without users is not told of one"


@pytest.mark.parametrize("url", ["redis://a:1/0", "rediss://u:p@a", "unix:///run/s"])
def test_one_server_has_no_sentinels(url: str) -> None:
    assert Sentinels.of(url) is None


@pytest.mark.parametrize(
    "url", ["http+sentinel://a/main", "redis+sentinel://a", "redis+sentinel://a/main/x", "redis+sentinel://a,,b/main"]
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"redis|address"):
        connect(url)
