"""Engines: the port an agent speaks, one driver per engine, and the processes that some drivers start."""

from glowplug.engines.port import (
    EngineCapabilities,
    EngineDriver,
    EngineHandle,
    EngineSettings,
    Health,
    LaunchRequest,
    LoadReport,
)

__all__ = [
    "EngineCapabilities",
    "EngineDriver",
    "EngineHandle",
    "EngineSettings",
    "Health",
    "LaunchRequest",
    "LoadReport",
]
