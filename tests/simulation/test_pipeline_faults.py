"""Break a pipeline's life (pipeline_life.py) between any two of its events, in every way listed there.

Each request ends, well or with an error code, and nothing is left in the end.

There are about 3,000 pairs of event and harm. A seed runs each NUM_SEEDS-th of them, two seeds run with each commit,
and `GLOWPLUG_SIM_SEEDS=0..149` runs all (3 minutes).
"""

import pytest

from tests.simulation.pipeline_life import END_S, HARMS, Life, num_events
from tests.simulation.seeds import seeds

NUM_SEEDS = 150


@pytest.mark.parametrize("seed", seeds(1))
def test_whatever_strikes_everybody_is_answered_and_nothing_is_left(seed: int) -> None:
    pairs = [(becomes, harm, at) for becomes in ("down", "up") for at in range(num_events(becomes)) for harm in HARMS]
    for pair in pairs[seed % NUM_SEEDS :: NUM_SEEDS]:
        life = Life(*pair)
        life.run(END_S)
        life.settled()
