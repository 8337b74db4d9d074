"""What forecasting costs: seconds of one core for a window of all models, and memory."""

import copy
import time

import numpy as np
import psutil

from bench.forecast.changes import day_and_night
from glowplug.domain.units import DAY_S
from glowplug.policies.prediction.combined import Combined
from glowplug.policies.prediction.port import WindowTotals

NUM_AHEAD = 12
NUM_DAYS = 8  # of past
NUM_WINDOWS = 20  # measured


def run(num_models: int, window_s: float) -> None:
    """Print both. All models have the past of one, which is learned first: what is measured is a window of all."""
    process, counts = psutil.Process(), day_and_night(num_days=10)
    before, known = process.memory_info().rss, Combined(window_s)
    num_past = NUM_DAYS * round(DAY_S / window_s)
    for at in range(num_past):
        known.closed(_window(at, window_s, counts[at % len(counts)]))
    models = [copy.deepcopy(known) for _ in range(num_models)]
    took = []
    for at in range(num_past, num_past + NUM_WINDOWS):
        window, began = _window(at, window_s, counts[at % len(counts)]), time.process_time()
        for model in models:
            model.closed(window)
            model.forecast(0.0, NUM_AHEAD)
        took.append(time.process_time() - began)
    grown = process.memory_info().rss - before
    load = f"load {psutil.getloadavg()[0]:.1f} of {psutil.cpu_count()} cores"
    print(f"{num_models} models, windows of {window_s:.0f} s, {NUM_AHEAD} ahead, five kinds of load; {load}")
    print(f"{np.median(took):.2f} s of a core for a window of all (most {max(took):.2f}), {grown / 1e6:.0f} MB")


def _window(at: int, window_s: float, value: float) -> WindowTotals:
    return WindowTotals(
        started_at=at * window_s,
        window_s=window_s,
        num_requests=value,
        prompt_tokens=500.0 * value,
        response_tokens=200.0 * value,
        concurrency_mean=value / 60,
        concurrency_peak=value / 30,
    )
