"""papers.md section 7: the fits against what the seed papers measured themselves."""

import pytest

from glowplug.engines.emulated_host.profiles import DEFAULT_PROFILE, PROFILES


def test_hydraserve_table_2_llama_7b_on_a10_with_8_requests_of_1024_tokens() -> None:
    profile = PROFILES["llama-2-7b/a10"]
    tpot_s = profile.step_s(tok=0, sq=0, num_decoding=8, ctx=8 * 1024)
    ttft_s = profile.step_s(tok=8 * 1024, sq=8 * 1024**2, num_decoding=0, ctx=0)
    assert tpot_s == pytest.approx(0.042, rel=0.05)
    assert ttft_s == pytest.approx(1.5, rel=0.15)


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_more_work_never_costs_less(name: str) -> None:
    profile = PROFILES[name]
    small = profile.step_s(tok=100, sq=10_000, num_decoding=1, ctx=100)
    assert profile.step_s(tok=200, sq=40_000, num_decoding=1, ctx=100) > small
    assert profile.step_s(tok=100, sq=10_000, num_decoding=9, ctx=900) > small


def test_the_default_profile_exists() -> None:
    assert DEFAULT_PROFILE in PROFILES
