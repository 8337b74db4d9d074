"""Account for the granted and promised bytes of every GPU; no other module does.

Grants come from a node's ledger. A claim promises bytes to a holder (an instance, a replica, one stage of a pipeline):
it holds until replaced or given up, and counts nothing once the ledger lists the holder. A reported instance claims by
its row. `version` grows when bytes come free, weights begin to be shared or a node joins; placements refused for lack
of bytes need no earlier retry.

Weights read by several holders in the same pages count once (Gpu.shared): further claims are reduced by them, and
`seen_by` shows the fleet as such an instance's placement sees it.

Instances are indexed by GPU and node, nodes in `nodes`; a change costs the same in any size of fleet.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from glowplug.domain.hardware import Gpu, Node, SharedWeights
from glowplug.domain.instance import Instance, InstanceState
from glowplug.fleet.node_index import NodeIndex

LEAVING = (InstanceState.DRAINING, InstanceState.SWAPPED_OUT)  # bytes come free by themselves


class LongestUnused:
    """Nodes ordered by the last use of an instance on them, longest ago first. Stored times are lower bounds, updated
    when the node would be next."""

    def __init__(self) -> None:
        self._waiting: list[tuple[float, str]] = []  # heap of (time, node_id + "/")
        self._at: dict[str, float] = {}

    def note(self, node_id: str, at: float) -> None:
        if at < self._at.get(f"{node_id}/", float("inf")):
            self._at[f"{node_id}/"] = at
            heapq.heappush(self._waiting, (at, f"{node_id}/"))

    def in_order(self, used_at: Callable[[str], float | None]) -> Generator[tuple[float, str], None, None]:
        """Yield (time, node_id + "/"); `used_at` returns the earliest last use on a node, None without instances. Close
        the generator after reading."""
        read = []
        try:
            while self._waiting:
                at, prefix = heapq.heappop(self._waiting)
                if self._at.get(prefix) != at:
                    continue
                now = used_at(prefix[:-1])
                if now is None:
                    del self._at[prefix]
                elif now > at:
                    self._at[prefix] = now
                    heapq.heappush(self._waiting, (now, prefix))
                else:
                    read.append((at, prefix))
                    yield at, prefix
        finally:
            for entry in read:
                heapq.heappush(self._waiting, entry)


class FleetCapacity:
    def __init__(self) -> None:
        self.version = 0
        self.on_gpu: dict[str, dict[str, Instance]] = {}  # living instances, by id
        self.on_node: dict[str, dict[str, Instance]] = {}  # by the node of their first worker
        self.dormant: dict[str, list[Instance]] = {}  # node_id -> replicas, unfinished ones too, and sleepers
        self.leaving: dict[str, dict[str, Instance]] = {}  # node_id -> draining and sleeping ones
        self.longest_unused = LongestUnused()
        self.num_active: Counter[str] = Counter()  # by model_key, those that serve or will
        self.stages: dict[str, dict[str, Instance]] = {}  # pipeline -> later stages, gone ones too
        self.pipelines: dict[str, None] = {}
        self.reserved: dict[str, int] = {}  # gpu_id -> bytes claimed and not granted
        self.num_promises = 0  # grows when a dormant instance is promised or given back
        self.taken: dict[str, str] = {}  # dormant instance -> the one that grows from it or replaces it
        self.cordoned: set[str] = set()
        self.nodes = NodeIndex((), self.reserved, self.dormant, {})
        self._gpus: dict[str, tuple[str, Gpu]] = {}  # gpu_id -> node and row
        self._free: dict[str, int] = {}
        self._nodes: dict[str, Node] = {}
        self._granted: dict[str, dict[str, int]] = {}  # gpu_id -> holder -> bytes
        self._claims: dict[str, dict[str, int]] = {}  # gpu_id -> holder -> bytes
        self._claimed: dict[str, tuple[str, ...]] = {}  # holder -> gpu_ids
        self._share_keys: dict[str, str] = {}  # holder of claims -> share_key
        self._sharing: dict[str, dict[str, str]] = {}  # share_key -> gpu_id -> node_id
        self._rows: dict[str, Instance] = {}
        self._gone: list[tuple[float, str]] = []

    # nodes

    def put_node(self, node: Node) -> bool:
        """Add or update a node. Return whether a placement may succeed that could not before."""
        before, known = self.version, self._nodes.get(node.node_id)
        self._nodes[node.node_id] = node
        if known is None or _terms(known) != _terms(node):
            self.version += 1
        if known is not None and known.gpus != node.gpus:
            for gpu_id in {g.gpu_id for g in known.gpus} - {g.gpu_id for g in node.gpus}:
                self._drop_gpu(gpu_id)
        for gpu in node.gpus:
            _, was = self._gpus.get(gpu.gpu_id, ("", None))
            if was is gpu or was == gpu:
                continue
            free = -1 if was is None else self.free_bytes(gpu.gpu_id)
            self._note_shared(node.node_id, was, gpu)
            self._gpus[gpu.gpu_id], self._free[gpu.gpu_id] = (node.node_id, gpu), gpu.free_bytes
            granted = self._granted[gpu.gpu_id] = dict[str, int]()
            for grant in gpu.grants:
                granted[grant.holder] = granted.get(grant.holder, 0) + grant.num_bytes
            self._add_up(gpu.gpu_id)
            offers_more = was is not None and {one.key for one in gpu.shared} > {one.key for one in was.shared}
            self.version += self.free_bytes(gpu.gpu_id) > free or offers_more
        self._offer(node)
        return self.version > before

    def cordon(self, node_id: str, *, is_cordoned: bool) -> None:
        (self.cordoned.add if is_cordoned else self.cordoned.discard)(node_id)
        self.version += 1
        if self.nodes.node(node_id) is not None:
            self._offer(self._nodes[node_id])

    def withdraw(self, node_id: str) -> None:
        """Exclude a silent node until it reports again."""
        self.nodes.drop(node_id)

    def drop_node(self, node_id: str) -> None:
        """Remove a node that has left; its instances stay until their end is reported."""
        self.withdraw(node_id)
        node = self._nodes.pop(node_id, None)
        for gpu in node.gpus if node else ():
            self._drop_gpu(gpu.gpu_id)

    def _offer(self, node: Node) -> None:
        self.nodes.put(replace(node, draining=True) if node.node_id in self.cordoned else node)

    def _drop_gpu(self, gpu_id: str) -> None:
        node_id, gpu = self._gpus.pop(gpu_id, ("", None))
        self._note_shared(node_id, gpu, None)
        self._free.pop(gpu_id, None)
        self._granted.pop(gpu_id, None)
        self._add_up(gpu_id)

    # bytes

    def _note_shared(self, node_id: str, was: Gpu | None, gpu: Gpu | None) -> None:
        if was is not None:
            for weights in was.shared:
                there = self._sharing.get(weights.key, {})
                there.pop(was.gpu_id, None)  # a row may list a key twice
                if not there:
                    self._sharing.pop(weights.key, None)
        if gpu is not None:
            for weights in gpu.shared:
                self._sharing.setdefault(weights.key, {})[gpu.gpu_id] = node_id

    def free_bytes(self, gpu_id: str) -> int:
        """Bytes neither granted nor claimed; 0 for an unknown GPU."""
        free = self._free.get(gpu_id)
        return free - self.reserved.get(gpu_id, 0) if free is not None else 0

    def granted(self, gpu_id: str) -> Mapping[str, int]:
        return self._granted.get(gpu_id, {})

    def bytes_of(self, gpu_id: str, holders: Iterable[str], share_key: str = "") -> int:
        """Bytes granted to or claimed by the holders, without the weights shared under `share_key`."""
        granted, claims = self.granted(gpu_id), self._claims.get(gpu_id, {})
        total = sum(granted[holder] if holder in granted else claims.get(holder, 0) for holder in holders)
        shared = self.shared(gpu_id, share_key)
        return total - (shared.num_bytes if shared and not shared.counts and shared.holders[0] in holders else 0)

    def shared(self, gpu_id: str, share_key: str) -> SharedWeights | None:
        _, gpu = self._gpus.get(gpu_id, ("", None))
        return gpu.shares(share_key) if gpu is not None and share_key else None

    def is_shared(self, share_key: str) -> bool:
        return bool(self._sharing.get(share_key))

    def counted_twice(self, gpu_id: str, holders: Collection[str]) -> int:
        """Bytes of shared weights counted too often when the holders' bytes are added up."""
        _, gpu = self._gpus.get(gpu_id, ("", None))
        extra = 0
        for weights in gpu.shared if gpu is not None else ():
            num_going = sum(holder in holders for holder in weights.holders)
            extra += weights.num_bytes * (num_going - (num_going == len(weights.holders)))
        return extra

    @contextmanager
    def seen_by(self, share_key: str) -> Iterator[None]:
        """Within this context, count weights shared under that key as free in `nodes` (Gpu.seen_by)."""
        node_ids = dict.fromkeys(self._sharing.get(share_key, {}).values()) if share_key else ()
        before = [node for node_id in node_ids if (node := self.nodes.node(node_id)) is not None]
        for node in before:
            self.nodes.put(replace(node, gpus=tuple(gpu.seen_by(share_key) for gpu in node.gpus)))
        try:
            yield
        finally:
            for node in before:
                self.nodes.put(node)

    def claim(self, holder: str, num_bytes: Mapping[str, int], share_key: str = "") -> None:
        """Promise bytes (gpu_id -> bytes), replacing the holder's earlier claim. Weights already shared under
        `share_key` are not claimed again."""
        old = self._claimed.pop(holder, ())
        self._share_keys.pop(holder, None)
        for gpu_id in old:
            self._claims[gpu_id].pop(holder, None)
        for gpu_id, num in num_bytes.items():
            self._claims.setdefault(gpu_id, {})[holder] = num
        if num_bytes:
            self._claimed[holder] = tuple(num_bytes)
            if share_key:
                self._share_keys[holder] = share_key
        for gpu_id in {*old, *num_bytes}:
            before = self.free_bytes(gpu_id)
            self._add_up(gpu_id)
            self.version += self.free_bytes(gpu_id) > before

    @contextmanager
    def without(self, holder: str) -> Iterator[None]:
        """Within this context, ignore the holder's claims, to try its placement anew."""
        version, claims = self.version, {g: self._claims[g][holder] for g in self._claimed.get(holder, ())}
        share_key = self._share_keys.get(holder, "")
        self.claim(holder, {})
        try:
            yield
        finally:
            self.claim(holder, claims, share_key)
            self.version = version

    def _add_up(self, gpu_id: str) -> None:
        claims = self._claims.get(gpu_id, {})
        granted = self._granted.get(gpu_id, {})
        total = sum(num for holder, num in claims.items() if holder not in granted) if claims else 0
        if total and self._share_keys:
            waiting = ((holder, num) for holder, num in claims.items() if holder not in granted)
            total -= sum(self._shared_already(gpu_id, holder, num) for holder, num in waiting)
        if total != self.reserved.get(gpu_id, 0) and gpu_id in self._gpus:
            self.nodes.touch(self._gpus[gpu_id][0])
        if total:
            self.reserved[gpu_id] = total
        else:
            self.reserved.pop(gpu_id, None)
            if not claims:
                self._claims.pop(gpu_id, None)

    def _shared_already(self, gpu_id: str, holder: str, num_claimed: int) -> int:
        shared = self.shared(gpu_id, self._share_keys.get(holder, ""))
        return min(shared.num_bytes, num_claimed) if shared else 0

    # instances

    def put_row(self, row: Instance) -> bool:
        """Add or update an instance. Return whether to retry placements that wait for bytes."""
        before, old = self.version, self._rows.get(row.instance_id)
        if old is not None:
            self._unlist(old)
        self._rows[row.instance_id] = row
        self._list(row)
        claims: Counter[str] = Counter()
        for worker in row.workers if _holds_bytes(row) else ():
            if worker.node_id == row.node_id:
                claims[worker.gpu_id] += worker.num_bytes
        self.claim(row.instance_id, claims, self._share_keys.get(row.instance_id, ""))
        has_changed = old is None or old.state is not row.state
        return self.version > before or (has_changed and not row.state.is_coming)

    def forget(self, instance_id: str) -> None:
        old = self._rows.pop(instance_id, None)
        if old is not None:
            self._unlist(old)
            self.claim(instance_id, {})
        self.taken.pop(instance_id, None)
        self._give_back_all(instance_id)

    @property
    def rows(self) -> Mapping[str, Instance]:
        return self._rows

    def keep_only(self, instance_ids: Iterable[str]) -> None:
        for instance_id in self._rows.keys() - set(instance_ids):
            self.forget(instance_id)

    def gone_before(self, before_s: float) -> list[Instance]:
        """Dequeue the instances gone since before that time."""
        found = dict[str, Instance]()
        while self._gone and self._gone[0][0] < before_s:
            _, instance_id = heapq.heappop(self._gone)
            row = self._rows.get(instance_id)
            if row is not None and row.state.is_gone and row.changed_at < before_s:
                found[instance_id] = row
        return list(found.values())

    def _list(self, row: Instance) -> None:
        if row.part_of:
            self.stages.setdefault(row.part_of, {})[row.instance_id] = row
        if row.state.is_gone:
            heapq.heappush(self._gone, (row.changed_at, row.instance_id))
            self.taken.pop(row.instance_id, None)
        if row.state.is_gone or row.state is InstanceState.READY:
            self._give_back_all(row.instance_id)
        if row.state.is_gone:
            return
        if not (row.is_whole or row.part_of):
            self.pipelines[row.instance_id] = None
        self.nodes.touch(row.node_id)
        self.on_node.setdefault(row.node_id, {})[row.instance_id] = row
        for worker in row.workers:
            if worker.node_id == row.node_id:
                self.on_gpu.setdefault(worker.gpu_id, {})[row.instance_id] = row
        if row.state in LEAVING:
            self.leaving.setdefault(row.node_id, {})[row.instance_id] = row
        else:
            self.longest_unused.note(row.node_id, row.ready_at)
        if row.serves and row.state is not InstanceState.DRAINING:
            self.num_active[row.model_key] += 1
        if _is_copy(row) and row.instance_id not in self.taken:
            self.dormant.setdefault(row.node_id, []).append(row)

    def _unlist(self, row: Instance) -> None:
        if row.part_of:
            _out_of(self.stages, row.part_of, row.instance_id)
        if row.state.is_gone:
            return
        self.pipelines.pop(row.instance_id, None)
        self.nodes.touch(row.node_id)
        _out_of(self.on_node, row.node_id, row.instance_id)
        for worker in row.workers:
            _out_of(self.on_gpu, worker.gpu_id, row.instance_id)
        if row.state in LEAVING:
            _out_of(self.leaving, row.node_id, row.instance_id)
        if row.serves and row.state is not InstanceState.DRAINING:
            self.num_active[row.model_key] -= 1
            if not self.num_active[row.model_key]:
                del self.num_active[row.model_key]
        if _is_copy(row):
            self._not_dormant(row)

    # promised copies

    def take(self, replica_id: str, taker: str) -> None:
        """Promise a dormant instance to `taker`, the only start that may use it."""
        self.taken[replica_id] = taker
        self.num_promises += 1
        row = self._rows.get(replica_id)
        if row is not None:
            self._not_dormant(row)

    def give_back(self, replica_id: str) -> None:
        """Free a dormant instance whose start did not happen."""
        row = self._rows.get(replica_id)
        self.num_promises += 1
        if self.taken.pop(replica_id, None) is not None and row is not None and _is_copy(row):
            self.nodes.touch(row.node_id)
            self.dormant.setdefault(row.node_id, []).append(row)
            self.version += 1

    def _give_back_all(self, taker: str) -> None:
        for replica_id in [r for r, by in self.taken.items() if by == taker]:
            self.give_back(replica_id)

    def _not_dormant(self, row: Instance) -> None:
        self.nodes.touch(row.node_id)
        kept = [r for r in self.dormant.get(row.node_id, ()) if r.instance_id != row.instance_id]
        if kept:
            self.dormant[row.node_id] = kept
        else:
            self.dormant.pop(row.node_id, None)


def _terms(node: Node) -> tuple[object, ...]:
    return node.engines, node.draining, node.abilities


def _holds_bytes(row: Instance) -> bool:
    return not (row.state.is_gone or row.state is InstanceState.DRAINING or row.state.is_dormant)


def _is_copy(row: Instance) -> bool:
    return row.state.is_dormant or (row.replica and row.state.is_coming)


def _out_of(index: dict[str, dict[str, Instance]], key: str, instance_id: str) -> None:
    rows = index.get(key)
    if rows is not None and rows.pop(instance_id, None) is not None and not rows:
        del index[key]
