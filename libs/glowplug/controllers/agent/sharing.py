"""Weights that instances read in the same pages, as measured, and granted once to all of them (Gpu.shared).

An engine that reads its weights where the node keeps them reports with its load how many bytes it reads there in place;
the rest are its own. A start counts on what others on its GPU were seen to share, or earlier engines with its key on
this node, and is checked against its own report; where no sharing has been seen it pays for all of its weights until it
has reported. So two starts at once take one copy of what they share, except for the first two of all.
"""

from dataclasses import replace

from glowplug.controllers.agent.record import Holding
from glowplug.controllers.agent.transaction import Transaction
from glowplug.domain.errors import OutOfMemory
from glowplug.domain.hardware import WEIGHT_OWNERS
from glowplug.domain.phrasing import counted
from glowplug.domain.units import show_bytes

SHARE = "share"  # the ability of an engine
KEYS_REMEMBERED = 1024


def expected(transaction: Transaction, holding: Holding) -> Holding:
    """The record of a start with the bytes that it should share: those that instances with its key share on its GPU,
    else those that earlier engines with the key were seen to share on this node."""
    known = _by_others(transaction, holding) or transaction.shared_seen.get(holding.model.share_key, 0)
    return _sharing(holding, known if _weights(transaction, holding) >= known else 0)


def seen(transaction: Transaction, holding: Holding, num_bytes: int) -> Holding:
    """Grant what an engine holds that was seen to read `num_bytes` of its weights in pages that others read too.

    Raises OutOfMemory, with nothing changed, where it had counted on more and its GPU lacks bytes for the difference.
    """
    known, num_bytes = _by_others(transaction, holding), min(num_bytes, _weights(transaction, holding))
    _remember(transaction, holding.model.share_key, num_bytes)
    if known:
        num_bytes = known if num_bytes >= known else 0
    if num_bytes == holding.instance.shared_bytes:
        return holding
    now, name = _sharing(holding, num_bytes), holding.instance.instance_id
    try:
        return transaction.grant(now, (name,))
    except OutOfMemory as error:
        most = show_bytes(holding.instance.shared_bytes)
        why = f"it reads {show_bytes(num_bytes)} of its weights in host memory, and not {most}: {error.message}"
        raise OutOfMemory(why, param=error.param) from error


def _remember(transaction: Transaction, key: str, num_bytes: int) -> None:
    """Note what engines with a key share: the least that they reported, and nothing once one shares nothing."""
    known = transaction.shared_seen.pop(key, num_bytes)
    if key and num_bytes:
        transaction.shared_seen[key] = min(known, num_bytes)
    while len(transaction.shared_seen) > KEYS_REMEMBERED:
        del transaction.shared_seen[next(iter(transaction.shared_seen))]


def said(transaction: Transaction, holding: Holding) -> str:
    """The part of a reason about shared weights; "" for an instance that shares nothing."""
    if holding.shared is None:
        return ""
    key, num_bytes = holding.shared
    shared = (
        weights for gpu in transaction.ledger.gpus if gpu.gpu_id in holding.shares and (weights := gpu.shares(key))
    )
    others = sum(len(weights.holders) - 1 for weights in shared)
    if not others:
        return f"; it reads {show_bytes(num_bytes)} of its weights in host memory, where others can share them"
    return f"; {show_bytes(num_bytes)} of its weights count once with {counted(others, 'other instance')} there"


def _sharing(holding: Holding, num_bytes: int) -> Holding:
    return replace(holding, instance=replace(holding.instance, shared_bytes=num_bytes))


def _by_others(transaction: Transaction, holding: Holding) -> int:
    """Bytes that other instances share under the same key on the instance's GPU."""
    gpu_ids = {worker.gpu_id for worker in holding.workers_on(transaction.node_id)}
    there = [weights for gpu in transaction.ledger.gpus if gpu.gpu_id in gpu_ids for weights in gpu.shared]
    me, key = holding.instance.instance_id, holding.model.share_key
    return next((one.num_bytes for one in there if one.key == key and one.holders != (me,)), 0)


def _weights(transaction: Transaction, holding: Holding) -> int:
    """Bytes of weights that could be shared at all: those of an instance that runs all of its model on one GPU."""
    instance, model = holding.instance, holding.model
    is_one = instance.is_whole and not instance.part_of and len(holding.own_workers) == 1
    if not (is_one and model.share_key and transaction.can(model, SHARE)):
        return 0
    shares = holding.shares or holding.shares_on(transaction.node_id)
    return sum(n for of_gpu in shares.values() for owner, n in of_gpu.items() if owner in WEIGHT_OWNERS)
