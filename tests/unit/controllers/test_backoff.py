"""A wait that doubles with each failure."""

from glowplug.controllers.autoscaler.keeping import KeptCopy
from glowplug.controllers.autoscaler.models import ModelRecord
from glowplug.controllers.backoff import backoff_s
from glowplug.domain.instance import InstanceState
from tests.fleet_builder import a_model, an_instance


def test_it_doubles_up_to_the_most_and_never_overflows():
    assert [backoff_s(num, 0.5, 3.0) for num in (1, 2, 3, 4, 5000)] == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_copies_and_starts_that_are_lost_for_ever_are_tried_again():
    kept, record = KeptCopy(num_lost=5000), ModelRecord("m", model=a_model(), num_failures=5000)
    kept.asleep_since["i-1"] = 1.0
    assert kept.saw(an_instance("i-1", state=InstanceState.FAILED), False, 2.0, 0.5, 60.0)
    record.failed(2.0, 0.5, 60.0)
    assert kept.not_before == record.not_before == 62.0
