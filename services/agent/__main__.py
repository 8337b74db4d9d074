"""`python -m services.agent`."""

from glowplug.runtime.entry import run_service

run_service("services.agent.main")
