"""A policy's own params, the papers' literal formulas among them."""

import re
from dataclasses import replace

import pytest

from glowplug.domain.errors import BadRequest
from glowplug.policies.caching.mcache_importance import CacheFacts
from glowplug.policies.caching.ordering import Resident
from glowplug.policies.options import base_name, configured, options_of
from glowplug.policies.placement.port import wants_seconds
from glowplug.policies.prediction.port import make_with
from glowplug.policies.registry import choose
from glowplug.policies.routing.port import BalancerParams
from glowplug.policies.scaling import preserve
from glowplug_lab.simulator.scenario.errors import ScenarioError
from glowplug_lab.simulator.scenario.load import load_tree
from tests.house.tree import ROOT


def test_the_unions_routing_with_an_option_still_follows_prefixes() -> None:
    alone, with_option = (choose("routing", name)(BalancerParams()) for name in ("union", "union:penalty=3"))
    assert type(with_option) is type(alone)
    assert with_option.params == replace(alone.params, penalty=3.0)


def test_a_routing_policy_has_options_where_it_takes_params() -> None:
    assert choose("routing", "prefix:penalty=3")(BalancerParams()).params.penalty == 3.0
    assert choose("routing", "llumnix_like:penalty=3")(BalancerParams())


def test_a_name_alone_is_the_policy_itself() -> None:
    assert choose("scaling", "preserve") is preserve.scale
    assert base_name("hydraserve:clear=false") == "hydraserve"
    assert options_of("preserve:shrink_after_s=2:scaler.again_s=5") == {
        "shrink_after_s": "2",
        "scaler": {"again_s": "5"},
    }


def test_options_of_functions_reach_their_params_nested_ones_too() -> None:
    policy = choose("scaling", "preserve:shrink_after_s=2:scaler.again_s=5")
    params = policy.keywords["params"]
    assert (params.shrink_after_s, params.scaler.again_s) == (2.0, 5.0)
    assert choose("placement", "hydraserve:allocation.overlap=false").keywords["params"].allocation.overlap is False
    assert choose("prewarming", "warmserve:scores.burst=ratio").keywords["params"].scores.burst == "ratio"
    assert wants_seconds(choose("placement", "hydraserve:allocation.overlap=false")), (
        "what a policy says of itself stays said"
    )


def test_what_zero_turns_off_in_the_unions_plan_may_be_zero() -> None:
    fields = ("z", "slack", "up", "down", "patience_s", "widest")
    plan = choose("scaling", "union:" + ":".join(f"plan.{name}=0" for name in fields)).keywords["params"].plan
    assert [getattr(plan, name) for name in fields] == [0.0] * len(fields)
    for wrong in ("plan.most_share=101", "plan.least_share=0.001"):
        with pytest.raises(BadRequest, match=r"most_share|least_share"):
            choose("scaling", f"union:{wrong}")
    with pytest.raises(BadRequest, match=r"plan\.aim"):
        choose("scaling", "union:plan.aim=0")


def test_a_documented_option_of_the_unions_routing_is_one() -> None:
    written = (ROOT / "docs" / "policies.md").read_text("utf-8")
    (name,) = re.findall(r"`(union:learn_lengths=[^`]*)`", written)
    params = choose("routing", name)(BalancerParams()).params
    assert (params.learn_lengths, params.overload_share) == (False, 0.1)


def test_a_forecaster_with_options_keeps_the_window_of_its_paper_and_its_season() -> None:
    make = choose("prediction", "preserve_workload:series.num_past=6")
    assert make.WINDOW_S == 600.0  # type: ignore[attr-defined]
    made = make_with(make, 25.0, 3600.0)
    assert (made.params.series.num_past, made.params.season_s) == (6, 3600.0)  # type: ignore[attr-defined]
    made = make_with(choose("prediction", "warmserve_csp:literal_weights=true"), 300.0, 3000.0)
    assert made.params.literal_weights and made.season_s == 3000.0  # type: ignore[attr-defined]


@pytest.mark.parametrize("policy", ["mcache", "union"])
def test_options_of_a_cache_lie_over_what_its_settings_say(policy: str) -> None:
    facts = CacheFacts(penalty_s=lambda name, num_bytes: 1.0)
    one, three = (
        choose("caching", f"{policy}:{options}")(facts) for options in ("spread=1:half_life_s=10", "half_life_s=10")
    )
    for memory in (one, three):
        memory.used("a", 1, 0.0, hit=False)
    there = Resident(name="a", num_bytes=1, last_used_at=0.0)
    assert one.utility(there, 10.0) == pytest.approx(one.utility(there, 0.0) / 2)  # one half-life
    assert three.utility(there, 10.0) != pytest.approx(three.utility(there, 0.0) / 2)


def test_options_of_a_router_lie_over_what_its_settings_say() -> None:
    made = choose("routing", "union:stall_ratio=1000:hold_overloaded=false")(BalancerParams(num_steps=7))
    assert (made.params.stall_ratio, made.params.hold_overloaded, made.params.decode_horizon) == (1000.0, False, 7)
    made = choose("routing", "preserve_load_aware:penalty=3")(BalancerParams(num_steps=7))
    assert (made.params.penalty, made.params.num_steps) == (3.0, 7)
    assert type(made) is type(choose("routing", "preserve_load_aware")(BalancerParams()))


def test_a_policy_whose_params_have_no_default_has_no_options() -> None:
    def policy(view: object, params: object) -> None: ...

    assert configured("scaling", "mine", policy) is policy
    with pytest.raises(BadRequest, match="it has no options"):
        configured("scaling", "mine:a=1", policy)


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        ("scaling", "hydraserve:literal_cod=true", "literal_cod: there is no such field (did you mean literal_code?"),
        ("scaling", "hydraserve:literal_code=maybe", "literal_code: 'maybe' is neither true nor false"),
        ("scaling", "hydraserve:literal_code", "'literal_code' is not field=value"),
        ("scaling", "hydraserve:literal_code=", "'literal_code=' is not field=value"),
        ("scaling", "hydraserve:=true", "'=true' is not field=value"),
        ("scaling", "preserve:scaler=1", "scaler: '1' is not a mapping of fields"),
        ("scaling", "hydraserve:literal_code.x=1", "literal_code: {'x': '1'} is neither true nor false"),
        ("scaling", "static:floor=1", "it has no options"),
        ("placement", "hydraserve:allocation.max_stages=0", "allocation.max_stages: 0 is below 1"),
        ("placement", "hydraserve:allocation.skew=nan", "allocation.skew: 'nan' is not a number"),
        ("placement", "hydraserve:allocation.max_stages=two", "allocation.max_stages: 'two' is not a whole number"),
        ("prewarming", "warmserve:scores.burst=often", "scores.burst: 'often' is not one of difference, ratio"),
        ("prediction", "last_window:x=1", "it has no options"),
        ("prediction", "warmserve_csp:num_errors=0", "num_errors: 0 is below 1"),
        ("caching", "lru:spread=1", "it has no options"),
        (
            "caching",
            "union:counts=requests",
            "counts: there is no such field (there are: half_life_s, max_names, spread)",
        ),
        ("routing", "round_robin:penalty=1", "it has no options"),
        ("routing", "union:nobody=1", "nobody: there is no such field"),
        ("routing", "prefix:nobody=1", "nobody: there is no such field"),
        ("routing", "nobody:penalty=1", "no routing policy named 'nobody'"),
    ],
)
def test_what_is_wrong_is_one_line_that_names_kind_and_field(kind: str, name: str, said: str) -> None:
    with pytest.raises(BadRequest) as caught:
        choose(kind, name)
    assert said in caught.value.message and "\n" not in caught.value.message
    assert caught.value.param == f"policy_{kind}"


def test_a_scenario_takes_them_and_names_its_field_when_they_are_wrong() -> None:
    tree = {
        "seconds": 1,
        "servers": [{"num_gpus": 1}],
        "models": [{"name": "m", "weights_bytes": "1GB", "costs": "llama-2-7b"}],
        "workload": {"source": "gamma", "rps": 1},
    }
    good = load_tree(tree | {"policies": {"prediction": "warmserve_csp:num_errors=2"}}, ROOT)
    assert good.setup.policies.prediction == "warmserve_csp:num_errors=2"
    with pytest.raises(ScenarioError, match=r"policies\.placement: .*stages_max: there is no such field"):
        load_tree(tree | {"policies": {"placement": "hydraserve:stages_max=2"}}, ROOT)
