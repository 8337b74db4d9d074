"""`python -m glowplug.services.placer`."""

from glowplug.runtime.entry import run_service

run_service("glowplug.services.placer.main")
