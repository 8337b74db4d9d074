"""Start the operator."""

import asyncio
import contextlib
import logging

from glowplug.runtime.rest import make_app
from glowplug.runtime.service import run, serve_rest
from glowplug.runtime.tasks import end, essential
from glowplug.services.operator.api_server import ApiError, ApiServer, Unreachable
from glowplug.services.operator.fleet import Fleet
from glowplug.services.operator.lease import Lease
from glowplug.services.operator.settings import OperatorSettings
from glowplug.services.operator.shell import Operator
from glowplug.telemetry import logs
from glowplug.telemetry.metrics import ShellMetrics

log = logging.getLogger(__name__)
RENEW = 1 / 3  # of the lease's time; a holder that cannot renew for two of these acts no more


class Leading:
    """Acts while this process holds the Lease (always, without an election)."""

    def __init__(self, api: ApiServer, fleet: Fleet, settings: OperatorSettings) -> None:
        self._api, self._fleet, self._settings = api, fleet, settings
        self._metrics = ShellMetrics("operator")
        self._metrics.introduce(settings.service_id)
        self._lease = Lease(api, settings.own_namespace(), settings.service_id, settings.leader_lease_s)
        self._operator: Operator | None = None
        self._work: asyncio.Task[None] | None = None
        self._trouble = "the Lease has not been read yet"

    def not_ready(self) -> str:
        """Why it cannot do its work; "" if it can, or could if the leader ended."""
        return self._trouble or (self._operator.trouble if self._operator else "")

    async def run(self) -> None:
        """Work until cancelled."""
        try:
            await (self._lead() if self._settings.leader_lease_s else self._alone())
        finally:
            await self._stop()

    async def release(self) -> None:
        """Once it has stopped: another operator need not wait for the end of the Lease."""
        if self._settings.leader_lease_s:
            with contextlib.suppress(ApiError, Unreachable):
                await self._lease.release()

    async def _alone(self) -> None:
        self._trouble = ""
        self._work = self._start()
        await self._work

    async def _lead(self) -> None:
        """Act while the Lease is held, and stop before another process may take it for lapsed."""
        loop, lease_s = asyncio.get_running_loop(), self._settings.leader_lease_s
        renewed_at = loop.time()
        while True:
            try:
                async with asyncio.timeout(RENEW * lease_s):
                    holds, self._trouble = await self._lease.hold(loop.time()), ""
            except (ApiError, Unreachable, TimeoutError) as error:
                self._trouble = f"the Lease cannot be renewed: {error or 'no answer came'}"
                holds = self._work is not None and loop.time() - renewed_at < 2 * RENEW * lease_s
                log.warning("%s; this operator %s", self._trouble, "goes on" if holds else "does not act")
            else:
                renewed_at = loop.time()
            if holds and self._work is None:
                self._work = self._start()
            elif not holds and self._work is not None:
                log.warning("another operator holds the Lease; this one waits")
                await self._stop()
            if self._work is not None and self._work.done():
                self._work.result()  # an error of its own ends the process, and Kubernetes starts it again
            await asyncio.sleep(RENEW * lease_s)

    def _start(self) -> asyncio.Task[None]:
        settings = self._settings
        self._operator = Operator(self._api, self._fleet, self._metrics, settings.service_id, settings.resync_s)
        log.info("%s makes the fleet what the custom resources declare", settings.service_id)
        return asyncio.create_task(self._operator.run(), name="operator")

    async def _stop(self) -> None:
        await end([self._work])
        self._work = self._operator = None


async def serve(stopping: asyncio.Event) -> None:
    settings = OperatorSettings()
    settings.service_id = settings.service_id or "operator-1"
    logs.configure(settings.service_id, level=settings.log_level, json=settings.log_json)
    if not settings.api_server():
        raise SystemExit("glowplug: GLOWPLUG_KUBERNETES_URL: give the API server's address outside a cluster")
    api = ApiServer(settings.api_server(), settings.kubernetes_account, settings.watch_namespace)
    fleet = Fleet(
        autoscaler=settings.autoscaler_url.rstrip("/"),
        placer=settings.placer_url.rstrip("/"),
        router=settings.router_url.rstrip("/"),
        token=settings.admin_token,
    )
    leading = Leading(api, fleet, settings)
    app = make_app(
        "operator",
        settings.service_id,
        ready=leading.not_ready,
        policies=dict,
        description="Custom resources of Kubernetes.",
    )
    rest, _ = await serve_rest(app, settings)
    work = essential(asyncio.create_task(leading.run(), name="operator"), stopping)
    try:
        await stopping.wait()
    finally:
        await end([work, rest])
        await leading.release()
        await fleet.close()
        await api.close()


def main() -> None:
    run(serve)
