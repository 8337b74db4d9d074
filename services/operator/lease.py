"""Which of several operators acts: the holder of a Lease of coordination.k8s.io.

A holder that does not renew is judged by how long this process has seen its Lease unchanged, so that clocks of two
machines need not agree (client-go's leader election does the same).
"""

from datetime import UTC, datetime
from typing import Any, Final

from glowplug.services.operator.api_server import ApiError, ApiServer

NAME: Final = "glowplug-operator"
CONFLICT, NOT_FOUND = 409, 404


class Lease:
    """The Lease of one namespace, as the process `me` holds it or waits for it."""

    def __init__(self, api: ApiServer, namespace: str, me: str, lease_s: float) -> None:
        self._api, self._me, self._lease_s = api, me, lease_s
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._seen: tuple[Any, float] = (None, 0.0)  # holder and renewal as last read; since when

    async def hold(self, now_s: float) -> bool:
        """Take or renew the Lease. Returns False while another process holds it. `now_s`: any steady clock. Raises
        ApiError and Unreachable."""
        try:
            found = await self._api.call("GET", f"{self._path}/{NAME}")
        except ApiError as error:
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
        """Give the Lease away where this process holds it, so that another need not wait."""
        found = await self._api.call("GET", f"{self._path}/{NAME}")
        if found.get("spec", {}).get("holderIdentity") == self._me:
            found["spec"]["holderIdentity"] = ""
            await self._api.call("PUT", f"{self._path}/{NAME}", json=found)

    async def _write(self, method: str, path: str, found: dict[str, Any], num_changes: int) -> bool:
        """Write it as ours. Returns False where another process was faster."""
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
        document = {**found, "apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "spec": spec}
        try:
            await self._api.call(method, path, json=document)
        except ApiError as error:
            if error.status == CONFLICT:
                return False
            raise
        return True
