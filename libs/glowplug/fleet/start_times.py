"""Learn and predict the seconds of each stage of a start, over the whole fleet, from a prior per engine.

The placer learns them, stores them (table `start_times`) and sends its prediction with each start command. Eq. 5 of
HydraServe, WarmServe's T_c, a router's Retry-After and the console read the same figures.

A prediction is the median of the last `KEPT` starts of the same model; else of models of its size class (weights within
a factor of two); else of any model of its engine; else the prior. GPU kind and start kind must match, except that
starts from nothing (cold, disk, host memory) differ only in their fetch. Figures of other models, and of the model's
weights of another size, are scaled by the priors.

A streamed load overlaps its fetch, so it teaches only its seconds after the last byte (`tail_s`), for streamed starts
alone. Seconds outside every stage (polls, notices) become `rest_s`, so that the sum is the whole start.

Busy cores slow a start from nothing, but for its fetch: figures are kept as on idle cores, and `slowed` makes them a
node's (Node.slowdown).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from statistics import median
from typing import Literal

from glowplug.domain.hardware import Node
from glowplug.domain.instance import BEFORE_START, Instance, InstanceState, Phase, PhaseName
from glowplug.domain.model import Model

START_TIMES = "start_times"  # written by the placer
KEPT = 3  # starts per row: the median ignores one slow start (bench: 3 was closer than 5)
MAX_ROWS = 5000  # beyond it, the least recently updated row is dropped
MAX_START_S = 86_400.0  # longer: a clock was set
MAX_SCALE = 100.0
NOT_SEEN = -1.0  # stage hidden by others


class StartKind(StrEnum):
    """State from which a start begins."""

    COLD = "cold"  # weights fetched over the network
    DISK = "disk"  # weights fetched from the node's own disk
    CACHED = "cached"  # weights in host memory, or none to fetch
    WAKE = "wake"  # engine asleep outside the GPU (SWAPPED_OUT)
    GROWTH = "growth"  # weights held by a replica (PREWARMED)
    JOIN = "join"  # the rest of a replica's start, then a growth


Scope = Literal["model", "size", "engine", "prior"]

FROM_NOTHING = (StartKind.COLD, StartKind.CACHED, StartKind.DISK)
_KINDS = {kind.value: kind for kind in StartKind}
_OF_STATE = {InstanceState.SWAPPED_OUT: StartKind.WAKE, InstanceState.PREWARMED: StartKind.GROWTH}


def kind_from(source: InstanceState) -> StartKind:
    return _OF_STATE.get(source, StartKind.JOIN)


def slowest(kinds: Iterable[StartKind]) -> StartKind:
    return min(kinds, key=(StartKind.COLD, StartKind.DISK, StartKind.CACHED).index)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds of the stages of one start. Launch and fetch overlap."""

    fetch_s: float = 0.0
    launch_s: float = 0.0
    load_s: float = 0.0
    warmup_s: float = 0.0
    rest_s: float = 0.0  # outside every stage
    tail_s: float = NOT_SEEN  # streamed load after the last byte; not in `whole_s`

    @property
    def whole_s(self) -> float:
        """Seconds from the command to READY, unstreamed."""
        return max(self.launch_s, self.fetch_s) + self.load_s + self.warmup_s + self.rest_s

    def slowed(self, by: float) -> "StageTimes":
        """Return the same start with the cores `by` times as slow. A fetch does not wait for cores."""
        if by == 1:
            return self
        return replace(self, **{name: took * by for name in _ON_CORES if (took := getattr(self, name)) > 0})

    def by_phase(self) -> dict[str, float]:
        seconds = {phase.value: getattr(self, name) for name, phase in _PHASES.items()}
        return {name: took for name, took in seconds.items() if took > 0}


_PHASES = {
    "fetch_s": PhaseName.FETCH, "launch_s": PhaseName.LAUNCH, "load_s": PhaseName.LOAD, "warmup_s": PhaseName.WARMUP,
}  # fmt: skip
_FIELDS = tuple(one.name for one in fields(StageTimes))
_ON_CORES = tuple(name for name in _FIELDS if name != "fetch_s")
_PREDICTED = tuple(name for name in _FIELDS if name != "tail_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """Expected seconds of an engine before its first start. Rate 0: the placer's setting applies."""

    launch_s: float = 0.0
    library_s: float = 0.0  # imports, part of the launch; beside the load in a streaming engine (Eq. 5's t_l)
    load_s: float = 0.0  # excluding the transfer
    load_bytes_per_s: float = 0.0
    warmup_s: float = 0.0
    fetch_s: float = 0.0
    fetch_bytes_per_s: float = 0.0  # an emulated network's; 0: none
    tail_s: float = 0.0  # streamed load after the last byte; 0: the last chunk's transfer over PCIe (Eq. 5)
    look_s: float = 0.0  # to find the weights in host memory
    rest_s: float = 0.0
    wake_s: float = 0.0  # excluding the transfer, at `load_bytes_per_s`
    growth_s: float = 0.0
    prefill_s: float = 0.0  # first token when warm
    needs_cores: bool = True  # else its starts take as long beside others
    reads_args: bool = False  # `engine_args` may override these fields and set `time_scale`

    def of(self, model: Model) -> "Prior":
        if not self.reads_args or not model.engine_args:
            return self
        scale = _number(model, "time_scale", 0.0) or 1.0
        return replace(
            self,
            launch_s=_number(model, "launch_s", self.launch_s) / scale,
            warmup_s=_number(model, "warmup_s", self.warmup_s) / scale,
            prefill_s=self.prefill_s / scale,
            load_bytes_per_s=_number(model, "load_bytes_per_s", self.load_bytes_per_s) * scale,
            fetch_bytes_per_s=_number(model, "fetch_bytes_per_s", self.fetch_bytes_per_s) * scale,
        )


PRIORS: Mapping[str, Prior] = {
    # Same as ColdStart in glowplug_lab/emulated/profiles.py; a unit test compares the two.
    "emulated": Prior(
        launch_s=2.0, load_bytes_per_s=10e9, warmup_s=0.5, look_s=0.002, rest_s=0.05,
        wake_s=0.05, growth_s=0.01, prefill_s=0.05, needs_cores=False, reads_args=True,
    ),
    # SmolLM2-135M on two cores at load 4, medians of 27 starts; mapped weights cost little time per byte.
    "llamacpp": Prior(
        launch_s=0.12, load_s=0.3, load_bytes_per_s=1e9, warmup_s=0.03, fetch_s=0.25, look_s=0.02, rest_s=0.05,
        prefill_s=0.25, tail_s=0.02,
    ),
    # Parked, on two cores. A plain start takes twenty times as long (docs/figures.md): the first one corrects this.
    "vllm": Prior(
        launch_s=0.3, load_s=1.5, load_bytes_per_s=2e9, warmup_s=0.5, fetch_s=0.25, look_s=0.02, rest_s=0.05,
        prefill_s=0.1, tail_s=0.6,
    ),
}  # fmt: skip
UNKNOWN = Prior()
ADAPTER_LOAD_S = 0.02  # excluding the transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class StartSample:
    """`took`: as on idle cores. `fetch_bytes`: of the weights; 0: unknown."""

    instance_id: str
    ended_at: float
    took: StageTimes
    prior: StageTimes
    fetch_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRow:
    """Last starts of one model, kind and kind of GPU, oldest first."""

    key: str
    model_key: str
    engine: str
    gpu_kind: str
    kind: StartKind
    size_class: int
    samples: tuple[StartSample, ...] = ()


_Group = tuple[str, str, StartKind, int | None]  # engine, GPU kind, start kind, size class (None: any)
_Stage = tuple[float, int | None]
_Read = tuple[str, str, str, int | None]  # model_key, engine, GPU kind and widest class read by a prediction


@dataclass(slots=True, kw_only=True)
class StartTimes:
    priors: Mapping[str, Prior] = field(default_factory=lambda: PRIORS)
    otherwise: Prior = UNKNOWN
    network_bytes_per_s: float = 2e9  # for network cards that report no rate
    pcie_bytes_per_s: float = 32e9  # host to GPU, unless node or engine declares a rate
    rows: dict[str, StartRow] = field(default_factory=dict)
    _groups: dict[_Group, tuple[StartSample, ...]] = field(default_factory=dict)
    _gpu_kinds: dict[str, str] = field(default_factory=dict)  # by engine, of its newest start
    _known: dict[tuple[object, ...], tuple[StageTimes, _Read]] = field(default_factory=dict)  # cached predictions
    growths_s: dict[str, float] = field(default_factory=dict)  # model_key -> quickest growth (no wait for weights)

    # learning

    def learn(self, instance: Instance, model: Model) -> StartRow | None:
        """Learn the start of a serving instance. Return its row, or None if nothing is new."""
        if instance.state is not InstanceState.READY or not instance.serves or instance.model_key != model.key:
            return None
        if instance.is_outdated(model):
            return None  # it may have started with other weights
        took, kind = _measured(instance), _kind_of(instance)
        if took is None or kind is None:
            return None
        row = StartRow(
            key=_key(model.key, _starter(model, instance.engine), instance.gpu_kind, kind),
            model_key=model.key,
            engine=_starter(model, instance.engine),
            gpu_kind=instance.gpu_kind,
            kind=kind,
            size_class=size_class(model),
        )
        kept = self._kept(row)
        prior = self.prior_times(model, kind)
        took = took.slowed(1 / max(1.0, instance.slowdown))
        sample = StartSample(
            instance_id=instance.instance_id,
            ended_at=instance.ready_at,
            took=took,
            prior=prior,
            fetch_bytes=model.fetch_bytes,
        )
        samples = _with(kept, (sample,))
        if samples == kept:
            return None
        self._put(replace(row, samples=samples))
        return self.rows[row.key]

    def restore(self, rows: Mapping[str, StartRow]) -> list[StartRow]:
        """Merge the sound stored rows; return the rows with samples that the store lacks."""
        rows = {key: row for key, row in rows.items() if _is_sound(row)}
        for key, row in rows.items():
            merged = replace(row, samples=_with(row.samples, self._kept(row)))
            if merged != self.rows.get(key):
                self._put(merged)
        return [row for key, row in self.rows.items() if rows.get(key) != row]

    def forget(self, is_gone: Callable[[str], bool]) -> list[str]:
        gone = [key for key, row in self.rows.items() if is_gone(row.model_key)]
        for key in gone:
            self.growths_s.pop(self.rows.pop(key).model_key, None)
        if gone:
            self._regroup()
        return gone

    def _kept(self, row: StartRow) -> tuple[StartSample, ...]:
        known = self.rows.get(row.key)
        return known.samples if known is not None and known.size_class == row.size_class else ()

    def _put(self, row: StartRow) -> None:
        self.rows.pop(row.key, None)
        self.rows[row.key] = row
        if len(self.rows) > MAX_ROWS:
            del self.rows[next(iter(self.rows))]
            self._regroup()
        else:
            self._group(row)
        self._gpu_kinds[row.engine] = row.gpu_kind
        reads = ((row.engine, row.gpu_kind, row.size_class), (row.engine, row.gpu_kind, None))
        self._known = {
            asked: (times, read)
            for asked, (times, read) in self._known.items()
            if read[0] != row.model_key and read[1:] not in reads
        }
        if row.kind is StartKind.GROWTH:
            quickest_s = min(sample.took.load_s for sample in row.samples)
            self.growths_s[row.model_key] = min(quickest_s, self.growths_s.get(row.model_key, quickest_s))

    def _regroup(self) -> None:
        self._known.clear()
        self._groups.clear()
        for row in self.rows.values():
            self._group(row)

    def _group(self, row: StartRow) -> None:
        for size in (row.size_class, None):
            group = (row.engine, row.gpu_kind, row.kind, size)
            self._groups[group] = _with(self._groups.get(group, ()), row.samples)

    # predicting

    def knows(self, model: Model) -> bool:
        return model.engine in self.priors or _starter(model) in self._gpu_kinds or self.otherwise is not UNKNOWN

    def _prior(self, model: Model) -> Prior:
        return self.priors.get(model.engine, self.otherwise).of(model)

    def predict(self, model: Model, kind: StartKind, gpu_kind: str = "", pcie_bytes_per_s: float = 0.0) -> StageTimes:
        """Predict the stages of a start. `gpu_kind` "": of the newest start. `pcie_bytes_per_s`: the node's (0: none),
        overrides the prior, not measurements."""
        gpu_kind = gpu_kind or self._gpu_kinds.get(_starter(model), "")
        asked = (model.key, model.revision, model.weights_bytes, model.fetch_bytes, kind, gpu_kind, pcie_bytes_per_s)
        known = self._known.get(asked)
        if known is None:
            prior = self.prior_times(model, kind, pcie_bytes_per_s)
            found = {name: self._stage(name, model, kind, gpu_kind, prior) for name in _PREDICTED}
            widest = None if any(size is None for _, size in found.values()) else size_class(model)
            read = (model.key, _starter(model), gpu_kind, widest)
            known = self._known[asked] = StageTimes(**{name: took for name, (took, _) in found.items()}), read
        return known[0]

    def prior_times(self, model: Model, kind: StartKind, pcie_bytes_per_s: float = 0.0) -> StageTimes:
        prior = self._prior(model)
        rate = pcie_bytes_per_s or prior.load_bytes_per_s or self.pcie_bytes_per_s
        moved_s = model.weights_bytes / model.num_gpus / rate
        if kind is StartKind.WAKE:
            return StageTimes(load_s=moved_s + prior.wake_s)
        if kind is StartKind.GROWTH:
            return StageTimes(load_s=prior.growth_s)
        fetch_s = prior.look_s
        if kind in (StartKind.COLD, StartKind.DISK):  # a disk's rate is measured by its node, not prior
            fetch_s = prior.fetch_s + model.fetch_bytes / self.network_bytes_per_s
        elif prior.fetch_bytes_per_s:
            fetch_s = model.weights_bytes / prior.fetch_bytes_per_s
        if model.base:
            return StageTimes(fetch_s=fetch_s, load_s=ADAPTER_LOAD_S + moved_s, rest_s=prior.rest_s)
        return StageTimes(
            fetch_s=fetch_s,
            launch_s=prior.launch_s,
            load_s=prior.load_s + moved_s,
            warmup_s=prior.warmup_s,
            rest_s=prior.rest_s,
            tail_s=prior.tail_s,
        )

    def tail_s(self, model: Model, gpu_kind: str = "") -> float:
        """Seconds of a streamed load after the last byte; 0: no prior, i.e. the last chunk's transfer over PCIe."""
        if not self._prior(model).tail_s:
            return 0.0
        gpu_kind = gpu_kind or self._gpu_kinds.get(_starter(model), "")
        prior = self.prior_times(model, StartKind.COLD)
        return max(0.0, self._stage("tail_s", model, StartKind.COLD, gpu_kind, prior)[0])

    def library_share(self, model: Model) -> float:
        """Share of a launch that a streaming engine does beside the load."""
        prior = self._prior(model)
        return prior.library_s / prior.launch_s if prior.launch_s else 0.0

    def slowdown(self, model: Model, node: Node, kind: StartKind) -> float:
        """How many times as long a start takes there now as on idle cores. Wakes and growths hardly wait for any."""
        return node.slowdown if kind in FROM_NOTHING and self._prior(model).needs_cores else 1.0

    def prefill_s(self, model: Model) -> float:
        return self._prior(model).prefill_s

    def latest(self, model: Model, kinds: Iterable[StartKind]) -> StartKind | None:
        """Return the kind of the model's last start among `kinds`, or None."""
        rows = [row for kind in kinds if (row := self._row(model, kind, self._gpu_kinds.get(_starter(model), "")))]
        return max(rows, key=lambda row: (row.samples[-1].ended_at, row.kind)).kind if rows else None

    def has_seen(self, model: Model) -> bool:
        return self.latest(model, StartKind) is not None

    def measured_by(self, model: Model, kind: StartKind, gpu_kind: str, stage: str = "load_s") -> tuple[Scope, int]:
        """Return whose starts predict the stage, and how many are in the median."""
        kinds = _alike(kind, stage)
        groups: list[tuple[Scope, int | None]] = [("size", size_class(model)), ("engine", None)]
        for one in kinds:
            row = self._row(model, one, gpu_kind)
            if row is not None and (num := sum(getattr(s.took, stage) >= 0 for s in row.samples)):
                return "model", num
        for scope, size in groups:
            for one in kinds:
                samples = self._groups.get((_starter(model), gpu_kind, one, size), ())
                if num := sum(getattr(s.took, stage) >= 0 for s in samples):
                    return scope, num
        return "prior", 0

    def _row(self, model: Model, kind: StartKind, gpu_kind: str) -> StartRow | None:
        return self.rows.get(_key(model.key, _starter(model), gpu_kind, kind))

    def _stage(self, name: str, model: Model, kind: StartKind, gpu_kind: str, prior: StageTimes) -> _Stage:
        """Seconds by the nearest starts that show the stage, and their size class (None: any)."""
        kinds = _alike(kind, name)
        mine: float = getattr(prior, name)
        for one in kinds:
            row = self._row(model, one, gpu_kind)
            if row is not None and (seen := [s for s in row.samples if getattr(s.took, name) >= 0]):
                return float(median(_own(s, name, model, mine) for s in seen)), size_class(model)
        for size in (size_class(model), None):
            for one in kinds:
                samples = self._groups.get((_starter(model), gpu_kind, one, size), ())
                if scaled := [_scaled(s, name, mine) for s in samples if getattr(s.took, name) >= 0]:
                    return float(median(scaled)), size
        return mine, None


def _alike(kind: StartKind, stage: str) -> tuple[StartKind, ...]:
    """Kinds of start that show the duration of this stage, `kind` itself first."""
    if kind not in FROM_NOTHING or stage == "fetch_s":
        return (kind,)
    return (kind, *(other for other in FROM_NOTHING if other is not kind))


def _starter(model: Model, engine: str = "") -> str:
    """Engine under which starts are grouped; adapters, which launch none, form a group."""
    return f"{engine or model.engine}+adapter" if model.base else engine or model.engine


def _key(model_key: str, engine: str, gpu_kind: str, kind: StartKind) -> str:
    return f"{model_key}/{engine}/{gpu_kind}/{kind.value}"


def size_class(model: Model) -> int:
    """Class of models whose weights are within a factor of two of each other."""
    return model.weights_bytes.bit_length()


def _is_sound(row: StartRow) -> bool:
    return bool(row.samples) and all(
        NOT_SEEN <= getattr(sample.took, name) <= MAX_START_S for sample in row.samples for name in _FIELDS
    )


def _own(sample: StartSample, name: str, model: Model, prior_s: float) -> float:
    if sample.fetch_bytes in (0, model.fetch_bytes):
        return float(getattr(sample.took, name))
    return _scaled(sample, name, prior_s)


def _scaled(sample: StartSample, name: str, prior_s: float) -> float:
    took: float = getattr(sample.took, name)
    its: float = getattr(sample.prior, name)
    if its <= 0 or prior_s <= 0:
        return took
    return took * min(max(prior_s / its, 1 / MAX_SCALE), MAX_SCALE)


def _with(kept: tuple[StartSample, ...], more: Iterable[StartSample]) -> tuple[StartSample, ...]:
    by_id = {sample.instance_id: sample for sample in (*kept, *more)}
    return tuple(sorted(by_id.values(), key=lambda s: (s.ended_at, s.instance_id))[-KEPT:])


def _kind_of(instance: Instance) -> StartKind | None:
    """None for an unknown kind, an interrupted start, or a JOIN, whose rest depends on when it joined."""
    if not instance.start_kind:
        return StartKind.WAKE if instance.source else StartKind.COLD
    kind = _KINDS.get(instance.start_kind)
    return None if kind is StartKind.JOIN else kind


def _measured(instance: Instance) -> StageTimes | None:
    """Seconds by phase; None if clocks are impossible. A pipeline's stages wait for each other between launch and
    warm-up, so only these count."""
    whole_s = instance.ready_at - instance.created_at
    if instance.created_at <= 0 or not 0 < whole_s <= MAX_START_S:
        return None
    phases: dict[PhaseName, Phase] = {}
    for phase in instance.phases:
        longest = phases.get(phase.name)
        if phase.name not in BEFORE_START and (longest is None or phase.actual_s > longest.actual_s):
            phases[phase.name] = phase
    shown = {name: phases[phase] for name, phase in _PHASES.items() if phase in phases}
    took = {name: min(max(0.0, phase.actual_s), whole_s) for name, phase in shown.items()}
    if not instance.is_whole:
        hidden = dict.fromkeys(_FIELDS, NOT_SEEN)
        return StageTimes(**hidden | {name: took[name] for name in ("launch_s", "warmup_s") if name in took})
    if {"load_s", "fetch_s"} <= shown.keys() and shown["load_s"].started_at < shown["fetch_s"].ended_at - 1e-6:
        took["tail_s"] = max(0.0, shown["load_s"].ended_at - shown["fetch_s"].ended_at)
        took["load_s"] = NOT_SEEN
    return StageTimes(**took, rest_s=max(0.0, whole_s - _covered_s(phases.values(), instance)))


def _covered_s(phases: Iterable[Phase], instance: Instance) -> float:
    covered_s, until = 0.0, instance.created_at
    for phase in sorted(phases, key=lambda p: p.started_at):
        ended_at = min(phase.ended_at, instance.ready_at)
        covered_s += max(0.0, ended_at - max(until, phase.started_at))
        until = max(until, ended_at)
    return covered_s


def _number(model: Model, name: str, otherwise: float) -> float:
    value = model.engine_args.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        return otherwise
    return float(value)
