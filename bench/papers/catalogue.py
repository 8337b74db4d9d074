"""Every row there is, in the order of the page."""

from bench.papers import m_cache, p0_forecast, w4_forecast
from bench.papers.experiment import Experiment

EXPERIMENTS: tuple[Experiment, ...] = (w4_forecast.EXPERIMENT, m_cache.M1, m_cache.M2, p0_forecast.EXPERIMENT)


def by_id(name: str) -> Experiment:
    """One row. Raises KeyError that lists what there is."""
    for experiment in EXPERIMENTS:
        if experiment.id.lower() == name.lower():
            return experiment
    raise KeyError(f"no row {name!r} (there are: {', '.join(e.id for e in EXPERIMENTS)})")
