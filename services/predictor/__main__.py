"""`python -m services.predictor`."""

from glowplug.runtime.entry import run_service

run_service("services.predictor.main")
