"""`deployments/prefect.yaml` as the settings want it: the watcher's interval, and exports on every pool."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ByteSize

from dcp.errors import EnvironmentFault
from flows.deploy_settings import PoolSettings
from flows.settings import LifecycleSettings

DEFAULT = PoolSettings(name="default", memory=ByteSize(4 << 30))
LARGE = PoolSettings(name="large-memory", memory=ByteSize(16 << 30))

_EXPORTS = ("export-step", "export-checkpoint")
"""Flows whose deployments are named as the pools are."""


def local_pools(settings: LifecycleSettings) -> list[PoolSettings]:
    """The pools of a local deployment: those of the settings, and the two that the project always has."""
    named = {pool.name: pool for pool in settings.deploy.pools}
    return [named.pop(DEFAULT.name, DEFAULT), named.pop(LARGE.name, LARGE), *named.values()]


def project_file(source: Path, settings: LifecycleSettings, pools: Sequence[PoolSettings]) -> str:
    """The text of the project file for these settings.

    Raises:
        EnvironmentFault: ``source`` cannot be read.
    """
    document = _read(source)
    deployments: list[dict[str, Any]] = document["deployments"]
    for one in deployments:
        for schedule in one.get("schedules", ()):
            if one["name"] == "watch":
                schedule["interval"] = settings.interval
    for flow in _EXPORTS:
        [model] = [
            one for one in deployments if _flow(one) == flow and one["work_pool"]["name"] == DEFAULT.name
        ]
        standing = {one["work_pool"]["name"] for one in deployments if _flow(one) == flow}
        for pool in pools:
            if pool.name not in standing:
                other = copy.deepcopy(model)
                other["name"] = other["work_pool"]["name"] = pool.name
                deployments.append(other)
    return yaml.safe_dump(document, sort_keys=False)


def pool_template(source: Path, pool: PoolSettings) -> dict[str, Any]:
    """The base job template of a local pool, whose runs may hold what the settings say.

    Raises:
        EnvironmentFault: ``source`` cannot be read.
    """
    template = _read(source)
    template["variables"]["properties"]["memory"]["default"] = int(pool.memory)
    return template


def _flow(deployment: dict[str, Any]) -> str:
    return str(deployment["tags"][0])


def _read(source: Path) -> dict[str, Any]:
    try:
        document = yaml.safe_load(source.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise EnvironmentFault(f"{source} cannot be read ({error})") from None
    return dict(document)
