"""Processes under a supervisor, stopped when their test ends."""

import asyncio
import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from glowplug.runtime.supervisor.child import Child, ChildSpec, ChildState
from glowplug.runtime.supervisor.output import Output
from tests.waiting import WAIT_S


class Children:
    """`states`: all their states, in order of change."""

    def __init__(self, folder: Path) -> None:
        self._output = Output(folder / "logs", max_bytes=1_000_000, stream=io.StringIO())
        self.states: list[ChildState] = []
        self.made: list[Child] = []

    def make(self, spec: ChildSpec, **bounds: Any) -> Child:
        child = Child(spec, self._output, lambda c: self.states.append(c.state), longest_wait_s=0.2)
        for name, value in bounds.items():
            setattr(child, name, value)
        self.made.append(child)
        return child


async def up(process: Child) -> None:
    process.start()
    await asyncio.wait_for(process.ready.wait(), WAIT_S)


@pytest.fixture
async def children(tmp_path: Path) -> AsyncIterator[Children]:
    made = Children(tmp_path)
    yield made
    for child in made.made:
        await child.stop(grace_s=5)
