"""The error tree of the package.

::

    CkptError                       everything raised on purpose; ``exit_code`` and ``advice``
    ├── UsageError (ValueError)     the caller asked for something impossible            exit 2
    │   └── SettingsError           a settings file is wrong; names file and field
    ├── CheckpointError             the checkpoint or artifact itself is at fault        exit 1
    │   ├── MetadataError           `.metadata` cannot be used
    │   ├── PickleError             a pickle outside the closed language
    │   ├── RecordError             one record cannot be decoded
    │   ├── SourceFileError         a file that is to become a checkpoint cannot be used
    │   ├── NotLoadableError        findings forbid what was asked; carries them
    │   │   └── StateMismatchError  a checkpoint does not fit the state dict it was to be loaded into
    │   └── ChangedError            the bytes changed while they were being read
    └── EnvironmentFault            storage or machine failed, nothing is known of the   exit 3
        │                           checkpoint
        ├── ResourceError (MemoryError)    memory or disk would not suffice
        └── StorageError (OSError)
            ├── NotFoundError (FileNotFoundError)
            ├── AlreadyExistsError (FileExistsError)
            ├── ForbiddenError (PermissionError)
            ├── OutOfSpaceError
            ├── BusyError
            ├── DamagedUploadError
            └── UnreachableError (ConnectionError)

A `CheckpointError` carries a finding code, so that one conversion (`as_finding`) turns a failure met
anywhere into the same `Finding` that a check would have reported. `StorageError` leaves also derive
from the builtin that callers of file APIs already expect.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dcp.findings import Code, Finding


class CkptError(Exception):
    """Root of the tree. ``str(error)`` is one line fit for a person."""

    exit_code = 3


class UsageError(CkptError, ValueError):
    """The request itself is wrong: a bad option, a layout that cannot be parsed, a URL without a scheme."""

    exit_code = 2


class SettingsError(UsageError):
    """A settings file is wrong; the message names file and field."""


class CheckpointError(CkptError):
    """The checkpoint is at fault.

    Attributes:
        code: the finding code this failure is reported under.
        key: flattened state-dict key concerned, if one is.
        file: object name relative to the checkpoint, if one is concerned.
        detail: JSON-able facts (offsets and lengths in bytes, expected and actual).
    """

    exit_code = 1

    def __init__(
        self,
        message: str,
        *,
        code: Code = "records.undecodable",
        key: str | None = None,
        file: str | None = None,
        **detail: object,
    ) -> None:
        super().__init__(message)
        self.code: Code = code
        self.key = key
        self.file = file
        self.detail = detail

    def as_finding(self) -> Finding:
        """The same failure as a `Finding` of this error's code."""
        from dcp.findings import SEVERITY, Finding

        return Finding(
            code=self.code,
            severity=SEVERITY[self.code],
            key=self.key,
            file=self.file,
            message=str(self),
            detail=self.detail,
        )


class MetadataError(CheckpointError):
    """`.metadata` is empty, unreadable, unsafe or of an unsupported kind (see ``code``)."""


class PickleError(CheckpointError):
    """A pickle that is malformed, too deep, or leaves the closed language. ``detail['offset']`` in bytes."""


class RecordError(CheckpointError):
    """One record's bytes do not hold what the index says."""


class SourceFileError(CheckpointError):
    """A file that was to be imported is damaged or holds what is not taken; the message names it."""


class NotLoadableError(CheckpointError):
    """What was asked cannot be done because of ``findings``."""

    def __init__(self, message: str, findings: Sequence[Finding]) -> None:
        first = findings[0] if findings else None
        super().__init__(
            message,
            code=first.code if first else "metadata.unsupported",
            key=first.key if first else None,
            file=first.file if first else None,
        )
        self.findings = tuple(findings)

    def __reduce__(self) -> tuple[type[NotLoadableError], tuple[str, tuple[Finding, ...]]]:
        # torch sends failures between ranks.
        return type(self), (str(self), self.findings)


class StateMismatchError(NotLoadableError):
    """A checkpoint and the state dict it was to be loaded into differ; every difference is a finding.

    ``torch.distributed.checkpoint.load`` raises it wrapped: it is an exception of the first pair in
    ``CheckpointException.failures``' values.
    """


class ChangedError(CheckpointError):
    """The checkpoint's fingerprint before and after reading differ."""


class EnvironmentFault(CkptError):
    """The environment failed; nothing follows about the checkpoint."""

    exit_code = 3


class ResourceError(EnvironmentFault, MemoryError):
    """The plan needs more memory or disk than there is; the message gives both numbers."""


class StorageError(EnvironmentFault, OSError):
    """A storage operation failed. ``url`` is the object or prefix concerned."""

    def __init__(self, message: str, url: str = "") -> None:
        super().__init__(message)
        self.url = url

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class NotFoundError(StorageError, FileNotFoundError):
    """The object or prefix does not exist."""


class AlreadyExistsError(StorageError, FileExistsError):
    """Conditional creation lost: the object exists already."""


class ForbiddenError(StorageError, PermissionError):
    """Credentials are missing or do not permit the operation."""


class OutOfSpaceError(StorageError):
    """The disk or quota is full."""


class BusyError(StorageError):
    """Somebody else is writing to the same place."""


class DamagedUploadError(StorageError):
    """A store has other bytes than it was sent; the message gives both sizes or checksums."""


class UnreachableError(StorageError, ConnectionError):
    """The store did not answer after bounded retries."""
