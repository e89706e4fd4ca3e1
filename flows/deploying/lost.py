"""Ends runs of a local deployment that are such in name only, since the worker that ran them was killed.

Prefect takes minutes to find out, and until then such a run holds the one slot of `watch`, whose new runs
are cancelled. Every run of a local deployment is a process of this machine, which tells at once.
"""

from __future__ import annotations

from collections.abc import Iterable

import psutil

from flows.deploying.server import Server

_RUN = "PREFECT__FLOW_RUN_ID"
"""A worker's name for the run in the environment of its process."""
_LIMIT = 200


def end_lost_runs(server: Server, pools: Iterable[str]) -> list[str]:
    """Have the runs of ``pools`` that have begun and have no process crash; their names.

    Raises:
        EnvironmentFault: the server refused.
    """
    filters = {
        "flow_runs": {"state": {"type": {"any_": ["RUNNING", "CANCELLING"]}}},
        "work_pools": {"name": {"any_": sorted(pools)}},
        "limit": _LIMIT,
    }
    begun = server.ask("POST", "flow_runs/filter", filters)
    alive = _runs_of_processes()
    # Asked for again: one that ended in the meantime had its process until then.
    still = {run["id"] for run in server.ask("POST", "flow_runs/filter", filters)}
    lost = [run for run in begun if run["id"] in still and run["id"] not in alive]
    state = {"type": "CRASHED", "message": "its process is gone: the worker was killed"}
    for run in lost:
        server.ask("POST", f"flow_runs/{run['id']}/set_state", {"state": state, "force": True})
    return [str(run["name"]) for run in lost]


def _runs_of_processes() -> set[str]:
    """Ids of runs that a process of this machine is at work on."""
    found = set()
    for process in psutil.process_iter():
        try:
            found.add(process.environ().get(_RUN, ""))
        except (psutil.Error, OSError):
            continue  # it has just ended, or is somebody else's
    return found
