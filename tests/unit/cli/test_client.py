"""What the command line sends to which service, and where it has it from."""

from pathlib import Path

import pytest

from glowplug.cli.client import FleetClient, connect

URLS = {"console": "http://127.0.0.1:1", "placer": "http://127.0.0.1:2"}


@pytest.mark.parametrize(
    ("console_key", "sent"), [("", {"Authorization": "Bearer api"}), ("own", {"Authorization": "Bearer own"})]
)
def test_the_console_gets_its_key_and_the_others_the_admin_token(console_key: str, sent: dict[str, str]) -> None:
    fleet = FleetClient(urls=URLS, admin_token="admin", api_key="api", console_key=console_key)
    assert fleet.headers("console") == sent
    assert fleet.headers("placer") == fleet.headers("router") == {"Authorization": "Bearer admin"}
    assert fleet.data_headers() == {"Authorization": "Bearer api"}


def test_where_nothing_is_asked_nothing_is_sent() -> None:
    fleet = FleetClient(urls=URLS)
    assert fleet.headers("console") == fleet.headers("placer") == fleet.data_headers() == {}


def test_the_environment_names_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOWPLUG_CONSOLE_URL", "http://127.0.0.1:1/")
    monkeypatch.setenv("GLOWPLUG_CONSOLE_KEY", "own")
    assert connect(tmp_path).headers("console") == {"Authorization": "Bearer own"}
