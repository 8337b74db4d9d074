"""PreServe's workload predictor: the prompt and response tokens of the windows to come, learned from past days.

Paper: PreServe section 4.1, Algorithms 1-2: two multiplicative LSTMs per service, windows of 10 minutes, two steps
ahead (the window that runs now is forecast first and stands in for itself), trained anew daily. The models are
`preserve_series.py` and `preserve_mlstm.py`, with their departures; mu and N are the predictor's and the scaler's.

Departures:
- Only tokens are learned. Requests and concurrency, which PreServe does not forecast, come from WarmServe's corrective
  seasonal predictor, so that whoever reads them finds them.
- Until `min_days` are there, and for a model with load in fewer than `min_active` of its windows, tokens come from that
  predictor too (the paper's cold-data mode leaves scaling to its defaults until days of data exist).
- Training is spread: `epochs_per_window` passes with every window that closes, so 24 windows, four hours, for 120
  passes; until then yesterday's weights go on. The first training begins so early that it ends before `min_days` are
  full.
"""

import math
from dataclasses import replace
from typing import ClassVar

from glowplug.domain.snapshot import Forecast
from glowplug.policies.prediction.learned import WorkloadParams
from glowplug.policies.prediction.port import WindowTotals
from glowplug.policies.prediction.preserve_series import TokenSeries
from glowplug.policies.prediction.warmserve_csp import WarmserveCsp

NAME = "preserve_workload"


class PreserveWorkload:
    """One model's predictor. The same windows give the same forecasts."""

    WINDOW_S: ClassVar[float] = 600.0

    def __init__(self, window_s: float = 600.0, params: WorkloadParams = WorkloadParams()) -> None:
        self.window_s, self.params = window_s, params
        self._per_day = max(1, round(params.season_s / window_s))
        self.prompts = TokenSeries(self._per_day, params.series)
        self.responses = TokenSeries(self._per_day, params.series)
        self._rest = WarmserveCsp(window_s, season_s=params.season_s)
        self._count = 0
        num_windows = math.ceil(params.series.num_epochs / params.epochs_per_window)
        self._first_training = max(1, params.min_days * self._per_day - num_windows - 2)

    def closed(self, window: WindowTotals) -> None:
        """The newest window, and a part of the training; a new one begins every day."""
        self._rest.closed(window)
        self.prompts.add(window.prompt_tokens)
        self.responses.add(window.response_tokens)
        self._count += 1
        since_first = self._count - self._first_training
        is_due = since_first >= 0 and since_first % self._per_day == 0
        for series in (self.prompts, self.responses):
            if is_due and self._is_active(series):
                series.begin_training()
            series.train(self.params.epochs_per_window)

    def forecast(self, now_s: float, num_ahead: int = 1) -> tuple[Forecast, ...]:
        """Tokens as learned, the rest by season and correction; all by those while nothing has been learned."""
        found = self._rest.forecast(now_s, num_ahead)
        prompts, responses = self.prompts.ahead(num_ahead), self.responses.ahead(num_ahead)
        return tuple(
            replace(
                one,
                source=NAME,
                prompt_tokens=prompts[at] if prompts else one.prompt_tokens,
                response_tokens=responses[at] if responses else one.response_tokens,
            )
            for at, one in enumerate(found)
        )

    def _is_active(self, series: TokenSeries) -> bool:
        return sum(v > 0 for v in series.values) >= self.params.min_active * len(series.values)
