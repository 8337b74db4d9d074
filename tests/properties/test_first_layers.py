"""WarmServe's replicas of the first k layers: k by the rule of erratum E7, against a start played layer by layer."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from glowplug.policies.prewarming.first_layers import LayerProfile, first_layers, first_layers_bytes

PROFILES = st.builds(
    LayerProfile,
    num_layers=st.integers(2, 96),
    weights_bytes=st.integers(1_000_000_000, 150_000_000_000),
    load_bytes_per_s=st.floats(1e8, 1e12),
    prefill_s_per_layer=st.floats(0.0, 0.1),
    lead_s=st.floats(0.0, 2.0),
)
MORE = st.floats(1.0, 100.0)


def waited_s(profile: LayerProfile, num_there: int) -> float:
    """Seconds the first prefill stands still: the layers that are missing come one after the other from the start on,
    each layer computes once it is there and the one before has been computed."""
    load_s, at_s = profile.load_s_per_layer, profile.lead_s
    for layer in range(1, profile.num_layers + 1):
        comes_at = max(0, layer - num_there) * load_s
        at_s = max(at_s, comes_at) + profile.prefill_s_per_layer
    return at_s - profile.lead_s - profile.num_layers * profile.prefill_s_per_layer


@given(PROFILES)
def test_a_start_with_k_layers_waits_for_none_and_with_one_less_it_does(profile: LayerProfile) -> None:
    k = first_layers(profile)
    assert 1 <= k <= profile.num_layers
    assert waited_s(profile, k) <= 1e-9 + 1e-9 * profile.lead_s
    if k == 1:
        return
    late_s = max(
        (layer - k + 1) * profile.load_s_per_layer - profile.lead_s - (layer - 1) * profile.prefill_s_per_layer
        for layer in range(k, profile.num_layers + 1)
    )
    assert late_s > 0.0
    if late_s > 1e-6:  # else rounding decides
        assert waited_s(profile, k - 1) > late_s / 2


@given(PROFILES, MORE)
def test_a_faster_link_or_a_longer_prefill_never_needs_more_layers(profile: LayerProfile, more: float) -> None:
    k, c = first_layers(profile), profile.prefill_s_per_layer
    assert first_layers(replace(profile, load_bytes_per_s=profile.load_bytes_per_s * more)) <= k
    assert first_layers(replace(profile, prefill_s_per_layer=c * more)) <= k
    assert first_layers(replace(profile, lead_s=profile.lead_s * more)) <= k


@given(PROFILES)
def test_without_compute_all_layers_are_needed(profile: LayerProfile) -> None:
    bare = replace(profile, prefill_s_per_layer=0.0, lead_s=0.0)
    assert first_layers(bare) == bare.num_layers
    assert first_layers_bytes(bare) == bare.weights_bytes


@given(PROFILES)
def test_bytes_are_those_of_k_layers_and_never_more_than_all(profile: LayerProfile) -> None:
    k, num_bytes = first_layers(profile), first_layers_bytes(profile)
    assert 0 < num_bytes <= profile.weights_bytes
    assert num_bytes >= profile.weights_bytes * k / profile.num_layers * (1 - 1e-12)
