"""Turning what storage libraries raise into the package's error tree, and retrying what may pass.

Libraries are recognised by the module and attributes of their exceptions, so that none of them is
imported to be recognised.
"""

from __future__ import annotations

import errno
import socket
import ssl
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from dcp.errors import (
    AlreadyExistsError,
    CkptError,
    ForbiddenError,
    NotFoundError,
    OutOfSpaceError,
    StorageError,
    UnreachableError,
)

if TYPE_CHECKING:
    from tenacity import RetryCallState

T = TypeVar("T")

_FULL = {errno.ENOSPC, errno.EDQUOT}
_HANDLES = {errno.EMFILE, errno.ENFILE}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
_CREDENTIAL_ERRORS = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "DefaultCredentialsError",
    "RefreshError",
}
_PASSING = {408, 429}
_DEAF = (ConnectionRefusedError, socket.gaierror, ssl.SSLCertVerificationError)
_ATTEMPTS = 8
_DEAF_ATTEMPTS = 5
_RETRY_SECONDS = 60.0
_FIRST_WAIT = 0.5
_LONGEST_WAIT = 10.0


def translate(error: BaseException, url: str) -> CkptError:
    """The `StorageError` leaf that says what ``error`` means for ``url``.

    What is not known to be absence, permission or space is `UnreachableError`: nothing may be concluded
    about the checkpoint from it.
    """
    if isinstance(error, CkptError):
        return error
    reason = f"{type(error).__name__}: {error}".strip().rstrip(":").splitlines()[0][:300]
    status = status_of(error)
    # OpenSSL counts its errors too, with numbers that mean something else.
    number = None if isinstance(error, ssl.SSLError) else getattr(error, "errno", None)
    if isinstance(error, FileExistsError) or status == 412:
        return AlreadyExistsError(f"{url} exists already", url)
    if type(error).__name__ in _CREDENTIAL_ERRORS:
        return ForbiddenError(f"no usable credentials for {url} ({reason})", url)
    if isinstance(error, PermissionError) or number in _DENIED or status in (401, 403):
        if number == errno.EROFS:
            return ForbiddenError(f"{url} is on a filesystem that can only be read ({reason})", url)
        return ForbiddenError(f"no permission for {url} ({reason})", url)
    if isinstance(error, NotADirectoryError):
        return NotFoundError(f"{url} is a file, not a directory", url)
    if isinstance(error, FileNotFoundError | IsADirectoryError) or status == 404:
        return NotFoundError(f"nothing at {url}", url)
    if number == errno.EFBIG:
        return OutOfSpaceError(f"{url} would be larger than a file may be there ({reason})", url)
    if number in _HANDLES:
        return StorageError(f"this process may open no more files, so not {url} ({reason})", url)
    if number in _FULL:
        return OutOfSpaceError(f"no space left writing {url} ({reason})", url)
    return UnreachableError(f"cannot reach {url} ({reason})", url)


def status_of(error: BaseException) -> int | None:
    """HTTP status carried by gcsfs, google-auth, aiohttp and botocore exceptions."""
    # An answer that breaks off is 400 to aiohttp's parser, whatever the server's own status was.
    if type(error).__module__ == "aiohttp.http_exceptions":
        return None
    for name in ("code", "status", "status_code"):
        value = getattr(error, name, None)
        if isinstance(value, str) and value.isdigit():
            value = int(value)
        if isinstance(value, int) and 100 <= value < 600:
            return value
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        value = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return value if isinstance(value, int) else None
    return None


def calling(url: str, operation: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Run one storage call once, raising only errors of the package's tree."""
    try:
        return operation(*args, **kwargs)
    # What is of the package's tree already must not become its own cause.
    except (KeyboardInterrupt, SystemExit, CkptError):
        raise
    # fsspec backends raise their own classes, plain OSError and asyncio timeouts alike.
    except Exception as error:
        raise translate(error, url) from error


def retrying(url: str, operation: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Run an idempotent storage call, repeating it while the store is unreachable, within bounds.

    A store that answers that it is busy, or that breaks off, is asked for about half a minute. An endpoint
    at which nobody listens or that has no address, for a few seconds. An answer that would be the same
    again, such as a bad request, is not asked for twice. No attempt begins later than 60 s after the first:
    some backends repeat by themselves before they give up.
    """
    from tenacity import Retrying, retry_if_exception, wait_random_exponential

    attempts = Retrying(
        retry=retry_if_exception(_may_pass),
        stop=_is_enough,
        wait=wait_random_exponential(multiplier=_FIRST_WAIT, max=_LONGEST_WAIT),
        reraise=True,
    )
    result: T = attempts(calling, url, operation, *args, **kwargs)
    return result


def _may_pass(error: BaseException) -> bool:
    if not isinstance(error, UnreachableError):
        return False
    cause = error.__cause__
    while cause is not None:
        status = status_of(cause)
        if status is not None:
            return status in _PASSING or status >= 500
        cause = cause.__cause__
    return True


def _is_enough(retry_state: RetryCallState) -> bool:
    assert retry_state.outcome is not None
    error = retry_state.outcome.exception()
    deaf = error is not None and _is_deaf(error)
    late = (retry_state.seconds_since_start or 0) > _RETRY_SECONDS
    return late or retry_state.attempt_number >= (_DEAF_ATTEMPTS if deaf else _ATTEMPTS)


def _is_deaf(error: BaseException) -> bool:
    """Whether nobody listens there, which libraries tell in exceptions of their own, some without a cause."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, _DEAF):
        found = found.__cause__ or found.__context__
    return found is not None
