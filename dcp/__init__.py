"""Everything this project knows about PyTorch Distributed Checkpoints, as a library.

Names are resolved on first use, so that ``import dcp`` costs nothing: neither torch nor numpy nor
pydantic is loaded before something needs it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "read_index": "dcp.checkpoint",
    "inspect": "dcp.inspection",
    "validate": "dcp.validation",
    "diff": "dcp.comparison",
    "test_load": "dcp.load",
    "export": "dcp.exporting",
    "plan_export": "dcp.exporting",
    "forecast": "dcp.load.forecast",
    "BucketReader": "dcp.load.reader",
    "StrictLoadPlanner": "dcp.load.planners",
    "PartialLoadPlanner": "dcp.load.planners",
    "cast": "dcp.load.transforms",
    "transpose": "dcp.load.transforms",
    "split": "dcp.load.transforms",
    "join": "dcp.load.transforms",
    "pad": "dcp.load.transforms",
    "BucketWriter": "dcp.save",
    "CheckedSavePlanner": "dcp.save",
    "import_torch_save": "dcp.save",
    "notify_committed": "dcp.notify",
}

__all__ = ["errors", *_HOME]


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("dcp.errors")
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'dcp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
