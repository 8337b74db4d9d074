"""A connection that has ended is freed at once: the collector runs seldom, and most engines get one a request."""

import gc
import weakref
from collections.abc import Callable

import pytest

from bench.budget.data_path import DataPath, request_bytes

WRONG = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"


def is_answered(path: DataPath) -> None:
    path.whole(request_bytes())


def leaves_midway(path: DataPath) -> None:
    path.ask(request_bytes())
    path.begin()


def is_refused(path: DataPath) -> None:
    path.ask(WRONG)


@pytest.mark.parametrize("sends", [is_answered, leaves_midway, is_refused])
async def test_both_connections_of_a_request_are_freed_without_the_collector(
    sends: Callable[[DataPath], None],
) -> None:
    router = DataPath.made()
    gc.disable()
    try:
        path = router.beside()
        kept = [weakref.ref(path.client), weakref.ref(path.engine)]
        sends(path)
        path.client.connection_lost(None)
        path.engine.connection_lost(None)
        del path
        assert [one() for one in kept] == [None, None]
    finally:
        gc.enable()
