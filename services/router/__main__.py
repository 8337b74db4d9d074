"""`python -m services.router`."""

from glowplug.runtime.entry import run_service

run_service("services.router.main")
