"""Whose weights stay in host memory, and mCache Eq. 1's P on a node: measured seconds, else the pace of what was."""

import pytest

from glowplug.controllers.prefetcher.cache import FetchSeconds
from glowplug.controllers.prefetcher.holds import Holds
from glowplug.controllers.prefetcher.params import SecondsParams
from glowplug.domain.instance import InstanceState
from tests.fleet_builder import a_model, an_instance


def test_a_prewarmed_replica_needs_no_host_memory() -> None:
    """Its weights lie on its GPUs: held here as well, many replicas would leave no memory for anybody's start."""
    holds = Holds("node-1", lambda weights: "digest", 120.0)
    holds.set_model(a_model("m"))
    holds.hold("r-1", "digest", 0.0)
    for revision, state in enumerate((InstanceState.LOADING, InstanceState.PREWARMED), start=1):
        holds.set_instance(an_instance("r-1", "m", state, replica=True, revision=revision), 1.0)
        held = holds.reason("digest", {"m"}, 2.0)
        assert held == ("r-1 uses it" if state is InstanceState.LOADING else "")


def test_an_engine_asleep_needs_no_cached_weights() -> None:
    """It sleeps in host memory of its own (`snapshot_ratio`): held here as well, sleepers would leave no memory for
    anybody's start."""
    holds = Holds("node-1", lambda weights: "digest", 120.0)
    holds.set_model(a_model("m"))
    holds.hold("i-1", "digest", 0.0)
    for revision, state in enumerate((InstanceState.READY, InstanceState.SWAPPED_OUT), start=1):
        holds.set_instance(an_instance("i-1", "m", state, revision=revision), 1.0)
        assert holds.reason("digest", {"m"}, 2.0) == ("i-1 uses it" if state is InstanceState.READY else "")


def test_a_replica_on_a_gpu_is_a_copy_once_it_is_whole() -> None:
    """mCache's worth of weights in host memory may count it (`copied_ratio`); one on its way is none, nor one gone."""
    holds = Holds("node-1", lambda weights: "digest", 120.0)
    seen = {}
    states = (InstanceState.LOADING, InstanceState.PREWARMED, InstanceState.STOPPED)
    for revision, state in enumerate(states, start=1):
        holds.set_instance(an_instance("r-1", "m", state, replica=True, revision=revision), 1.0)
        seen[state] = holds.has_copy({"m", "n"})
        assert not holds.has_copy({"n"})
    assert seen == dict(zip(states, (False, True, False), strict=True))


def test_the_measured_first_then_the_pace_of_its_source_then_a_guess() -> None:
    seconds = FetchSeconds(SecondsParams(newest=0.5, bytes_per_s=100.0))
    assert seconds.expected("a", 500) == pytest.approx(5.0)
    seconds.measured("a", 100, 4.0, "http")
    assert seconds.expected("a", 100) == pytest.approx(4.0)
    assert seconds.expected("a", 200) == pytest.approx(8.0), "its source gives 25 bytes a second"
    assert seconds.expected("b", 200) == pytest.approx(8.0)
    seconds.measured("a", 100, 2.0, "http")
    assert seconds.expected("a", 100) == pytest.approx(3.0)


def test_no_time_is_no_measurement_and_memory_is_bounded() -> None:
    seconds = FetchSeconds(SecondsParams(max_digests=2, bytes_per_s=100.0))
    seconds.measured("a", 100, 0.0, "file")
    assert seconds.expected("a", 100) == pytest.approx(1.0)
    for at, name in enumerate("abc"):
        seconds.measured(name, 100, 1.0 + at, "file")
    assert seconds.expected("c", 100) == pytest.approx(3.0)
    assert seconds.expected("a", 100) == seconds.expected("unseen", 100) != pytest.approx(1.0)
