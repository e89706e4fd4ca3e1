"""What a local deployment asks Prefect's API: whether it is healthy, its pools and their workers."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import httpx

from dcp.errors import EnvironmentFault

_TIMEOUT = 30.0
_ATTEMPTS = 6


@dataclass(frozen=True, slots=True)
class Server:
    """A Prefect server; ``url`` ends in ``/api``."""

    url: str

    def healthy(self) -> bool:
        """Whether it answers."""
        try:
            return httpx.get(f"{self.url}/health", timeout=5.0).is_success
        except httpx.HTTPError:
            return False

    def make_pool(self, name: str, template: dict[str, Any], description: str) -> None:
        """Create a process pool, or give the one that stands this template."""
        facts = {"description": description, "base_job_template": template}
        if self.ask("GET", f"work_pools/{name}", missing=True) is None:
            self.ask("POST", "work_pools/", {"name": name, "type": "process", **facts})
        else:
            self.ask("PATCH", f"work_pools/{name}", facts)

    def workers(self, pool: str) -> list[str]:
        """Names of the pool's workers that are online."""
        found = self.ask("POST", f"work_pools/{pool}/workers/filter", {}) or []
        return [worker["name"] for worker in found if worker["status"] == "ONLINE"]

    def deployments(self) -> list[str]:
        """Every deployment, as ``flow/deployment``."""
        flows = {flow["id"]: flow["name"] for flow in self.ask("POST", "flows/filter", {}) or []}
        found = self.ask("POST", "deployments/filter", {}) or []
        return sorted(f"{flows.get(each['flow_id'], '?')}/{each['name']}" for each in found)

    def ask(self, method: str, path: str, body: object = None, *, missing: bool = False) -> Any:
        """One request below ``url``; None for what is not there, where that may be ``missing``.

        Raises:
            EnvironmentFault: it was refused, or not answered.
        """
        try:
            answer = self._answer(method, path, body)
            if missing and answer.status_code == 404:
                return None
            answer.raise_for_status()
        except httpx.HTTPError as error:
            raise EnvironmentFault(f"Prefect's API at {self.url} refused {method} {path}: {error}") from None
        return answer.json() if answer.content else {}

    def _answer(self, method: str, path: str, body: object) -> httpx.Response:
        """The answer, asked for again while the server is too busy to do anything."""
        attempt = 1
        while True:
            answer = httpx.request(method, f"{self.url}/{path}", json=body, timeout=_TIMEOUT)
            if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE or attempt == _ATTEMPTS:
                return answer
            time.sleep(attempt)
            attempt += 1
