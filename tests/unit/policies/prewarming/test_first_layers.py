"""k of the models of WarmServe's evaluation, and how a plan takes room for it."""

from dataclasses import replace

import pytest

from glowplug.domain.errors import BadRequest
from glowplug.domain.instance import InstanceState
from glowplug.domain.snapshot import Forecast
from glowplug.policies.prewarming.first_layers import LayerProfile, first_layers, first_layers_bytes
from glowplug.policies.prewarming.port import PrewarmView, reads_profile
from glowplug.policies.prewarming.warmserve import WarmserveParams, plan
from glowplug.policies.registry import choose
from tests.fleet_builder import MIB, a_model, a_node, an_instance

CAN = ("emulated:prewarm",)
ON = WarmserveParams(first_layers=True, num_layers=10)
LLAMA_7B = LayerProfile(
    num_layers=32, weights_bytes=12_550_000_000, load_bytes_per_s=32e9, prefill_s_per_layer=0.035 / 32
)


def test_seven_billion_weights_over_pcie_hide_two_layers_behind_a_prefill_of_35_ms() -> None:
    """Erratum E7: 12.3 ms a layer against 1.1 ms of compute: 31 x 1.1 ms hide two."""
    assert first_layers(LLAMA_7B) == 30
    assert first_layers_bytes(LLAMA_7B) == 12_550_000_000 * 30 // 32


def test_what_a_growth_takes_anyhow_hides_more() -> None:
    """The extension: 150 ms until the first layer computes hide thirteen layers more."""
    assert first_layers(replace(LLAMA_7B, lead_s=0.15)) == 17


def test_layers_that_load_faster_than_they_compute_need_one() -> None:
    assert first_layers(replace(LLAMA_7B, load_bytes_per_s=1e12)) == 1


def test_a_model_has_layers_and_a_link_a_rate() -> None:
    with pytest.raises(ValueError, match="num_layers"):
        replace(LLAMA_7B, num_layers=0)
    with pytest.raises(ValueError, match="load_bytes_per_s"):
        replace(LLAMA_7B, load_bytes_per_s=0.0)


def view(nodes, models, **fields) -> PrewarmView:
    """Replicas load in 1 s and a prefill takes half of that: of ten layers six must lie there."""
    fields = {"prefill_s": {m.key: 0.5 for m in models}} | fields
    return PrewarmView(
        now_s=100.0,
        nodes=nodes,
        models={m.key: m for m in models},
        forecasts={
            m.key: Forecast(made_at=0.0, window_s=300.0, concurrency_mean=1, concurrency_peak=1) for m in models
        },
        load_s={m.key: 1.0 for m in models},
        **fields,
    )


def test_replicas_of_the_first_layers_are_smaller_so_more_of_them_fit() -> None:
    models = [a_model("a", mib=100), a_model("b", mib=100)]
    node = a_node(gpus_mib=(130,), abilities=CAN)
    whole, first = plan(view([node], models)), plan(view([node], models), ON)
    assert [s.bytes_per_gpu for s in whole.steps] == [100 * MIB]
    assert [s.bytes_per_gpu for s in first.steps] == [60 * MIB, 60 * MIB]


def test_a_model_whose_prefill_nobody_has_seen_is_prewarmed_whole() -> None:
    models = [a_model("a", mib=100)]
    (step,) = plan(view([a_node(abilities=CAN)], models, prefill_s={}), ON).steps
    assert step.bytes_per_gpu == 100 * MIB


def test_the_growth_counts_only_where_it_is_asked_for() -> None:
    models, node = [a_model("a", mib=100)], a_node(abilities=CAN)
    seen = view([node], models, growth_s={"a": 0.2})
    assert plan(seen, ON).steps[0].bytes_per_gpu == 60 * MIB
    assert plan(seen, replace(ON, growth_leads=True)).steps[0].bytes_per_gpu == 40 * MIB


def test_room_is_what_the_replicas_that_give_way_hold_and_no_more() -> None:
    """Erratum E9 with a replica of 60 MiB: dropping it is not enough for 70, though its whole model would be."""
    row = an_instance("r-0", "old", InstanceState.PREWARMED, mib=60, replica=True)
    node = a_node(gpus_mib=(65,), grants={0: [("r-0", 60)]}, abilities=CAN)
    models = [a_model("a", mib=70), a_model("old", mib=100)]
    seen = view([node], models, dormant={"node-1": [row]}, prefill_s={})
    seen = replace(seen, forecasts={"a": seen.forecasts["a"]})
    assert plan(seen, ON).steps == ()
    assert plan(replace(seen, nodes=[replace(node, gpus=(replace(node.gpus[0], total_bytes=70 * MIB),))]), ON).steps


def test_the_option_is_a_word_of_the_policy_and_asks_for_its_profile() -> None:
    for name in ("warmserve", "warmserve_literal", "union"):
        assert reads_profile(choose("prewarming", f"{name}:first_layers=true"))
        assert not reads_profile(choose("prewarming", name))
    assert not reads_profile(choose("prewarming", "warmserve:proactive=false")) and not reads_profile(None)
    with pytest.raises(BadRequest, match="first_layers is true or false"):
        choose("prewarming", "warmserve:first_layers=3")
