"""Fixtures of the contract tests."""

from collections.abc import AsyncIterator

import pytest

from tests.contract.data_port_rig import Rig, a_rig


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    """It knows the model `m`, which is cold."""
    async with a_rig() as made:
        yield made
