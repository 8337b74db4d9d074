"""The byte ledger: every byte of every GPU of a node has at most one named owner (ARCHITECTURE.md).

Weights that several holders read in the same pages (`Gpu.shared`) are granted once: to a single holder, or jointly as
soon as there are two. The last holder gets the grant back. `ByteLedger` swaps a whole frozen `Gpu` at a time, so that a
reader never sees half a grant.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from glowplug.domain.errors import OutOfMemory
from glowplug.domain.hardware import WEIGHT_OWNERS, Gpu, GpuRole, Grant, GrantOwner, SharedWeights
from glowplug.domain.units import show_bytes


def grant(
    gpu: Gpu, holder: str, bytes_by_owner: Mapping[GrantOwner, int], shared: tuple[str, int] | None = None
) -> Gpu:
    """Grant all bytes or none. `shared` (key, bytes): bytes of its weights in pages common to all holders with that
    key.

    Raises OutOfMemory when they do not fit; ValueError for negative bytes, for a holder that has a grant already, and
    for shared bytes that exceed its weights or differ from the other sharers'.
    """
    if any(num_bytes < 0 for num_bytes in bytes_by_owner.values()):
        raise ValueError(f"{holder}: negative bytes {dict(bytes_by_owner)}")
    if any(g.holder == holder for g in gpu.all_grants):
        raise ValueError(f"{holder} already holds bytes of {gpu.gpu_id}")
    new = [Grant(holder=holder, owner=o, num_bytes=n) for o, n in bytes_by_owner.items() if n]
    asleep = tuple(one for one in new if one.owner is GrantOwner.SLEEPER)
    awake = tuple(one for one in new if one.owner is not GrantOwner.SLEEPER)
    granted = replace(gpu, grants=gpu.grants + awake, sleepers=gpu.sleepers + asleep)
    granted = _share(granted, holder, *shared) if shared is not None and shared[1] else granted
    wanted = granted.used_bytes - gpu.used_bytes + sum(one.num_bytes for one in asleep)
    if wanted > gpu.free_bytes:
        raise OutOfMemory(
            f"{gpu.gpu_id} has {show_bytes(gpu.free_bytes)} of {show_bytes(gpu.total_bytes)} free, "
            f"{holder} needs {show_bytes(wanted)}",
            param="gpu_id",
        )
    return _with_role(granted)


def release(gpu: Gpu, holder: str) -> Gpu:
    """Return the same `gpu` if the holder has no grant. Shared weights stay while another holder reads them."""
    kept, asleep = (tuple(g for g in held if g.holder != holder) for held in (gpu.grants, gpu.sleepers))
    if (len(kept), len(asleep)) == (len(gpu.grants), len(gpu.sleepers)):
        return gpu
    rest = replace(gpu, grants=kept, sleepers=asleep)
    for weights in gpu.shared:
        if holder in weights.holders:
            rest = _leave(rest, weights, holder)
    return _with_role(rest)


def _share(gpu: Gpu, holder: str, key: str, num_bytes: int) -> Gpu:
    """Share weights so far granted to `holder` alone."""
    known, own = gpu.shares(key), [g.num_bytes for g in gpu.grants if g.holder == holder and g.owner in WEIGHT_OWNERS]
    if len(own) != 1 or not 0 < num_bytes <= own[0] or (known is not None and known.num_bytes != num_bytes):
        raise ValueError(f"{holder} cannot share {num_bytes} bytes of {gpu.gpu_id} as {key}: {known}")
    if known is None:
        return replace(gpu, shared=(*gpu.shared, SharedWeights(key=key, num_bytes=num_bytes, holders=(holder,))))
    joined = replace(known, holders=(*known.holders, holder))
    for one in (holder,) if known.counts else joined.holders:
        gpu = _add(gpu, one, -num_bytes)
    return replace(gpu, shared=tuple(joined if weights is known else weights for weights in gpu.shared))


def _leave(gpu: Gpu, weights: SharedWeights, holder: str) -> Gpu:
    """Remove a holder whose own grants are gone already."""
    left = replace(weights, holders=tuple(one for one in weights.holders if one != holder))
    if weights.counts and not left.counts:
        gpu = _add(gpu, left.holders[0], left.num_bytes)
    stay = ((left if one.key == weights.key else one) for one in gpu.shared)
    return replace(gpu, shared=tuple(one for one in stay if one.holders))


def _add(gpu: Gpu, holder: str, num_bytes: int) -> Gpu:
    """Change a grant, which stays even when empty."""
    changed = tuple(
        replace(g, num_bytes=g.num_bytes + num_bytes) if g.holder == holder and g.owner in WEIGHT_OWNERS else g
        for g in gpu.grants
    )
    return replace(gpu, grants=changed)


def shrink(gpu: Gpu, holder: str, owner: GrantOwner, num_bytes: int) -> Gpu:
    """Cut the bytes of `holder` for `owner` down to `num_bytes`; the same `gpu` if nothing changes.

    Raises ValueError when the holder has less, for negative bytes, and for weights that it shares.
    """
    if owner in WEIGHT_OWNERS and any(holder in weights.holders for weights in gpu.shared):
        raise ValueError(f"{holder} shares its weights on {gpu.gpu_id}, and cannot keep a part of them")
    held = sum(g.num_bytes for g in gpu.grants if g.holder == holder and g.owner == owner)
    if not 0 <= num_bytes <= held:
        raise ValueError(f"{holder} holds {held} bytes of {gpu.gpu_id} for {owner}, to keep {num_bytes}")
    if num_bytes == held:
        return gpu
    cut = tuple(
        replace(g, num_bytes=num_bytes) if g.holder == holder and g.owner == owner else g
        for g in gpu.grants
        if num_bytes or g.holder != holder or g.owner != owner
    )
    return _with_role(replace(gpu, grants=cut))


def _with_role(gpu: Gpu) -> Gpu:
    """Set the role by WarmServe Fig. 5: weights of a running engine make a GPU dedicated, prewarmed ones alone
    universal."""
    owners = {g.owner for g in gpu.grants}
    if owners & {GrantOwner.WEIGHTS, GrantOwner.KV}:
        return replace(gpu, role=GpuRole.DEDICATED)
    return replace(gpu, role=GpuRole.UNIVERSAL if GrantOwner.PREWARM in owners else GpuRole.IDLE)


class ByteLedger:
    """The GPUs of one node. Single writer: the agent's controller."""

    def __init__(self, gpus: Iterable[Gpu]) -> None:
        self._gpus = {gpu.gpu_id: gpu for gpu in gpus}

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        return tuple(self._gpus.values())

    def exchange(
        self,
        releases: Iterable[str],
        holder: str,
        bytes_by_gpu: Mapping[str, Mapping[GrantOwner, int]],
        shared: tuple[str, int] | None = None,
    ) -> None:
        """Free the grants of `releases` and grant `bytes_by_gpu` (gpu_id -> owner -> bytes) to `holder`, in one
        step; `shared` as in `grant`.

        Raises OutOfMemory when they do not fit (or a GPU is not of this node), ValueError as `grant`; nothing changes
        then.
        """
        gpus = dict(self._gpus)
        for other in releases:
            gpus = {gpu_id: release(gpu, other) for gpu_id, gpu in gpus.items()}
        for gpu_id, bytes_by_owner in bytes_by_gpu.items():
            if gpu_id not in gpus:
                raise OutOfMemory(f"this node has no GPU {gpu_id!r}", param="gpu_id")
            gpus[gpu_id] = grant(gpus[gpu_id], holder, bytes_by_owner, shared)
        self._gpus = gpus

    def shrink(self, gpu_id: str, holder: str, owner: GrantOwner, num_bytes: int) -> int:
        """Return the bytes freed. Raises ValueError when the holder has less there, for negative bytes, or when the
        GPU is not of this node."""
        gpu = self._gpus.get(gpu_id)
        if gpu is None:
            raise ValueError(f"this node has no GPU {gpu_id!r}")
        self._gpus[gpu_id] = shrink(gpu, holder, owner, num_bytes)
        return gpu.used_bytes - self._gpus[gpu_id].used_bytes

    def release(self, holder: str) -> int:
        """Return the bytes freed."""
        before = sum(gpu.free_bytes for gpu in self._gpus.values())
        self._gpus = {gpu_id: release(gpu, holder) for gpu_id, gpu in self._gpus.items()}
        return sum(gpu.free_bytes for gpu in self._gpus.values()) - before

    @property
    def holders(self) -> frozenset[str]:
        return frozenset(g.holder for gpu in self._gpus.values() for g in gpu.all_grants)

    def held_bytes(self, holder: str) -> int:
        """Count bytes granted to the holder alone."""
        return sum(g.num_bytes for gpu in self._gpus.values() for g in gpu.all_grants if g.holder == holder)
