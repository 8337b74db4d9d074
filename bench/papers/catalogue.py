"""All rows, in the order of the page."""

from bench.papers import (
    h_load,
    h_pipeline,
    m_cache,
    p0_forecast,
    p4_router,
    p_hours,
    p_lengths,
    p_serve,
    s_swap,
    u_union,
    w4_forecast,
    w_stages,
    w_warm,
)
from bench.papers.experiment import Experiment

EXPERIMENTS: tuple[Experiment, ...] = (
    w_warm.W1,
    w_warm.W2,
    w_warm.W3,
    w_stages.EXPERIMENT,
    w4_forecast.EXPERIMENT,
    w_warm.W5,
    h_pipeline.H1,
    h_load.H2,
    h_pipeline.H3,
    h_pipeline.H4,
    m_cache.M1,
    m_cache.M2,
    s_swap.S1,
    s_swap.S2,
    p_serve.P1,
    p_lengths.P1E,
    p_serve.P2,
    p_hours.P2M,
    p_serve.P3,
    p_lengths.P3E,
    p4_router.EXPERIMENT,
    p0_forecast.EXPERIMENT,
    u_union.EXPERIMENT,
)


def by_id(name: str) -> Experiment:
    """The row of that name. Raises KeyError that lists all names."""
    for experiment in EXPERIMENTS:
        if experiment.id.lower() == name.lower():
            return experiment
    raise KeyError(f"no row {name!r} (there are: {', '.join(e.id for e in EXPERIMENTS)})")
