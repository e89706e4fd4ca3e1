"""What using a checkpoint costs: loads by 1 to 1024 ranks, and an export, from the index alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dcp.checkpoint import Survey
from dcp.errors import CheckpointError, ResourceError, UsageError
from flows.text import name


@dataclass(frozen=True, slots=True)
class LoadCost:
    """A load by some ranks. Bytes are those of all ranks, but ``slowest``: of the rank that reads most."""

    layout: str
    ranks: int
    needed: int
    read: int
    requests: int
    slowest: int
    torch_read: int
    torch_slowest: int


@dataclass(frozen=True, slots=True)
class PartCosts:
    """Loads of one checkpoint; ``part`` is empty if it is the whole step."""

    part: str
    costs: tuple[LoadCost, ...]


@dataclass(frozen=True, slots=True)
class LoadCosts:
    """All loads, or why there are none."""

    parts: tuple[PartCosts, ...]
    why_not: str


@dataclass(frozen=True, slots=True)
class ExportCost:
    """What an export of everything as one torch.save file takes, in bytes and estimated seconds."""

    memory: int
    disk: int
    bytes: int
    seconds: float


def load_costs(parts: Mapping[str, Survey]) -> LoadCosts:
    """Forecast loads by 1 to 1024 ranks of parts whose index can be read, by prefix."""
    from dcp.load.forecast import forecast

    if not parts:
        return LoadCosts((), "There is no index that could be read.")
    found = []
    for prefix, part in parts.items():
        try:
            report = forecast(part)
        except CheckpointError as error:
            return LoadCosts((), name(str(error), 600))
        costs = tuple(
            LoadCost(
                layout=each.layout,
                ranks=each.ranks,
                needed=each.bytes_loaded,
                read=each.bucket_reader.bytes,
                requests=each.bucket_reader.requests,
                slowest=each.bucket_reader.slowest_bytes,
                torch_read=each.torch_reader.bytes,
                torch_slowest=each.torch_reader.slowest_bytes,
            )
            for each in report.layouts
        )
        found.append(PartCosts(name(prefix.rstrip("/")) if prefix else "", costs))
    return LoadCosts(tuple(found), "")


def export_cost(parts: Mapping[str, Survey]) -> ExportCost | None:
    """What exporting all parts one after the other takes; None where it would be refused."""
    from dcp.exporting import plan_export

    plans = []
    for part in parts.values():
        try:
            plans.append(plan_export(part, "checkpoint.pt"))
        except (CheckpointError, UsageError, ResourceError):
            return None
    if not plans:
        return None
    return ExportCost(
        memory=max(plan.memory for plan in plans),
        disk=sum(plan.disk for plan in plans),
        bytes=sum(plan.bytes for plan in plans),
        seconds=sum(plan.seconds for plan in plans),
    )
