"""`python -m glowplug.services.agent`."""

from glowplug.runtime.entry import run_service

run_service("glowplug.services.agent.main")
