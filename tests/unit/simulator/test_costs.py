"""What steps cost: the constants of the calibration, the figures they were checked against, and pipelines."""

import pytest

from glowplug.simulator.costs import FITTED, FITTED_MS


@pytest.mark.parametrize("profile", FITTED_MS, ids="/".join)
def test_a_step_takes_what_was_fitted(profile):
    """Eight prompts of 256 tokens, then a step of them with 300 tokens of context each."""
    (base, token, token2), (step, sequence, context) = FITTED_MS[profile]
    costs = FITTED[profile]
    assert costs.prefill_s(2048, 8 * 256**2) * 1e3 == pytest.approx(base + token * 2048 + token2 * 8 * 256**2)
    assert costs.decode_s(8, 2400) * 1e3 == pytest.approx(step + sequence * 8 + context * 2400)


def test_a_7b_on_an_a10_answers_as_hydraserve_measured_it():
    """HydraServe's Table 2, eight warm requests of 1024 tokens: TTFT 1.5 s, TPOT 42 ms."""
    costs = FITTED["llama-2-7b", "a10"]
    assert costs.prefill_s(8 * 1024, 8 * 1024**2) == pytest.approx(1.67, abs=0.01)
    assert costs.decode_s(8, 8 * 1024) == pytest.approx(0.0425, abs=0.0001)


def test_a_token_of_a_pipeline_pays_its_hops():
    """Erratum E13: s hops a token, for it returns to the first stage; s - 1 for the first; a single worker has none."""
    whole = FITTED["llama-2-7b", "a10"]
    four = whole.pipelined(4, 0.001)
    assert four.prefill_s(512, 512**2) == pytest.approx(whole.prefill_s(512, 512**2) + 0.003)
    assert four.decode_s(0, 0) == pytest.approx(whole.decode_s(0, 0) + 0.004)
    assert whole.pipelined(1, 0.001) is whole
