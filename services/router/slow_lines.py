"""One line in the log for each request that waited for a start, lost its instance, or failed: why was it slow?

A warm request that ends well writes none. In a flood of failures at most MOST_A_S lines a second are written; the next
line says how many were not."""

import logging
import math
from typing import Final

from glowplug.events.facts import RequestFinished

MOST_A_S: Final = 10
log = logging.getLogger(__name__)


class SlowLines:
    """The lines of one router."""

    def __init__(self) -> None:
        self._second, self._num, self._num_unsaid = -1, 0, 0

    def take(self, fact: RequestFinished, traceparent: str) -> None:
        """Write the line of a request that is not warm and well. `traceparent`: "" where no trace is kept of it."""
        second = math.floor(fact.finished_at)
        if second != self._second:
            self._second, self._num = second, 0
        self._num += 1
        if self._num > MOST_A_S:
            self._num_unsaid += 1
            return
        unsaid = f" ({self._num_unsaid} such requests before it have no line)" if self._num_unsaid else ""
        self._num_unsaid = 0
        log.log(
            logging.WARNING if fact.status >= 500 else logging.INFO,
            "%s%s",
            sentence(fact),
            unsaid,
            extra={
                "request_id": fact.request_id,
                "model": fact.model_key,
                "instance": fact.instance_id or None,
                "error_code": fact.error_code or None,
                "trace_id": traceparent[3:35] or None,
                "event_id": None,  # of whatever made the connection that the answer came on
                "event_type": None,
            },
        )


def sentence(fact: RequestFinished) -> str:
    """What a person is told of a request: how it ended, how long it took, and how much of that it waited."""
    waited = f"waited {fact.queue_s:.2f} s for {'a start of its model' if fact.cold else 'an instance'}"
    end = f"was answered with {fact.status} after {fact.e2e_s:.2f} s"
    lost = f", and its stream went on elsewhere {fact.num_continued} times" if fact.num_continued else ""
    return f"a request for {fact.model_key} {waited} and {end}{lost}"
