"""One table from what went wrong to what to do next.

`advice_for` takes a finding code or an error and gives one sentence that ends in a command to type
where there is one. Everything that tells people what to do asks here.
"""

from __future__ import annotations

import errno

from dcp.errors import (
    AlreadyExistsError,
    BusyError,
    ChangedError,
    CkptError,
    DamagedUploadError,
    EnvironmentFault,
    ForbiddenError,
    NotFoundError,
    OutOfSpaceError,
    PickleError,
    ResourceError,
    SettingsError,
    SourceFileError,
    StorageError,
    UnreachableError,
    UsageError,
)
from dcp.findings import Code

_CODES: dict[Code, str] = {
    "incomplete.no-metadata": "The save has not finished. While the job may still write it, wait; otherwise "
    "resume from an earlier step (ckpt status), and the directory can be deleted.",
    "metadata.empty": "The index was cut off while being written. Resume from an earlier step (ckpt status).",
    "metadata.unreadable": "The index is damaged. Restore .metadata from the bucket's object versions, or "
    "resume from an earlier step: ckpt status",
    "metadata.unsafe": "Do not load this checkpoint with torch: its index asks for code. "
    "Find out who wrote it before anything else; looking at it is safe: ckpt inspect {url}",
    "metadata.unsupported": "This is not a plain DCP checkpoint. See what it is: ckpt inspect {url}",
    "files.missing": "Restore the object from the bucket's versions or resume from an earlier step: "
    "ckpt status",
    "files.truncated": "The upload was cut off. Restore the object's older version or resume from an "
    "earlier step: ckpt status",
    "files.unsafe-path": "The index points outside the checkpoint. Do not load it; find out who wrote it: "
    "ckpt inspect {url}",
    "files.newer-than-metadata": "Either the step was overwritten and the save did not finish, or this is "
    "a copy. If it is a copy: ckpt validate --copied {url}",
    "files.orphan": "Left over from an earlier save into the same directory; harmless to loading.",
    "records.out-of-bounds": "The index and the data file do not belong together. "
    "Resume from an earlier step: ckpt status",
    "records.overlap": "The index and the data file do not belong together. Resume from an earlier step: "
    "ckpt status",
    "records.missing": "The index is incomplete. Resume from an earlier step: ckpt status",
    "records.corrupt": "Bytes changed after they were written. Restore the object's older version or resume "
    "from an earlier step; then check the rest: ckpt validate --scrub {url}",
    "records.undecodable": "These bytes are not a tensor as torch saves it. If another library wrote them, "
    "leave the key out: ckpt export --exclude KEY {url} DEST",
    "records.unsafe": "Nothing was executed. Decide whether the listed classes are yours before loading "
    "with weights_only=False. If they are: ckpt validate --allow CLASS {url}",
    "records.mismatch": "The data does not match the index. Resume from an earlier step; find every such "
    "record: ckpt validate --scrub {url}",
    "records.unchecked": "This was not checked, which is no fault in itself.",
    "tiling.gap": "Part of the tensor was never saved, and a load would leave those elements as they were. "
    "Resume from an earlier step: ckpt status",
    "tiling.overlap": "Two ranks claim the same elements. Check the sharding of the saving job, and resume "
    "from an earlier step: ckpt status",
    "tiling.out-of-bounds": "The index is inconsistent. Resume from an earlier step: ckpt status",
    "keys.missing": "The loading code expects these keys. Compare with a step that loads: "
    "ckpt validate --against {earlier} {url}",
    "keys.unexpected": "Loading ignores these keys in silence. If the model is not meant to have changed, "
    "see since when: ckpt diff {earlier} {url}",
    "keys.renamed": "The names changed, not the tensors. Rename on export by the rule above, here for an "
    "inserted 'net.': ckpt export --rename 'net[.]=>' {url} DEST",
    "keys.shape": "The model changed shape since the expectation was recorded. If that is intended, record "
    "a new one: ckpt contract {url} > contract.json",
    "keys.dtype": "Loading would cast in silence. If the new type is intended: "
    "ckpt contract {url} > contract.json",
    "keys.kind": "A tensor and an object changed places; loading would replace one by the other in "
    "silence. See since when: ckpt diff {earlier} {url}",
    "keys.ignored": "Ignored by the settings.",
    "ranks.shared-value": "Save such values under per-rank keys, e.g. rng/rank_0.",
    "optim.incomplete": "The optimizer would start some moments from nothing. Check the saving code.",
    "values.nonfinite": "The model holds NaN or infinity. Look at the loss of this step before using it.",
    "values.unchanged": "These tensors did not change since the compared step.",
    "values.zero": "A weight that is all zero was lost, or never trained. Compare with the step before: "
    "ckpt validate --scrub --against {earlier} {url}",
    "values.norm-jump": "Look at the loss between the two steps before using this one: ckpt diff --values "
    "{earlier} {url}",
    "export.dropped-empty": "Empty containers are dropped when the checkpoint is saved, not here.",
    "export.unsafe-object": "Left out of the export. To keep it: ckpt export --allow-pickle {url} DEST",
    "export.skipped-object": "The format cannot hold it.",
    "export.list-gap": "A list cannot begin or go on without its items. Take the whole list, or none of it: "
    "ckpt export --include GLOB {url} DEST",
    "export.overflow": "The type is too small for these numbers, and what loads them computes with "
    "infinity. Choose one of a larger range: ckpt export --dtype bfloat16 {url} DEST",
    "publish.foreign": "What is not the step's is on the publisher's word; tensors under its names must be "
    "its own. Publish it under the step it came from, or export this one: ckpt export {url} DEST",
    "manifest.damaged": "Do not load what it lists. Restore manifest.json from the bucket's object versions, "
    "or point the alias at another step: ckpt publish --alias latest PUBLISHED_URL",
}

_ERRORS: tuple[tuple[type[CkptError], str], ...] = (
    (
        SourceFileError,
        "Nothing was imported, and nothing of the file was run. Compare its size or checksum with the "
        "original's and copy it again, or write it anew with torch.save.",
    ),
    (SettingsError, "Correct the setting and run the command again."),
    (NotFoundError, "Check the spelling; see what is there with your storage tool's ls."),
    (AlreadyExistsError, "Choose another name, or look at what is there first."),
    (
        ForbiddenError,
        "Check this machine's credentials (gcloud auth application-default login, AWS_PROFILE).",
    ),
    (OutOfSpaceError, "Free space or choose another destination; nothing half-written was left behind."),
    (BusyError, "Wait until the other one has finished, or choose another destination."),
    (
        DamagedUploadError,
        "Nothing of it was kept. Run the command again; if it happens again, look at proxies on the way.",
    ),
    (UnreachableError, "Nothing is known of the checkpoint. Check network and endpoint, then run it again."),
    (
        ResourceError,
        "Nothing was written. What an export takes, and what there is here: ckpt export --plan {url} DEST",
    ),
    (ChangedError, "Somebody is writing to it. Wait for the save to finish and run it again."),
    (PickleError, "Nothing was executed. Find every such record: ckpt validate --scrub {url}"),
    (UsageError, "See the command's --help."),
    (StorageError, "Nothing is known of the checkpoint. Run it again; details are told with --debug."),
    (EnvironmentFault, "Nothing is known of the checkpoint. What went wrong in full: the same with --debug."),
)


_LOCAL_FORBIDDEN = "See whose it is and what may be done there (ls -ld, mount), or choose another place."
_TOO_LARGE = "Raise the limit (ulimit -f) or choose another filesystem; nothing half-written was left behind."

_HANDLES = "Raise the limit (ulimit -n), or ask for fewer and larger files (--max-shard-size)."


def _on_this_machine(error: BaseException) -> str:
    """Advice for what a local filesystem refuses, where that is not a bucket's; otherwise empty."""
    url = getattr(error, "url", "")
    if not url or "://" in url:
        return ""
    if isinstance(error, ForbiddenError):
        return _LOCAL_FORBIDDEN
    if isinstance(error, OutOfSpaceError) and getattr(error.__cause__, "errno", None) == errno.EFBIG:
        return _TOO_LARGE
    if getattr(error.__cause__, "errno", None) in (errno.EMFILE, errno.ENFILE):
        return _HANDLES
    return ""


def advice_for(what: Code | BaseException, url: str = "URL", *, earlier: str = "EARLIER_STEP") -> str:
    """The next step for a finding code or an error; empty where there is nothing useful to say.

    Args:
        what: the code or the error.
        url: of the checkpoint.
        earlier: of an earlier checkpoint that is good, to hold it against.
    """
    if isinstance(what, BaseException):
        code: Code | None = getattr(what, "code", None)
        local = _on_this_machine(what)
        if local:
            return local
        for kind, text in _ERRORS:
            if isinstance(what, kind):
                return text.format(url=url)
        if not isinstance(what, CkptError) or code is None:
            return ""
        return _CODES[code].format(url=url, earlier=earlier)
    return _CODES[what].format(url=url, earlier=earlier)
