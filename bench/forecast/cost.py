"""What forecasting costs: seconds of one core for a window of all models, and memory."""

import time

import numpy as np
import psutil

from bench.forecast.changes import day_and_night
from bench.forecast.loads import WINDOW_S
from glowplug.policies.prediction.combined import Combined
from glowplug.policies.prediction.port import WindowTotals

NUM_AHEAD = 12
NUM_WINDOWS = 20  # measured, with days of past before them


def run(num_models: int) -> None:
    """Print both, for windows of 600 s and of 300 s."""
    print(f"{num_models} models, {NUM_AHEAD} windows ahead, five kinds of load; load {psutil.getloadavg()[0]:.1f} of {psutil.cpu_count()} cores")
    for window_s in (WINDOW_S, WINDOW_S // 2):
        _measure(num_models, float(window_s))


def _measure(num_models: int, window_s: float) -> None:
    process, counts = psutil.Process(), day_and_night(num_days=10)
    before = process.memory_info().rss
    models = [Combined(window_s) for _ in range(num_models)]
    first = models[0]
    num_past = 8 * round(86_400 / window_s)
    for at in range(num_past):
        first.closed(_window(at, window_s, counts[at % len(counts)]))
    for at in range(num_past - 2, num_past):  # the others have as much memory, and a short past
        for model in models[1:]:
            model.closed(_window(at, window_s, counts[at % len(counts)]))
    _fill(models[1:], first)
    took = []
    for at in range(num_past, num_past + NUM_WINDOWS):
        window = _window(at, window_s, counts[at % len(counts)])
        began = time.process_time()
        for model in models:
            model.closed(window)
            model.forecast(0.0, NUM_AHEAD)
        took.append(time.process_time() - began)
    grown = process.memory_info().rss - before
    print(f"windows of {window_s:.0f} s: {np.median(took):.2f} s of a core (most {max(took):.2f}), {grown / 1e6:.0f} MB")


def _fill(models: list[Combined], known: Combined) -> None:
    """A past of days for each, copied from the first: what is measured is a window of all of them."""
    from copy import deepcopy

    for model in models:
        model._mixture = deepcopy(known._mixture)


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
