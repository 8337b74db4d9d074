"""Instances and GPUs: what follows from their fields."""

import pytest

from glowplug.domain.hardware import Gpu, Grant, GrantOwner
from glowplug.domain.instance import Instance, InstanceState, Phase, PhaseName, Worker


def an_instance(instance_id: str, created_at: float, state: InstanceState = InstanceState.READY) -> Instance:
    worker = Worker(worker_id=f"{instance_id}-w0", node_id="node-1", gpu_id="node-1/0", num_bytes=10)
    return Instance(
        instance_id=instance_id, model_key="m", engine="e", state=state, workers=(worker,), created_at=created_at
    )


@pytest.mark.parametrize("state", InstanceState)
def test_an_instance_is_gone_coming_or_neither(state: InstanceState) -> None:
    assert not (state.is_gone and state.is_coming)
    assert state.is_gone == (state.value in ("stopped", "failed"))
    assert state.is_coming == (state.value in ("starting", "loading"))


def test_an_instance_is_where_its_first_worker_is() -> None:
    instance = an_instance("i-1", 0)
    assert (instance.node_id, instance.gpu_id) == ("node-1", "node-1/0")


def test_the_free_bytes_of_a_gpu_are_what_no_grant_holds() -> None:
    grants = tuple(Grant(holder="i", owner=owner, num_bytes=10) for owner in GrantOwner)
    assert Gpu(gpu_id="g", total_bytes=100, grants=grants).free_bytes == 60


def test_a_phase_lasts_from_start_to_end() -> None:
    assert Phase(name=PhaseName.LOAD, started_at=2.0, ended_at=3.5).actual_s == 1.5
