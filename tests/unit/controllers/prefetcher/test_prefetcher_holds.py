"""Whose weights stay in host memory."""

from glowplug.controllers.prefetcher.holds import Holds
from glowplug.domain.instance import InstanceState
from tests.fleet_builder import a_model, an_instance


def test_a_prewarmed_replica_needs_no_host_memory() -> None:
    """Its weights lie on its GPUs: held here as well, many replicas would leave no room for anybody's start."""
    holds = Holds("node-1", lambda weights: "digest", 120.0)
    holds.set_model(a_model("m"))
    holds.hold("r-1", "digest", 0.0)
    for revision, state in enumerate((InstanceState.LOADING, InstanceState.PREWARMED), start=1):
        holds.set_instance(an_instance("r-1", "m", state, replica=True, revision=revision), 1.0)
        held = holds.reason("digest", {"m"}, 2.0)
        assert held == ("r-1 uses it" if state is InstanceState.LOADING else "")


def test_an_engine_asleep_needs_no_cached_weights() -> None:
    """It sleeps in host memory of its own (`snapshot_ratio`): held here as well, sleepers would leave no room for
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
