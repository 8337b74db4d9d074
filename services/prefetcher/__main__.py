"""`python -m glowplug.services.prefetcher`."""

from glowplug.runtime.entry import run_service

run_service("glowplug.services.prefetcher.main")
