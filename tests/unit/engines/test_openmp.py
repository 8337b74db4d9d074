"""How OpenMP threads wait, and when they count as crowded."""

import contextlib
import threading
import time
from pathlib import Path

import pytest

from glowplug.engines import openmp
from glowplug.engines.openmp import SPIN_COUNT, WAIT_POLICY, CoreTime, Crowd, Crowding, core_time, share_cores
from tests.waiting import wait_until


def _period(waited_share: float) -> CoreTime:
    return CoreTime(round(1e8 * (1 - waited_share)), round(1e8 * waited_share))


def test_what_an_operator_has_set_of_the_two_variables_stays() -> None:
    ours = openmp.environment({"PATH": "/bin"})
    assert ours == {WAIT_POLICY: "PASSIVE", SPIN_COUNT: ours[SPIN_COUNT]}
    assert int(ours[SPIN_COUNT]) > 0
    assert openmp.environment({WAIT_POLICY: "ACTIVE"}) == {WAIT_POLICY: "ACTIVE"}
    assert openmp.environment({SPIN_COUNT: "5"}) == {SPIN_COUNT: "5"}


def test_the_share_waited_is_of_the_time_in_which_it_could_have_run() -> None:
    assert (CoreTime(400, 200) - CoreTime(100, 100)).waited_share == pytest.approx(0.25)
    assert CoreTime(0, 0).waited_share == 0.0
    assert CoreTime(10, -5).waited_share == 0.0  # an ended thread took its sums with it


def test_it_is_crowded_until_known_to_be_free_and_at_once_again() -> None:
    crowding = Crowding()
    assert [crowding.observe(_period(share)) for share in (0.02, 0.10, 0.02)] == [True, True, False]
    shares = [0.02, 0.10, 0.45, 0.10, 0.10, 0.20, 0.10, 0.10, 0.10, 0.02]
    seen = [crowding.observe(_period(share)) for share in shares]
    assert seen == [False, False, True, True, True, True, True, True, False, False]


def _threads() -> set[str]:
    return {task.name for task in Path("/proc/self/task").iterdir()}


def _come(crowd: Crowd) -> set[str]:
    before = _threads()
    crowd.set(True)
    crowd.set(True)
    wait_until("three threads have come", lambda: len(_threads() - before) >= 3, every_s=0.005)
    return _threads() - before


@pytest.fixture
def crowd() -> Crowd:
    with contextlib.suppress(OSError):
        return Crowd(3)
    pytest.skip("GNU's OpenMP library is not here")


def test_a_crowd_of_three_is_a_thread_and_two_more_and_leaves_none_behind(crowd: Crowd) -> None:
    """Unrelated threads may start and end meanwhile."""
    for _ in range(2):
        came = _come(crowd)
        crowd.set(False)
        crowd.set(False)
        wait_until("three have gone", lambda: len(came & _threads()) <= len(came) - 3, every_s=0.005)  # noqa: B023


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel does not tell")
def test_time_on_a_core_is_counted_of_all_threads() -> None:
    before, until = core_time(), time.thread_time() + 0.05
    while time.thread_time() < until:
        pass
    assert (core_time() - before).ran_ns >= 0.04e9


@pytest.mark.parametrize("num_threads", [0, 1, 10_000])
def test_one_thread_or_more_than_there_are_cores_need_nobody_to_follow(num_threads: int) -> None:
    share_cores(num_threads)
    assert "openmp-wait" not in {thread.name for thread in threading.enumerate()}
