"""`open_store`: from a URL to a `Store`, with one set of rules for every backend.

GCS is talked to directly unless options ask for what only gcsfs does; everything else goes through fsspec.
Listings are not cached. Against an emulator gcsfs is kept from probing for bucket kinds, which costs
a minute each. Filesystems are opened per process, so workers must be spawned, never forked.
"""

from __future__ import annotations

import os
from os import PathLike
from typing import Any

from dcp.errors import UsageError
from dcp.storage.faults import calling
from dcp.storage.local import LocalStore
from dcp.storage.remote import MemoryStore, RemoteStore
from dcp.storage.s3 import S3Store
from dcp.storage.store import Store
from dcp.storage.urls import normalise_url, split_protocol, split_url

_KINDS = {"memory": MemoryStore, "s3": S3Store, "s3a": S3Store}
_EXTRAS = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}


def open_store(url: str | PathLike[str], **options: Any) -> Store:
    """Open the prefix ``url``: a local path, ``gs://``, ``s3://``, ``memory://`` or another fsspec URL.

    Nothing is read or created.

    Args:
        url: the prefix; relative local paths are taken from the working directory.
        options: passed to the fsspec filesystem, e.g. ``token="anon"``.

    Raises:
        UsageError: the protocol is unknown or its package is not installed.
        ForbiddenError: there are no credentials for it.
    """
    url = normalise_url(url)
    protocol, _ = split_protocol(url)
    if protocol == "file":
        return LocalStore(url, options)
    if protocol in ("gs", "gcs"):
        from dcp.storage import gcs  # an HTTP client, which local paths need not wait for

        if gcs.understands(options):
            return calling(url, gcs.GcsStore, url, options)
        if os.environ.get("STORAGE_EMULATOR_HOST"):
            os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    filesystem = calling(url, _filesystem_class(url), **{"use_listings_cache": False, **options})
    return _KINDS.get(protocol, RemoteStore)(url, filesystem, options)


def require_protocol(url: str) -> None:
    """Check that locations like ``url`` can be opened here, without doing so.

    Raises:
        UsageError: the protocol is unknown or its package is not installed.
    """
    if split_protocol(url)[0] not in ("file", "gs", "gcs"):
        _filesystem_class(url)


def _filesystem_class(url: str) -> type[Any]:
    import fsspec

    protocol, _ = split_protocol(url)
    try:
        if protocol in ("s3", "s3a"):
            from dcp.storage.s3_filesystem import BoundedS3FileSystem

            return BoundedS3FileSystem
        found: type[Any] = fsspec.get_filesystem_class(protocol)
    except ValueError:
        raise UsageError(
            f"unknown protocol {protocol!r} in {url}; use a path, gs://, s3:// or memory://"
        ) from None
    except ImportError:
        package = _EXTRAS.get(protocol, f"the fsspec package for {protocol}")
        raise UsageError(f"{url} needs {package}: pip install {package}") from None
    return found


def open_parent(url: str, **options: Any) -> tuple[Store, str]:
    """The store an object lies in and the object's name in it."""
    parent, name = split_url(url)
    return open_store(parent, **options), name
