"""Saving: what a training job plugs into ``torch.distributed.checkpoint.save``.

- `dcp.save.writer`: `BucketWriter`, a storage writer whose steps are committed whole or not at all.
- `dcp.save.files`: which items go into which file, and how one file is written.
- `dcp.save.planner`: `CheckedSavePlanner`, a save planner that notices what ranks do not agree on.
- `dcp.save.shared`: which keys those are, and keys of the ranks' own; pure functions on plans.
- `dcp.save.digests`: digests of values, at a bounded cost.
- `dcp.save.importing`: `import_torch_save`, a `torch.save` file to a checkpoint.
- `dcp.save.torch_source`: such a file as flat values, mapped and never run.

It needs torch, as `dcp.load` does; nothing else imports it at module level.
"""

from __future__ import annotations

from dcp.collector import gc_paused

# torch makes a million objects when it is imported, and the collector looks through them again and again.
with gc_paused():
    from dcp.save.importing import ImportReport, import_torch_save
    from dcp.save.planner import CheckedSavePlanner
    from dcp.save.writer import BucketWriter

__all__ = ["BucketWriter", "CheckedSavePlanner", "ImportReport", "import_torch_save"]
