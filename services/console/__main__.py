"""`python -m services.console`."""

from glowplug.runtime.entry import run_service

run_service("services.console.main")
