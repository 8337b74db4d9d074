"""One "no room" for all that are alike: of size where bytes decide, of seconds too where HydraServe's layout does."""

from typing import Any

from glowplug.controllers.effects import Publish, Tick
from glowplug.controllers.placer.controller import PlacerController
from glowplug.domain.instance import Phase, PhaseName
from glowplug.domain.model import Model, Slo
from glowplug.events.commands import PlaceInstance, StartInstance
from glowplug.events.facts import InstanceReady, NodeBeat, RequestFinished
from glowplug.policies.decisions import PlaceDecision
from glowplug.policies.eviction.lru import evict
from glowplug.policies.placement import hydraserve, union
from glowplug.policies.placement.first_fit import place as first_fit
from glowplug.policies.placement.hydraserve_allocation import StageSeconds
from glowplug.policies.placement.port import PlacementView, PlaceRequest
from tests.fleet_builder import a_model, a_node, an_event, an_instance

NODES = ("node-1", "node-2")
FAST, SLOW = 0.1, 30.0  # seconds of launch


def placer(place: Any, num_free: int = 0) -> PlacerController:
    """Two nodes of one GPU each, with so many MiB of 300 free."""
    controller = PlacerController(place, evict, {"placement": "p", "eviction": "lru"}, epoch=3)
    controller.handle(Tick(), 0.0)
    beats(controller, num_free, 1, 1.0)
    return controller


def taught(controller: PlacerController, **launch_s: float) -> None:
    """What a start of each of those models took before."""
    for name, seconds in launch_s.items():
        launch = Phase(name=PhaseName.LAUNCH, started_at=1.0, ended_at=1.0 + seconds)
        row = an_instance(
            f"before-{name}", name, phases=(launch,), created_at=1.0, ready_at=1.0 + seconds, gpu_kind="host"
        )
        assert controller.fleet.network.times.learn(row, of_size(name)) is not None


def beats(controller: PlacerController, num_free: int, revision: int, now_s: float) -> list[Any]:
    effects: list[Any] = []
    for node_id in NODES:
        node = a_node(
            node_id, revision=revision, grants={0: [("other", 300 - num_free)]}, abilities=("emulated:stages",)
        )
        effects += controller.handle(an_event(NodeBeat(node=node)), now_s)
    return effects


def ask(controller: PlacerController, model: Model, now_s: float) -> list[Any]:
    command = PlaceInstance(instance_id=f"i-{model.key}", model=model, reason="", wanted_at=now_s)
    return controller.handle(an_event(command, issuer="autoscaler-1", epoch=1), now_s)


def started(effects: list[Any]) -> list[str]:
    return [e.payload.instance_id for e in effects if isinstance(e, Publish) and isinstance(e.payload, StartInstance)]


def of_size(name: str, **fields: Any) -> Model:
    return a_model(name, mib=150, **fields)


def test_section_4_1_a_model_that_would_be_late_says_nothing_of_one_that_would_not() -> None:
    """Two stages of 75 MiB fit; what was measured of one model rules them out, of the other it does not."""
    controller = placer(hydraserve.place)
    taught(controller, slow=SLOW, fast=FAST)
    for at, name in enumerate(("slow", "fast")):
        assert started(ask(controller, of_size(name, slo=Slo(ttft_s=5.0)), 2.0 + at / 10)) == []
    assert started(beats(controller, 100, 2, 2.5)) == ["i-fast", "i-fast.1"]


def test_who_has_waited_too_long_says_nothing_of_who_has_not() -> None:
    controller = placer(hydraserve.place)
    taught(controller, m=4.5, n=4.5)
    ask(controller, of_size("m", slo=Slo(ttft_s=5.0)), 2.0)
    ask(controller, of_size("n", slo=Slo(ttft_s=5.0)), 2.9)
    assert started(beats(controller, 100, 2, 2.95)) == ["i-n", "i-n.1"], "4.5 s of 5, after 0.95 s and after 0.05 s"


def test_where_bytes_decide_one_answer_does_for_all_of_a_size() -> None:
    asked_at: list[float] = []

    def counting(request: PlaceRequest, view: PlacementView) -> PlaceDecision:
        asked_at.append(view.now_s)
        return hydraserve.place(request, view)

    controller = placer(counting)
    for at, name in enumerate(("a", "b", "c")):
        ask(controller, of_size(name, slo=Slo(ttft_s=5.0 + at)), 2.0)
    taught(controller, a=SLOW, b=FAST)
    asked_at.clear()
    beats(controller, 20, 2, 2.5)
    assert asked_at == [2.5] * len(NODES), "once in the pass of each beat"


def test_a_policy_that_reads_a_field_nobody_listed_is_asked_about_each_of_its_values() -> None:
    """Refusals are shared by what the policy read, so that a new policy cannot be answered wrongly."""
    asked_of: list[float] = []

    def only_pinned(request: PlaceRequest, view: PlacementView) -> PlaceDecision:
        asked_of.append(view.now_s)
        return first_fit(request, view) if request.model.pinned else PlaceDecision(reason="it is not pinned")

    def only_few(request: PlaceRequest, view: PlacementView) -> PlaceDecision:
        asked_of.append(view.now_s)
        known = view.warm(request.model)
        return PlaceDecision(reason="it is slow") if known is None else first_fit(request, view)

    for policy in (only_pinned, only_few):
        controller = placer(policy)
        controller.fleet.network.seconds["c"] = StageSeconds(prefill_s=0.1)
        for name in ("a", "b", "c"):
            assert started(ask(controller, of_size(name, pinned=name == "c"), 2.0)) == []
        asked_of.clear()
        assert started(beats(controller, 300, 2, 2.5)) == ["i-c"]
        assert asked_of[:2] == [2.5, 2.5], "for a, which answers for b, and for c"


def test_requests_teach_only_a_placement_that_reads_seconds() -> None:
    warm = RequestFinished(
        model_key="m", request_id="r", router_id="router-1", instance_id="i-1", status=200, arrived_at=0.0,
        finished_at=12.0, queue_s=1.0, ttft_s=2.0, e2e_s=12.0, prompt_tokens=5, response_tokens=101,
        tokens_exact=True, cold=False,
    )  # fmt: skip
    for place, learns in ((first_fit, False), (hydraserve.place, True), (union.place, True)):
        controller = placer(place)
        controller.handle(an_event(InstanceReady(instance=an_instance("i-1"))), 2.0)
        controller.handle(an_event(warm), 12.0)
        assert ("m" in controller.fleet.network.seconds) == learns == controller.reads_ends
