"""`python -m services.placer`."""

from glowplug.runtime.entry import run_service

run_service("services.placer.main")
