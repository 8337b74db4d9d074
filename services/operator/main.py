"""Start the operator."""

import asyncio
import contextlib
import logging
import time
from collections import deque
from contextlib import aclosing
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any, Final

import httpx

from glowplug.controllers import backoff
from glowplug.controllers.resources import messages as msg
from glowplug.controllers.resources.controller import ResourcesController
from glowplug.controllers.resources.messages import FINALIZER, MANAGER, Resource, ResourceKind
from glowplug.runtime.clock import now_s
from glowplug.runtime.custom_resources import GROUP, VERSION
from glowplug.runtime.rest import make_app
from glowplug.runtime.service import run, serve_rest
from glowplug.runtime.tasks import end, essential
from glowplug.services.operator.api_server import ApiServer, ApiServerError, Expired, Unreachable
from glowplug.services.operator.fleet import FleetRest
from glowplug.services.operator.settings import OperatorSettings
from glowplug.telemetry import logs
from glowplug.telemetry.metrics import ShellMetrics

# Leader election by a Lease of coordination.k8s.io. A silent holder is judged by how long this process has seen its
# Lease unchanged, so that clocks need not agree (client-go's leader election does the same).

NAME: Final = "glowplug-operator"
CONFLICT, NOT_FOUND = 409, 404


class KubernetesLease:
    def __init__(self, api: ApiServer, namespace: str, me: str, lease_s: float) -> None:
        self._api, self._me, self._lease_s = api, me, lease_s
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._seen: tuple[Any, float] = (None, 0.0)  # holder and renewal as last read; since when

    async def hold(self, now_s: float) -> bool:
        """Take or renew the Lease; False while another process holds it. `now_s`: any steady clock. Raises
        ApiServerError and Unreachable."""
        try:
            found = await self._api.call("GET", f"{self._path}/{NAME}")
        except ApiServerError as error:
            if error.status != NOT_FOUND:
                raise
            return await self._write("POST", self._path, {"metadata": {"name": NAME}}, num_changes=0)
        spec = found.get("spec") or {}
        state = (spec.get("holderIdentity"), spec.get("renewTime"))
        if state != self._seen[0]:
            self._seen = (state, now_s)
        holder = spec.get("holderIdentity") or ""
        if holder not in ("", self._me) and now_s - self._seen[1] < self._lease_s:
            return False
        num_changes = int(spec.get("leaseTransitions") or 0) + (holder != self._me)
        return await self._write("PUT", f"{self._path}/{NAME}", found, num_changes)

    async def release(self) -> None:
        found = await self._api.call("GET", f"{self._path}/{NAME}")
        if found.get("spec", {}).get("holderIdentity") == self._me:
            found["spec"]["holderIdentity"] = ""
            await self._api.call("PUT", f"{self._path}/{NAME}", json=found)

    async def _write(self, method: str, path: str, found: dict[str, Any], num_changes: int) -> bool:
        """Return False if another process was faster."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        known = found.get("spec") or {}
        acquired = known.get("acquireTime") if known.get("holderIdentity") == self._me else None
        spec = {
            "holderIdentity": self._me,
            "leaseDurationSeconds": max(1, round(self._lease_s)),
            "acquireTime": acquired or now,
            "renewTime": now,
            "leaseTransitions": num_changes,
        }
        document = {**found, "apiVersion": "coordination.k8s.io/v1", "kind": "KubernetesLease", "spec": spec}
        try:
            await self._api.call(method, path, json=document)
        except ApiServerError as error:
            if error.status == CONFLICT:
                return False
            raise
        return True


# The shell of the operator's controller. One task takes all stimuli in turn, and an effect's answer before the next
# effect. Failures are decided again at the next look; no state is lost by a restart.

log = logging.getLogger(__name__)
FIRST_S, MOST_S = 0.5, 15.0
BETWEEN_S: Final = 0.1
WAITING: Final = 1000
NOT_FOUND, CONFLICT = 404, 409
NOTE_CHARS: Final = 1024  # Kubernetes' limit for a note


class Operator:
    def __init__(self, api: ApiServer, fleet: FleetRest, metrics: ShellMetrics, service_id: str, look_s: float) -> None:
        self._api, self._fleet, self._metrics = api, fleet, metrics
        self._service_id, self._look_s = service_id, look_s
        self._controller = ResourcesController()
        self._stimuli: asyncio.Queue[Any] = asyncio.Queue(WAITING)
        self._look_now = asyncio.Event()
        self._said = ""
        self._troubles = dict.fromkeys(ResourceKind, "they have not been listed yet")

    @property
    def trouble(self) -> str:
        return next((f"{kind}s cannot be followed: {why}" for kind, why in self._troubles.items() if why), "")

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for kind in ResourceKind:
                group.create_task(self._follow(kind))
            group.create_task(self._look())
            group.create_task(self._work())

    async def _follow(self, kind: ResourceKind) -> None:
        num_failures = 0
        while True:
            try:
                found, version = await self._api.list(kind)
                await self._stimuli.put(msg.Listed(kind, tuple(map(Resource.read, found))))
                num_failures, self._troubles[kind] = 0, ""
                while True:
                    version = await self._watched(kind, version)
                    await asyncio.sleep(BETWEEN_S)
            except Expired:
                log.info("the operator lists every %s again: the API server no longer has the version it watched", kind)
            except (ApiServerError, Unreachable) as error:
                num_failures += 1
                pause_s = backoff.backoff_s(num_failures, FIRST_S, MOST_S)
                if isinstance(error, ApiServerError) or num_failures > 1:  # a watch may end by a lost connection
                    self._troubles[kind] = str(error)
                    log.warning("the operator watches %s again in %g s: %s", kind, pause_s, self.trouble)
                await asyncio.sleep(pause_s)

    async def _watched(self, kind: ResourceKind, version: str) -> str:
        async with aclosing(self._api.watch(kind, version)) as changes:
            async for change, document in changes:
                version = str(document["metadata"]["resourceVersion"])
                if change == "DELETED":
                    await self._stimuli.put(msg.Gone(str(document["metadata"]["uid"])))
                elif change != "BOOKMARK":
                    await self._stimuli.put(msg.Seen(Resource.read({**document, "kind": kind.value})))
        return version

    async def _look(self) -> None:
        while True:
            self._look_now.clear()
            try:
                stimulus: Any = msg.Looked(await self._fleet.look())
            except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
                why = f"{type(error).__name__}: {error}".splitlines()[0][:300]
                stimulus = msg.Lost(f"the fleet's REST cannot be read: {why}")
                self._say(stimulus.why)
            await self._stimuli.put(stimulus)
            try:
                await asyncio.wait_for(self._look_now.wait(), self._look_s)
            except TimeoutError:
                continue

    def _say(self, trouble: str) -> None:
        if trouble != self._said:
            log.warning("the operator is blocked: %s", trouble)
        self._said = trouble

    async def _work(self) -> None:
        while True:
            stimulus = await self._stimuli.get()
            effects = deque(self._handle(stimulus))
            while effects:
                effect = effects.popleft()
                try:
                    outcomes = await self._perform(effect)
                except Unreachable as error:
                    self._say(f"the API server does not answer: {error}; its changes are decided again")
                    for missed in (effect, *effects):
                        self._handle(msg.NotDone(missed))
                    break
                effects.extend(further for outcome in outcomes for further in self._handle(outcome))

    def _handle(self, stimulus: Any) -> list[Any]:
        self._metrics.stimuli.labels("operator", type(stimulus).__name__).inc()
        return self._controller.handle(stimulus, now_s())

    async def _perform(self, effect: Any) -> list[Any]:
        """Return the resulting stimuli. Raises Unreachable."""
        self._metrics.effects.labels("operator", type(effect).__name__).inc()
        resource: Resource = effect.resource
        try:
            match effect:
                case msg.Declare():
                    self._look_now.set()
                    return [_logged(effect, await self._fleet.declare(resource))]
                case msg.Withdraw():
                    self._look_now.set()
                    return [_logged(effect, await self._fleet.withdraw(resource, effect.key))]
                case msg.AddFinalizer():
                    return _seen(await self._api.apply(resource, {"metadata": {"finalizers": [FINALIZER]}}))
                case msg.RemoveFinalizer():
                    log.info("%s %s is gone from the fleet", resource.kind, resource.source)
                    return _seen(await self._api.apply(resource, {}))
                case msg.WriteStatus():
                    return _seen(await self._api.apply(resource, {"status": dict(effect.status)}, "status"))
                case _:
                    await self._announce(resource, effect.notice)
                    return []
        except ApiServerError as error:
            if error.status == NOT_FOUND:
                return [msg.Gone(resource.uid)] if not isinstance(effect, msg.Announce) else []
            if error.status == CONFLICT:
                return await self._read_again(resource)
            self._say(f"{type(effect).__name__} of {resource.kind} {resource.source}: {error}")
            return [msg.NotDone(effect)]

    async def _read_again(self, resource: Resource) -> list[Any]:
        try:
            found = await self._api.get(resource)
        except ApiServerError as error:
            if error.status != NOT_FOUND:
                raise Unreachable(str(error)) from error
            return [msg.Gone(resource.uid)]
        is_another = found["metadata"]["uid"] != resource.uid
        return [msg.Gone(resource.uid)] * is_another + _seen(found)

    async def _announce(self, resource: Resource, notice: msg.Notice) -> None:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(notice.at_s)) + f".{int(notice.at_s % 1 * 1e6):06d}Z"
        document = {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"name": f"{resource.name[:200]}.{sha256(notice.name.encode()).hexdigest()[:16]}"},
            "eventTime": at,
            "reportingController": f"{GROUP}/{MANAGER}",
            "reportingInstance": self._service_id[:128],
            "action": notice.reason,
            "reason": notice.reason,
            "note": notice.note[:NOTE_CHARS],
            "type": "Warning" if notice.is_warning else "Normal",
            "regarding": {
                "apiVersion": f"{GROUP}/{VERSION}",
                "kind": resource.kind.value,
                "name": resource.name,
                "namespace": resource.namespace,
                "uid": resource.uid,
            },
        }
        try:
            path = f"/apis/events.k8s.io/v1/namespaces/{resource.namespace}/events"
            await self._api.call("POST", path, json=document)
        except ApiServerError as error:
            if error.status != CONFLICT:
                raise


def _seen(document: dict[str, Any]) -> list[Any]:
    return [msg.Seen(Resource.read(document))]


def _logged(effect: Any, answer: msg.Answered) -> msg.Answered:
    resource: Resource = effect.resource
    what = "undeployed" if isinstance(effect, msg.Withdraw) else "deployed"
    if answer.message:
        log.warning("%s %s could not be %s: %s", resource.kind, resource.source, what, answer.message)
    else:
        log.info("%s %s of generation %d was %s", resource.kind, resource.source, resource.generation, what)
    return answer


RENEW = 1 / 3  # of the lease's time; after two failed renewals a holder stops acting


class Leading:
    def __init__(self, api: ApiServer, fleet: FleetRest, settings: OperatorSettings) -> None:
        self._api, self._fleet, self._settings = api, fleet, settings
        self._metrics = ShellMetrics("operator")
        self._metrics.introduce(settings.service_id)
        self._lease = KubernetesLease(api, settings.own_namespace(), settings.service_id, settings.leader_lease_s)
        self._operator: Operator | None = None
        self._work: asyncio.Task[None] | None = None
        self._trouble = "the KubernetesLease has not been read yet"

    def not_ready(self) -> str:
        return self._trouble or (self._operator.trouble if self._operator else "")

    async def run(self) -> None:
        try:
            await (self._lead() if self._settings.leader_lease_s else self._alone())
        finally:
            await self._stop()

    async def release(self) -> None:
        """Release the Lease after the stop."""
        if self._settings.leader_lease_s:
            with contextlib.suppress(ApiServerError, Unreachable):
                await self._lease.release()

    async def _alone(self) -> None:
        self._trouble = ""
        self._work = self._start()
        await self._work

    async def _lead(self) -> None:
        """Act while the Lease is held, and stop before it may lapse."""
        loop, lease_s = asyncio.get_running_loop(), self._settings.leader_lease_s
        renewed_at = loop.time()
        while True:
            try:
                async with asyncio.timeout(RENEW * lease_s):
                    holds, self._trouble = await self._lease.hold(loop.time()), ""
            except (ApiServerError, Unreachable, TimeoutError) as error:
                self._trouble = f"the Lease cannot be renewed: {error or 'no answer came'}"
                holds = self._work is not None and loop.time() - renewed_at < 2 * RENEW * lease_s
                state = "acts until its lease ends" if holds else "does not act"
                log.warning("this operator %s: %s", state, self._trouble)
            else:
                renewed_at = loop.time()
            if holds and self._work is None:
                self._work = self._start()
            elif not holds and self._work is not None:
                log.warning("this operator stops and waits: another one holds the Lease")
                await self._stop()
            if self._work is not None and self._work.done():
                self._work.result()  # its own error ends the process; Kubernetes restarts it
            await asyncio.sleep(RENEW * lease_s)

    def _start(self) -> asyncio.Task[None]:
        settings = self._settings
        self._operator = Operator(self._api, self._fleet, self._metrics, settings.service_id, settings.resync_s)
        log.info("%s applies the custom resources to the fleet", settings.service_id)
        return asyncio.create_task(self._operator.run(), name="operator")

    async def _stop(self) -> None:
        await end([self._work])
        self._work = self._operator = None


async def serve(stopping: asyncio.Event) -> None:
    settings = OperatorSettings.read()
    settings.service_id = settings.service_id or "operator-1"
    logs.configure(settings.service_id, level=settings.log_level, json=settings.log_json)
    if not settings.api_server():
        raise SystemExit("glowplug: GLOWPLUG_KUBERNETES_URL: give the API server's address outside a cluster")
    api = ApiServer(settings.api_server(), settings.kubernetes_account, settings.watch_namespace)
    fleet = FleetRest(
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
