"""Rendered manifests for the tests, a copy each."""

import pytest

from tests.k8s.rendering import MONITORED, OVERLAYS, TARGETS, Manifest, render


@pytest.fixture(params=OVERLAYS)
def overlay(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def manifests(overlay: str) -> list[Manifest]:
    return render(overlay)


@pytest.fixture(params=MONITORED)
def monitored(request: pytest.FixtureRequest) -> list[Manifest]:
    return render(request.param)


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> str:
    return str(request.param)
