"""The union of the papers on one knob: how many instances run.

PreServe's forecast of tokens plans the window (section 4.3.2), WarmServe's rule on the load of the last seconds is its
floor within it (section 3), what waits and runs now is the floor of both, and HydraServe's groups bring several new
instances with one cold start (section 6.1). The last instance goes by the model's keep-alive, sooner while weights of
it lie prewarmed on GPUs and coming back costs little (WarmServe section 5).

HydraServe's look at arrivals (section 6.1) asks for instances of requests that are still to come. Here it does so while
a prewarmed copy makes that cheap: where weights come over the network, a second fetch delays the first, and what it
pushes out of host memory is fetched again (mCache's workload has a fifth fewer fetches so, simulated, three seeds).

Ours, not a paper's: an instance counts for the scarcer of its slots and its KV cache, as the look-ahead sees it.
Where two rules disagree the larger number holds, for a missing instance costs a request its objective and a spare one
only GPU-seconds. On the way down all must let go (while data is cold PreServe has no say), and the spare ones go once
they have been spare for as long as the model keeps its last one (HydraServe's 30 s for each, section 8.1), or at once
while an instance of another model finds no room. Where that one needs several GPUs, neighbours have to be free
together: who drains is then not taken back while a prewarmed copy can be grown instead.

While anything is expected one instance stays (PreServe, erratum E32), asked for or not. Where the models expected need
more memory than there is, they then take it from each other with nobody waiting: `last_by_keep_alive=True` leaves the
first and the last instance to requests and the model's keep-alive.
"""

from dataclasses import dataclass, field, replace

from glowplug.domain.instance import InstanceState
from glowplug.domain.model import Model
from glowplug.domain.snapshot import FleetSnapshot
from glowplug.policies.decisions import ScaleDecision
from glowplug.policies.scaling import hydraserve, preserve, reactive, warmserve
from glowplug.policies.scaling.preserve_scaler import ScalerState
from glowplug.policies.scaling.standing import Standing, settle, standing


@dataclass(frozen=True, slots=True, kw_only=True)
class UnionParams:
    plan: preserve.PreserveParams = field(default_factory=preserve.PreserveParams)
    load: warmserve.WarmserveParams = field(default_factory=warmserve.WarmserveParams)
    arrivals: hydraserve.HydraserveParams = field(default_factory=hydraserve.HydraserveParams)
    prewarmed_keep_alive_ratio: float = 1.0  # of the model's keep-alive, while a copy lies prewarmed
    spare_s: float = 10.0  # spare instances live this long where the model's keep-alive has no end
    last_by_keep_alive: bool = False  # a plan of one neither starts the first instance nor keeps the last


@dataclass(frozen=True, slots=True, kw_only=True)
class UnionState:
    """What each of the three remembers."""

    plan: ScalerState = field(default_factory=ScalerState)
    load: warmserve.WarmserveState | None = None
    arrivals: hydraserve.HydraserveState | None = None
    spare_since: float | None = None  # when there began to be more than are wanted


def scale(
    snapshot: FleetSnapshot,
    model: Model,
    state: UnionState | None = None,
    params: UnionParams = UnionParams(),
) -> tuple[ScaleDecision, UnionState]:
    """The number of instances `model` should have now, and how many of them one start may bring."""
    st = standing(snapshot, model)
    state = state or UnionState()
    plan, scaler = preserve.plan_for(st, state.plan, params.plan)
    if params.last_by_keep_alive and not (plan.is_cold or st.demand) and plan.num_wanted == 1:
        plan = replace(plan, num_wanted=0)
    load, average = warmserve.watch(st, state.load, params.load, slots_used(st))
    arrivals = hydraserve.watch(st, state.arrivals, params.arrivals)
    options = [(st.needed, reactive.why(st)), (load.num_wanted, load.reason)]
    options.append((plan.num_wanted, plan.reason))  # while data is cold: what its look-ahead adds
    if st.is_prewarmed and is_short(st):  # what is to come of the burst costs little
        options.append(hydraserve.target(st, arrivals, params.arrivals))
    wanted, reason = max(options, key=lambda option: option[0])
    is_growing = (
        any(i.state is not InstanceState.READY for i in st.running)
        or st.load.num_waiting > 0
        or warmserve.is_growing(st, params.load)
    )
    keep_alive_s = model.keep_alive_s
    if st.is_prewarmed and keep_alive_s > 0:
        keep_alive_s *= params.prewarmed_keep_alive_ratio
    since = None if wanted >= st.num_running else st.now_s if state.spare_since is None else state.spare_since
    spare_s = 0.0 if since is None else st.now_s - since
    hold_s = keep_alive_s if keep_alive_s >= 0 else params.spare_s
    if snapshot.gpus_without_room:
        hold_s = 0.0
    decision = settle(
        st,
        wanted,
        reason,
        may_go=lambda i: not is_growing and (spare_s >= hold_s or st.is_idle(i, hold_s)),
        keep_alive_s=keep_alive_s,
        group_size=params.arrivals.group_size,
        inputs={"load_average": round(average, 3), "planned": -1 if plan.is_cold else plan.num_wanted},
        take_back=not (snapshot.gpus_without_room > 1 and st.is_prewarmed),
    )
    return decision, UnionState(plan=scaler, load=load, arrivals=arrivals, spare_since=since)


def is_short(st: Standing) -> bool:
    """Whether requests wait that those who serve have no slot for. Where the model has an objective for its tokens the
    union's routing holds some for the sake of what runs there: they have a slot."""
    if not st.model.slo.tpot_s:
        return st.load.num_waiting > 0
    slots = sum(i.max_concurrency for i in st.running if i.state is InstanceState.READY)
    return st.load.num_waiting > 0 and slots_used(st) > slots


def slots_used(st: Standing) -> float:
    """The load in requests, where one that needs much of a KV cache counts for as many as that would hold."""
    used = float(st.load.num_waiting)
    for instance in st.running:
        outlook = st.load.outlook_by_instance.get(instance.instance_id)
        full = outlook.peak_ratio * instance.max_concurrency if outlook else 0.0
        used += max(st.in_flight(instance), full)
    return max(used, float(st.demand))
