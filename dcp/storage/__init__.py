"""The one place that opens filesystems.

`open_store(url)` gives a `Store`: a prefix on local disk, GCS, S3 or in memory, with few verbs that
mean the same everywhere. `ObjectInfo` is what a listing says of an object; `ByteRange` a half-open
range of one; `fetch` reads many ranges in parallel and hands them out in order. Failures are
`StorageError` leaves: absent, forbidden, unreachable, out of space.
"""

from dcp.storage.fetch import fetch, fetch_by, reader_threads
from dcp.storage.opening import open_parent, open_store, require_protocol
from dcp.storage.options import require_options
from dcp.storage.ranges import ByteRange, coalesce
from dcp.storage.reading import open_reader
from dcp.storage.store import ObjectInfo, Sink, Store
from dcp.storage.urls import home_expanded, is_safe_name, join_url, normalise_url

__all__ = [
    "ByteRange",
    "ObjectInfo",
    "Sink",
    "Store",
    "coalesce",
    "fetch",
    "fetch_by",
    "home_expanded",
    "is_safe_name",
    "join_url",
    "normalise_url",
    "open_parent",
    "open_reader",
    "open_store",
    "reader_threads",
    "require_options",
    "require_protocol",
]
