"""The certificate of a finished file: every tensor's digest, computed from nothing but the file.

An export reports a digest of each tensor that it computed from the source's chunks. `certify` computes the
same digests from what was written; where the two are equal, the file holds what the checkpoint held. Neither
torch nor the whole file in memory is needed.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import local

from dcp.exporting.report import ExportedTensor
from dcp.exporting.tensor_stream import digest_text
from dcp.safetensors_file import Stored, read_header
from dcp.storage import Store, open_parent

_BLOCK = 4 << 20
_THREADS = 4


def certify(url: str, **options: object) -> dict[str, ExportedTensor]:
    """Tensors of a safetensors file by name, with digests of their bytes as they stand in the file.

    Raises:
        RecordError: the file is not what its name says, or is cut off.
        StorageError: storage failed.
    """
    store, name = open_parent(url, **options)
    return certify_safetensors(store, name)


def certify_safetensors(store: Store, name: str) -> dict[str, ExportedTensor]:
    """As `certify`, for an object of a store."""
    stored, _ = read_header(store, store.info(name))
    return digests(store, name, stored)


def digests(store: Store, name: str, stored: dict[str, Stored]) -> dict[str, ExportedTensor]:
    """Digest the byte ranges of an object, several tensors at a time, a block of each in memory."""
    own = local()

    def one(place: Stored) -> ExportedTensor:
        import xxhash

        if not hasattr(own, "buffer"):
            own.buffer = bytearray(_BLOCK)
        digest = xxhash.xxh3_128()
        for start in range(place.start, place.end, _BLOCK):
            view = memoryview(own.buffer)[: min(_BLOCK, place.end - start)]
            store.read_into(name, start, [view])
            digest.update(view)
        return ExportedTensor(
            shape=list(place.shape), dtype=place.dtype, digest=digest_text(digest.hexdigest())
        )

    with ThreadPoolExecutor(_THREADS, thread_name_prefix="certify") as pool:
        return dict(zip(stored, pool.map(one, stored.values()), strict=True))
