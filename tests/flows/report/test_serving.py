"""Pages on loopback: those that were given, to this machine, and nothing else."""

import http.client
from urllib.parse import urlsplit

import pytest

from dcp.errors import UsageError
from flows.report.saving import default_name, save
from flows.report.serving import served

_PAGES = {"report.html": b"<p>run</p>", "published/demo/step_1/report.html": b"<p>step</p>"}


def _ask(at: str, path: str, host: str | None = None, method: str = "GET") -> tuple[int, bytes]:
    place = urlsplit(at)
    connection = http.client.HTTPConnection(place.hostname or "", place.port or 0, timeout=10)
    connection.request(method, path, headers={"Host": host or place.netloc})
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found


def test_it_serves_what_it_was_given_and_nothing_else() -> None:
    with served(_PAGES) as at:
        assert at.startswith("http://127.0.0.1:")
        assert _ask(at, urlsplit(at).path) == (200, b"<p>run</p>")
        assert _ask(at, "/") == (200, b"<p>run</p>")
        assert _ask(at, "/published/demo/step_1/report.html") == (200, b"<p>step</p>")
        assert _ask(at, "/", method="HEAD") == (200, b"")
        for path in ("/../etc/passwd", "/published", "/etc/passwd", "/%2e%2e/pyproject.toml"):
            assert _ask(at, path)[0] == 404
        assert _ask(at, "/", host="evil.example:80")[0] == 404


def test_a_port_that_is_taken_is_named() -> None:
    with served(_PAGES) as at:
        port = urlsplit(at).port or 0
        with pytest.raises(UsageError, match=f"port {port} cannot be listened on"), served(_PAGES, port):
            pass


@pytest.mark.parametrize(
    ("subject", "name"),
    [
        ("step_100", "step_100-report.html"),
        ("a/../b c", "a-..-b-c-report.html"),
        ("..", "report.html"),
        ("", "report.html"),
    ],
)
def test_names_are_plain(subject: str, name: str) -> None:
    assert default_name(subject) == name


def test_a_directory_is_refused(tmp_path: object) -> None:
    with pytest.raises(UsageError, match="is a directory; name a file in it"):
        save("page", str(tmp_path))
