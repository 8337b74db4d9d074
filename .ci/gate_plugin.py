"""What gate.sh adds to pytest (`-p gate_plugin`), in pytest-xdist's controller and in each of its workers.

- A test that does not come back is ended from outside the interpreter: the stacks of all threads, then exit 1; xdist
  calls the test failed. pytest-timeout alone cannot: its alarm waits for C code to return, is lost in another task of
  asyncio, and is off as soon as a test's body has failed, while its fixtures still have to end.
- SIGUSR1 has a process write its stacks.
- A worker that dies while xdist sends it work ends no run: xdist 3.8 takes the closed channel for an error of its own,
  and hears a moment later that the worker is gone, when it gives the work to others.
- Each outcome is on disk at once ($GATE_RESULTS, one JSON a line), so that a run that is ended has not said nothing.
"""

import contextlib
import faulthandler
import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

OUT = Path(os.environ["GATE_OUT"])
GRACE_S = float(os.environ.get("GATE_GRACE_S", "30"))  # beyond a test's own limit: pytest-timeout's end says more
MOST_S = float(os.environ.get("GATE_TEST_S", "1200"))  # whatever a test's marker says
TOLD = 3000  # characters of a failure
_stacks = _results = None
_until_s = 0.0


def pytest_configure(config):
    global _stacks, _results
    _stacks = (OUT / "stacks" / str(os.getpid())).open("w")
    faulthandler.register(signal.SIGUSR1, file=_stacks, all_threads=True)
    if not hasattr(config, "workerinput"):
        _results = Path(os.environ["GATE_RESULTS"]).open("a", buffering=1)  # noqa: SIM115, open until the process ends


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_newgateway():
    from xdist.workermanage import WorkerController

    if not hasattr(WorkerController, "gate_sends"):
        WorkerController.gate_sends = WorkerController.sendcommand
        WorkerController.sendcommand = _send


def _send(controller, name, **given):
    with contextlib.suppress(OSError):
        controller.gate_sends(name, **given)


@pytest.hookimpl(trylast=True)  # conftest.py sorts, too
def pytest_collection_modifyitems(items):
    """What is cheap and certain begins, then tests of what the change touches."""
    touched = set(os.environ.get("GATE_FIRST", "").split())

    def turn(item):
        path = item.nodeid.partition("::")[0]
        return 0 if path.startswith(("tests/house/", "tests/unit/")) else 1 if path in touched else 2

    items.sort(key=turn)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):
    global _until_s
    marker = item.get_closest_marker("timeout")
    own_s = marker.args[0] if marker and marker.args else item.config.getini("timeout") or 300
    _until_s = time.monotonic() + min(float(own_s), MOST_S) + GRACE_S
    _stacks.write(f"\n{plain(item.nodeid)}\n")
    _stacks.flush()
    _arm()


@pytest.hookimpl(trylast=True)
def pytest_exception_interact():
    _arm()  # pytest's own faulthandler plugin has just switched it off


def pytest_runtest_logfinish():
    global _until_s
    _until_s = 0.0
    faulthandler.cancel_dump_traceback_later()


def _arm():
    if _until_s:
        faulthandler.dump_traceback_later(max(1.0, _until_s - time.monotonic()), exit=True, file=_stacks)


def _write(**row):
    if _results is not None:
        _results.write(json.dumps(row) + "\n")


def pytest_collection_finish(session):
    _write(collected=[plain(item.nodeid) for item in session.items])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(ids):
    _write(collected=[plain(name) for name in ids])


def pytest_collectreport(report):
    if report.failed and _results is not None:
        _write(hard=report.nodeid, text=str(report.longrepr)[-TOLD:])
        pytest.exit(f"{report.nodeid} cannot be collected", returncode=4)


def pytest_runtest_logstart(nodeid):
    _write(began=plain(nodeid), at=time.time())


def pytest_runtest_logreport(report):
    outcome = "xfailed" if hasattr(report, "wasxfail") and report.skipped else report.outcome
    _write(test=plain(report.nodeid), when=report.when, outcome=outcome, text=str(report.longrepr or "")[-TOLD:])


def pytest_sessionfinish(exitstatus):
    _write(exit=int(exitstatus))


def plain(nodeid):
    """A test's name without the `@group` that xdist's loadgroup writes behind it: alone, it has none."""
    return re.sub(r"@[^\]]*$", "", nodeid)
