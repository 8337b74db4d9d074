"""Each controller's declared reads against its handlers, and both against the wire's lists."""

import importlib
from typing import Any

import pytest

from glowplug.controllers.agent.controller import AgentController
from glowplug.controllers.autoscaler.controller import AutoscalerController
from glowplug.controllers.placer.controller import PlacerController
from glowplug.controllers.placer.reads import READS as PLACER
from glowplug.controllers.placer.reads import reads_of
from glowplug.controllers.predictor.controller import PredictorController
from glowplug.controllers.prefetcher.controller import PrefetcherController
from glowplug.controllers.prefetcher.params import PrefetcherParams
from glowplug.controllers.reads import Reads
from glowplug.controllers.router.controller import RouterController
from glowplug.events.commands import PlaceInstance
from glowplug.events.envelope import COMMANDS, PAYLOADS
from glowplug.events.facts import (
    NodeBeat,
    NodeJoined,
    NodeLeft,
    RouterRequestsFinished,
    RouterUsageReported,
    WeightsFetched,
)
from glowplug.events.subjects import commands_to, entity_facts, facts_of, filters, is_telemetry
from glowplug.memory.ledger import ByteLedger
from glowplug.policies.registry import choose
from glowplug.services.router.keys import FACTS as KEY_FACTS
from glowplug.weights.region import region_digest

MAKE: dict[str, Any] = {
    "router": RouterController,
    "predictor": PredictorController,
    "autoscaler": lambda: AutoscalerController(choose("scaling", "reactive"), "reactive", 1),
    "placer": lambda: PlacerController(choose("placement", "first_fit"), choose("eviction", "lru"), {}, 1),
    "prefetcher": lambda: PrefetcherController("n", PrefetcherParams(capacity_bytes=1), digest_of=region_digest),
    "agent": lambda: AgentController("n", ByteLedger([]), {}),
}

# Handed by a service's shell to others than its controller.
BESIDE = {"router": (*KEY_FACTS, RouterUsageReported)}


def reads_by(service: str) -> Reads:
    found: Reads = importlib.import_module(f"glowplug.controllers.{service}.reads").READS
    return found


@pytest.mark.parametrize("service", MAKE)
def test_every_handler_has_a_subscription_and_every_subscription_a_handler(service: str) -> None:
    controller = MAKE[service]()
    handled = {cls for cls in controller.handlers if getattr(cls, "TYPE", "") in PAYLOADS}
    handled |= set(BESIDE.get(service, ()))
    read = set(reads_by(service).payloads)
    assert handled - read == set(), "handled, and never delivered"
    assert read - handled == set(), "delivered, and never handled"


@pytest.mark.parametrize("service", MAKE)
def test_a_declaration_names_each_kind_once_and_where_it_belongs(service: str) -> None:
    reads = reads_by(service)
    assert reads.service == service
    assert len(set(reads.payloads)) == len(reads.payloads)
    assert {cls.TYPE for cls in reads.commands} == {kind for kind in COMMANDS if kind.startswith(f"{service}.")}
    assert not [cls for cls in reads.facts if is_telemetry(cls.TYPE)]
    assert not [cls for cls in (*reads.telemetry, *reads.telemetry_if_asked) if not is_telemetry(cls.TYPE)]


def test_an_entity_is_one_filter_where_all_of_its_kinds_are_read() -> None:
    assert filters([NodeJoined, WeightsFetched, NodeLeft]) == [entity_facts("node"), facts_of("weights.fetched")]
    assert filters([NodeLeft]) == [facts_of("node.left")]
    assert filters([NodeBeat]) == [facts_of("node.beat")]
    assert PLACER.command_filters() == [commands_to("placer")]
    assert Reads(service="placer").command_filters() == []
    assert Reads(service="placer", commands=(PlaceInstance,)).payloads == (PlaceInstance,)


@pytest.mark.parametrize(
    ("placement", "prewarming", "is_asked"),
    [
        ("first_fit", "none", False),
        ("hydraserve", "none", True),
        ("first_fit", "warmserve", False),
        ("first_fit", "warmserve:first_layers=true", True),
    ],
)
def test_the_placer_reads_how_requests_end_where_a_policy_learns_from_it(
    placement: str, prewarming: str, is_asked: bool
) -> None:
    reads = reads_of(choose("placement", placement), choose("prewarming", prewarming))
    assert (RouterRequestsFinished in reads.telemetry) is is_asked
    assert reads.telemetry_if_asked == ()
