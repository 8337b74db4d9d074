"""What a step costs on a pipeline: one prompt gains nothing, several overlap."""

import pytest

from glowplug.simulator.costs import StepCosts

COSTS = StepCosts(prefill_base_s=0.01, prefill_s_per_token=1e-3, decode_base_s=0.02)


def test_one_prompt_passes_every_stage_and_takes_as_long_as_on_one_gpu() -> None:
    piped = COSTS.pipelined(4, 0.0)
    assert piped.prefill_s(512, 512**2) == pytest.approx(COSTS.prefill_s(512, 512**2))


def test_prompts_of_one_step_follow_each_other_through_the_stages() -> None:
    """Four equal micro-batches on four stages: seven of sixteen parts of the time one after the other."""
    piped = COSTS.pipelined(4, 0.0)
    work_s = piped.prefill_s(2048, 4 * 512**2) - COSTS.prefill_base_s
    assert work_s == pytest.approx(2048e-3 * 7 / 16)
    assert COSTS.prefill_s(2048, 4 * 512**2) == pytest.approx(0.01 + 2.048)


def test_a_slower_gpu_keeps_the_pipeline() -> None:
    assert COSTS.pipelined(4, 0.0).scaled(2.0).num_stages == 4
