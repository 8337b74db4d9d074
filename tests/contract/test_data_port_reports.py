"""What a router reports of the requests it has not finished: where each stands, never what it says, in a bound."""

import asyncio

from glowplug.events.facts import RequestFinished, RouterRequestsReported
from tests.contract.data_port_rig import DONE, TOKEN, a_model, a_rig, chat, streaming


async def test_held_sent_and_streaming_ones_stand_where_they_are() -> None:
    go_on, end = asyncio.Event(), asyncio.Event()
    async with a_rig(models=(a_model(), a_model("other"))) as rig:
        assert rig.reports.live(10) == RouterRequestsReported(router_id="router-1", num_live=0)
        clients = [
            await rig.held(chat(model, stream=True, extra=b"x-request-id: r-%d\r\n" % number))
            for number, model in enumerate(("m", "other", "m", "m"))
        ]
        report = rig.reports.live(10)
        assert [(r.request_id, r.model_key, r.state, r.position) for r in report.requests] == [
            ("r-0", "m", "held", 1),
            ("r-1", "other", "held", 1),
            ("r-2", "m", "held", 2),
            ("r-3", "m", "held", 3),
        ]
        assert all(r.eta_s > 0 and r.stream and not r.instance_id for r in report.requests)

        await rig.engine(streaming(go_on, TOKEN, end, DONE), max_concurrency=2)
        await rig.until(lambda: rig.num_in_flight == 2)
        sent = rig.reports.live(10)
        assert [(r.state, r.position) for r in sent.requests] == [
            ("dispatched", 0),
            ("held", 1),
            ("dispatched", 0),
            ("held", 1),
        ]
        assert sent.requests[0].instance_id == "i-1" and sent.requests[0].cold and sent.requests[0].eta_s == 0
        go_on.set()
        await rig.until(lambda: [r.state for r in rig.reports.live(10).requests].count("streaming") == 2)
        begun = rig.reports.live(10).requests[0]
        assert begun.ttft_s > 0 and begun.response_tokens == 1

        assert len(rig.reports.live(2).requests) == 2 and rig.reports.live(2).num_live == 4
        end.set()
        clients[1].close()
        await rig.until(lambda: not rig.table.exchanges)
        ended = [p for p in rig.reported if isinstance(p, RequestFinished)]
        assert {(f.request_id, f.status, f.error_code, f.stream) for f in ended} == {
            ("r-0", 200, "", True),
            ("r-1", 499, "client_left", True),
            ("r-2", 200, "", True),
            ("r-3", 200, "", True),
        }


async def test_reports_come_while_there_are_requests_and_once_more() -> None:
    async with a_rig() as rig:
        told = rig.reported
        reporting = asyncio.create_task(rig.reports.report_requests(0.01, 10))
        await asyncio.sleep(0.05)
        assert told == [], "a quiet router says nothing"
        client = await rig.sent(chat(stream=True))
        await rig.until(lambda: len(told) > 2)
        client.close()
        await rig.until(lambda: not rig.table.exchanges)
        reports = [p for p in told if isinstance(p, RouterRequestsReported)]
        await rig.until(lambda: isinstance(told[-1], RouterRequestsReported) and told[-1].num_live == 0)
        num_told = len(told)
        await asyncio.sleep(0.05)
        assert len(told) == num_told and reports[0].num_live == 1
        reporting.cancel()
        await asyncio.gather(reporting, return_exceptions=True)


async def test_none_are_told_when_the_bound_is_none() -> None:
    async with a_rig() as rig:
        await rig.held(chat(stream=True))
        await rig.reports.report_requests(0.01, 0)
        assert rig.reported == []
