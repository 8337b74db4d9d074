"""Weights in a replica of the first layers. Lane: fast, 0.01 s."""

import pytest

from glowplug_vllm import layout

SMALL = {
    "model.embed_tokens.weight": 40,
    "model.layers.0.self_attn.qkv_proj.weight": 6,
    "model.layers.0.mlp.down_proj.weight": 4,
    "model.layers.1.self_attn.qkv_proj.weight": 6,
    "model.layers.1.mlp.down_proj.weight": 4,
    "model.norm.weight": 1,
    "lm_head.weight": 40,
}


@pytest.mark.parametrize(
    ("num_bytes", "kept"),
    [(0, 0), (39, 0), (40, 1), (49, 1), (50, 3), (59, 3), (60, 5), (100, 5), (101, 7), (1000, 7)],
)
def test_section_4_a_layer_is_held_whole_or_not_at_all_and_never_more_than_its_bytes(num_bytes: int, kept: int) -> None:
    """WarmServe section 4: the first k layers."""
    assert layout.leading(SMALL, num_bytes) == frozenset(list(SMALL)[:kept])


@pytest.mark.parametrize(
    ("spans", "is_one"),
    [([(0, 4)], True), ([(0, 4), (4, 6), (6, 7)], True), ([(4, 6), (0, 4)], False), ([(0, 4), (5, 6)], False)],
)
def test_what_lies_side_by_side_in_its_order_is_one_run(spans: list[tuple[int, int]], is_one: bool) -> None:
    assert layout.is_one_run(spans) is is_one
