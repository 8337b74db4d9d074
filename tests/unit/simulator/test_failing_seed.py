"""Simulations of tests/simulation run with their own seeds and the commit's, and print a failing one."""

import pytest

from tests.simulation.conftest import again
from tests.simulation.seeds import EACH, VARIABLE, read, seeds


@pytest.mark.parametrize("seed", [3])
def test_the_printed_command_names_the_seed(seed: int, request: pytest.FixtureRequest) -> None:
    command = again(request.node)
    assert command.startswith(f"{VARIABLE}=3 python -m pytest ")
    assert command.endswith("test_the_printed_command_names_the_seed[3]'")


def test_without_a_seed_the_command_is_the_test_alone(request: pytest.FixtureRequest) -> None:
    assert again(request.node).startswith("python -m pytest ")


def test_half_of_the_seeds_stay_and_half_follow_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    first, *others = seeds()
    assert seeds() == [first, *others] and seeds(1) == [first, others[0]] and first == 0
    found = {first, *(one.values[0] for one in others)}
    assert {*range(EACH)} < found and len(found) == 2 * EACH
    assert [[mark.name for mark in one.marks] for one in others] == [["long"]] * len(others)
    monkeypatch.setenv(VARIABLE, "5,7..9")
    assert seeds() == [5, 7, 8, 9]


def test_seeds_are_read() -> None:
    assert read("17") == (17,) and read("0..2,8") == (0, 1, 2, 8)
    with pytest.raises(ValueError):
        read("x")
