"""Rows W3s and W3k: the stage model behind Figure 8, and what replicas hold over time."""

import math
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest

from bench.papers import w_layers, w_stages
from bench.papers.w_stages import MODELS, PCIE, RANGES, STAGES, STEPS, StartStages, expected_s
from glowplug.domain.instance import InstanceState
from tests.fleet_builder import MIB, an_instance


def misfit(stages: StartStages) -> float:
    """Squares of the logarithms by which the eight printed ends are missed (section 7.2)."""
    total = 0.0
    for (before, after), printed in RANGES.items():
        ratios = [expected_s(m, before, stages) / expected_s(m, after, stages) for m in MODELS]
        total += sum(math.log(o / p) ** 2 for o, p in zip((min(ratios), max(ratios)), printed, strict=True))
    return total


def test_the_constants_of_the_stages_are_those_that_miss_the_printed_ranges_least() -> None:
    least = misfit(STAGES)
    free = [field.name for field in fields(STAGES) if field.name != "first_token_70b_s"]
    assert len(free) == 6
    for name in free:
        for factor in (0.97, 1.03):
            assert misfit(replace(STAGES, **{name: getattr(STAGES, name) * factor})) > least, name


def test_a_first_token_of_70b_with_all_prewarmed_is_the_printed_one() -> None:
    """Section 7.2: "the first token in ~665 ms"."""
    assert expected_s("70b", "+CommGroup") == pytest.approx(0.665)


def test_every_step_leaves_one_stage_less_and_one_gpu_has_no_group() -> None:
    for model in MODELS:
        seconds = [expected_s(model, step) for step in STEPS]
        assert seconds == sorted(seconds, reverse=True)
    assert expected_s("7b-0", "+Weights") == expected_s("7b-0", "+CommGroup")


@pytest.mark.parametrize(("step", "hits"), [("+Device", 0), ("+Weights", 1)])
def test_the_simulator_takes_the_stages_and_little_besides(step: str, hits: int) -> None:
    out = w_stages.run(f"13b {step}", 1, True)
    assert out["hits"] == hits and out["starts"] == 2
    assert out["ttft"] == pytest.approx(expected_s("13b", step), abs=0.02)


def test_over_pcie_only_the_weights_come_faster() -> None:
    rates = [[s for s in w_stages.settings("70b", step) if "pcie" in s] for step in ("+Engine", PCIE)]
    assert rates == [["servers.server.pcie_bytes_per_s=8700000000"], ["servers.server.pcie_bytes_per_s=32000000000"]]
    assert [s for s in w_stages.settings("70b", "+Engine") if "pcie" not in s] == [
        s for s in w_stages.settings("70b", PCIE) if "pcie" not in s
    ]


def test_what_replicas_hold_is_counted_from_ready_to_gone() -> None:
    world = SimpleNamespace(began_s=100.0, control=SimpleNamespace(on_save=[]))
    held = w_layers.Held(world)  # type: ignore[arg-type]
    (saved,) = world.control.on_save
    for at_s, state in (
        (105.0, InstanceState.LOADING),
        (110.0, InstanceState.PREWARMED),
        (130.0, InstanceState.STOPPED),
    ):
        saved("instances", an_instance("r", state=state, mib=60, replica=True), at_s)
    saved("instances", an_instance("i", mib=60), 120.0)
    assert held.num.total == 20.0 and held.num_bytes.total == 20.0 * 60 * MIB
