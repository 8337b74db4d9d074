"""One byte ledger per GPU with named owners (house section 6)."""

import pytest

from glowplug.domain.errors import OutOfMemory
from glowplug.domain.hardware import Gpu, GpuRole, GrantOwner
from glowplug.memory.ledger import ByteLedger, grant, release

GPU = Gpu(gpu_id="n/0", total_bytes=100)


def test_grant_names_holder_and_owner() -> None:
    granted = grant(GPU, "i-1", {GrantOwner.WEIGHTS: 60, GrantOwner.KV: 30})
    assert [(g.holder, g.owner, g.num_bytes) for g in granted.grants] == [("i-1", "weights", 60), ("i-1", "kv", 30)]
    assert granted.free_bytes == 10 and granted.role is GpuRole.DEDICATED
    assert GPU.free_bytes == 100


def test_grant_is_all_or_nothing() -> None:
    with pytest.raises(OutOfMemory, match="100 B of 100 B free, i-1 needs 101 B"):
        grant(GPU, "i-1", {GrantOwner.WEIGHTS: 90, GrantOwner.KV: 11})


def test_exactly_full_fits() -> None:
    assert grant(GPU, "i-1", {GrantOwner.WEIGHTS: 100}).free_bytes == 0


@pytest.mark.parametrize("shares", [{GrantOwner.KV: -1}, {GrantOwner.WEIGHTS: 5, GrantOwner.KV: -5}])
def test_negative_bytes_are_refused(shares: dict[GrantOwner, int]) -> None:
    with pytest.raises(ValueError, match="negative"):
        grant(GPU, "i-1", shares)


def test_a_holder_holds_once() -> None:
    with pytest.raises(ValueError, match="holds bytes"):
        grant(grant(GPU, "i-1", {GrantOwner.KV: 1}), "i-1", {GrantOwner.KV: 1})


def test_release_gives_everything_back_and_is_idempotent() -> None:
    granted = grant(GPU, "i-1", {GrantOwner.WEIGHTS: 60})
    assert release(granted, "i-1") == GPU
    assert release(granted, "i-2") is granted


def test_roles_follow_owners() -> None:
    prewarmed = grant(GPU, "r-1", {GrantOwner.PREWARM: 10})
    assert prewarmed.role is GpuRole.UNIVERSAL
    assert grant(prewarmed, "i-1", {GrantOwner.WEIGHTS: 10}).role is GpuRole.DEDICATED


def test_ledger_of_a_node() -> None:
    ledger = ByteLedger([GPU, Gpu(gpu_id="n/1", total_bytes=50)])
    ledger.grant("n/0", "i-1", {GrantOwner.WEIGHTS: 10})
    ledger.grant("n/1", "i-1", {GrantOwner.WEIGHTS: 20})
    assert ledger.holders == {"i-1"} and ledger.held_bytes("i-1") == 30
    with pytest.raises(OutOfMemory, match="no GPU 'n/7'"):
        ledger.grant("n/7", "i-2", {})
    assert ledger.release("i-1") == 30 and ledger.release("i-1") == 0
    assert [gpu.used_bytes for gpu in ledger.gpus] == [0, 0]
