"""A simulation that fails prints the command that runs its seed alone."""

import os
import shlex
from collections.abc import Generator, Mapping

import pytest

SEEDS = "GLOWPLUG_SIM_SEEDS"


def again(nodeid: str, env: Mapping[str, str]) -> str:
    """The command for one test: a seed beyond the usual ones is there only under the same number of seeds."""
    told = env.get(SEEDS, "")
    return (f"{SEEDS}={shlex.quote(told)} " if told else "") + shlex.join(["python", "-m", "pytest", nodeid])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        report.sections.append(("again", again(item.nodeid, os.environ)))
    return report
