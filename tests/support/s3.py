"""moto's server in a process of its own, as the S3 of the tests."""

import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.servers import serve


@dataclass(frozen=True, slots=True)
class MotoS3:
    """A running server. `endpoint` is what AWS_ENDPOINT_URL must be."""

    endpoint: str

    def make_bucket(self, name: str | None = None) -> str:
        """Make a bucket, by default with a name that no other test has, and return its `s3://` URL."""
        name = name or f"ckpt-{uuid.uuid4().hex[:12]}"
        self._resource().create_bucket(Bucket=name)
        return f"s3://{name}"

    def drop_bucket(self, url: str) -> None:
        """Delete a bucket and all in it, so that the server's memory does not grow with the tests."""
        bucket = self._resource().Bucket(url.removeprefix("s3://"))
        bucket.objects.all().delete()
        bucket.delete()

    def _resource(self) -> Any:
        import boto3

        return boto3.resource("s3", endpoint_url=self.endpoint)


@contextmanager
def moto_server(directory: Path) -> Iterator[MotoS3]:
    """Run the server; its log goes to `directory`."""

    def command(port: int) -> list[str]:
        return [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]

    with serve("moto", command, health="/moto-api/data.json", directory=directory) as endpoint:
        yield MotoS3(endpoint)
