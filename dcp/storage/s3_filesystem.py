"""s3fs's filesystem with bounds on what it and botocore repeat by themselves.

Both repeat what fails, one inside of the other, and `dcp.storage.faults.retrying` repeats around them: left
alone, one read over a link that breaks off is tried for minutes. Only botocore knows all that may pass, such
as a damaged body that S3 refuses, so it repeats a little; s3fs does not; `retrying` does the rest.
"""

from __future__ import annotations

import os
from typing import Any

from s3fs import S3FileSystem

_ATTEMPTS = 3
"""Requests that botocore makes of one; as many as in its own standard mode."""


class BoundedS3FileSystem(S3FileSystem):  # type: ignore[misc]
    """As its base, whose arguments it takes; ``config_kwargs["retries"]`` and AWS_MAX_ATTEMPTS come first."""

    retries = 1

    def __init__(self, *args: Any, config_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        bounds: dict[str, Any] = {}
        if "AWS_MAX_ATTEMPTS" not in os.environ:
            bounds["retries"] = {"total_max_attempts": _ATTEMPTS}
        super().__init__(*args, config_kwargs={**bounds, **(config_kwargs or {})}, **kwargs)
