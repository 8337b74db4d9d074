"""The layout of a cold start: pipeline stages, full-memory ones among them, and servers.

Paper: HydraServe sections 4.1 and 5.2, Algorithm 1. With s stages of which w are full-memory workers, model bytes M,
and for each server q the network share b_q and the PCIe rate p_q:

    fetch   = max_q( max(t_cc + t_cu + max(M/(s p_q), t_l),  M/(s b_q) + chunk/p_q) )     (5), with the last chunk
    TTFT    = fetch + t_w + t_p (s - w + w/s) + t_n (s - 1)
    TPOT    = t_d (s - w + w/s) + t_n s    (t_n only where s > 1)                          (2)

Departures:
- An engine's work after loading (t_w: graphs, first token) has no term in the paper and overlaps with nothing. Eq. 5 is
  for engines that load while weights arrive (`ServerOffer.streams`); others start beside the fetch, then load: max(t_cc
  + t_cu + t_l, M/(s b_q)) + M/(s p_q).
- Algorithm 1 still names Eq. 1 (`overlap=False`: t_c + M/s max(1/b + 1/p), then the same), which section 5 replaces by
  Eq. 5 (erratum E14); Eq. 5 hides loading behind fetching, so the last chunk's PCIe transfer is added (E15), or the
  measured `StageSeconds.tail_s`.
- A token returns to the first stage: s hops per token, none for a single worker, s - 1 for the first (E13).
- b_q is a new fetch's share, B/(N+1), not B (E16), and the newcomer is checked too (E17).
- "The scheme that incurs minimal GPU sharing" is the smallest s, then the smallest w, then the most free GPUs (E20). A
  group prefers as many full-memory workers as instances wanted (section 6.2).
- Where no scheme meets the objectives the paper takes one worker on i_1. Here it is the first server that holds the
  model without making another fetch late, else the first that holds it, as the reason says; else the request waits
  (E19).
- Stages are never equal: each has its own bytes where layer sizes are known (`ColdStart.parts`), else the largest is
  1/0.9 of the mean, as in the published code. A server is admitted for the largest.
- Without a TTFT objective the smallest scheme is one worker. Where a request waits, `soonest=True` takes the smallest
  layout within a tenth of the soonest first token, then the one where most stages can grow to the whole model; none
  growing is a last resort.
- Section 7 raises pipelining on top of tensor parallelism for large models, and does not evaluate it. Here a worker of
  `ColdStart.num_gpus` > 1 is a tensor group on one server, with one fetch over its card (for Eq. 3-4) and loads side by
  side, M/(s g p_q) each; t_p and t_d are the group's.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from glowplug.domain.bounds import Count, Positive
from glowplug.domain.decision import Rival
from glowplug.policies.placement.links import LinkLedger, admits, settle

AS_SOON: Final = 1.1  # times the soonest: fewer stages are preferred


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    container_s: float = 0.0  # t_cc
    cuda_s: float = 0.0  # t_cu
    library_s: float = 0.0  # t_l
    hop_s: float = 0.0  # t_n
    prefill_s: float = 0.0  # t_p
    decode_s: float = 0.0  # t_d
    warmup_s: float = 0.0  # t_w
    tail_s: float = 0.0  # of a streamed load after the last byte; 0: the last chunk's transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOffer:
    """One server: its link, PCIe rate per GPU, and free bytes (`gpus`: gpu_id -> bytes)."""

    node_id: str
    link: LinkLedger
    pcie_bytes_per_s: float
    gpus: tuple[tuple[str, int], ...] = ()
    empty_gpus: frozenset[str] = frozenset()
    lost: Mapping[str, float] = field(default_factory=dict)  # gpu_id -> worth of the replicas dropped there
    stages: StageSeconds | None = None  # where its GPUs differ
    streams: bool = True  # weights load while they arrive (Eq. 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdStart:
    """A start and its objectives. `waited_s` has passed already; `num_required` workers are wanted in the end, each on
    `num_gpus` GPUs of one server. Bytes are the whole model's."""

    weight_bytes: int
    kv_bytes: int
    slo_ttft_s: float
    slo_tpot_s: float
    stages: StageSeconds
    waited_s: float = 0.0
    num_required: int = 1
    is_awaited: bool = False  # a request waits for the start
    num_gpus: int = 1
    file_bytes: int = 0  # of the weights as fetched; 0: `weight_bytes`
    parts: Mapping[int, Sequence[int]] = field(default_factory=dict)  # number of stages -> bytes fetched by each

    @property
    def memory_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes

    def bytes_per_gpu(self, num_stages: int = 1) -> int:
        return -(-self.memory_bytes // (num_stages * self.num_gpus))


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationParams:
    max_stages: Count = 4
    overlap: bool = True
    skew: Positive = 0.9
    chunk_bytes: Positive = 16e6
    check_contention: bool = True
    check_newcomer: bool = True  # False: Eq. 3 as printed
    max_rivals: Count = 8
    pipeline_over_tensor: bool = False  # stages of tensor groups
    soonest: bool = False  # first token, where a request waits without an objective


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlace:
    """One GPU, or a tensor group on one server. `num_bytes` on each, `fetch_bytes` for all."""

    node_id: str
    gpu_ids: tuple[str, ...]
    num_bytes: int
    fetch_bytes: float
    is_full: bool
    is_shared: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayout:
    workers: tuple[StagePlace, ...]
    ttft_s: float
    tpot_s: float
    meets_slo: bool
    reason: str
    rivals: tuple[Rival, ...] = ()

    @property
    def num_stages(self) -> int:
        return len(self.workers)

    @property
    def num_full(self) -> int:
        return sum(worker.is_full for worker in self.workers)


def allocate(
    start: ColdStart, servers: Sequence[ServerOffer], now_s: float, params: AllocationParams = AllocationParams()
) -> StageLayout | None:
    """Lay out one cold start. None when no server can hold it now."""
    by_time = seeks_soonest(start, params)
    fitting: list[tuple[tuple[float, ...], StageLayout]] = []
    rivals: list[Rival] = []
    least = start.bytes_per_gpu(params.max_stages)
    holding = [server for server in servers if _holds(server, least, start.num_gpus)]
    links = [settle(server.link, now_s) for server in holding]
    settled = [s if s.link is link else replace(s, link=link) for s, link in zip(holding, links, strict=True)]
    ordered = sorted(settled, key=lambda server: _distance(server, start.num_gpus))
    for num_stages in range(1, params.max_stages + 1):
        for num_full in range(num_stages + 1):
            found = _scheme(start, ordered, now_s, params, num_stages, num_full)
            if found is None:
                continue
            rivals.append(_rival(_named(num_stages, num_full), found))
            wanted = min(start.num_required, params.max_stages)
            if found.meets_slo and num_stages >= wanted:
                shared = sum(worker.is_shared for worker in found.workers)
                is_short = num_full < min(wanted, num_stages)
                order = (is_short, num_stages, -num_full if by_time else num_full, shared)
                fitting.append((order, found))
    if fitting:
        if by_time:
            fitting = [entry for entry in fitting if entry[1].num_full] or fitting
            soonest_s = min(found.ttft_s for _, found in fitting)
            fitting = [(order, found) for order, found in fitting if found.ttft_s <= AS_SOON * soonest_s]
        return _with_rivals(min(fitting, key=lambda entry: entry[0])[1], rivals, params)
    # no scheme meets the objectives: one worker where no other start becomes late, else anywhere
    for checks in (replace(params, check_newcomer=False), replace(params, check_contention=False)):
        single = _scheme(start, ordered, now_s, checks, 1, 1)
        if single is not None:
            if params.check_contention and not checks.check_contention:
                single = replace(single, reason=f"{single.reason}, and makes another start late on every link")
            return _with_rivals(single, [*rivals, *_alone(start, ordered, now_s, params)], params)
    return None


def seeks_soonest(start: ColdStart, params: AllocationParams) -> bool:
    return params.soonest and start.is_awaited and math.isinf(start.slo_ttft_s)


def _alone(start: ColdStart, ordered: Sequence[ServerOffer], now_s: float, params: AllocationParams) -> Iterator[Rival]:
    anywhere = replace(params, check_contention=False)
    found = ((s.node_id, _scheme(start, [s], now_s, anywhere, 1, 1)) for s in ordered)
    able = (_rival(f"one worker on {node_id}", layout) for node_id, layout in found if layout is not None)
    return itertools.islice(able, params.max_rivals)


def _distance(server: ServerOffer, num_gpus: int) -> tuple[float, float, str]:
    lost = sum(sorted(server.lost.get(gpu_id, 0.0) for gpu_id, _ in server.gpus)[:num_gpus]) if server.lost else 0.0
    return (1 / server.link.share() + 1 / server.pcie_bytes_per_s, lost, server.node_id)


def _holds(server: ServerOffer, num_bytes: int, num_gpus: int) -> bool:
    return sum(free >= num_bytes for _, free in server.gpus) >= num_gpus


def _scheme(
    start: ColdStart,
    ordered: Sequence[ServerOffer],
    now_s: float,
    params: AllocationParams,
    num_stages: int,
    num_full: int,
) -> StageLayout | None:
    parts, loads = _parts(start, params, num_stages)
    part, loaded = max(parts), max(loads)
    whole, low = start.bytes_per_gpu(), start.bytes_per_gpu(num_stages)
    spare_s = now_s + start.slo_ttft_s - start.waited_s - besides_s(start.stages, num_stages, num_full)

    def may_join(server: ServerOffer) -> bool:
        after_s = after_fetch_s(server.stages or start.stages, loaded / start.num_gpus, server)
        return admits(server.link, part, spare_s - after_s, now_s, check_newcomer=params.check_newcomer)

    def open_to(num_bytes: int) -> Iterator[tuple[ServerOffer, tuple[str, ...]]]:
        for server in ordered:
            gpus = _gpus(server, num_bytes, start.num_gpus)
            if gpus and (not params.check_contention or may_join(server)):
                yield server, gpus

    chosen: list[tuple[ServerOffer, StagePlace]] = []
    for num_bytes, wanted, is_full in ((whole, num_full, True), (low, num_stages, False)):
        if len(chosen) >= wanted:
            continue
        taken = {server.node_id for server, _ in chosen}
        for server, gpus in open_to(num_bytes):
            if server.node_id in taken:
                continue
            place = StagePlace(
                node_id=server.node_id,
                gpu_ids=gpus,
                num_bytes=num_bytes,
                fetch_bytes=parts[len(chosen)],
                is_full=is_full,
                is_shared=not server.empty_gpus.issuperset(gpus),
            )
            chosen.append((server, place))
            if len(chosen) == wanted:
                break
        if len(chosen) < wanted:
            return None
    sizes = zip(chosen, parts, loads, strict=True)
    ttft_s = max(ready_s(start.stages, part, on, params, start.num_gpus, loaded) for (on, _), part, loaded in sizes)
    ttft_s += besides_s(start.stages, num_stages, num_full)
    tpot_s = start.stages.decode_s * _slowdown(num_stages, num_full)
    tpot_s += start.stages.hop_s * num_stages if num_stages > 1 else 0.0
    meets = start.waited_s + ttft_s <= start.slo_ttft_s and tpot_s <= start.slo_tpot_s
    verdict = "which meets its objectives" if meets else "which misses its objectives"
    if start.slo_ttft_s == start.slo_tpot_s == math.inf:
        verdict = "and it has no objectives to meet"
    first = f"{'is' if num_stages == 1 else 'are'} expected to give the first token"
    return StageLayout(
        workers=tuple(place for _, place in chosen),
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        meets_slo=meets,
        reason=f"{_named(num_stages, num_full)} {first} after {ttft_s:.2f} s{_per_token(tpot_s)}, {verdict}",
    )


def _parts(start: ColdStart, params: AllocationParams, num_stages: int) -> tuple[list[float], list[float]]:
    file_bytes = start.file_bytes or start.weight_bytes
    if known := start.parts.get(num_stages):
        return [float(part) for part in known], [start.weight_bytes * part / file_bytes for part in known]
    evenness = params.skew if num_stages > 1 else 1.0
    return (
        [file_bytes / num_stages / evenness] * num_stages,
        [start.weight_bytes / num_stages / evenness] * num_stages,
    )


def _named(num_stages: int, num_full: int) -> str:
    if num_stages == 1:
        return "one worker" if num_full else "one worker with little memory"
    return f"{num_stages} stages ({num_full or 'none'} with full memory)"


def _rival(name: str, layout: StageLayout) -> Rival:
    why = "it meets the objectives" if layout.meets_slo else "it misses the objectives"
    return Rival(name=name, score=layout.ttft_s, why=why, unit="s to the first token")


def _per_token(tpot_s: float) -> str:
    return f" and each further one {tpot_s:.3f} s later" if tpot_s else ""


def ready_s(
    stages: StageSeconds,
    part_bytes: float,
    server: ServerOffer,
    params: AllocationParams,
    num_gpus: int = 1,
    loaded_bytes: float | None = None,
) -> float:
    """Return seconds until a worker is warm: Eq. 5's first term, or Eq. 1's, or without streaming the slower of process
    and fetch, then the load. `stages`: for a server without its own; `loaded_bytes`: if unlike the fetched
    `part_bytes`."""
    loaded_bytes = part_bytes if loaded_bytes is None else loaded_bytes
    stages = server.stages or stages
    fetch_s, load_s = part_bytes / server.link.share(), loaded_bytes / num_gpus / server.pcie_bytes_per_s
    started_s = stages.container_s + stages.cuda_s
    if not params.overlap:
        return started_s + stages.library_s + fetch_s + load_s + stages.warmup_s
    if not server.streams:
        return max(started_s + stages.library_s, fetch_s) + load_s + stages.warmup_s
    last_s = stages.tail_s or min(params.chunk_bytes, loaded_bytes / num_gpus) / server.pcie_bytes_per_s
    return max(started_s + max(load_s, stages.library_s), fetch_s + last_s) + stages.warmup_s


def after_fetch_s(stages: StageSeconds, part_bytes: float, server: ServerOffer) -> float:
    """Return seconds between the last byte and a warm engine (erratum E17)."""
    return stages.warmup_s + (stages.tail_s if server.streams else part_bytes / server.pcie_bytes_per_s)


def _slowdown(num_stages: int, num_full: int) -> float:
    """A full-memory worker adds 1/s, a low-memory one, which shares its GPU, adds 1."""
    return num_stages - num_full + num_full / num_stages


def besides_s(stages: StageSeconds, num_stages: int, num_full: int) -> float:
    """Return seconds of TTFT after the workers are ready: fetches are due that long before the objective (E17)."""
    return stages.prefill_s * _slowdown(num_stages, num_full) + stages.hop_s * (num_stages - 1)


def _gpus(server: ServerOffer, num_bytes: int, num_gpus: int) -> tuple[str, ...]:
    """Choose GPUs: least lost, empty before shared, then the fullest that fit; () for too few."""
    lost, empty = server.lost, server.empty_gpus
    fits = [
        (lost.get(gpu_id, 0.0), gpu_id not in empty, free, gpu_id) for gpu_id, free in server.gpus if free >= num_bytes
    ]
    if len(fits) < num_gpus:
        return ()
    return (min(fits)[3],) if num_gpus == 1 else tuple(sorted(one[3] for one in sorted(fits)[:num_gpus]))


def _with_rivals(layout: StageLayout, rivals: list[Rival], params: AllocationParams) -> StageLayout:
    listed = sorted(rivals, key=lambda r: (r.score, r.name))[: params.max_rivals]
    return replace(layout, rivals=tuple(listed))
