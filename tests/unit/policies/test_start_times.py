"""Start times: by model, else size class, else engine, else priors."""

import random
from dataclasses import replace
from typing import Any

import pytest

from glowplug.domain.instance import Instance, InstanceState, Phase, PhaseName
from glowplug.domain.model import Model, WeightsRef
from glowplug.fleet.start_times import (
    ADAPTER_LOAD_S,
    KEPT,
    MAX_ROWS,
    MAX_START_S,
    PRIORS,
    Prior,
    StageTimes,
    StartKind,
    StartTimes,
)
from glowplug_lab.emulated.profiles import ColdStart
from tests.fleet_builder import a_model, an_instance

GB = 10**9


def model(name: str = "m", size_gb: float = 10, **fields: Any) -> Model:
    return a_model(name, weights_bytes=int(size_gb * GB), **fields)


def start(
    instance_id: str,
    name: str = "m",
    *,
    kind: str = "cached",
    at: float = 100.0,
    rest: float = 0.0,
    fetch: float = 0.0,
    gpu_id: str = "node-1/0",
    **stages: float,
) -> Instance:
    """Stages in sequence, the process beside the fetch, and `rest` s of nothing."""
    phases, now = [Phase(name=PhaseName.FETCH, started_at=at, ended_at=at + fetch)], at
    for stage, seconds in stages.items():
        began = max(now, at + fetch) if stage == "load" else now
        phases.append(Phase(name=PhaseName(stage), started_at=began, ended_at=began + seconds))
        now = began + seconds
    return an_instance(
        instance_id, name, start_kind=kind, gpu_kind="host", gpu_id=gpu_id, phases=tuple(phases), created_at=at,
        ready_at=now + rest,
    )  # fmt: skip


def test_a_model_never_started_has_the_prior_of_its_engine_for_its_own_size() -> None:
    took = StartTimes().predict(model(size_gb=20), StartKind.CACHED, "host")
    assert (took.launch_s, took.load_s, took.warmup_s) == (2.0, 2.0, 0.5)
    assert took.whole_s == pytest.approx(4.5, abs=0.1)


def test_the_emulated_engines_prior_is_its_own_model_of_time() -> None:
    for field in ("launch_s", "load_bytes_per_s", "warmup_s"):
        assert getattr(PRIORS["emulated"], field) == getattr(ColdStart(), field)


def test_what_a_model_says_of_its_emulated_engine_stands_before_the_prior() -> None:
    args = {"launch_s": 4.0, "warmup_s": 0, "load_bytes_per_s": 5e9, "fetch_bytes_per_s": 1e9, "time_scale": 2}
    took = StartTimes().predict(model(engine_args=args), StartKind.CACHED, "host")
    assert (took.launch_s, took.load_s, took.warmup_s, took.fetch_s) == (2.0, 1.0, 0.0, 5.0)


def test_what_one_node_has_seen_is_known_of_every_other() -> None:
    """Fault: each node's first start had no prediction."""
    times = StartTimes()
    times.learn(start("i-1", launch=3.0, load=1.5, warmup=0.7, rest=0.2, gpu_id="node-7/0"), model())
    took = times.predict(model(), StartKind.CACHED, "host")
    assert took.by_phase() == pytest.approx({"launch": 3.0, "load": 1.5, "warmup": 0.7})
    assert took.whole_s == pytest.approx(5.4)


def test_a_cold_and_a_cached_start_differ_in_their_fetch_alone() -> None:
    times, one = StartTimes(), model()
    times.learn(start("i-1", kind="cold", fetch=8.0, launch=3.0, load=1.5, warmup=0.5), one)
    cold, cached = (times.predict(one, kind, "host") for kind in (StartKind.COLD, StartKind.CACHED))
    assert cold.whole_s == pytest.approx(10.0)
    assert cached.whole_s == pytest.approx(5.0), "the first start from host memory waits for no fetch"
    assert cached.fetch_s < 0.01


def test_warm_up_hides_behind_nothing() -> None:
    assert StageTimes(fetch_s=9.0, launch_s=2.0, load_s=1.0, warmup_s=3.0).whole_s == 13.0


def test_models_of_one_size_class_tell_of_each_other_scaled_by_their_priors() -> None:
    times = StartTimes()
    times.learn(start("i-1", "a", launch=4.0, load=2.0, warmup=1.0), model("a", 10))
    took = times.predict(model("b", 12), StartKind.CACHED, "host")
    assert took.by_phase() == pytest.approx({"launch": 4.0, "load": 2.4, "warmup": 1.0})


def test_a_fetch_of_a_models_earlier_weights_tells_of_new_ones_by_their_bytes() -> None:
    times, before = StartTimes(), model(weights=WeightsRef(uri="file:/1", num_bytes=2 * GB), revision=1)
    after = replace(before, weights=WeightsRef(uri="file:/2", num_bytes=10 * GB), revision=2)
    times.learn(start("i-1", kind="cold", fetch=4.0, launch=3.0, load=1.0), before)
    fetches = [times.predict(one, StartKind.COLD, "host").fetch_s for one in (before, after)]
    assert fetches == [4.0, pytest.approx(20.0)]
    late = replace(start("i-2", kind="cold", fetch=4.0), model_revision=1, engine_digest=before.engine_digest)
    assert times.learn(late, after) is None, "it may have started with the earlier weights"


def test_an_own_start_goes_before_the_class_and_the_class_before_the_engine() -> None:
    times = StartTimes()
    for name, size_gb, launch_s in (("far", 100, 9.0), ("near", 11, 5.0), ("m", 10, 3.0)):
        times.learn(start(f"i-{name}", name, launch=launch_s), model(name, size_gb))
    launches = [
        times.predict(model(name, size), StartKind.CACHED, "host").launch_s
        for name, size in (("m", 10), ("new", 11), ("other", 30))
    ]
    assert launches == [3.0, 4.0, 5.0], "its own; the median of its class; the median of all"


@pytest.mark.parametrize("other", [{"gpu_kind": "cuda"}, {"engine": "vllm"}, {"start_kind": "wake"}])
def test_other_gpus_engines_and_kinds_tell_nothing(other: dict[str, Any]) -> None:
    times, one = StartTimes(), model()
    times.learn(replace(start("i-1", launch=30.0, load=30.0), **other), one)
    assert times.predict(one, StartKind.CACHED, "host") == StartTimes().predict(one, StartKind.CACHED, "host")


def test_a_wake_is_predicted_from_wakes_and_from_the_prior_before() -> None:
    times, one = StartTimes(), model(size_gb=16)
    assert times.predict(one, StartKind.WAKE, "host").whole_s == pytest.approx(1.6, abs=0.1)
    times.learn(replace(start("i-1", kind="wake", load=1.757), phases=start("i-1", load=1.757).phases[1:]), one)
    assert times.predict(one, StartKind.WAKE, "host").whole_s == pytest.approx(1.757)


def test_one_slow_start_moves_nothing_and_two_do() -> None:
    times, one = StartTimes(), model()
    for n in range(KEPT):
        times.learn(start(f"i-{n}", at=100.0 + n, launch=2.0), one)
    times.learn(start("slow-0", at=200.0, launch=20.0), one)
    assert times.predict(one, StartKind.CACHED, "host").launch_s == 2.0
    times.learn(start("slow-1", at=201.0, launch=20.0), one)
    assert times.predict(one, StartKind.CACHED, "host").launch_s == 20.0


def test_a_start_is_learned_once_however_often_it_is_told() -> None:
    times, one = StartTimes(), model()
    row = start("i-1", launch=2.0)
    assert times.learn(row, one) is not None and times.learn(replace(row, revision=9), one) is None
    for n in range(KEPT):
        times.learn(start(f"j-{n}", at=200.0 + n, launch=2.0), one)
    assert times.learn(row, one) is None, "nor once newer ones have taken its place"


@pytest.mark.parametrize(
    "row",
    [
        replace(start("i"), state=InstanceState.DRAINING),
        replace(start("i"), start_kind="interrupted"),
        replace(start("i"), created_at=0.0),
        replace(start("i", launch=1.0), ready_at=50.0),
        replace(start("i", launch=1.0), ready_at=100.0),
        replace(start("i", launch=1.0), ready_at=100.5 + MAX_START_S),
        replace(start("i"), part_of="p"),
        start("i", "other", launch=1.0),
        start("i", kind="join", launch=1.0),
    ],
    ids=[
        "drains",
        "broken off by its agent's restart",
        "no begin",
        "a clock that went back",
        "no time at all",
        "a clock that was set",
        "a later stage",
        "of another model",
        "a join",
    ],
)
def test_what_is_no_measure_is_not_learned(row: Instance) -> None:
    assert StartTimes().learn(row, model()) is None


def phase(name: str, first: float, end: float) -> Phase:
    return Phase(name=PhaseName(name), started_at=100.0 + first, ended_at=100.0 + end)


@pytest.mark.parametrize(
    ("phases", "whole_s", "expected"),
    [
        ((), MAX_START_S, StageTimes(rest_s=MAX_START_S)),
        ((phase("launch", 0, 2), phase("launch", 2, 3)), 4, StageTimes(launch_s=2, rest_s=2)),
        ((phase("launch", 0, 1), phase("launch", 1, 3)), 4, StageTimes(launch_s=2, rest_s=2)),
        ((phase("decide", 0, 3), phase("room", 3, 4), phase("load", 1, 4)), 4, StageTimes(load_s=3, rest_s=1)),
        ((phase("load", 0, 9),), 4, StageTimes(load_s=4)),
        ((phase("load", 3, 1),), 4, StageTimes(rest_s=4)),
        ((phase("fetch", 0, 2), phase("load", 2, 3)), 4, StageTimes(fetch_s=2, load_s=1, rest_s=1)),
        ((phase("fetch", 0, 2), phase("load", 1, 3)), 4, StageTimes(fetch_s=2, load_s=-1, tail_s=1, rest_s=1)),
        ((phase("fetch", 0, 3), phase("load", 1, 2)), 4, StageTimes(fetch_s=3, load_s=-1, tail_s=0, rest_s=1)),
        ((phase("fetch", 1, 3), phase("launch", 0, 2), phase("load", 3, 4)), 6,
         StageTimes(fetch_s=2, launch_s=2, load_s=1, rest_s=2)),
        ((phase("warmup", -2, 1), phase("launch", 3, 3.5)), 4, StageTimes(launch_s=0.5, warmup_s=3, rest_s=2.5)),
    ],
)  # fmt: skip
def test_a_start_is_measured_by_its_longest_stages_and_the_rest_is_outside_them(
    phases: tuple[Phase, ...], whole_s: float, expected: StageTimes
) -> None:
    row = an_instance(start_kind="cached", created_at=100.0, ready_at=100.0 + whole_s, phases=phases)
    learned = StartTimes().learn(row, model())
    assert learned is not None and learned.samples[0].took == expected


def test_a_start_that_does_not_say_from_what_was_a_wake_or_a_cold_one() -> None:
    kinds = []
    for source in ("", "i-0"):
        row = StartTimes().learn(replace(start("i-1", launch=1.0), start_kind="", source=source), model())
        kinds.append(row and row.kind)
    assert kinds == [StartKind.COLD, StartKind.WAKE]


def test_a_streamed_load_says_nothing_of_one_from_host_memory() -> None:
    """Eq. 5: its seconds are the network's."""
    times, one = StartTimes(), model()
    row = start("i-1", kind="cold", fetch=30.0, launch=1.0)
    load = Phase(name=PhaseName.LOAD, started_at=101.0, ended_at=130.1)
    times.learn(replace(row, phases=(*row.phases, load), ready_at=130.1), one)
    assert times.predict(one, StartKind.CACHED, "host").load_s == 1.0, "the prior's: 10 GB at 10 GB/s"


def streamed(instance_id: str, tail: float, one: Model) -> Instance:
    row = start(instance_id, one.key, kind="cold", fetch=30.0, launch=1.0)
    load = Phase(name=PhaseName.LOAD, started_at=101.0, ended_at=130.0 + tail)
    return replace(row, engine=one.engine, phases=(*row.phases, load), ready_at=130.0 + tail)


def test_what_follows_the_last_byte_is_learned_from_streamed_starts_for_streamed_starts() -> None:
    times, one = StartTimes(), model(engine="vllm")
    before = times.predict(one, StartKind.CACHED, "host")
    assert times.tail_s(one, "host") == PRIORS["vllm"].tail_s
    for number, tail in enumerate((0.9, 1.1, 4.0)):
        times.learn(streamed(f"i-{number}", tail, one), one)
    assert times.tail_s(one, "host") == pytest.approx(1.1)
    assert times.predict(one, StartKind.CACHED, "host").load_s == before.load_s
    again = StartTimes()
    again.restore(times.rows)
    assert again.tail_s(one, "host") == pytest.approx(1.1)


def test_a_start_that_was_not_streamed_says_nothing_of_the_tail() -> None:
    times, one = StartTimes(), model(engine="vllm")
    times.learn(replace(start("i-1", kind="cold", fetch=8.0, launch=1.0, load=2.5), engine="vllm"), one)
    assert times.tail_s(one, "host") == PRIORS["vllm"].tail_s
    assert times.tail_s(model(), "host") == 0.0, "the emulated engine's is the way of the last chunk"


def test_of_a_pipeline_only_the_process_and_its_warm_up_are_taken() -> None:
    times, one = StartTimes(), model()
    row = replace(start("i-1", kind="cold", fetch=4.0, launch=3.0, load=0.3, warmup=0.6, rest=20.0), num_stages=4)
    times.learn(row, one)
    prior, took = (t.predict(one, StartKind.COLD, "host") for t in (StartTimes(), times))
    assert (took.launch_s, took.warmup_s) == (pytest.approx(3.0), pytest.approx(0.6))
    assert (took.fetch_s, took.load_s, took.rest_s) == (prior.fetch_s, prior.load_s, prior.rest_s)


def test_rows_come_back_from_the_store_and_what_it_lacks_is_told() -> None:
    first, one = StartTimes(), model()
    for n in range(3):
        first.learn(start(f"i-{n}", at=100.0 + n, launch=3.0 + n), one)
    stored = dict(first.rows)
    again = StartTimes()
    assert again.restore(stored) == []
    assert again.predict(one, StartKind.CACHED, "host") == first.predict(one, StartKind.CACHED, "host")
    assert [row.key for row in again.restore({})] == list(stored), "an emptied store gets them again"
    newer = again.learn(start("i-9", at=300.0, launch=9.0), one)
    assert again.restore(stored) == [newer], "a row that is behind wins over nobody"


def test_models_that_are_gone_are_forgotten_and_their_class_with_them() -> None:
    times = StartTimes()
    times.learn(start("i-1", "a", launch=9.0), model("a"))
    times.learn(start("i-1", "a", kind="growth", load=1.0), model("a"))
    assert times.predict(model("b"), StartKind.CACHED, "host").launch_s == 9.0 and times.growths_s == {"a": 1.0}
    times.learn(start("i-2", "z", launch=5.0), model("z"))
    assert times.forget(lambda key: key == "c") == []
    assert times.forget(lambda key: key == "a") == ["a/emulated/host/cached", "a/emulated/host/growth"]
    assert times.growths_s == {} and times.predict(model("b"), StartKind.CACHED, "host").launch_s == 5.0
    times.forget(lambda key: key == "z")
    assert times.rows == {} and times.predict(model("b"), StartKind.CACHED, "host").launch_s == 2.0


def test_weights_of_another_size_under_the_same_name_begin_anew() -> None:
    times = StartTimes()
    times.learn(start("i-1", load=1.0), model(size_gb=10))
    assert times.predict(model(size_gb=10), StartKind.CACHED, "host").load_s == pytest.approx(1.0)
    times.learn(start("i-2", at=200.0, load=8.0), model(size_gb=80, revision=2))
    assert times.predict(model(size_gb=10), StartKind.CACHED, "host").load_s == pytest.approx(8.0)
    assert times.predict(model(size_gb=80, revision=2), StartKind.CACHED, "host").load_s == pytest.approx(8.0)


def test_a_rate_that_a_node_declares_goes_before_the_prior_and_behind_what_was_seen() -> None:
    times, one = StartTimes(), model()
    assert times.predict(one, StartKind.CACHED, "host", 40e9).load_s == 0.25
    times.learn(start("i-1", load=0.7), one)
    assert times.predict(one, StartKind.CACHED, "host", 40e9).load_s == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({}, Prior(launch_s=4.0, warmup_s=2.0, prefill_s=1.0, load_bytes_per_s=8.0, fetch_bytes_per_s=6.0)),
        (
            {"launch_s": 3, "warmup_s": 0.0, "load_bytes_per_s": 5.0, "fetch_bytes_per_s": 7, "time_scale": 2},
            Prior(launch_s=1.5, prefill_s=0.5, load_bytes_per_s=10.0, fetch_bytes_per_s=14.0),
        ),
        (
            {"launch_s": -1, "warmup_s": True, "load_bytes_per_s": "5", "time_scale": 0},
            Prior(launch_s=4.0, warmup_s=2.0, prefill_s=1.0, load_bytes_per_s=8.0, fetch_bytes_per_s=6.0),
        ),
    ],
    ids=["none", "numbers", "no numbers"],
)
def test_a_models_arguments_override_a_prior_that_reads_them(args: dict[str, Any], expected: Prior) -> None:
    prior = Prior(launch_s=4.0, warmup_s=2.0, prefill_s=1.0, load_bytes_per_s=8.0, fetch_bytes_per_s=6.0)
    assert prior.of(model(engine_args=args)) == prior
    assert replace(prior, reads_args=True).of(model(engine_args=args)) == replace(expected, reads_args=True)


def test_without_prior_or_start_nothing_is_known() -> None:
    times = StartTimes(priors={})
    assert not times.knows(model())
    assert StartTimes(priors={}, otherwise=Prior(launch_s=1.0)).knows(model())
    times.learn(start("i-1", launch=1.0), model())
    assert times.knows(model())


def test_rows_that_no_start_has_made_are_left_out() -> None:
    times, one = StartTimes(), model()
    row = times.learn(start("i-1", launch=3.0), one)
    assert row is not None
    sample = row.samples[0]
    odd = [replace(sample, took=replace(sample.took, load_s=seconds)) for seconds in (-7.0, 1e300)]
    for samples in ((), *((one_of,) for one_of in odd)):
        again = StartTimes()
        again.restore({row.key: replace(row, samples=samples)})
        assert again.rows == {} and again.predict(one, StartKind.CACHED, "host").launch_s == 2.0
    tiny = replace(sample, prior=replace(sample.prior, launch_s=1e-300))
    again.restore({row.key: replace(row, samples=(tiny,))})
    assert again.predict(model("n"), StartKind.CACHED, "host").launch_s == 300.0, "at most a hundred times as long"


def test_a_start_changes_the_predictions_that_read_it_and_leaves_the_others_as_they_are() -> None:
    chance, times = random.Random(1), StartTimes()
    models = [model(f"m{n}", size_gb) for n, size_gb in enumerate((1, 1, 10, 10, 90))]
    kinds = (StartKind.COLD, StartKind.CACHED, StartKind.WAKE)
    for number in range(60):
        asked = [(m, kind, gpu_kind) for m in models for kind in kinds for gpu_kind in ("", "host", "other")]
        known = [times.predict(*one) for one in asked]
        assert known == [replace(times, _known={}).predict(*one) for one in asked]
        chosen, kind = chance.choice(models[:4]), chance.choice(kinds[:2])
        took = {"launch": chance.random(), "load": 1.0, "warmup": 1.0}
        row = start(f"i-{number}", chosen.key, kind=kind, at=100.0 + number, **took)
        times.learn(replace(row, gpu_kind=chance.choice(("host", "host", "other"))), chosen)
    before = times.predict(models[2], StartKind.CACHED, "host")
    assert times.learn(start("i-last", "m0", at=900.0, launch=0.5, load=1.0, warmup=1.0), models[0]) is not None
    assert times.predict(models[2], StartKind.CACHED, "host") is before, "of another class, which has starts of its own"


def test_a_start_from_disk_teaches_its_own_fetch_and_the_rest_of_every_start_from_nothing() -> None:
    """Fault: its fetch once counted as a cold start's."""
    times, one = StartTimes(), model()
    assert times.predict(one, StartKind.DISK, "host").fetch_s == times.predict(one, StartKind.COLD, "host").fetch_s
    times.learn(start("i-1", kind="cold", fetch=8.0, launch=1.0, load=1.0), one)
    times.learn(start("i-2", kind="disk", fetch=2.0, launch=1.0, load=3.0), one)
    took = {kind: times.predict(one, kind, "host") for kind in (StartKind.COLD, StartKind.DISK, StartKind.CACHED)}
    assert {kind.value: found.fetch_s for kind, found in took.items()} == {"cold": 8.0, "disk": 2.0, "cached": 0.002}
    assert (took[StartKind.DISK].load_s, took[StartKind.CACHED].load_s) == (3.0, 1.0)
    assert times.measured_by(one, StartKind.DISK, "host", "fetch_s") == ("model", 1)
    assert times.measured_by(one, StartKind.CACHED, "host", "fetch_s") == ("prior", 0)
    assert times.latest(one, StartKind) is StartKind.COLD and times.latest(one, [StartKind.DISK]) is StartKind.DISK
    assert times.latest(one, [StartKind.WAKE]) is None and times.has_seen(one) and not times.has_seen(model("n"))
    times.learn(start("i-3", at=90.0, launch=1.0), one)
    assert times.latest(one, StartKind) is StartKind.COLD, "the other one was earlier"
    times.learn(start("i-4", kind="disk", at=200.0, launch=1.0), one)
    assert times.latest(one, StartKind) is StartKind.DISK


def test_whose_starts_predict_a_stage_is_told_with_their_number() -> None:
    times = StartTimes()
    hidden = replace(start("i-h", "a", at=50.0, launch=1.0), num_stages=2)  # shows no load
    for row in (start("i-1", "a", rest=1.0), start("i-2", "a", load=1.0), hidden):
        times.learn(row, model("a"))
    for number in range(2):
        times.learn(start(f"j-{number}", "b", load=0.0, rest=1.0), model("b", 11))
    times.learn(start("k", "c", load=5.0), model("c", 100))
    asked = {
        "its own": (model("a"), StartKind.CACHED, "load_s", ("model", 2)),
        "of another kind": (model("a"), StartKind.COLD, "load_s", ("model", 2)),
        "its class": (model("new", 11), StartKind.CACHED, "load_s", ("size", KEPT)),
        "all": (model("new", 40), StartKind.CACHED, "load_s", ("engine", KEPT)),
        "no fetch of another kind": (model("a"), StartKind.COLD, "fetch_s", ("prior", 0)),
        "nobody's": (model("a"), StartKind.WAKE, "load_s", ("prior", 0)),
    }
    for why, (one, kind, stage, expected) in asked.items():
        assert times.measured_by(one, kind, "host", stage) == expected, why
    assert times.measured_by(model("a"), StartKind.CACHED, "cuda") == ("prior", 0)
    assert times.predict(model("a"), StartKind.CACHED, "host").load_s == 0.5, "a stage without a second counts"
    alone = StartTimes()
    alone.learn(replace(hidden, model_key="c"), model("c", 100))
    assert alone.measured_by(model("d", 100), StartKind.CACHED, "host") == ("prior", 0)
    assert alone.measured_by(model("d", 100), StartKind.CACHED, "host", "launch_s") == ("size", 1)
    assert alone.measured_by(model("d", 100), StartKind.CACHED, "host", "warmup_s") == ("prior", 0)


@pytest.mark.parametrize(
    ("its", "mine", "expected"),
    [(2.0, 1.0, 4.0), (2.0, 4.0, 16.0), (2.0, 0.0, 8.0), (0.0, 2.0, 8.0), (2.0, 1000.0, 800.0), (2.0, 0.001, 0.08)],
)
def test_starts_of_others_are_scaled_by_the_priors_a_hundredfold_at_most(
    its: float, mine: float, expected: float
) -> None:
    times = StartTimes()
    times.learn(start("i-1", "a", launch=8.0), model("a", engine_args={"launch_s": its}))
    took = times.predict(model("b", engine_args={"launch_s": mine}), StartKind.CACHED, "host")
    assert took.launch_s == pytest.approx(expected)


PRIOR = Prior(
    launch_s=8.0, library_s=2.0, load_s=1.0, load_bytes_per_s=1e9, warmup_s=0.5, fetch_s=3.0, tail_s=0.25, look_s=0.125,
    rest_s=0.75, wake_s=0.5, growth_s=0.0625, prefill_s=0.375,
)  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "fields", "prior", "rate", "expected"),
    [
        (StartKind.COLD, {}, {}, 0.0, StageTimes(fetch_s=8, launch_s=8, load_s=11, warmup_s=0.5, rest_s=0.75)),
        (StartKind.DISK, {}, {}, 0.0, StageTimes(fetch_s=8, launch_s=8, load_s=11, warmup_s=0.5, rest_s=0.75)),
        (StartKind.CACHED, {}, {}, 0.0, StageTimes(fetch_s=0.125, launch_s=8, load_s=11, warmup_s=0.5, rest_s=0.75)),
        (StartKind.CACHED, {}, {"fetch_bytes_per_s": 5e9}, 0.0,
         StageTimes(fetch_s=2, launch_s=8, load_s=11, warmup_s=0.5, rest_s=0.75)),
        (StartKind.COLD, {"base": "b"}, {}, 0.0, StageTimes(fetch_s=8, load_s=10 + ADAPTER_LOAD_S, rest_s=0.75)),
        (StartKind.WAKE, {}, {}, 0.0, StageTimes(load_s=10.5)),
        (StartKind.WAKE, {"num_gpus": 2}, {}, 5e9, StageTimes(load_s=1.5)),
        (StartKind.WAKE, {}, {"load_bytes_per_s": 0.0}, 0.0, StageTimes(load_s=1.75)),
        (StartKind.GROWTH, {}, {}, 0.0, StageTimes(load_s=0.0625)),
    ],
)  # fmt: skip
def test_before_a_start_the_engines_prior_tells_its_stages(
    kind: StartKind, fields: dict[str, Any], prior: dict[str, float], rate: float, expected: StageTimes
) -> None:
    times = StartTimes(priors={"emulated": replace(PRIOR, **prior)}, network_bytes_per_s=2e9, pcie_bytes_per_s=8e9)
    one = model(weights=WeightsRef(uri="file:/w", num_bytes=10 * GB), **fields)
    assert times.predict(one, kind, "host", rate) == expected
    tail_s = 0.0 if one.base else 0.25
    assert (times.library_share(one), times.prefill_s(one), times.tail_s(one)) == (0.25, 0.375, tail_s)
    assert StartTimes(priors={}).library_share(one) == 0.0


def test_without_a_kind_of_gpu_that_of_the_newest_start_is_meant() -> None:
    times, one = StartTimes(), model(engine="vllm")
    for number, gpu_kind in enumerate(("cuda", "host")):
        row = streamed(f"i-{number}", 1.0 + number, one)
        times.learn(replace(row, gpu_kind=gpu_kind), one)
    assert times.predict(one, StartKind.COLD) == times.predict(one, StartKind.COLD, "host")
    assert (times.tail_s(one), times.tail_s(one, "cuda")) == (pytest.approx(2.0), pytest.approx(1.0))
    assert times.has_seen(one) and times.knows(one) and StartTimes().knows(one)


def test_adapters_are_timed_by_the_engine_that_took_them() -> None:
    times, one = StartTimes(), model(base="b")
    row = times.learn(replace(start("i", load=1.0), engine="vllm"), one)
    assert row is not None and (row.engine, row.key) == ("vllm+adapter", "m/vllm+adapter/host/cached")
    assert times.predict(one, StartKind.CACHED, "host") == StartTimes().predict(one, StartKind.CACHED, "host")
    times.learn(start("j", load=1.0), one)
    assert times.predict(one, StartKind.CACHED, "host").load_s == 1.0


def test_the_quickest_growth_of_a_model_is_kept() -> None:
    times = StartTimes()
    for number, seconds in enumerate((3.0, 1.0, 2.0, 4.0, 5.0, 6.0)):
        times.learn(start(f"i-{number}", kind="growth", at=100.0 + number, load=seconds), model())
    assert times.growths_s == {"m": 1.0}


def test_beyond_the_most_rows_the_one_without_news_for_longest_is_dropped() -> None:
    times = StartTimes()
    row = times.learn(start("i", launch=3.0), model())
    assert row is not None
    times.rows |= {f"k{n}": replace(row, key=f"k{n}", model_key=f"k{n}") for n in range(MAX_ROWS - 1)}
    times.learn(start("i-2", at=200.0, launch=3.0), model())
    assert len(times.rows) == MAX_ROWS and list(times.rows)[-1] == row.key
    times.restore({"k0": times.rows["k0"]})
    times.learn(start("i-3", "n", launch=3.0), model("n"))
    assert len(times.rows) == MAX_ROWS and "k0" not in times.rows and {"k1", row.key} <= times.rows.keys()


def test_a_start_beside_busy_cores_teaches_how_long_it_takes_on_idle_ones() -> None:
    times, model = StartTimes(), a_model()
    phases = (
        Phase(name=PhaseName.FETCH, started_at=100.0, ended_at=104.0),
        Phase(name=PhaseName.LOAD, started_at=104.0, ended_at=107.0),
    )
    row = an_instance("i-1", start_kind="cold", phases=phases, created_at=100.0, ready_at=107.0, slowdown=1.5)
    times.learn(row, model)
    known = times.predict(model, StartKind.COLD)
    assert (known.fetch_s, known.load_s) == (4.0, 2.0)
    assert (known.slowed(2.0).fetch_s, known.slowed(2.0).load_s) == (4.0, 4.0)
