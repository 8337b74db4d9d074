"""The shell of the operator's controller: follows the API server, looks at the fleet, and carries out what is decided.

One task takes all stimuli in turn, and an effect's answer before the next effect. What fails is decided again at the
next look; nothing is kept that a restart would lose.
"""

import asyncio
import logging
import time
from collections import deque
from contextlib import aclosing
from hashlib import sha256
from typing import Any, Final

import httpx

from glowplug.controllers import backoff
from glowplug.controllers.resources import messages as msg
from glowplug.controllers.resources.controller import ResourcesController
from glowplug.controllers.resources.messages import FINALIZER, MANAGER, Kind, Resource
from glowplug.runtime.custom_resources import GROUP, VERSION
from glowplug.services.operator.api_server import ApiError, ApiServer, Expired, Unreachable
from glowplug.services.operator.fleet import Fleet
from glowplug.telemetry.metrics import ShellMetrics

log = logging.getLogger(__name__)
FIRST_S, MOST_S = 0.5, 15.0  # pause before the API server is asked again
BETWEEN_S: Final = 0.1  # two watches; the API server ends each now and then
WAITING: Final = 1000  # stimuli that wait; the watches wait beyond
NOT_FOUND, CONFLICT = 404, 409
NOTE_CHARS: Final = 1024  # of an event, as Kubernetes allows


class Operator:
    """One operator at work. `look_s`: seconds between two looks at the fleet."""

    def __init__(self, api: ApiServer, fleet: Fleet, metrics: ShellMetrics, service_id: str, look_s: float) -> None:
        self._api, self._fleet, self._metrics = api, fleet, metrics
        self._service_id, self._look_s = service_id, look_s
        self._controller = ResourcesController()
        self._stimuli: asyncio.Queue[Any] = asyncio.Queue(WAITING)
        self._look_now = asyncio.Event()
        self._said = ""  # the last trouble in the log
        self._troubles = dict.fromkeys(Kind, "they have not been listed yet")  # why a kind cannot be followed

    @property
    def trouble(self) -> str:
        """Why it cannot do its work; "" if it can."""
        return next((f"{kind}s cannot be followed: {why}" for kind, why in self._troubles.items() if why), "")

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as group:
            for kind in Kind:
                group.create_task(self._follow(kind))
            group.create_task(self._look())
            group.create_task(self._work())

    async def _follow(self, kind: Kind) -> None:
        """List the resources of a kind and watch them, anew when the API server has forgotten where we are."""
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
                log.info("the API server keeps no %s of that version any more: they are listed again", kind)
            except (ApiError, Unreachable) as error:
                num_failures += 1
                pause_s = backoff.backoff_s(num_failures, FIRST_S, MOST_S)
                if isinstance(error, ApiError) or num_failures > 1:  # a watch may end by a lost connection
                    self._troubles[kind] = str(error)
                    log.warning("%s; tried again in %g s", self.trouble, pause_s)
                await asyncio.sleep(pause_s)

    async def _watched(self, kind: Kind, version: str) -> str:
        """One watch, to its end. Returns the version up to which it has come."""
        async with aclosing(self._api.watch(kind, version)) as changes:
            async for change, document in changes:
                version = str(document["metadata"]["resourceVersion"])
                if change == "DELETED":
                    await self._stimuli.put(msg.Gone(str(document["metadata"]["uid"])))
                elif change != "BOOKMARK":
                    await self._stimuli.put(msg.Seen(Resource.read({**document, "kind": kind.value})))
        return version

    async def _look(self) -> None:
        """Look at the fleet at a steady beat, and soon after a change of ours."""
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
        """Log a trouble once, not at each look."""
        if trouble != self._said:
            log.warning("%s", trouble)
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
                    self._say(f"the API server does not answer: {error}; what it was to take is decided again")
                    for missed in (effect, *effects):
                        self._handle(msg.NotDone(missed))
                    break
                effects.extend(further for outcome in outcomes for further in self._handle(outcome))

    def _handle(self, stimulus: Any) -> list[Any]:
        self._metrics.stimuli.labels("operator", type(stimulus).__name__).inc()
        return self._controller.handle(stimulus, time.time())

    async def _perform(self, effect: Any) -> list[Any]:
        """Carry out one effect. Returns the stimuli that come of it. Raises Unreachable."""
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
                case msg.Hold():
                    return _seen(await self._api.apply(resource, {"metadata": {"finalizers": [FINALIZER]}}))
                case msg.Release():
                    log.info("%s %s is gone from the fleet", resource.kind, resource.source)
                    return _seen(await self._api.apply(resource, {}))
                case msg.WriteStatus():
                    return _seen(await self._api.apply(resource, {"status": dict(effect.status)}, "status"))
                case _:
                    await self._announce(resource, effect.notice)
                    return []
        except ApiError as error:
            if error.status == NOT_FOUND:
                return [msg.Gone(resource.uid)] if not isinstance(effect, msg.Announce) else []
            if error.status == CONFLICT:
                return await self._read_again(resource)
            self._say(f"{type(effect).__name__} of {resource.kind} {resource.source}: {error}")
            return [msg.NotDone(effect)]

    async def _read_again(self, resource: Resource) -> list[Any]:
        """Somebody else was faster: look at what is there now."""
        try:
            found = await self._api.get(resource)
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise Unreachable(str(error)) from error
            return [msg.Gone(resource.uid)]
        is_another = found["metadata"]["uid"] != resource.uid
        return [msg.Gone(resource.uid)] * is_another + _seen(found)

    async def _announce(self, resource: Resource, notice: msg.Notice) -> None:
        """Create an event; one that is there already was announced before."""
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
        except ApiError as error:
            if error.status != CONFLICT:
                raise


def _seen(document: dict[str, Any]) -> list[Any]:
    return [msg.Seen(Resource.read(document))]


def _logged(effect: Any, answer: msg.Answered) -> msg.Answered:
    """The answer, with a line in the log that says what the fleet made of the call."""
    resource: Resource = effect.resource
    what = "undeployed" if isinstance(effect, msg.Withdraw) else "deployed"
    if answer.message:
        log.warning("%s %s could not be %s: %s", resource.kind, resource.source, what, answer.message)
    else:
        log.info("%s %s of generation %d was %s", resource.kind, resource.source, resource.generation, what)
    return answer
