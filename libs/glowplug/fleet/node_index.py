"""Index the fleet's nodes, so that a placement finds its candidates without reading every node.

A placement ranks nodes by offer (rate, losses, id) and takes the first few. Nodes of one `NodeKind` differ only in free
bytes and id, so its first few with enough bytes represent it, found by a tree of maxima over the ids. Nodes with copies
to drop or busy links are examined one by one.

The owner reports changes (`NodeIndex`), policies only read (`IndexedNodes`); an answer holds until the next change.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

from glowplug.domain.hardware import CachedWeights, Node
from glowplug.domain.instance import Instance, InstanceState
from glowplug.domain.model import Model

_Answer = TypeVar("_Answer")
_NOWHERE = -1  # free bytes of a node that is no candidate


@dataclass(frozen=True, slots=True, eq=False)
class NodeKind:
    """All that matters to a start, except id and free bytes."""

    engines: tuple[str, ...]
    abilities: tuple[str, ...]
    draining: bool
    rates: tuple[tuple[str, float], ...]  # of its links, by the last part of their names
    gpus: tuple[tuple[str, int], ...]  # kind and total bytes

    def takes(self, engine: str) -> bool:
        return not self.draining and engine in self.engines

    def could_hold(self, num_bytes: int, num_gpus: int, engine: str) -> bool:
        return engine in self.engines and sum(total >= num_bytes for _, total in self.gpus) >= num_gpus

    @property
    def is_mixed(self) -> bool:
        return len({total for _, total in self.gpus}) > 1


@dataclass(slots=True, eq=False)
class NodeMemory:
    """One node. `free`, `bare` and `cleared` are bytes by GPU, largest first."""

    node: Node
    kind: NodeKind
    at: int = _NOWHERE  # position by id
    rows: tuple[Instance, ...] = ()
    free: tuple[int, ...] = ()  # neither granted nor promised
    bare: tuple[int, ...] = ()  # ... of the GPUs without droppable copies
    cleared: tuple[int, ...] = ()  # ... with every copy dropped
    answers: dict[Any, Any] = field(default_factory=dict)


class IndexedNodes:
    """Nodes by id with their offers, read-only. `reserved`: gpu_id -> bytes promised; `dormant`: node_id -> dormant
    rows; `scores`: replica id -> worth when last planned."""

    def __init__(
        self, reserved: Mapping[str, int], dormant: Mapping[str, Sequence[Instance]], scores: Mapping[str, float]
    ) -> None:
        self.reserved, self.dormant, self.scores = reserved, dormant, scores
        self._by_id: dict[str, NodeMemory] = {}
        self._kinds: Counter[NodeKind] = Counter()
        self._changed: set[str] = set()
        self._order: list[str] | None = None
        self._kind_of: dict[Any, NodeKind] = {}
        self._trees: dict[NodeKind, dict[tuple[int, str], _Maxima]] = {}  # by number of GPUs, and "free" or "bare"
        self._with_rows: dict[str, tuple[Instance, ...]] = {}
        self._copies: dict[str, dict[str, Instance]] = {}  # model_key -> dormant rows by id
        self._worthless: set[str] = set()  # nodes with a copy of score 0
        self._caching: dict[str, set[str]] = {}  # digest -> nodes with the weights in memory
        self._on_disk: dict[str, set[str]] = {}  # ... and on disk

    # questions

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Node]:
        return (self._by_id[node_id].node for node_id in self._ids())

    def node(self, node_id: str) -> Node | None:
        """Return the node, or None if it is not alive."""
        known = self._by_id.get(node_id)
        return known.node if known else None

    def kinds(self) -> Collection[NodeKind]:
        return self._kinds.keys()

    def num_able(self, engine: str, ability: str) -> int:
        named = f"{engine}:{ability}"
        return sum(num for kind, num in self._kinds.items() if kind.takes(engine) and named in kind.abilities)

    def could_hold(self, num_bytes: int, num_gpus: int, engine: str, *, even_draining: bool = True) -> bool:
        kinds = (kind for kind in self._kinds if even_draining or not kind.draining)
        return any(kind.could_hold(num_bytes, num_gpus, engine) for kind in kinds)

    def models_with_copies(self) -> Collection[str]:
        self._work_out()
        return self._copies.keys()

    def copies(self, model: Model) -> tuple[Instance, ...]:
        """Dormant instances to grow from: none that is outdated."""
        self._work_out()
        return tuple(row for row in self._copies.get(model.key, {}).values() if not row.is_outdated(model))

    def holders(self, model: Model) -> Set[str] | None:
        """Ids of nodes with the weights in host memory; None: every node."""
        return _having(self._caching, model) if model.weights.uri else None

    def disk_holders(self, model: Model) -> Set[str]:
        return _having(self._on_disk, model) if model.weights.uri else frozenset()

    def among(self, node_ids: Collection[str] | None, num_bytes: int, num_gpus: int, engine: str) -> list[Node]:
        """Return the nodes of `node_ids` (None: all) that have the bytes once copies are dropped, by id."""
        self._work_out()
        ids = self._by_id.keys() if node_ids is None else node_ids
        found = (node_id for node_id in ids if self._offers(node_id, "cleared", num_bytes, num_gpus, engine))
        return [self._by_id[node_id].node for node_id in sorted(found)]

    def candidates(
        self,
        needs: Sequence[int],
        num_gpus: int,
        engine: str,
        count: int,
        *,
        drops: str = "",
        loses: Callable[[NodeMemory], float] | None = None,
        busy: Collection[str] = (),
        only: Set[str] | None = None,
        besides: Set[str] = frozenset(),
    ) -> list[Node]:
        """Return, by id, the first `count` nodes of each kind for each of `needs` (bytes on each of `num_gpus` GPUs),
        ordered by (loss, id), and perhaps others.

        `drops`: on which GPUs nothing is lost if copies may be dropped: "bare" ones (without copies) or "free" ones;
        "": none may be dropped. `loses`: the loss of any other node, cached per node and (needs, num_gpus, drops) until
        the node changes. `busy`: nodes ranked one by one, all returned. `only`, `besides`: nodes to search in or to
        leave out.
        """
        self._work_out()
        ids, least, which = self._ids(), min(needs), drops or "free"
        reach = "cleared" if drops else "free"
        if only is not None and len(only) * 8 < len(ids):
            return [n for n in self.among(only, least, num_gpus, engine) if n.node_id not in besides]
        found = {*busy, *(self._worthless if drops else ())}
        for kind in self._taking(engine):
            if kind.is_mixed:
                found.update(node_id for node_id, known in self._by_id.items() if known.kind is kind)
                continue
            short: list[int] = []
            for need in needs:
                places = self._first(kind, num_gpus, which, need, count, only, (besides, busy))
                found.update(ids[place] for place in places)
                if len(places) < count:
                    short.append(need)
            if loses is not None and short:
                here = {n for n in self._with_rows if n in self._by_id and self._by_id[n].kind is kind}
                here = (here if only is None else here & only) - besides - set(busy)
                able = [n for n in here if self._offers(n, reach, min(short), num_gpus, engine)]
                question = ("loses", tuple(needs), num_gpus, drops)
                ranked = sorted((self._answer(self._by_id[n], question, loses), n) for n in able)
                for need in short:
                    fits = (n for _, n in ranked if self._offers(n, reach, need, num_gpus, engine))
                    found.update(islice(fits, count))
        asked = (n for n in found if (only is None or n in only) and n not in besides)
        offering = (n for n in asked if self._offers(n, reach, least, num_gpus, engine))
        return [self._by_id[node_id].node for node_id in sorted(offering)]

    def answers(
        self, question: Any, answer: Callable[[NodeMemory], _Answer], nodes: Iterable[Node] | None = None
    ) -> Iterator[_Answer]:
        """Answer a question about each node by id, or each of `nodes`; cached until the node changes."""
        self._work_out()
        for node_id in self._ids() if nodes is None else (node.node_id for node in nodes):
            yield self._answer(self._by_id[node_id], question, answer)

    @staticmethod
    def _answer(known: NodeMemory, question: Any, answer: Callable[[NodeMemory], _Answer]) -> _Answer:
        if question not in known.answers:
            known.answers[question] = answer(known)
        found: _Answer = known.answers[question]
        return found

    # recomputing

    def _kind(self, node: Node) -> NodeKind:
        gpus = tuple((gpu.kind, gpu.total_bytes) for gpu in node.gpus)
        what = (node.engines, node.abilities, node.draining, _rates(node), gpus)
        known = self._kind_of.get(what)
        if known is None:
            known = self._kind_of[what] = NodeKind(*what)
        return known

    def _ids(self) -> list[str]:
        if self._order is None:
            self._order = sorted(self._by_id)
            self._trees.clear()
            for place, node_id in enumerate(self._order):
                self._by_id[node_id].at = place
        return self._order

    def _taking(self, engine: str) -> list[NodeKind]:
        return [kind for kind in self._kinds if kind.takes(engine)]

    def _offers(self, node_id: str, reach: str, num_bytes: int, num_gpus: int, engine: str) -> bool:
        known = self._by_id.get(node_id)
        if known is None or not known.kind.takes(engine):
            return False
        has = known.cleared if reach == "cleared" else known.free
        return len(has) >= num_gpus and has[num_gpus - 1] >= num_bytes

    def _first(
        self,
        kind: NodeKind,
        num_gpus: int,
        which: str,
        need: int,
        count: int,
        only: Set[str] | None = None,
        besides: Sequence[Collection[str]] = (),
    ) -> list[int]:
        self._work_out()
        ids = self._ids()
        trees = self._trees.setdefault(kind, {})
        tree = trees.get((num_gpus, which))
        if tree is None:
            has = [_NOWHERE] * len(ids)
            for known in self._by_id.values():
                if known.kind is kind:
                    has[known.at] = _nth(getattr(known, which), num_gpus)
            tree = trees[num_gpus, which] = _Maxima(has)
        places: list[int] = []
        for place in tree.at_least(max(0, need)):
            if (only is None or ids[place] in only) and not any(ids[place] in others for others in besides):
                places.append(place)
                if len(places) == count:
                    break
        return places

    def _work_out(self) -> None:
        if not self._changed:
            return
        changed, self._changed = self._changed, set()
        for node_id in changed:
            self._note_rows(node_id)
            known = self._by_id.get(node_id)
            if known is not None:
                self._weigh(known)
                self._judge(node_id, known)

    def _note_rows(self, node_id: str) -> None:
        before, rows = self._with_rows.pop(node_id, ()), tuple(self.dormant.get(node_id, ()))
        if rows:
            self._with_rows[node_id] = rows
        for row in before:
            mine = self._copies.get(row.model_key)
            if mine is not None and mine.pop(row.instance_id, None) is not None and not mine:
                del self._copies[row.model_key]
        for row in rows:
            self._copies.setdefault(row.model_key, {})[row.instance_id] = row

    def _weigh(self, known: NodeMemory) -> None:
        known.answers.clear()
        known.rows = self._with_rows.get(known.node.node_id, ())
        droppable = {row.instance_id for row in known.rows if row.state is not InstanceState.SWAPPED_OUT}
        free, bare, cleared = [], [], []
        for gpu in known.node.gpus:
            here = gpu.free_bytes - self.reserved.get(gpu.gpu_id, 0)
            copies = [grant.num_bytes for grant in gpu.grants if grant.holder in droppable] if droppable else []
            free.append(here)
            cleared.append(here + (gpu.freed_by(droppable) if gpu.shared else sum(copies)))
            if not copies:
                bare.append(here)
        known.free, known.bare, known.cleared = (tuple(sorted(has, reverse=True)) for has in (free, bare, cleared))
        if self._order is not None:
            for (num_gpus, which), tree in self._trees.get(known.kind, {}).items():
                tree.put(known.at, _nth(getattr(known, which), num_gpus))

    def _judge(self, node_id: str, known: NodeMemory) -> None:
        if any(not self.scores.get(row.instance_id) for row in known.rows):
            self._worthless.add(node_id)
        else:
            self._worthless.discard(node_id)

    def _leave_trees(self, known: NodeMemory) -> None:
        if self._order is not None:
            for tree in self._trees.get(known.kind, {}).values():
                tree.put(known.at, _NOWHERE)

    @staticmethod
    def _cache(
        known: dict[str, set[str]], node_id: str, before: Sequence[CachedWeights], now: Sequence[CachedWeights]
    ) -> None:
        old, new = {one.digest for one in before}, {one.digest for one in now}
        for digest in old - new:
            known[digest].discard(node_id)
            if not known[digest]:
                del known[digest]
        for digest in new - old:
            known.setdefault(digest, set()).add(node_id)

    @staticmethod
    def _count(counter: Counter[Any], key: Any, by: int) -> None:
        counter[key] += by
        if not counter[key]:
            del counter[key]


class NodeIndex(IndexedNodes):
    """The owner's index. Call `touch` or `score` after changing `reserved`, `dormant` or `scores`."""

    def __init__(
        self,
        nodes: Iterable[Node] = (),
        reserved: Mapping[str, int] | None = None,
        dormant: Mapping[str, Sequence[Instance]] | None = None,
        scores: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(
            {} if reserved is None else reserved, {} if dormant is None else dormant, {} if scores is None else scores
        )
        for node in nodes:
            self.put(node)
        self._changed.update(self.dormant)

    def put(self, node: Node) -> None:
        node_id, known = node.node_id, self._by_id.get(node.node_id)
        if known is None:
            self._by_id[node_id] = known = NodeMemory(node, self._kind(node))
            self._kinds[known.kind] += 1
            self._order = None
            self._cache(self._caching, node_id, (), node.cached)
            self._cache(self._on_disk, node_id, (), node.on_disk)
            self._changed.add(node_id)
            return
        before, known.node = known.node, node
        if before.cached is not node.cached and before.cached != node.cached:
            self._cache(self._caching, node_id, before.cached, node.cached)
            known.answers.clear()
        if before.on_disk is not node.on_disk and before.on_disk != node.on_disk:
            self._cache(self._on_disk, node_id, before.on_disk, node.on_disk)
        if not _is_like(before, node):
            kind = self._kind(node)
            if kind is not known.kind:
                self._leave_trees(known)
                self._count(self._kinds, known.kind, -1)
                self._kinds[kind] += 1
                known.kind = kind
            self._changed.add(node_id)

    def touch(self, node_id: str) -> None:
        """Note changed promises, rows or scores of a node."""
        self._changed.add(node_id)

    def drop(self, node_id: str) -> None:
        gone = self._by_id.pop(node_id, None)
        if gone is not None:
            self._leave_trees(gone)
            self._count(self._kinds, gone.kind, -1)
            self._cache(self._caching, node_id, gone.node.cached, ())
            self._cache(self._on_disk, node_id, gone.node.on_disk, ())
            self._worthless.discard(node_id)
            self._order = None

    def score(self, scores: Mapping[str, float]) -> None:
        self._work_out()
        self.scores, self._worthless = scores, set()
        for node_id in self._with_rows:
            if (known := self._by_id.get(node_id)) is not None:
                known.answers.clear()
                self._judge(node_id, known)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetView:
    """The living nodes by id, as a policy sees them; cordoned ones are marked draining. Prefer `fleet`: iterating over
    `nodes` is linear in the fleet."""

    now_s: float
    nodes: Sequence[Node] | IndexedNodes
    reserved: Mapping[str, int] = field(default_factory=dict)  # gpu_id -> bytes promised, not yet in the ledger
    dormant: Mapping[str, Sequence[Instance]] = field(default_factory=dict)  # replicas (even unfinished), sleepers
    scores: Mapping[str, float] = field(default_factory=dict)  # replica id -> worth when last planned
    _built: list[NodeIndex] = field(default_factory=list, init=False, compare=False, repr=False)

    @property
    def fleet(self) -> IndexedNodes:
        """Return the index given as `nodes`, or one built from these nodes."""
        if isinstance(self.nodes, IndexedNodes):
            return self.nodes
        if not self._built:
            self._built.append(NodeIndex(self.nodes, self.reserved, self.dormant, self.scores))
        return self._built[0]


class _Maxima:
    """A tree of maxima that finds the first numbers that are large enough."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._size = 1 << max(0, len(numbers) - 1).bit_length()
        self._most = [_NOWHERE] * self._size + list(numbers) + [_NOWHERE] * (self._size - len(numbers))
        for at in range(self._size - 1, 0, -1):
            self._most[at] = max(self._most[2 * at], self._most[2 * at + 1])

    def put(self, place: int, number: int) -> None:
        at, most = place + self._size, self._most
        most[at] = number
        while at > 1:
            at >>= 1
            largest = max(most[2 * at], most[2 * at + 1])
            if most[at] == largest:
                break
            most[at] = largest

    def at_least(self, least: int) -> Iterator[int]:
        waiting = [1]
        while waiting:
            at = waiting.pop()
            if self._most[at] < least:
                continue
            if at >= self._size:
                yield at - self._size
            else:
                waiting += (2 * at + 1, 2 * at)


def _nth(has: Sequence[int], num: int) -> int:
    return has[num - 1] if len(has) >= num else _NOWHERE


def _is_like(one: Node, other: Node) -> bool:
    return (one.gpus is other.gpus or one.gpus == other.gpus) and (
        one.engines == other.engines
        and one.abilities == other.abilities
        and one.draining == other.draining
        and (one.links is other.links or _rates(one) == _rates(other))
    )


def _rates(node: Node) -> tuple[tuple[str, float], ...]:
    return tuple((link.link_id.rpartition("/")[2], link.bytes_per_s) for link in node.links)


def _having(known: Mapping[str, set[str]], model: Model) -> Set[str]:
    return known.get(model.weights.digest, frozenset()) if known else frozenset()
