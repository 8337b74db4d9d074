"""Weights that instances read in the same pages, as measured, and granted once to all of them (Gpu.shared).

An engine reports how many bytes of weights it reads in place where the node keeps them; the rest are its own. A start
counts on the bytes shared on its GPU, or by earlier engines with its key on this node; without such evidence it pays
for all until its own report. So two starts at once share one copy, except for the first two of all.
"""

from dataclasses import replace

from glowplug.controllers.agent.record import Holding
from glowplug.controllers.agent.transaction import Transaction
from glowplug.domain.errors import OutOfMemory
from glowplug.domain.hardware import WEIGHT_OWNERS
from glowplug.domain.phrasing import counted
from glowplug.domain.units import show_bytes

SHARE = "share"
KEYS_REMEMBERED = 1024


def expected(transaction: Transaction, holding: Holding) -> Holding:
    """Expect the bytes shared under the start's key on its GPU, else by earlier engines on this node."""
    known = _by_others(transaction, holding) or transaction.shared_seen.get(holding.model.share_key, 0)
    return _sharing(holding, known if _weights(transaction, holding) >= known else 0)


def seen(transaction: Transaction, holding: Holding, num_bytes: int) -> Holding:
    """Grant an engine's bytes, with `num_bytes` of weights seen in shared pages.

    Raises OutOfMemory, with nothing changed, if it counted on more and its GPU lacks the difference.
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
    """Keep the least reported for a key; forget it once one shares nothing."""
    known = transaction.shared_seen.pop(key, num_bytes)
    if key and num_bytes:
        transaction.shared_seen[key] = min(known, num_bytes)
    while len(transaction.shared_seen) > KEYS_REMEMBERED:
        del transaction.shared_seen[next(iter(transaction.shared_seen))]


def said(transaction: Transaction, holding: Holding) -> str:
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
    gpu_ids = {worker.gpu_id for worker in holding.workers_on(transaction.node_id)}
    there = [weights for gpu in transaction.ledger.gpus if gpu.gpu_id in gpu_ids for weights in gpu.shared]
    me, key = holding.instance.instance_id, holding.model.share_key
    return next((one.num_bytes for one in there if one.key == key and one.holders != (me,)), 0)


def _weights(transaction: Transaction, holding: Holding) -> int:
    """Only an instance with all of its model on one GPU can share."""
    instance, model = holding.instance, holding.model
    is_one = instance.is_whole and not instance.part_of and len(holding.own_workers) == 1
    if not (is_one and model.share_key and transaction.can(model, SHARE)):
        return 0
    shares = holding.shares or holding.shares_on(transaction.node_id)
    return sum(n for of_gpu in shares.values() for owner, n in of_gpu.items() if owner in WEIGHT_OWNERS)
