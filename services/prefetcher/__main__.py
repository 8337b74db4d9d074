"""`python -m services.prefetcher`."""

from glowplug.runtime.entry import run_service

run_service("services.prefetcher.main")
