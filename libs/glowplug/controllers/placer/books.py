"""What lies on which GPU, kept as events come: nobody scans the fleet to know it.

A *claim* is bytes promised to a holder that its GPU's ledger does not show yet: of a placement, or of an instance whose
start was told before the beat that shows its grant. `version` grows when bytes come free anywhere or a node joins: a
placement that found no room need not ask again before.
"""

import heapq
from collections.abc import Iterable, Iterator, Mapping

from glowplug.domain.hardware import Gpu, Node
from glowplug.domain.instance import Instance, InstanceState


class Books:
    """Indices over nodes and rows. Sizes in bytes; every change costs what it changes."""

    def __init__(self) -> None:
        self.version = 0
        self.by_gpu: dict[str, dict[str, Instance]] = {}  # those that are not gone
        self.by_node: dict[str, dict[str, Instance]] = {}  # likewise, by the node of their first worker
        self.dormant: dict[str, list[Instance]] = {}  # node_id -> replicas, coming ones too, and engines asleep
        self.parts: dict[str, dict[str, Instance]] = {}  # pipeline -> rows of its later stages, gone ones too
        self.reserved: dict[str, int] = {}  # gpu_id -> bytes claimed and not granted
        self.num_promises = 0  # grows whenever a dormant row is promised or given back
        self.taken: dict[str, str] = {}  # dormant row -> the instance it is promised to, or that takes its place
        self._gpus: dict[str, Gpu] = {}
        self._free: dict[str, int] = {}  # gpu_id -> bytes not granted
        self._nodes: dict[str, Node] = {}
        self._held: dict[str, dict[str, int]] = {}  # gpu_id -> holder -> bytes granted
        self._claims: dict[str, dict[str, int]] = {}  # gpu_id -> holder -> bytes claimed
        self._claimed: dict[str, tuple[str, ...]] = {}  # holder -> gpu_ids
        self._rows: dict[str, Instance] = {}
        self._gone: list[tuple[float, str]] = []

    # nodes

    def node(self, node: Node) -> bool:
        """A node as it is now. Whether something may be placed that could not before."""
        before, known = self.version, self._nodes.get(node.node_id)
        self._nodes[node.node_id] = node
        if known is None or _terms(known) != _terms(node):
            self.version += 1
        if known is not None and known.gpus != node.gpus:
            for gpu_id in {g.gpu_id for g in known.gpus} - {g.gpu_id for g in node.gpus}:
                self._drop_gpu(gpu_id)
        for gpu in node.gpus:
            was = self._gpus.get(gpu.gpu_id)
            if was is gpu or was == gpu:
                continue
            room = -1 if was is None else self.room(gpu.gpu_id)
            self._gpus[gpu.gpu_id], self._free[gpu.gpu_id] = gpu, gpu.free_bytes
            held: dict[str, int] = {}
            for grant in gpu.grants:
                held[grant.holder] = held.get(grant.holder, 0) + grant.num_bytes
            self._held[gpu.gpu_id] = held
            self._recount(gpu.gpu_id)
            self.version += self.room(gpu.gpu_id) > room
        return self.version > before

    def drop_node(self, node_id: str) -> None:
        """It has left. Its rows stay until somebody says what became of them."""
        node = self._nodes.pop(node_id, None)
        for gpu in node.gpus if node else ():
            self._drop_gpu(gpu.gpu_id)

    def _drop_gpu(self, gpu_id: str) -> None:
        self._gpus.pop(gpu_id, None)
        self._free.pop(gpu_id, None)
        self._held.pop(gpu_id, None)
        self._recount(gpu_id)

    def room(self, gpu_id: str) -> int:
        """Bytes neither granted nor promised; 0 on a GPU that is not known."""
        free = self._free.get(gpu_id)
        return free - self.reserved.get(gpu_id, 0) if free is not None else 0

    def holders(self, gpu_id: str) -> Mapping[str, int]:
        """Who is granted how much there."""
        return self._held.get(gpu_id, {})

    def held_bytes(self, gpu_id: str, holders: Iterable[str]) -> int:
        """What those hold on that GPU, or are promised there."""
        held, claims = self.holders(gpu_id), self._claims.get(gpu_id, {})
        return sum(held.get(holder, claims.get(holder, 0)) for holder in holders)

    # claims

    def claim(self, holder: str, bytes_by_gpu: Mapping[str, int]) -> None:
        """Promise bytes to a holder, in place of what it was promised before."""
        old = self._claimed.pop(holder, ())
        for gpu_id in old:
            self._claims[gpu_id].pop(holder, None)
        for gpu_id, num_bytes in bytes_by_gpu.items():
            self._claims.setdefault(gpu_id, {})[holder] = num_bytes
        if bytes_by_gpu:
            self._claimed[holder] = tuple(bytes_by_gpu)
        for gpu_id in {*old, *bytes_by_gpu}:
            before = self.room(gpu_id)
            self._recount(gpu_id)
            self.version += self.room(gpu_id) > before

    def set_aside(self, holder: str) -> dict[str, int]:
        """Take its claims off the books while its own placement is tried; `put_back` what is returned."""
        claims = {gpu_id: self._claims[gpu_id].pop(holder) for gpu_id in self._claimed.pop(holder, ())}
        for gpu_id in claims:
            self._recount(gpu_id)
        return claims

    def put_back(self, holder: str, claims: Mapping[str, int]) -> None:
        version = self.version
        self.claim(holder, claims)
        self.version = version

    def _recount(self, gpu_id: str) -> None:
        claims = self._claims.get(gpu_id)
        held = self._held.get(gpu_id, {})
        total = sum(n for holder, n in claims.items() if holder not in held) if claims else 0
        if total:
            self.reserved[gpu_id] = total
        else:
            self.reserved.pop(gpu_id, None)
            if not claims:
                self._claims.pop(gpu_id, None)

    # rows

    def row(self, row: Instance) -> bool:
        """One instance as it is now. Whether anybody who waits for room should look again."""
        before, old = self.version, self._rows.get(row.instance_id)
        if old is not None:
            self._unlist(old)
        self._rows[row.instance_id] = row
        self._list(row)
        is_held = not row.state.is_gone and row.state is not InstanceState.DRAINING and not row.state.is_dormant
        claims: dict[str, int] = {}
        for worker in row.workers if is_held else ():
            if worker.node_id == row.node_id:
                claims[worker.gpu_id] = claims.get(worker.gpu_id, 0) + worker.num_bytes
        if claims or row.instance_id in self._claimed:
            self.claim(row.instance_id, claims)
        turned = old is None or old.state is not row.state
        return self.version > before or (turned and not row.state.is_coming)

    def forget(self, instance_id: str) -> None:
        """No row of it any more."""
        old = self._rows.pop(instance_id, None)
        if old is not None:
            self._unlist(old)
            self.claim(instance_id, {})
        self.taken.pop(instance_id, None)
        self._give_back_all(instance_id)

    def living(self) -> Iterator[Instance]:
        """Rows that are not gone."""
        return (row for rows in self.by_node.values() for row in rows.values())

    def only(self, instance_ids: Iterable[str]) -> None:
        """Forget every row but these."""
        for instance_id in self._rows.keys() - set(instance_ids):
            self.forget(instance_id)

    def _list(self, row: Instance) -> None:
        if row.part_of:
            self.parts.setdefault(row.part_of, {})[row.instance_id] = row
        if row.state.is_gone:
            heapq.heappush(self._gone, (row.changed_at, row.instance_id))
            self.taken.pop(row.instance_id, None)
        if row.state.is_gone or row.state is InstanceState.READY:  # what was promised to it and still lies there
            self._give_back_all(row.instance_id)
        if row.state.is_gone:
            return
        self.by_node.setdefault(row.node_id, {})[row.instance_id] = row
        for worker in row.workers:
            if worker.node_id == row.node_id:
                self.by_gpu.setdefault(worker.gpu_id, {})[row.instance_id] = row
        if _is_copy(row) and row.instance_id not in self.taken:
            self.dormant.setdefault(row.node_id, []).append(row)

    def _unlist(self, row: Instance) -> None:
        if row.part_of:
            _out_of(self.parts, row.part_of, row.instance_id)
        _out_of(self.by_node, row.node_id, row.instance_id)
        for worker in row.workers:
            _out_of(self.by_gpu, worker.gpu_id, row.instance_id)
        if _is_copy(row):
            self._not_dormant(row)

    def _not_dormant(self, row: Instance) -> None:
        kept = [r for r in self.dormant.get(row.node_id, ()) if r.instance_id != row.instance_id]
        if kept:
            self.dormant[row.node_id] = kept
        else:
            self.dormant.pop(row.node_id, None)

    def take(self, replica_id: str, taker: str) -> None:
        """A dormant row is promised: nobody else grows from it or drops it."""
        self.taken[replica_id] = taker
        self.num_promises += 1
        row = self._rows.get(replica_id)
        if row is not None:
            self._not_dormant(row)

    def give_back(self, replica_id: str) -> None:
        """What it was promised for did not come to be."""
        row = self._rows.get(replica_id)
        self.num_promises += 1
        if self.taken.pop(replica_id, None) is not None and row is not None and _is_copy(row):
            self.dormant.setdefault(row.node_id, []).append(row)
            self.version += 1

    def _give_back_all(self, taker: str) -> None:
        for replica_id in [r for r, by in self.taken.items() if by == taker]:
            self.give_back(replica_id)

    def gone_before(self, before_s: float) -> list[Instance]:
        """Rows gone since before that time, each told once."""
        found = []
        while self._gone and self._gone[0][0] < before_s:
            _, instance_id = heapq.heappop(self._gone)
            row = self._rows.get(instance_id)
            if row is not None and row.state.is_gone and row.changed_at < before_s:
                found.append(row)
        return found


def _terms(node: Node) -> tuple[object, ...]:
    return node.engines, node.draining, node.abilities


def _is_copy(row: Instance) -> bool:
    """A replica, there or on its way, or an engine asleep."""
    return row.state.is_dormant or (row.replica and row.state.is_coming)


def _out_of(index: dict[str, dict[str, Instance]], key: str, instance_id: str) -> None:
    rows = index.get(key)
    if rows is not None and rows.pop(instance_id, None) is not None and not rows:
        del index[key]
