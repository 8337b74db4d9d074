"""`python -m glowplug.services.console`."""

from glowplug.runtime.entry import run_service

run_service("glowplug.services.console.main")
