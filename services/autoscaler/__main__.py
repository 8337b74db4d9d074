"""`python -m glowplug.services.autoscaler`."""

from glowplug.runtime.entry import run_service

run_service("glowplug.services.autoscaler.main")
