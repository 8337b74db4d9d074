"""Fixtures with misbehaving drivers (executor_rig.py)."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.unit.agent.executor_rig import FakeSleeper, FakeStager, Rig, rig_of


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with rig_of(tmp_path, FakeSleeper()) as rig:
        yield rig


@pytest.fixture
async def launched(tmp_path: Path) -> AsyncIterator[Rig]:
    async with rig_of(tmp_path, FakeStager()) as launched:
        await launched.launch()
        yield launched
