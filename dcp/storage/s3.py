"""A store on S3: requests go through s3fs, large objects as multipart uploads.

S3 shows nothing of an upload before it is completed, and keeps what a killed writer had sent until somebody
aborts it. It does not say whose an upload is, so a hidden object beside the target names its writer and
holds its identity. Parts travel with their MD5, which S3 itself holds against the bytes.
"""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from threading import Lock
from typing import Any

from dcp.errors import DamagedUploadError, ForbiddenError, NotFoundError, StorageError
from dcp.storage.faults import retrying
from dcp.storage.partial import TEMPORARY
from dcp.storage.remote import RemoteStore
from dcp.storage.store import Sink
from dcp.storage.uploads import Pieces, Upload, is_abandoned, is_bare, is_partial, require_same, uploading

_LONGEST_ID = 4096
"""Most bytes of an upload's identity."""


class S3Store(RemoteStore):
    """A prefix in a bucket."""

    def child(self, name: str) -> S3Store:
        self._path(name)
        return S3Store(f"{self.url}/{name.strip('/')}", self.filesystem, self.options)

    def place(self, name: str) -> dict[str, str]:
        """Bucket and key of an object, as S3's verbs take them."""
        bucket, _, key = self._path(name).partition("/")
        return {"Bucket": bucket, "Key": key}

    def call(self, url: str, verb: str, **arguments: Any) -> Mapping[str, Any]:
        """One request that may be repeated without harm, repeated within bounds."""
        answer: Mapping[str, Any] = retrying(url, self.filesystem.call_s3, verb, **arguments)
        return answer

    def create(self, name: str, data: bytes) -> None:
        # A creation whose answer is lost is told as somebody else's: callers settle that by looking.
        retrying(f"{self.url}/{name}", self.filesystem.pipe_file, self._path(name), data, mode="create")

    def writer(self, name: str) -> AbstractContextManager[Sink]:
        folder, _, last = name.rpartition("/")
        # Who may write need not be allowed to list.
        with suppress(ForbiddenError):
            self._sweep(folder, f".{last}")
        return uploading(_S3Upload(self, name))

    def sweep(self) -> None:
        self._sweep("", ".")

    def unfinished(self) -> Iterator[tuple[str, float | None]]:
        return self._partial("", ".")

    def _sweep(self, folder: str, start: str) -> None:
        for name, modified in list(self._partial(folder, start)):
            if not is_abandoned(name, modified):
                continue
            if is_bare(name.rpartition("/")[2]):
                self.remove(name)
            else:
                head, _, last = name.rpartition(TEMPORARY)[0].rpartition("/")
                self.withdraw(f"{head}/{last[1:]}" if head else last[1:], name)

    def withdraw(self, target: str, marker: str) -> None:
        """Abort the upload of ``target`` that ``marker`` names, and remove the marker."""
        url = f"{self.url}/{target}"
        with suppress(NotFoundError):
            identity = self.read(marker, _LONGEST_ID).decode()
            with suppress(NotFoundError):
                self.call(url, "abort_multipart_upload", **self.place(target), UploadId=identity)
        self.remove(marker)

    def _partial(self, folder: str, start: str) -> Iterator[tuple[str, float | None]]:
        """Hidden objects directly in ``folder`` with names that begin so, and when they were written."""
        place = self.place(f"{folder}/{start}" if folder else start)
        query = {"Bucket": place["Bucket"], "Prefix": place["Key"], "Delimiter": "/"}
        above = f"{folder}/" if folder else ""
        while True:
            page = self.call(self.url, "list_objects_v2", **query)
            for entry in page.get("Contents", ()):
                if is_partial(entry["Key"]):
                    yield above + entry["Key"].rpartition("/")[2], entry["LastModified"].timestamp()
            if not page.get("IsTruncated"):
                return
            query["ContinuationToken"] = page["NextContinuationToken"]


class _S3Upload(Upload):
    def __init__(self, store: S3Store, name: str) -> None:
        super().__init__()
        self._store = store
        self._name = name
        self._url = f"{store.url}/{name}"
        self._place = store.place(name)
        folder, _, last = name.rpartition("/")
        self._marker = f"{folder}/.{last}{self.mark}" if folder else f".{last}{self.mark}"
        self._lock = Lock()
        self._identity: str | None = None
        self._parts: dict[int, _Part] = {}

    def whole(self, pieces: Pieces) -> None:
        body = b"".join(pieces)
        digest = hashlib.md5(body, usedforsecurity=False).digest()
        answer = self._store.call(
            self._url, "put_object", **self._place, Body=body, ContentMD5=b64encode(digest).decode()
        )
        self._require(answer, answer["ETag"], digest.hex(), len(body))

    def part(self, number: int, data: memoryview) -> None:
        digest = hashlib.md5(data, usedforsecurity=False).digest()
        answer = self._store.call(
            self._url,
            "upload_part",
            **self._place,
            UploadId=self._begun(),
            PartNumber=number + 1,
            Body=data.obj if len(data) == len(data.obj) else bytes(data),  # type: ignore[arg-type]
            ContentMD5=b64encode(digest).decode(),
        )
        if _is_plain(answer):
            require_same(f"{self._url} part {number + 1}", "the MD5", digest.hex(), answer["ETag"].strip('"'))
        self._parts[number] = _Part(answer["ETag"], digest, len(data))

    def _begun(self) -> str:
        """The upload's identity, which stands in the marker before the first part is sent."""
        with self._lock:
            if self._identity is None:
                answer = self._store.call(self._url, "create_multipart_upload", **self._place)
                self._identity = str(answer["UploadId"])
                self._store.replace(self._marker, self._identity.encode())
            return self._identity

    def complete(self) -> None:
        parts = [self._parts[number] for number in range(len(self._parts))]
        listed = [{"PartNumber": n, "ETag": part.etag} for n, part in enumerate(parts, 1)]
        sums = hashlib.md5(b"".join(part.digest for part in parts), usedforsecurity=False).hexdigest()
        expected = f"{sums}-{len(parts)}"
        try:
            answer = self._store.call(
                self._url,
                "complete_multipart_upload",
                **self._place,
                UploadId=self._begun(),
                MultipartUpload={"Parts": listed},
            )
        except NotFoundError:
            # Perhaps an attempt completed it whose answer was lost.
            answer = self._store.call(self._url, "head_object", **self._place)
            if _is_plain(answer) and answer["ETag"].strip('"') != expected:
                raise
        self._require(answer, answer["ETag"], expected, sum(part.size for part in parts))
        # The object is there and whole: a marker that cannot be removed now is swept by the next writer.
        with suppress(StorageError):
            self._store.remove(self._marker)

    def abort(self) -> None:
        if self._identity is not None:
            self._store.withdraw(self._name, self._marker)

    def _require(self, answer: Mapping[str, Any], etag: str, expected: str, size: int) -> None:
        """What is stored must be what was sent; if it is not, nobody may find it under the object's name."""
        try:
            stored = self._store.call(self._url, "head_object", **self._place)
            require_same(self._url, "a size of", size, int(stored["ContentLength"]))
            require_same(self._url, "the tag", etag, stored["ETag"])
            if _is_plain(answer) and _is_plain(stored):
                require_same(self._url, "the MD5", expected, etag.strip('"'))
        except DamagedUploadError:
            self._store.remove(self._name)
            raise


@dataclass(frozen=True, slots=True)
class _Part:
    etag: str
    digest: bytes
    """MD5 of what was sent."""
    size: int
    """Bytes."""


def _is_plain(answer: Mapping[str, Any]) -> bool:
    """Whether tags are MD5s: they are not where S3 encrypts with a key of the customer's."""
    return "SSECustomerAlgorithm" not in answer and "kms" not in str(answer.get("ServerSideEncryption", ""))
