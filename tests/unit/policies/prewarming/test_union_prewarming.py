"""The union prewarms what lies in host memory: the network is for cold starts."""

from glowplug.domain.hardware import CachedWeights
from glowplug.domain.instance import InstanceState
from glowplug.domain.snapshot import Forecast
from glowplug.policies.prewarming import union, warmserve
from glowplug.policies.prewarming.port import PrewarmView
from tests.fleet_builder import a_model, a_node, an_instance


def test_replicas_only_where_host_memory_has_the_weights():
    """WarmServe section 7.1 has all weights in host memory; its plan costs cold starts their link elsewhere."""
    near = CachedWeights(digest="d", num_bytes=1, model_keys=("near",))
    models = {key: a_model(key) for key in ("near", "far")}
    due = Forecast(made_at=0.0, window_s=300.0, concurrency_mean=8.0, concurrency_peak=8.0)
    view = PrewarmView(
        now_s=0.0,
        nodes=[a_node(gpus_mib=(300, 300), cached=(near,), abilities=("emulated:prewarm",))],
        models=models,
        forecasts=dict.fromkeys(models, due),
        load_s=dict.fromkeys(models, 1.0),
    )

    assert {step.model_key for step in warmserve.plan(view).steps} == {"near", "far"}
    assert {step.model_key for step in union.plan(view).steps} == {"near"}
    assert union.plan(view).inputs["over_network"] > 0


def test_of_replicas_nobody_forecast_the_longest_unused_goes_first_and_any_wished_for_last():
    """WarmServe gives a score to what its forecast wants alone; the rest would go in the order of their ids."""
    near = CachedWeights(digest="d", num_bytes=1, model_keys=("wished", "recent", "old"))
    models = {key: a_model(key) for key in near.model_keys}
    rows = {key: an_instance(f"i-{key}", key, InstanceState.PREWARMED) for key in models}
    view = PrewarmView(
        now_s=100.0,
        nodes=[a_node(cached=(near,), abilities=("emulated:prewarm",))],
        models=models,
        dormant={"node-1": tuple(rows.values())},
        forecasts={"wished": Forecast(made_at=0.0, window_s=300.0, concurrency_mean=1.0, concurrency_peak=1.0)},
        load_s={"wished": 0.1},
        last_used_at={"wished": 0.0, "recent": 99.0, "old": 10.0},
    )

    worth = union.plan(view).scores

    assert sorted(worth, key=worth.__getitem__) == ["i-old", "i-recent", "i-wished"]
    assert set(warmserve.plan(view).scores) == {"i-wished"}
