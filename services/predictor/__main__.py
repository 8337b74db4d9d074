"""`python -m glowplug.services.predictor`."""

from glowplug.runtime.entry import run_service

run_service("glowplug.services.predictor.main")
