"""A router's limits on callers."""

import asyncio
import contextlib
import math
from pathlib import Path
from typing import Any

import pytest

from glowplug.controllers.router.messages import Dispatch, Hold, Reject
from glowplug.domain.access import AccessLimits
from glowplug.events.facts import RouterUsageReported
from glowplug.policies.limits.limiter import Limiter
from glowplug.policies.limits.scope import Limit, LimitRefusal, Reservation, Scope
from glowplug.policies.prediction.response_length import ResponseLengths
from glowplug.services.router import limits
from glowplug.services.router.api_errors import ApiError
from glowplug.services.router.http_request import HttpRequest
from glowplug.services.router.keys import Caller
from glowplug.services.router.limits import CallerLimits, LimitsCopy, _duration, _error
from tests.fleet_builder import a_model, an_instance
from tests.waiting import until

NOW_S, CHAT = 1_790_000_000.0, b"/v1/chat/completions"
OF_DAY = (Scope("tenant/acme", AccessLimits(tokens_per_day=100)),)


def used_up() -> Limiter:
    limiter = Limiter("r-1")
    reserved = limiter.admit(OF_DAY, 100, NOW_S)
    assert isinstance(reserved, Reservation)
    limiter.end(reserved, 100, NOW_S)
    return limiter


async def test_a_day_outlives_its_router(tmp_path: Path) -> None:
    copy, again = LimitsCopy(tmp_path / "r-1" / "limits.json"), Limiter("r-1")
    await copy.write(used_up(), NOW_S)
    copy.read(again, NOW_S + 60)
    assert isinstance(again.admit(OF_DAY, 1, NOW_S + 60), LimitRefusal)


async def test_a_copy_that_cannot_be_read_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, limiter = tmp_path / "limits.json", Limiter("r-1")
    LimitsCopy(path).read(limiter, NOW_S)
    assert not caplog.records
    path.write_bytes(b"{")
    LimitsCopy(path).read(limiter, NOW_S)
    assert len(limiter) == 0 and "starting without it" in caplog.text


@pytest.mark.parametrize("is_needed", [True, False])
async def test_reports_are_sent_while_anybody_has_limits(tmp_path: Path, is_needed: bool) -> None:
    made, sent = CallerLimits("r-1", lambda _: ResponseLengths(), lambda: NOW_S), list[Any]()
    task = asyncio.create_task(made.report(sent.append, lambda: is_needed, LimitsCopy(tmp_path / "limits.json")))
    await asyncio.sleep(0.01)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    wanted = [RouterUsageReported(router_id="r-1", number=int(NOW_S * 1000), scopes={})] if is_needed else []
    assert sent == wanted


def test_durations_are_written_as_openai_writes_them() -> None:
    written = {0: b"0ms", 120: b"120ms", 999: b"999ms", 1000: b"1s", 7660: b"7.7s", 59_900: b"59.9s"}
    written |= {60_000: b"1m0s", 361_500: b"6m1.5s"}
    assert {milliseconds: _duration(milliseconds) for milliseconds in written} == written


# -- one caller ------------------------------------------------------------------------------------------

OF_MINUTE = AccessLimits(requests_per_minute=2, tokens_per_minute=1000)


class Rig:
    def __init__(self, limits: AccessLimits = OF_MINUTE, *, learned: bool = False) -> None:
        self.now_s, self.lengths = NOW_S, ResponseLengths()
        self.limits = CallerLimits("r-1", lambda _: self.lengths, lambda: self.now_s, learned=learned)
        self.caller, self.model = Caller(tenant="acme", tenant_limits=limits), a_model()

    def admit(self, path: bytes = CHAT, prompt: int = 10, most: int = 20, **over: Any) -> tuple[Reservation, str]:
        request = HttpRequest(path=path, caller=self.caller, **over)
        try:
            reserved = self.limits.admit(request, self.model, prompt, most)
        except ApiError as error:
            error.add_note(request.notes.decode())
            raise
        return reserved, request.notes.decode()


def test_a_request_reserves_its_prompt_and_each_of_its_answers() -> None:
    rig = Rig()
    reserved, notes = rig.admit()
    assert reserved.tokens == 30 and notes.splitlines() == [
        "x-ratelimit-limit-requests: 2", "x-ratelimit-remaining-requests: 1", "x-ratelimit-reset-requests: 30s",
        "x-ratelimit-limit-tokens: 1000", "x-ratelimit-remaining-tokens: 970", "x-ratelimit-reset-tokens: 1.8s",
    ]  # fmt: skip
    three = rig.limits.admit(HttpRequest(path=CHAT, caller=rig.caller), rig.model, 10, 20, 3)
    assert three.tokens == 70


def test_a_caller_of_anthropics_paths_reads_its_headers() -> None:
    for over in ({"path": b"/v1/messages"}, {"path": CHAT, "first_path": b"/v1/messages/count_tokens"}):
        _, notes = Rig().admit(**over)  # type: ignore[arg-type]
        assert notes.splitlines() == [
            "anthropic-ratelimit-requests-limit: 2", "anthropic-ratelimit-requests-remaining: 1",
            "anthropic-ratelimit-requests-reset: 2026-09-21T14:13:50Z", "anthropic-ratelimit-tokens-limit: 1000",
            "anthropic-ratelimit-tokens-remaining: 970", "anthropic-ratelimit-tokens-reset: 2026-09-21T14:13:22Z",
        ]  # fmt: skip
    assert "anthropic" not in Rig().admit(b"/v1/messagesx")[1]
    assert "x-ratelimit-limit-requests" not in Rig(AccessLimits(tokens_per_minute=50)).admit()[1]
    assert "tokens" not in Rig(AccessLimits(requests_per_minute=2)).admit(b"/v1/messages")[1]


@pytest.mark.parametrize(
    ("scope_id", "limit", "wait_s", "expected"),
    [
        ("tenant/acme", Limit.REQUESTS, 7.2, ("requests", "rate_limit_exceeded", 8, "tenant acme")),
        ("tenant/acme", Limit.REQUESTS, 0.2, ("requests", "rate_limit_exceeded", 1, "tenant acme")),
        ("key/aaaaaaa1", Limit.TOKENS, 8.0, ("tokens", "rate_limit_exceeded", 8, "key gp-aaaaaaa1")),
        ("model/acme/m/1", Limit.TOKENS, math.inf, ("tokens", "rate_limit_exceeded", None, "tenant acme at model m/1")),
        ("tenant/acme", Limit.DAY, 9.0, ("insufficient_quota", "insufficient_quota", 9, "tenant acme")),
        ("tenant/acme", Limit.MONTH, math.inf, ("insufficient_quota", "insufficient_quota", None, "tenant acme")),
        ("tenant/acme", Limit.CONCURRENT, 1.0, ("requests", "rate_limit_exceeded", 1, "tenant acme")),
    ],
)
def test_a_refusal_names_whose_limit_it_is_and_when_to_come_again(
    scope_id: str, limit: Limit, wait_s: float, expected: tuple[str, str, float | None, str]
) -> None:
    error = _error(LimitRefusal(scope_id, limit, 5, wait_s))
    assert (error.status, error.type, error.code, error.retry_after_s) == (429, *expected[:3])
    assert f"{expected[3]} " in error.message.replace(":", " ") and "5 " in error.message
    assert ("at model" in error.message) is scope_id.startswith("model/")


@pytest.mark.parametrize(
    ("limits", "retried"),
    [
        (AccessLimits(requests_per_minute=1), True),  # after 60 s
        (AccessLimits(tokens_per_minute=5), False),
        (AccessLimits(tokens_per_day=5), False),
    ],
)
def test_a_client_is_told_not_to_wait_for_longer_than_a_minute(limits: AccessLimits, retried: bool) -> None:
    rig = Rig(limits)
    if retried:
        rig.admit()
    with pytest.raises(ApiError) as refused:
        rig.admit()
    assert (refused.value.retry_after_s == 60.0) is retried
    assert ("x-should-retry: false" in refused.value.__notes__[0]) is not retried


def test_a_request_that_may_not_be_held_is_rejected_and_a_sent_one_is_held_no_more() -> None:
    rig = Rig(AccessLimits(queued=1))
    first, second = rig.admit()[0], rig.admit()[0]
    held = Hold(1, 5.0)
    assert rig.limits.effect(held, first) is held
    refused = rig.limits.effect(held, second)
    assert isinstance(refused, Reject) and refused.ticket == 1 and isinstance(refused.error, ApiError)
    sent = Dispatch(1, an_instance(), 0.0, False)
    assert rig.limits.effect(sent, first) is sent
    assert rig.limits.effect(held, second) is held


@pytest.mark.parametrize(("is_whole", "learned"), [(True, False), (False, False), (True, True)])
def test_an_end_is_settled_once_and_teaches_by_whole_answers(is_whole: bool, learned: bool) -> None:
    rig = Rig(AccessLimits(tokens_per_minute=1000), learned=learned)
    before = rig.lengths.expect(10, 0)
    rig.limits.reserved[5] = rig.admit(most=500)[0]
    for _ in range(2):
        rig.limits.end(5, "m", 10, 40, is_whole=is_whole)
    rig.limits.end(6, "m", 10, 40, is_whole=is_whole)
    assert "remaining-tokens: 920" in rig.admit(most=20)[1]
    assert (rig.lengths.expect(10, 0) == before) is (learned or not is_whole)


# -- reports and the copy --------------------------------------------------------------------------------


async def test_an_urgent_report_comes_between_two_others_and_a_copy_at_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "REPORT_SOONEST_S", 0.001)
    rig, sent, copies = Rig(AccessLimits(concurrent=2)), list[RouterUsageReported](), list[float]()
    copy = LimitsCopy(tmp_path / "limits.json")
    write = copy.write

    async def counted(limiter: Limiter, now_s: float) -> None:
        copies.append(now_s)
        await write(limiter, now_s)

    monkeypatch.setattr(copy, "write", counted)
    looks = list[bool]()

    def is_needed() -> bool:
        looks.append(False)
        return False

    monkeypatch.setattr(limits, "REPORT_EVERY_S", 0.001)
    reporting = asyncio.create_task(rig.limits.report(sent.append, is_needed, copy))
    await until(lambda: len(looks) >= 3)
    assert not sent, "nobody has limits"
    monkeypatch.setattr(limits, "REPORT_EVERY_S", 60.0)
    rig.limits.limiter.take("r-2", 1, {}, NOW_S)
    rig.limits.limiter.report(NOW_S)
    rig.admit()
    assert rig.limits.limiter.urgent
    await until(lambda: len(sent) == 1)
    assert sent[0].router_id == "r-1" and set(sent[0].scopes) == {"tenant/acme"} and not copies
    reporting.cancel()
    await asyncio.gather(reporting, return_exceptions=True)
    monkeypatch.setattr(limits, "REPORT_EVERY_S", 0.0)
    reporting = asyncio.create_task(rig.limits.report(sent.append, lambda: False, copy))
    for now_s, num in (
        (NOW_S, 0),
        (NOW_S + 9.9, 0),
        (NOW_S + 10.0, 1),
        (NOW_S + 19.9, 1),
        (NOW_S + 20.0, 2),
        (NOW_S - 1.0, 3),
    ):
        rig.now_s = now_s
        before = len(sent)
        await until(lambda before=before: len(sent) >= before + 3)  # type: ignore[misc]
        assert len(copies) == num, now_s
    reporting.cancel()
    await asyncio.gather(reporting, return_exceptions=True)


async def test_a_copy_has_what_is_needed_of_every_scope_and_pauses_at_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "COPY_SLICE", 2)
    limiter, turns, found = Limiter("r-1"), 0, list[Any]()
    for number in range(5):
        limiter.admit((Scope(f"tenant/{number}", AccessLimits(requests_per_minute=1)),), 0, NOW_S + 30.0 * (number > 0))
    limiter.take("r-2", 1, {}, NOW_S + 60)

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    monkeypatch.setattr(LimitsCopy, "_replace", lambda self, copy: found.append(copy))
    counting = asyncio.create_task(count())
    await LimitsCopy(tmp_path / "x").write(limiter, NOW_S + 60.0)
    counting.cancel()
    assert set(found[0].scopes) == {f"tenant/{number}" for number in range(1, 5)}
    assert (found[0].written_at, found[0].routers, turns >= 2) == (NOW_S + 60.0, ["r-2"], True)
