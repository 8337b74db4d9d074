"""A server's name as a node id, the same for its agent and its prefetcher."""

import pytest
from pydantic import ValidationError

from services.agent.settings import AgentSettings
from services.prefetcher.settings import PrefetcherSettings


@pytest.mark.parametrize("settings", [AgentSettings, PrefetcherSettings])
def test_a_name_with_dots_is_one_word(
    settings: type[AgentSettings] | type[PrefetcherSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOWPLUG_NODE_ID", "ip-10-0-0-1.internal")
    assert settings().node_id == "ip-10-0-0-1-internal"
    monkeypatch.setenv("GLOWPLUG_NODE_ID", "Node*")
    with pytest.raises(ValidationError):
        settings()
