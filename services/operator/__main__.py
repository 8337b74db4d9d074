"""`python -m glowplug.services.operator`."""

from glowplug.runtime.entry import run_service

run_service("glowplug.services.operator.main")
