"""What the tests of the manifests are run on, each with its copy."""

import pytest

from tests.k8s.rendering import MONITORED, OVERLAYS, TARGETS, Manifest, render


@pytest.fixture(params=OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def manifests(overlay: str) -> list[Manifest]:
    """Of a whole fleet, on emulated GPUs or real ones."""
    return render(overlay)


@pytest.fixture(params=MONITORED)
def monitored(request: pytest.FixtureRequest) -> list[Manifest]:
    """The same with what Prometheus' operator reads."""
    return render(request.param)


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> str:
    """Anything that can be rendered."""
    return str(request.param)
