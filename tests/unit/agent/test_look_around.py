"""How often an agent looks at fetched weights."""

from glowplug.controllers.agent.messages import Surroundings
from glowplug.domain.hardware import Link
from glowplug.services.agent.service import LINKS_S, next_look_s


def test_links_are_looked_for_more_often_only_where_a_prefetcher_is_to_say_them() -> None:
    url = "http://prefetcher"
    known = (Link(link_id="node-1/nic", bytes_per_s=1e9),)
    assert next_look_s(Surroundings(prefetcher_url=url), 5.0) == LINKS_S
    assert next_look_s(Surroundings(prefetcher_url=url), 0.1) == 0.1
    assert next_look_s(Surroundings(prefetcher_url=url, links=known), 5.0) == 5.0
    assert next_look_s(Surroundings(), 5.0) == 5.0
