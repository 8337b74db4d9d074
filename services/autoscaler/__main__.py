"""`python -m services.autoscaler`."""

from glowplug.runtime.entry import run_service

run_service("services.autoscaler.main")
