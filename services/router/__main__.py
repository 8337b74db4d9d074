"""`python -m glowplug.services.router`."""

from glowplug.runtime.entry import run_service

run_service("glowplug.services.router.main")
