"""A failed simulation prints the command that runs its seed alone."""

import shlex
from collections.abc import Generator

import pytest

from tests.lanes import without_group
from tests.simulation.seeds import VARIABLE


def again(item: pytest.Item) -> str:
    """It names the seed, since another commit chooses others."""
    seed = item.callspec.params.get("seed") if isinstance(item, pytest.Function) and hasattr(item, "callspec") else None
    return ("" if seed is None else f"{VARIABLE}={seed} ") + shlex.join(
        ["python", "-m", "pytest", without_group(item.nodeid)]
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        report.sections.append(("again", again(item)))
    return report
