"""What a test-load reports, one part a layout; its JSON is what ``ckpt test-load --json`` prints."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dcp.findings import Finding, Report

Engine = Literal["simulated", "gloo"]
Reader = Literal["bucket", "torch"]
"""What gloo ranks read with: `dcp.BucketReader`, or torch's own `FileSystemReader` (local paths only)."""


class LayoutReport(Report):
    """One layout's load. ``ok`` means that every tensor arrived whole on every rank.

    Attributes:
        part: of a step of several checkpoints, the name of the one that was loaded; else empty.
        layout: text such as ``"fsdp=2,tp=2"``.
        ranks: number of ranks.
        bytes_needed: distinct bytes of tensors and objects that the ranks together need, whether or not the
            objects could be unpickled here.
        bytes_read: bytes read from storage for it, heads of records included: by all ranks together with
            gloo, once for all of them when simulated. Layouts that one simulated pass serves share what it
            reads, and each reports all of it.
        requests: ranges read, likewise.
        rank_bytes: bytes of tensors that each rank loaded, by rank.
        rank_read: bytes that each rank's own `BucketReader` reads, by rank: measured with gloo, counted
            from the plan when simulated, since there no rank reads alone.
        rank_requests: ranges, likewise.
        rank_seconds: duration of each rank's own load, by rank; when simulated, of planning, copying and
            comparing for it.
        tensors: tensors loaded.
        objects: objects unpickled with ``weights_only``.
        objects_scanned: objects that were only scanned, since only their own classes could load them.
        seconds: duration; layouts that share a pass share its waiting equally.
        findings: everything that was wrong.
    """

    part: str = ""
    layout: str
    ranks: int
    ok: bool
    bytes_needed: int = 0
    bytes_read: int = 0
    requests: int = 0
    rank_bytes: list[int] = Field(default_factory=list)
    rank_read: list[int] = Field(default_factory=list)
    rank_requests: list[int] = Field(default_factory=list)
    rank_seconds: list[float] = Field(default_factory=list)
    tensors: int = 0
    objects: int = 0
    objects_scanned: int = 0
    seconds: float = 0.0
    findings: list[Finding] = Field(default_factory=list)


class TestLoadReport(Report):
    """The whole test-load.

    Attributes:
        checkpoint: its URL.
        engine: what loaded it.
        bytes_read: bytes read from storage in all, the index left out: the simulated engine's one pass, which
            also compares; with gloo what torch's loads read on all ranks, without the comparison after them.
        tp_rules_idle: globs of tp rules that match no tensor.
        seconds: duration in all.
    """

    checkpoint: str
    engine: Engine
    ok: bool
    layouts: list[LayoutReport]
    bytes_read: int = 0
    tp_rules_idle: list[str] = Field(default_factory=list)
    seconds: float = 0.0
