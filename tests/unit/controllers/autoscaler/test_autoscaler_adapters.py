"""A base and its adapters: instance counts and refused deployments."""

from dataclasses import replace

import pytest

from glowplug.controllers import operator
from glowplug.controllers.effects import Tick
from glowplug.domain.errors import Conflict, InvalidModelFile
from glowplug.domain.instance import InstanceState
from glowplug.domain.snapshot import ModelLoad
from glowplug.events.commands import PlaceInstance, StopInstance
from glowplug.events.facts import ModelDeployed, RequestWaiting
from tests.fleet_builder import a_model, an_event, an_instance, load_report
from tests.unit.controllers.autoscaler.rig import autoscaler, is_ready, published

MANY = {"max_instances": 8, "max_concurrency": 2}


def an_adapter(key: str = "a", **fields):
    return a_model(key, base="m", **(MANY | fields))


def waits(key: str, num: int = 1):
    return an_event(
        RequestWaiting(
            model_key=key, request_id="r-1", router_id="router-1", num_waiting=num, waiting_since=1.0, deadline_at=60.0
        )
    )


def test_a_base_scales_by_the_sum_and_an_adapter_to_no_more_than_there_are_hosts():
    scaler = autoscaler(a_model("m", **MANY), an_adapter("a"), an_adapter("b"))
    is_ready(scaler, 1.0, an_instance("i-1", "m", max_concurrency=2, adapter_slots=4))
    is_ready(scaler, 1.0, an_instance("i-a", "a", max_concurrency=2, host_id="i-1"))
    busy = ModelLoad(num_in_flight=2, num_waiting=2, in_flight_by_instance={"i-a": 2})
    scaler.handle(load_report(a=busy, b=ModelLoad(num_waiting=1)), 2.0)
    placed = published(scaler.handle(Tick(), 2.1), PlaceInstance)
    assert sorted(one.model.key for one in placed) == ["b", "m", "m"], "five requests need three engines of two slots"
    is_ready(scaler, 2.2, an_instance("i-2", "m", max_concurrency=2, adapter_slots=4))
    scaler.handle(load_report(a=busy), 2.3)
    assert [one.model.key for one in published(scaler.handle(Tick(), 2.4), PlaceInstance)] == ["a"], "a second host"


def test_an_adapter_spreads_where_others_fill_its_host():
    scaler = autoscaler(a_model("m", **MANY), an_adapter("a"), an_adapter("b"))
    for host in ("i-1", "i-2"):
        is_ready(scaler, 1.0, an_instance(host, "m", max_concurrency=2, adapter_slots=4))
    for key in ("a", "b"):
        is_ready(scaler, 1.0, an_instance(f"i-{key}", key, max_concurrency=2, host_id="i-1"))
    others = ModelLoad(num_in_flight=2, in_flight_by_instance={"i-b": 2})
    scaler.handle(load_report(a=ModelLoad(num_waiting=1), b=others), 2.0)
    assert [one.model.key for one in published(scaler.handle(Tick(), 2.1), PlaceInstance)] == ["a"]


def test_a_base_stays_while_its_adapters_are_asked_and_an_idle_adapter_leaves_it():
    scaler = autoscaler(a_model("m", keep_alive_s=5.0), an_adapter(keep_alive_s=5.0))
    is_ready(scaler, 1.0, an_instance("i-1", "m", ready_at=1.0), an_instance("i-a", "a", ready_at=1.0, host_id="i-1"))
    for at in (2.0, 4.0, 6.0, 8.0):
        load = ModelLoad(num_in_flight=1, in_flight_by_instance={"i-a": 1}, last_active_at=at)
        scaler.handle(load_report(m=ModelLoad(), a=load), at)
        assert published(scaler.handle(Tick(), at), StopInstance) == []
    scaler.handle(load_report(m=ModelLoad(), a=ModelLoad(last_active_at=8.0)), 13.5)
    stops = published(scaler.handle(Tick(), 13.6), StopInstance)
    assert {one.instance_id: one.becomes for one in stops}["i-a"] == "stopped"


def test_a_drained_base_drains_its_adapters_and_none_is_loaded_until_it_is():
    scaler = autoscaler(a_model("m"), an_adapter())
    is_ready(scaler, 1.0, an_instance("i-1", "m"), an_instance("i-a", "a", host_id="i-1"))
    scaler.handle(operator.Suspend(model_key="m"), 2.0)
    stops = published(scaler.handle(Tick(), 2.1), StopInstance)
    assert [one.instance_id for one in stops] == ["i-a"], "the base's own stop was sent at once"
    with pytest.raises(Conflict, match="load m first"):
        scaler.handle(operator.Load(model_key="a"), 2.2)
    assert published(scaler.handle(waits("a"), 3.0), PlaceInstance) == []


def test_deployments_that_cannot_be_are_refused_with_the_reason():
    scaler = autoscaler(a_model("m"), an_adapter("a"), an_adapter("b"))
    scaler.handle(operator.Deploy(model=a_model("x-1")), 1.0)
    with pytest.raises(InvalidModelFile, match="no model 'nobody' is deployed"):
        scaler.handle(operator.Deploy(model=a_model("c", base="nobody")), 1.0)
    with pytest.raises(InvalidModelFile, match="an adapter itself"):
        scaler.handle(operator.Deploy(model=a_model("c", base="a")), 1.0)
    with pytest.raises(Conflict, match="has adapters"):
        scaler.handle(operator.Deploy(model=a_model("m", base="x-1")), 1.0)
    with pytest.raises(Conflict, match="the base of a, b: undeploy its adapters first"):
        scaler.handle(operator.Undeploy(model_key="m"), 1.0)
    for key in ("a", "b", "m"):
        scaler.handle(operator.Undeploy(model_key=key), 2.0)
    assert list(scaler.models) == ["x-1"]


def test_adapters_follow_a_base_that_is_deployed_anew_and_hold_it_to_their_engine():
    scaler = autoscaler(a_model("m", **MANY))
    for key in ("a", "b"):
        scaler.handle(operator.Deploy(model=an_adapter(key)), 1.0)
    anew = replace(scaler.models["m"], context_tokens=1234, max_concurrency=5, engine_args={"n_threads": 2})
    effects = scaler.handle(operator.Deploy(model=anew), 2.0)
    assert [one.model.key for one in published(effects, ModelDeployed)] == ["m", "a", "b"]
    for key in ("m", "a", "b"):
        found = scaler.models[key]
        assert (found.context_tokens, found.max_concurrency, found.engine_args) == (1234, 5, {"n_threads": 2})
        assert found.revision >= 2000, "routers and agents take the row"
    assert published(scaler.handle(operator.Deploy(model=anew), 3.0), ModelDeployed) == [], "nothing has changed"
    with pytest.raises(Conflict, match="its adapter a cannot follow: adapter: it is one for emulated"):
        scaler.handle(operator.Deploy(model=replace(anew, engine="vllm")), 4.0)
    assert scaler.models["m"].engine == "emulated"


def test_200_adapters_come_and_go_and_nothing_of_them_is_kept():
    scaler = autoscaler(a_model("m", **MANY))
    is_ready(scaler, 1.0, an_instance("i-1", "m", max_concurrency=2, adapter_slots=8))
    sizes = []
    for turn in range(200):
        key, now_s = f"a-{turn}", 10.0 + turn
        scaler.handle(operator.Deploy(model=an_adapter(key)), now_s)
        scaler.handle(waits(key), now_s)
        is_ready(scaler, now_s, an_instance(f"i-{turn}", key, host_id="i-1"))
        scaler.handle(operator.Undeploy(model_key=key), now_s)
        row = an_instance(f"i-{turn}", key, InstanceState.STOPPED, host_id="i-1", revision=2)
        is_ready(scaler, now_s, row)
        scaler.restore("instances", {"i-1": scaler.instances.by_id["i-1"]}, now_s + 0.5)
        scaler.restore("models", {"m": scaler.models["m"]}, now_s + 0.5)
        scaler.handle(Tick(), now_s + 0.9)
        sizes.append((len(scaler._models.records), len(scaler.instances.by_id), len(scaler.models)))
    assert max(sizes[100:]) == max(sizes[20:100]), "rows of gone instances stay for seconds, and not for ever"
    assert max(num for num, _, _ in sizes) < 40 and sizes[-1][2] == 1
