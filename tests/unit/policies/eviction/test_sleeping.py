"""How many sleeping engines are of use on a device, and the host memory of one."""

from dataclasses import replace

import pytest

from glowplug.policies.eviction.sleeping import host_bytes, num_useful
from tests.fleet_builder import a_model

MODEL = replace(a_model("m", weights_bytes=60, kv_bytes=40), max_instances=8)


@pytest.mark.parametrize(
    ("gpu_bytes", "shares", "num"),
    [(99, False, 1), (100, False, 1), (199, False, 1), (200, False, 2), (139, True, 1), (140, True, 2), (180, True, 3)],
)
def test_as_many_as_can_be_awake_at_once(gpu_bytes: int, shares: bool, num: int) -> None:
    assert num_useful(MODEL, gpu_bytes, shares=shares) == num


def test_no_more_than_the_model_may_have_and_a_group_by_each_gpu() -> None:
    assert num_useful(replace(MODEL, max_instances=2), 1000, shares=False) == 2
    assert num_useful(replace(MODEL, kv_bytes=0), 1000, shares=True) == 8
    assert num_useful(replace(MODEL, num_gpus=2), 100, shares=False) == 2


def test_weights_that_are_shared_are_none_of_its_own() -> None:
    assert host_bytes(MODEL, 0) == 84 and host_bytes(MODEL, 60) == 0
